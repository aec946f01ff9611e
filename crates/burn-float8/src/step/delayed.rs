//! Amax histories of delayed scaling on the device: one row of a `[n, len]` tensor per cast of each
//! layer. All rows advance together when an optimizer step begins. Nothing waits for the device.
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

use burn_backend::tensor::{BoolTensor, Device, FloatTensor};
use burn_backend::{FloatDType, Scalar, TensorData, TensorMetadata, get_device_settings};
use burn_std::{Shape, Slice};

use super::without_backward::{Observed, WithoutBackward};
use super::{AmaxState, DeviceState, Peers, TrackedCast};
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{AmaxComputeAlgo, DelayedScaling};
use crate::profile::operation;
use crate::terms::Role;

/// Amax of a tensor for the delayed scaling history of its cast.
pub(crate) struct Observation<B: Float8Backend> {
    pub(crate) state: Arc<DeviceState<B>>,
    pub(crate) observed: Observed<B>,
    pub(crate) is_confirmed: AtomicBool,
}

impl<B: Float8Backend> Observation<B> {
    /// Adds the amax to the step, once. Called when backward reaches a linear that read the tensor.
    pub(crate) fn confirm(&self) {
        if !self.is_confirmed.swap(true, Relaxed) {
            let _timer = operation("amax_history");
            self.state.lock().histories.observe(&self.observed);
        }
    }

    /// Records the amax of a forward that no backward can reach.
    pub(crate) fn note_without_backward(&self) {
        self.state.lock().histories.without_backward.note(&self.observed);
    }
}

/// Histories of all casts of an applied configuration on one device.
#[derive(Default)]
pub(crate) struct Histories<B: Float8Backend> {
    tables: Vec<(DelayedScaling, HistoryTable<B>)>,
    without_backward: WithoutBackward<B>,
    /// Number of the last step with an amax of each layer.
    told_in: HashMap<String, u64>,
    /// Whether every cast is known, in this process or a peer.
    is_all_known: bool,
}

/// Histories with the same parameters.
#[derive(Default)]
struct HistoryTable<B: Float8Backend> {
    rows: Vec<Row<B>>,
    places: HashMap<(String, Role), usize>,
    /// `[capacity]`: the largest amax of each row observed in the current step. Entries of other
    /// rows are arbitrary.
    running: Option<FloatTensor<B>>,
    /// Rows without an observation in the last step, on host and device. Most steps observe the
    /// same rows.
    stale: Option<(Vec<bool>, BoolTensor<B>)>,
    /// `[n, len]`, newest first, unused entries 0, and the scaling amaxes `[n, 1]`, of the first n
    /// rows. Later rows are new.
    state: Option<(FloatTensor<B>, FloatTensor<B>)>,
}

/// One cast of one layer.
struct Row<B: Float8Backend> {
    layer: String,
    role: Role,
    /// Whether any process ever observed an amax.
    is_known: bool,
    /// Whether the current step may have an amax.
    is_observed: bool,
    /// Whether a step with an amax has ended in any process, so that the history sets the scale.
    has_scale: bool,
    /// Its scaling amax, `[1]`.
    scaling_amax: Option<FloatTensor<B>>,
    /// Initial scaling amax, for a scale of 1. Used if the first step has no valid amax.
    initial: f32,
}

impl<B: Float8Backend> Histories<B> {
    /// Amax `[1]` that sets the scale of a cast in the step `number`, once its first step has
    /// ended. None if the layer had no amax in this step and the previous one: its history is
    /// outdated.
    pub(super) fn scaling_amax(
        &mut self,
        layer: &str,
        role: Role,
        scaling: DelayedScaling,
        number: u64,
    ) -> Option<FloatTensor<B>> {
        let _timer = operation("amax_history");
        let (_, table) = self.tables.iter_mut().find(|(s, _)| *s == scaling)?;
        let row = *table.places.get(&(layer.to_string(), role))?;
        let has_left = self.told_in.get(layer).is_some_and(|step| step + 1 < number);
        if has_left { None } else { table.scaling_amax(row) }
    }

    /// Records that backward reached a layer in the step `number`.
    pub(super) fn note_backward(&mut self, layer: &str, number: u64) {
        self.without_backward.note_backward();
        self.note_told(layer, number);
    }

    /// Ends the current step by a call. It is the only end of a step if backward reaches no linear.
    pub(super) fn end(&mut self) {
        self.without_backward.end();
    }

    fn note_told(&mut self, layer: &str, number: u64) {
        match self.told_in.get_mut(layer) {
            Some(step) => *step = number,
            None => drop(self.told_in.insert(layer.into(), number)),
        }
    }

    fn observe(&mut self, Observed { cast, amax }: &Observed<B>) {
        let table = self.table(cast.scaling);
        let row = table.place(cast);
        table.observe(row, amax.clone());
    }

