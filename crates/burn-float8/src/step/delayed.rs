//! Amax histories of delayed scaling, on the device: one row of a `[n, len]` tensor for each cast of each layer, all of
//! them moved on at once when an optimizer step begins, by so many launches whatever the number of layers and micro-batches.
//! Nothing waits for the device.
//!
//! ```text
//! amax     = max over the step's observations                 valid = 0 < amax < ∞, and no observation was inf or NaN
//! history  ← valid ? [amax, history[.. len-1]] : history
//! scaling  ← valid ? algo(history) · 2^margin  : scaling      scale = FMAX / scaling
//! ```
mod on_device;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{FloatDType, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_std::{Shape, Slice};

use super::{DeviceState, Ranks, TrackedCast};
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{AmaxComputeAlgo, DelayedScaling};
use crate::profile::operation;
use crate::terms::Role;

/// Amaxes of one cast in one step that are kept apart.
const MAX_OBSERVED: usize = 256;

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
    /// Adds the amax to the step, once: backward has come to the tensor, so it was no evaluation that cast it.
    pub(crate) fn confirm(&self) {
        if !self.is_confirmed.swap(true, Relaxed) {
            let Self { state, layer, role, delayed, initial, amax, .. } = self;
            state.lock().histories.observe(layer, *role, *delayed, amax.clone(), *initial);
        }
    }
}

/// The histories of all casts of a conversion on one device.
pub(crate) struct Histories<B: Float8Backend> {
    tables: Vec<(DelayedScaling, Table<B>)>,
    /// Whether each cast of a sharded model has a row, on all ranks.
    has_all_rows: bool,
}

impl<B: Float8Backend> Default for Histories<B> {
    fn default() -> Self {
        Self { tables: vec![], has_all_rows: false }
    }
}

/// The histories with the same parameters.
struct Table<B: Float8Backend> {
    /// By layer and role, in the order of rows once they have one.
    casts: Vec<((String, Role), Tracked<B>)>,
    places: HashMap<(String, Role), usize>,
    /// `[rows, len]`, newest first, unused entries 0; and the scaling amaxes `[rows, 1]`. Casts beyond `rows` are new.
    rows: usize,
    state: Option<(FloatTensor<B>, FloatTensor<B>)>,
    slots: Slots<B>,
}

/// One cast.
struct Tracked<B: Float8Backend> {
    /// Where this step's amaxes lie, one for each micro-batch.
    observed: Vec<usize>,
    /// Its entry of the scaling amaxes, `[1]`.
    scaling_amax: Option<FloatTensor<B>>,
    /// Where scaling starts if the first step gives no amax: a scale of 1.
    initial: f32,
}

/// Amaxes of the step under way, in one tensor `[n]`; the first is zero and nobody's.
struct Slots<B: Float8Backend> {
    amaxes: Option<FloatTensor<B>>,
    used: usize,
    /// Slots below `used` whose amaxes were folded into another.
    free: Vec<usize>,
    /// Which slots were read last, and that list on the device, twice: most steps read the same.
    gathered: Vec<(Vec<i32>, IntTensor<B>)>,
}

/// A cast's history on the host; all values by their bits, so that infinities and NaN survive any file format.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmaxState {
    /// Newest first, padded with zeros to the length of the history; empty if no step has ended.
    pub history: Vec<u32>,
    /// What the scale is made of.
    pub scaling_amax: Option<u32>,
    /// Amaxes of the step under way.
    pub observed: Vec<u32>,
}

impl<B: Float8Backend> Histories<B> {
    /// The amax of which the scale of a cast is made, `[1]`, once its first step has ended.
    pub(crate) fn scaling_amax(&mut self, layer: &str, role: Role, scaling: DelayedScaling) -> Option<FloatTensor<B>> {
        let _timer = operation("amax_history");
        let (_, table) = self.tables.iter_mut().find(|(s, _)| *s == scaling)?;
        let row = *table.places.get(&(layer.to_string(), role))?;
        table.scaling_amax(row)
    }

    fn observe(&mut self, layer: &str, role: Role, scaling: DelayedScaling, amax: FloatTensor<B>, initial: f32) {
        let _timer = operation("amax_history");
        let table = self.table(scaling);
        let row = table.place(layer, role, initial);
        let observed = &mut table.casts[row].1.observed;
        // Without an optimizer step there is no end to them.
        if observed.len() == MAX_OBSERVED {
            table.slots.fold(observed);
        }
        observed.push(table.slots.add(amax));
    }

