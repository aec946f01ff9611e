//! Amax histories of delayed scaling, on the device: one row of a `[n, len]` tensor for each cast of each layer, all of
//! them moved on at once when an optimizer step begins. Nothing waits for the device.
//!
//! ```text
//! running  ← max(running, amax)                               for each observation of the step; NaN wins
//! valid    = 0 < running < ∞
//! history  ← valid ? [running, history[.. len-1]] : history
//! scaling  ← valid ? algo(history) · 2^margin     : scaling   scale = FMAX / scaling
//! ```
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{FloatDType, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_std::{Shape, Slice};

use super::{DeviceState, Ranks, TrackedCast};
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{AmaxComputeAlgo, DelayedScaling};
use crate::profile::operation;
use crate::terms::Role;

/// The amax of a tensor for the history of delayed scaling that its cast belongs to.
pub(crate) struct Observation<B: Float8Backend> {
    pub(crate) state: Arc<DeviceState<B>>,
    /// The layer by its name: a history outlives no model, and a layer no cycle.
    pub(crate) layer: String,
    pub(crate) role: Role,
    pub(crate) delayed: DelayedScaling,
    /// An amax whose scale is 1.
    pub(crate) initial: f32,
    pub(crate) amax: FloatTensor<B>,
    pub(crate) is_confirmed: AtomicBool,
}

impl<B: Float8Backend> Observation<B> {
    /// Adds the amax to the step, once: backward has come to a linear that read the tensor.
    pub(crate) fn confirm(&self) {
        if !self.is_confirmed.swap(true, Relaxed) {
            let _timer = operation("amax_history");
            let Self { state, layer, role, delayed, initial, amax, .. } = self;
            let mut step = state.lock();
            let table = step.histories.table(*delayed);
            let row = table.place(layer, *role, *initial);
            table.rows[row].observe(amax.clone());
        }
    }
}

/// The histories of all casts of a conversion on one device.
pub(crate) struct Histories<B: Float8Backend> {
    tables: Vec<(DelayedScaling, Table<B>)>,
    /// The step under way.
    number: u64,
    /// The step in which backward last came to each layer.
    trained_in: HashMap<String, u64>,
    /// Whether each cast of a sharded model has a row, on all ranks.
    has_all_rows: bool,
}

impl<B: Float8Backend> Default for Histories<B> {
    fn default() -> Self {
        Self { tables: vec![], number: 0, trained_in: HashMap::new(), has_all_rows: false }
    }
}

/// The histories with the same parameters.
struct Table<B: Float8Backend> {
    rows: Vec<Row<B>>,
    places: HashMap<(String, Role), usize>,
    /// `[n, len]`, newest first, unused entries 0; and the scaling amaxes `[n, 1]`, of the first n rows. Others are new.
    state: Option<(FloatTensor<B>, FloatTensor<B>)>,
}

/// One cast of one layer.
struct Row<B: Float8Backend> {
    layer: String,
    role: Role,
    /// The largest amax of the step under way, `[1]`.
    running: Option<FloatTensor<B>>,
    /// Its entry of the scaling amaxes, `[1]`.
    scaling_amax: Option<FloatTensor<B>>,
    /// Where scaling starts if the first step gives no amax: a scale of 1.
    initial: f32,
}

impl<B: Float8Backend> Row<B> {
    fn observe(&mut self, amax: FloatTensor<B>) {
        self.running = Some(match self.running.take() {
            None => amax,
            Some(running) => {
                let bool_dtype = get_device_settings::<B>(&B::float_device(&amax)).bool_dtype;
                // Comparisons with NaN are false.
                let is_larger = B::float_greater(amax.clone(), running.clone(), bool_dtype);
                let is_nan = B::float_is_nan(amax.clone(), bool_dtype);
                B::float_mask_where(running, B::bool_or(is_larger, is_nan), amax)
            }
        });
    }
}

/// A cast's history on the host; all values by their bits, so that infinities and NaN survive any file format.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmaxState {
    /// Newest first, padded with zeros to the length of the history; empty if no step has ended.
    pub history: Vec<u32>,
    /// What the scale is made of.
    pub scaling_amax: Option<u32>,
    /// The largest amax of the step under way, if it has one; of several, the largest counts.
    pub observed: Vec<u32>,
}

impl<B: Float8Backend> Histories<B> {
    /// The amax of which the scale of a cast is made, `[1]`, once its first step has ended. None if the history stands still while
    /// steps go on, since the layer was frozen or is left out: this step and the one before have seen no backward come to it.
    pub(crate) fn scaling_amax(&mut self, layer: &str, role: Role, scaling: DelayedScaling) -> Option<FloatTensor<B>> {
        let _timer = operation("amax_history");
        let (_, table) = self.tables.iter_mut().find(|(s, _)| *s == scaling)?;
        let row = *table.places.get(&(layer.to_string(), role))?;
        let has_left = self.trained_in.get(layer).is_some_and(|step| step + 1 < self.number);
        if has_left { None } else { table.scaling_amax(row) }
    }