    /// Completes the amaxes of the step `number`: adds layers that backward did not reach, and the
    /// amaxes of all processes.
    pub(crate) fn complete(&mut self, number: u64, peers: Option<&Peers<B>>) {
        let mut seen = self.without_backward.take();
        seen.retain(|observed| self.told_in.get(&observed.cast.layer) != Some(&number));
        for observed in &seen {
            self.observe(observed);
        }
        seen.iter().for_each(|observed| self.note_told(&observed.cast.layer, number));
        if let Some(peers) = peers {
            self.reduce(peers);
        }
    }

    /// Creates a row for each of these casts, in their order.
    pub(crate) fn declare(&mut self, casts: &[TrackedCast]) {
        for cast in casts {
            self.table(cast.scaling).place(cast);
        }
    }

    /// Replaces the running amaxes with the maximum over all processes, in one exchange.
    fn reduce(&mut self, peers: &Peers<B>) {
        if self.tables.is_empty() {
            return;
        }
        self.share_known(peers);
        let own = self.tables.iter_mut().map(|(_, table)| table.running(&peers.device)).collect();
        let all = peers.hooks.max("amax histories", B::float_cat(own, 0));
        let mut begin = 0;
        for (_, table) in &mut self.tables {
            let end = begin + table.rows.len();
            table.running = Some(B::float_slice(all.clone(), &[Slice::from(begin..end)]));
            table.rows.iter_mut().for_each(|row| row.is_observed = true);
            begin = end;
        }
    }

    /// Exchanges which casts any process has observed.
    fn share_known(&mut self, peers: &Peers<B>) {
        let rows = || self.tables.iter().flat_map(|(_, table)| &table.rows);
        // Rows stay known, so this is the same in all processes.
        if self.is_all_known {
            return;
        }
        let any = peers.any("casts with a history", rows().map(|row| u8::from(row.is_known)).collect());
        let rows = self.tables.iter_mut().flat_map(|(_, table)| &mut table.rows);
        rows.zip(&any).for_each(|(row, any)| row.is_known = *any);
        self.is_all_known = any.iter().all(|any| *any);
    }

    /// Ends the step.
    pub(super) fn update(&mut self) {
        if self.tables.is_empty() {
            return;
        }
        let _timer = operation("amax_history");
        for (scaling, table) in &mut self.tables {
            table.update(*scaling);
        }
    }

    fn table(&mut self, scaling: DelayedScaling) -> &mut HistoryTable<B> {
        let i = self.tables.iter().position(|(s, _)| *s == scaling).unwrap_or_else(|| {
            self.tables.push((scaling, HistoryTable::default()));
            self.tables.len() - 1
        });
        &mut self.tables[i].1
    }

    /// Reads all histories to the host, by layer. Waits for the device.
    pub(crate) fn export(&self) -> BTreeMap<String, (DelayedScaling, BTreeMap<Role, AmaxState>)> {
        let bits = |t: &FloatTensor<B>| -> Vec<u32> { read_f32::<B>(t.clone()).iter().map(|x| x.to_bits()).collect() };
        let mut layers = BTreeMap::<_, (_, BTreeMap<_, _>)>::new();
        for (scaling, table) in &self.tables {
            let (history, scaling_amax) =
                table.state.as_ref().map_or_else(Default::default, |(h, s)| (bits(h), bits(s)));
            let running = table.running.as_ref().map(bits).unwrap_or_default();
            for (i, row) in table.rows.iter().enumerate().filter(|(_, row)| row.is_known) {
                let of_row = history.chunks(scaling.amax_history_len).nth(i).filter(|_| row.has_scale);
                let observed = running.get(i).filter(|bits| row.is_observed && **bits != 0);
                let state = AmaxState {
                    history: of_row.unwrap_or_default().to_vec(),
                    scaling_amax: scaling_amax.get(i).copied().filter(|_| row.has_scale),
                    observed: observed.copied().into_iter().collect(),
                };
                let (_, roles) = layers.entry(row.layer.clone()).or_insert_with(|| (*scaling, BTreeMap::new()));
                roles.insert(row.role, state);
            }
        }
        layers
    }

    /// Restores a cast's saved history. The caller has checked its length.
    pub(crate) fn restore(&mut self, cast: &TrackedCast, saved: &AmaxState, device: &Device<B>) {
        let scaling = cast.scaling;
        let table = self.table(scaling);
        let at = table.place(cast);
        table.rows[at].is_known = true;
        // Compared by bits, NaN is the largest.
        if let Some(bits) = saved.observed.iter().max() {
            table.observe(at, tensor::<B>(vec![f32::from_bits(*bits)], [1], device));
        }
        let Some(scaling_amax) = saved.scaling_amax else { return };
        table.rows[at].has_scale = true;
        table.grow(scaling, at + 1, device);
        let len = saved.history.len();
        let history = tensor::<B>(saved.history.iter().map(|bits| f32::from_bits(*bits)).collect(), [1, len], device);
        let scaling_amax = tensor::<B>(vec![f32::from_bits(scaling_amax)], [1, 1], device);
        let of_row = |width: usize| [Slice::from(at..at + 1), Slice::from(0..width)];
        let (all, amaxes) = table.state.take().expect("grown to hold this row");
        let all = B::float_slice_assign(all, &of_row(len), history);
        table.state = Some((all, B::float_slice_assign(amaxes, &of_row(1), scaling_amax)));
    }
}