    /// Puts the largest of all ranks' amaxes of each cast in the place of this rank's, by one all-reduce.
    pub(crate) fn reduce(&mut self, ranks: &Ranks<B>) {
        if ranks.casts.is_empty() {
            return;
        }
        if let Some(collectives) = B::fp8_collectives(&ranks.device, &ranks.comm) {
            return self.reduce_on_device(ranks, &*collectives);
        }
        let bits = |amaxes: &FloatTensor<B>| -> Vec<u32> {
            read_f32::<B>(amaxes.clone()).iter().map(|x| x.to_bits()).collect()
        };
        let own: Vec<_> =
            self.tables.iter().map(|(_, table)| table.slots.amaxes.as_ref().map_or_else(Vec::new, bits)).collect();
        let largest = ranks.casts.iter().map(|cast| {
            let (table, row) = self.place(cast)?;
            self.tables[table].1.casts[row].1.observed.iter().map(|slot| own[table][*slot]).max()
        });
        // Zero is what no rank has cast; as an amax it counts as little.
        let largest = ranks.max_bits("amax histories", largest.map(|bits| bits.unwrap_or(0)).collect());
        for (cast, bits) in ranks.casts.iter().zip(largest) {
            if let Some((table, row)) = self.place(cast) {
                self.tables[table].1.casts[row].1.observed.clear();
            }
            if bits > 0 {
                let table = self.table(cast.scaling);
                let row = table.place(&cast.layer, cast.role, cast.initial);
                let slot = table.slots.add(tensor::<B>(vec![f32::from_bits(bits)], [1], &ranks.device));
                table.casts[row].1.observed.push(slot);
            }
        }
    }

    /// The table and the row of a cast.
    fn place(&self, cast: &TrackedCast) -> Option<(usize, usize)> {
        let number = self.tables.iter().position(|(scaling, _)| *scaling == cast.scaling)?;
        Some((number, *self.tables[number].1.places.get(&(cast.layer.clone(), cast.role))?))
    }

    /// Ends the step.
    pub(crate) fn update(&mut self) {
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
            let slots = Slots { amaxes: None, used: 1, free: vec![], gathered: vec![] };
            self.tables.push((scaling, Table { casts: vec![], places: HashMap::new(), rows: 0, state: None, slots }));
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
            let slots = table.slots.amaxes.as_ref().map_or_else(Vec::new, bits);
            for (i, ((name, role), cast)) in table.casts.iter().enumerate() {
                let state = AmaxState {
                    history: history.chunks(scaling.amax_history_len).nth(i).unwrap_or_default().to_vec(),
                    scaling_amax: scaling_amax.get(i).copied(),
                    observed: cast.observed.iter().map(|slot| slots[*slot]).collect(),
                };
                layers.entry(name.clone()).or_insert_with(|| (*scaling, BTreeMap::new())).1.insert(*role, state);
            }
        }
        layers
    }

    /// Puts a cast's saved history back; its length has been checked.
    pub(crate) fn restore(
        &mut self,
        layer: &str,
        role: Role,
        scaling: DelayedScaling,
        saved: &AmaxState,
        initial: f32,
        device: &Device<B>,
    ) {
        let scalar = |bits: u32| tensor::<B>(vec![f32::from_bits(bits)], [1], device);
        let table = self.table(scaling);
        let row = table.place(layer, role, initial);
        table.casts[row].1.observed = saved.observed.iter().map(|bits| table.slots.add(scalar(*bits))).collect();
        let Some(scaling_amax) = saved.scaling_amax else { return };
        table.grow(scaling, row + 1, device);
        let len = saved.history.len();
        let history = tensor::<B>(saved.history.iter().map(|bits| f32::from_bits(*bits)).collect(), [1, len], device);
        let scaling_amax = tensor::<B>(vec![f32::from_bits(scaling_amax)], [1, 1], device);
        let at = |width: usize| [Slice::from(row..row + 1), Slice::from(0..width)];
        let (all, amaxes) = table.state.take().expect("grown to hold this row");
        let all = B::float_slice_assign(all, &at(len), history);
        table.state = Some((all, B::float_slice_assign(amaxes, &at(1), scaling_amax)));
    }
}