    /// Notes that backward has come to a layer.
    pub(crate) fn note_backward(&mut self, layer: &str) {
        match self.trained_in.get_mut(layer) {
            Some(step) => *step = self.number,
            None => drop(self.trained_in.insert(layer.into(), self.number)),
        }
    }

    /// Puts the largest of all ranks' amaxes of each cast in the place of this rank's, by one all-reduce.
    pub(crate) fn reduce(&mut self, ranks: &Ranks<B>) {
        if ranks.casts.is_empty() {
            return;
        }
        self.share_rows(ranks);
        let rows: Vec<_> = ranks.casts.iter().map(|cast| self.place(cast)).collect();
        let zero = || B::float_zeros(Shape::from(vec![1]), &ranks.device, FloatDType::F32);
        let running = |place: &Option<(usize, usize)>| {
            let (table, row) = (*place)?;
            self.tables[table].1.rows[row].running.clone()
        };
        let own: Vec<_> = rows.iter().map(|place| running(place).unwrap_or_else(zero)).collect();
        let all = ranks.max("amax histories", B::float_cat(own, 0));
        for (i, place) in rows.into_iter().enumerate() {
            let Some((table, row)) = place else { continue };
            let row = &mut self.tables[table].1.rows[row];
            // Zero is what no rank has cast; as an amax it counts as little.
            row.running = Some(B::float_slice(all.clone(), &[Slice::from(i..i + 1)]));
        }
    }

    /// Gives a row to each cast that has one on any rank.
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

    /// The table and the row of a cast.
    fn place(&self, cast: &TrackedCast) -> Option<(usize, usize)> {
        let number = self.tables.iter().position(|(scaling, _)| *scaling == cast.scaling)?;
        Some((number, *self.tables[number].1.places.get(&(cast.layer.clone(), cast.role))?))
    }

    /// Ends the step; `number` is the next.
    pub(crate) fn update(&mut self, number: u64) {
        self.number = number;
        if self.tables.is_empty() {
            return;
        }
        let _timer = operation("amax_history");
        for (scaling, table) in &mut self.tables {
            table.update(*scaling);
        }
    }

    fn table(&mut self, scaling: DelayedScaling) -> &mut Table<B> {
        let i = self.tables.iter().position(|(s, _)| *s == scaling).unwrap_or_else(|| {
            self.tables.push((scaling, Table { rows: vec![], places: HashMap::new(), state: None }));
            self.tables.len() - 1
        });
        &mut self.tables[i].1
    }

    /// Reads all histories back, by layer; this waits for the device.
    pub(crate) fn export(&self) -> BTreeMap<String, (DelayedScaling, BTreeMap<Role, AmaxState>)> {
        let bits = |t: &FloatTensor<B>| -> Vec<u32> { read_f32::<B>(t.clone()).iter().map(|x| x.to_bits()).collect() };
        let mut layers = BTreeMap::<_, (_, BTreeMap<_, _>)>::new();
        for (scaling, table) in &self.tables {
            let (history, scaling_amax) =
                table.state.as_ref().map_or_else(Default::default, |(h, s)| (bits(h), bits(s)));
            for (i, row) in table.rows.iter().enumerate() {
                let state = AmaxState {
                    history: history.chunks(scaling.amax_history_len).nth(i).unwrap_or_default().to_vec(),
                    scaling_amax: scaling_amax.get(i).copied(),
                    observed: row.running.as_ref().map(bits).unwrap_or_default(),
                };
                let (_, roles) = layers.entry(row.layer.clone()).or_insert_with(|| (*scaling, BTreeMap::new()));
                roles.insert(row.role, state);
            }
        }
        layers
    }

    /// Puts a cast's saved history back; its length has been checked.
    pub(crate) fn restore(&mut self, cast: &TrackedCast, saved: &AmaxState, device: &Device<B>) {
        let TrackedCast { layer, role, scaling, initial } = cast;
        let table = self.table(*scaling);
        let at = table.place(layer, *role, *initial);
        let row = &mut table.rows[at];
        // By their bits NaN is the largest.
        let observed = saved.observed.iter().max();
        row.running = observed.map(|bits| tensor::<B>(vec![f32::from_bits(*bits)], [1], device));
        let Some(scaling_amax) = saved.scaling_amax else { return };
        table.grow(*scaling, at + 1, device);
        let len = saved.history.len();
        let history = tensor::<B>(saved.history.iter().map(|bits| f32::from_bits(*bits)).collect(), [1, len], device);
        let scaling_amax = tensor::<B>(vec![f32::from_bits(scaling_amax)], [1, 1], device);
        let of_row = |width: usize| [Slice::from(at..at + 1), Slice::from(0..width)];
        let (all, amaxes) = table.state.take().expect("grown to hold this row");
        let all = B::float_slice_assign(all, &of_row(len), history);
        table.state = Some((all, B::float_slice_assign(amaxes, &of_row(1), scaling_amax)));
    }