impl<B: Float8Backend> HistoryTable<B> {
    fn place(&mut self, TrackedCast { layer, role, initial, .. }: &TrackedCast) -> usize {
        let (next, role, initial) = (self.rows.len(), *role, *initial);
        let place = *self.places.entry((layer.clone(), role)).or_insert(next);
        if place == next {
            let layer = layer.clone();
            let [is_known, is_observed, has_scale] = [false; 3];
            self.rows.push(Row { layer, role, is_known, is_observed, has_scale, scaling_amax: None, initial });
        }
        place
    }

    /// Running maxima `[rows]`, zero for rows that this step did not observe.
    fn running(&mut self, device: &Device<B>) -> FloatTensor<B> {
        let rows = self.rows.len();
        let running = self.with_capacity(rows, device);
        self.running = Some(running.clone());
        let running =
            if running.shape()[0] == rows { running } else { B::float_slice(running, &[Slice::from(0..rows)]) };
        if self.rows.iter().all(|row| row.is_observed) {
            return running;
        }
        let stale: Vec<bool> = self.rows.iter().map(|row| !row.is_observed).collect();
        let known = self.stale.take().filter(|(known, _)| *known == stale);
        let (stale, mask) = known.unwrap_or_else(|| {
            let data = TensorData::new(stale.clone(), [rows]);
            let data = data.convert_dtype(get_device_settings::<B>(device).bool_dtype.into());
            (stale, B::bool_from_data(data, device))
        });
        self.stale = Some((stale, mask.clone()));
        B::float_mask_fill(running, mask, Scalar::from(0f32))
    }

    /// Running maxima with space for `rows` rows.
    fn with_capacity(&mut self, rows: usize, device: &Device<B>) -> FloatTensor<B> {
        let zeros = |n: usize| B::float_zeros(Shape::from(vec![n]), device, FloatDType::F32);
        match self.running.take() {
            None => zeros(rows.max(64)),
            Some(running) if running.shape()[0] < rows => {
                let more = zeros(rows.max(2 * running.shape()[0]) - running.shape()[0]);
                B::float_cat(vec![running, more], 0)
            }
            Some(running) => running,
        }
    }

    /// Adds an amax `[1]` to the current step.
    fn observe(&mut self, row: usize, amax: FloatTensor<B>) {
        let running = self.with_capacity(row + 1, &B::float_device(&amax));
        let at = [Slice::from(row..row + 1)];
        let largest = match self.rows[row].is_observed {
            true => larger::<B>(B::float_slice(running.clone(), &at), amax),
            false => amax,
        };
        self.running = Some(B::float_slice_assign(running, &at, largest));
        (self.rows[row].is_known, self.rows[row].is_observed) = (true, true);
    }

    fn scaling_amax(&mut self, row: usize) -> Option<FloatTensor<B>> {
        let (_, amaxes) = self.state.as_ref()?;
        if !self.rows[row].has_scale {
            return None;
        }
        let slice = || {
            let row = B::float_slice(amaxes.clone(), &[Slice::from(row..row + 1), Slice::from(0..1)]);
            B::float_reshape(row, Shape::from(vec![1]))
        };
        Some(self.rows[row].scaling_amax.get_or_insert_with(slice).clone())
    }

    /// Extends the history to the first `rows` casts.
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
        let Some(device) = self.running.as_ref().map(B::float_device) else { return };
        if !self.rows.iter().any(|row| row.is_observed) {
            return;
        }
        let bool_dtype = get_device_settings::<B>(&device).bool_dtype;
        let rows = self.rows.len();
        self.grow(scaling, rows, &device);
        let amax = B::float_reshape(self.running(&device), Shape::from(vec![rows, 1]));
        for row in &mut self.rows {
            (row.is_observed, row.scaling_amax) = (false, None);
            row.has_scale |= row.is_known;
        }
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

/// The larger of two amaxes; NaN wins.
fn larger<B: Float8Backend>(one: FloatTensor<B>, other: FloatTensor<B>) -> FloatTensor<B> {
    let bool_dtype = get_device_settings::<B>(&B::float_device(&one)).bool_dtype;
    // Comparisons with NaN are false.
    let is_larger = B::float_greater(other.clone(), one.clone(), bool_dtype);
    let is_nan = B::float_is_nan(other.clone(), bool_dtype);
    B::float_mask_where(one, B::bool_or(is_larger, is_nan), other)
}

fn tensor<B: Float8Backend>(values: Vec<f32>, shape: impl Into<Shape>, device: &Device<B>) -> FloatTensor<B> {
    let tensor = B::float_from_data(TensorData::new(values, shape), device);
    debug_assert_eq!(tensor.dtype(), burn_backend::DType::F32);
    tensor
}