impl<B: Float8Backend> Slots<B> {
    /// Writes an amax `[1]` into the next slot.
    fn add(&mut self, amax: FloatTensor<B>) -> usize {
        let device = B::float_device(&amax);
        let zeros = |n: usize| B::float_zeros(Shape::from(vec![n]), &device, FloatDType::F32);
        let amaxes = match self.amaxes.take() {
            None => zeros(64),
            Some(amaxes) if !self.free.is_empty() || self.used < amaxes.shape()[0] => amaxes,
            Some(amaxes) => {
                let more = zeros(amaxes.shape()[0]);
                B::float_cat(vec![amaxes, more], 0)
            }
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used - 1
        });
        self.amaxes = Some(B::float_slice_assign(amaxes, &[Slice::from(slot..slot + 1)], amax));
        slot
    }

    /// Leaves all slots to the next amaxes.
    fn forget(&mut self) {
        self.used = 1;
        self.free.clear();
    }

    /// The amaxes of these slots, `[n]`.
    fn gather(&mut self, slots: Vec<i32>) -> Option<FloatTensor<B>> {
        let amaxes = self.amaxes.clone()?;
        let known = self.gathered.iter().position(|(known, _)| *known == slots);
        let (slots, indices) = known.map(|i| self.gathered.remove(i)).unwrap_or_else(|| {
            let device = B::float_device(&amaxes);
            let data = TensorData::new(slots.clone(), [slots.len()]);
            let data = data.convert_dtype(get_device_settings::<B>(&device).int_dtype.into());
            (slots, B::int_from_data(data, &device))
        });
        self.gathered.push((slots, indices.clone()));
        // What a sharded model's ranks exchange, and what the histories take.
        if self.gathered.len() > 2 {
            self.gathered.remove(0);
        }
        Some(B::float_select(amaxes, 0, indices))
    }

    /// Leaves one slot of these, with their maximum.
    fn fold(&mut self, slots: &mut Vec<usize>) {
        let all = slots.iter().map(|slot| *slot as i32).collect();
        if let (Some(first), Some(amaxes)) = (slots.first().copied(), self.gather(all)) {
            let (max, buffer) = (B::float_max_dim(amaxes, 0), self.amaxes.take().expect("gathered from it"));
            self.amaxes = Some(B::float_slice_assign(buffer, &[Slice::from(first..first + 1)], max));
            self.free.extend(slots.drain(1..));
        }
    }
}

impl<B: Float8Backend> Table<B> {
    fn place(&mut self, layer: &str, role: Role, initial: f32) -> usize {
        let next = self.casts.len();
        let place = *self.places.entry((layer.to_string(), role)).or_insert(next);
        if place == next {
            let new = Tracked { observed: vec![], scaling_amax: None, initial };
            self.casts.push(((layer.to_string(), role), new));
        }
        place
    }

    fn scaling_amax(&mut self, row: usize) -> Option<FloatTensor<B>> {
        let (_, amaxes) = self.state.as_ref()?;
        if row >= self.rows {
            return None;
        }
        let cast = &mut self.casts[row].1;
        let slice = || {
            let row = B::float_slice(amaxes.clone(), &[Slice::from(row..row + 1), Slice::from(0..1)]);
            B::float_reshape(row, Shape::from(vec![1]))
        };
        Some(cast.scaling_amax.get_or_insert_with(slice).clone())
    }

    /// Gives the first `rows` casts a row.
    fn grow(&mut self, scaling: DelayedScaling, rows: usize, device: &Device<B>) {
        if rows <= self.rows {
            return;
        }
        let new = rows - self.rows;
        let zeros = B::float_zeros(Shape::from(vec![new, scaling.amax_history_len]), device, FloatDType::F32);
        let initial = self.casts[self.rows..rows].iter().map(|(_, cast)| cast.initial).collect();
        let initial = tensor::<B>(initial, [new, 1], device);
        self.state = Some(match self.state.take() {
            Some((history, amaxes)) => (B::float_cat(vec![history, zeros], 0), B::float_cat(vec![amaxes, initial], 0)),
            None => (zeros, initial),
        });
        self.rows = rows;
    }

    fn update(&mut self, scaling: DelayedScaling) {
        let DelayedScaling { amax_history_len: len, amax_compute_algo, margin } = scaling;
        let count = self.casts.iter().map(|(_, cast)| cast.observed.len()).max().unwrap_or(0);
        if count == 0 {
            return;
        }
        // [rows, count]: each cast's observations, the last repeated; zero, which is not valid, where there is none.
        let mut slots = Vec::with_capacity(self.casts.len() * count);
        for (_, cast) in &mut self.casts {
            let mut own = core::mem::take(&mut cast.observed);
            own.resize(count, own.last().copied().unwrap_or(0));
            slots.extend(own.into_iter().map(|slot| slot as i32));
            cast.scaling_amax = None;
        }
        self.slots.forget();
        let Some(observed) = self.slots.gather(slots) else { return };
        let device = B::float_device(&observed);
        let bool_dtype = get_device_settings::<B>(&device).bool_dtype;
        self.grow(scaling, self.casts.len(), &device);
        let rows = self.rows;
        let observed = B::float_reshape(observed, Shape::from(vec![rows, count]));
        // Comparisons with NaN are false.
        let finite = B::float_lower_equal_elem(observed.clone(), Scalar::from(f32::MAX), bool_dtype);
        let cleaned = B::float_mask_fill(observed, B::bool_not(finite.clone()), Scalar::from(0f32));
        let amax = B::float_max_dim(cleaned, 1);
        let positive = B::float_greater_elem(amax.clone(), Scalar::from(0f32), bool_dtype);
        let valid = B::bool_and(B::bool_all_dim(finite, 1), positive);

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