    /// The step under way is this one.
    pub(crate) fn set_number(&mut self, number: u64) {
        self.number = number;
    }
}

impl<B: Float8Backend> Table<B> {
    fn place(&mut self, layer: &str, role: Role, initial: f32) -> usize {
        let next = self.rows.len();
        let place = *self.places.entry((layer.to_string(), role)).or_insert(next);
        if place == next {
            let (layer, running, scaling_amax) = (layer.to_string(), None, None);
            self.rows.push(Row { layer, role, running, scaling_amax, initial });
        }
        place
    }

    fn scaling_amax(&mut self, row: usize) -> Option<FloatTensor<B>> {
        let (_, amaxes) = self.state.as_ref()?;
        if row >= amaxes.shape()[0] {
            return None;
        }
        let slice = || {
            let row = B::float_slice(amaxes.clone(), &[Slice::from(row..row + 1), Slice::from(0..1)]);
            B::float_reshape(row, Shape::from(vec![1]))
        };
        Some(self.rows[row].scaling_amax.get_or_insert_with(slice).clone())
    }

    /// Gives the first `rows` casts a place in the history.
    fn grow(&mut self, scaling: DelayedScaling, rows: usize, device: &Device<B>) {
        let known = self.state.as_ref().map_or(0, |(_, amaxes)| amaxes.shape()[0]);
        if rows <= known {
            return;
        }
        let new = rows - known;
        let zeros = B::float_zeros(Shape::from(vec![new, scaling.amax_history_len]), device, FloatDType::F32);
        let initial = self.rows[known..rows].iter().map(|row| row.initial).collect();
        let initial = tensor::<B>(initial, [new, 1], device);
        self.state = Some(match self.state.take() {
            Some((history, amaxes)) => (B::float_cat(vec![history, zeros], 0), B::float_cat(vec![amaxes, initial], 0)),
            None => (zeros, initial),
        });
    }

    fn update(&mut self, scaling: DelayedScaling) {
        let DelayedScaling { amax_history_len: len, amax_compute_algo, margin } = scaling;
        let Some(device) = self.rows.iter().find_map(|row| row.running.as_ref().map(B::float_device)) else { return };
        let bool_dtype = get_device_settings::<B>(&device).bool_dtype;
        let rows = self.rows.len();
        self.grow(scaling, rows, &device);
        // Zero, which is not valid, where there is none.
        let zero = || B::float_zeros(Shape::from(vec![1]), &device, FloatDType::F32);
        let running = self.rows.iter_mut().map(|row| {
            row.scaling_amax = None;
            row.running.take().unwrap_or_else(zero)
        });
        let amax = B::float_reshape(B::float_cat(running.collect(), 0), Shape::from(vec![rows, 1]));
        // Comparisons with NaN are false.
        let finite = B::float_lower_equal_elem(amax.clone(), Scalar::from(f32::MAX), bool_dtype);
        let positive = B::float_greater_elem(amax.clone(), Scalar::from(0f32), bool_dtype);
        let valid = B::bool_and(finite, positive);

        let (history, amaxes) = self.state.take().expect("grown above");
        let shifted = if len > 1 {
            let older = B::float_slice(history.clone(), &[Slice::from(0..rows), Slice::from(0..len - 1)]);
            B::float_cat(vec![amax, older], 1)
        } else {
            amax
        };
        let history =
            B::float_mask_where(history, B::bool_expand(valid.clone(), Shape::from(vec![rows, len])), shifted);
        let chosen = match amax_compute_algo {
            AmaxComputeAlgo::Max => B::float_max_dim(history.clone(), 1),
            AmaxComputeAlgo::MostRecent => B::float_slice(history.clone(), &[Slice::from(0..rows), Slice::from(0..1)]),
        };
        let chosen = B::float_mul_scalar(chosen, Scalar::from(2f32.powi(margin)));
        let chosen = B::float_clamp(chosen, Scalar::from(f32::MIN_POSITIVE), Scalar::from(f32::MAX));
        self.state = Some((history, B::float_mask_where(amaxes, valid, chosen)));
    }
}

fn tensor<B: Float8Backend>(values: Vec<f32>, shape: impl Into<Shape>, device: &Device<B>) -> FloatTensor<B> {
    let tensor = B::float_from_data(TensorData::new(values, shape), device);
    debug_assert_eq!(tensor.dtype(), burn_backend::DType::F32);
    tensor
}
