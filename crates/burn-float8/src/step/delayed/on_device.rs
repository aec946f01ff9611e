//! The histories' all-reduce on a device's memory: which casts there are is known on the host, what they have observed stays on the
//! device.
use burn_backend::tensor::FloatTensor;
use burn_backend::{FloatDType, Scalar, TensorMetadata, get_device_settings};
use burn_std::{Shape, Slice};

use super::{DelayedScaling, Histories, Ranks, Slots, Table};
use crate::backend::{DeviceCollectives, Float8Backend};

impl<B: Float8Backend> Histories<B> {
    /// Puts the largest of all ranks' amaxes of each cast in the place of this rank's, by one all-reduce.
    pub(super) fn reduce_on_device(&mut self, ranks: &Ranks<B>, collectives: &dyn DeviceCollectives<B>) {
        self.share_rows(ranks);
        // By scaling, in the order of the casts: other ranks may have made their tables in another one.
        let mut groups: Vec<(DelayedScaling, Vec<Option<usize>>)> = vec![];
        for cast in &ranks.casts {
            let place = self.place(cast).map(|(_, row)| row);
            match groups.iter_mut().find(|(scaling, _)| *scaling == cast.scaling) {
                Some((_, rows)) => rows.push(place),
                None => groups.push((cast.scaling, vec![place])),
            }
        }
        let own = groups.iter().map(|(scaling, rows)| self.table(*scaling).largest(rows, ranks)).collect();
        let all = collectives.all_reduce_max("amax histories", B::float_cat(own, 0));
        let all = all.unwrap_or_else(|error| panic!("{error}"));
        let mut at = 0;
        for (scaling, rows) in groups {
            let of_group = Slice::from(at..at + rows.len());
            at += rows.len();
            self.table(scaling).put(&rows, B::float_slice(all.clone(), &[of_group]));
        }
    }

    /// Gives a row to each cast that has one on any rank, as each of them did once it was cast.
    fn share_rows(&mut self, ranks: &Ranks<B>) {
        // Rows stay, so it is the same on all ranks.
        if self.has_all_rows {
            return;
        }
        let own = ranks.casts.iter().map(|cast| u32::from(self.place(cast).is_some())).collect();
        let any = ranks.max_bits("casts with a history", own);
        for (cast, any) in ranks.casts.iter().zip(&any) {
            if *any > 0 {
                self.table(cast.scaling).place(&cast.layer, cast.role, cast.initial);
            }
        }
        self.has_all_rows = any.iter().all(|any| *any > 0);
    }
}

impl<B: Float8Backend> Table<B> {
    /// The largest amax that was observed of each cast, `[casts]`, NaN if one was; zero where there is none.
    fn largest(&mut self, rows: &[Option<usize>], ranks: &Ranks<B>) -> FloatTensor<B> {
        let observed = |row: &Option<usize>| row.map_or(&[][..], |row| &self.casts[row].1.observed);
        let count = rows.iter().map(|row| observed(row).len()).max().unwrap_or(0).max(1);
        // The first slot is zero.
        let slots = rows.iter().flat_map(|row| {
            observed(row).iter().copied().chain(core::iter::repeat(0)).take(count).map(|slot| slot as i32)
        });
        let slots = slots.collect();
        let Some(amaxes) = self.slots.gather(slots) else {
            return B::float_zeros(Shape::from(vec![rows.len()]), &ranks.device, FloatDType::F32);
        };
        let amaxes = B::float_reshape(amaxes, Shape::from(vec![rows.len(), count]));
        let bool_dtype = get_device_settings::<B>(&ranks.device).bool_dtype;
        let has_nan = B::bool_any_dim(B::float_is_nan(amaxes.clone(), bool_dtype), 1);
        let largest = B::float_mask_fill(B::float_max_dim(amaxes, 1), has_nan, Scalar::from(f32::NAN));
        B::float_reshape(largest, Shape::from(vec![rows.len()]))
    }

    /// Makes these, `[casts]`, what was observed of each cast.
    fn put(&mut self, rows: &[Option<usize>], reduced: FloatTensor<B>) {
        // Slots are taken until an observation has ended the step.
        if rows.iter().all(Option::is_none) {
            return;
        }
        let first = self.slots.append(reduced);
        for (i, row) in rows.iter().enumerate() {
            if let Some(row) = row {
                self.casts[*row].1.observed = vec![first + i];
            }
        }
    }
}

impl<B: Float8Backend> Slots<B> {
    /// Puts amaxes `[n]` behind those that are used; the slot of the first.
    fn append(&mut self, amaxes: FloatTensor<B>) -> usize {
        let first = self.used;
        self.used += amaxes.shape()[0];
        let before = match self.amaxes.take() {
            Some(all) => B::float_slice(all, &[Slice::from(0..first)]),
            None => B::float_zeros(Shape::from(vec![first]), &B::float_device(&amaxes), FloatDType::F32),
        };
        self.amaxes = Some(B::float_cat(vec![before, amaxes], 0));
        first
    }
}
