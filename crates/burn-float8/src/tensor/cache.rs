//! What all clones of a tensor share: its FP8 copies, what their casts found out, and which linears read it.
//!
//! | operand | made | held |
//! | --- | --- | --- |
//! | x, by rows | fprop | weakly, plus by the ring of recent casts: Autodiff's saved clone of x must not keep it until backward |
//! | x, transposed | wgrad | as above; in the forward of [`linear`](crate::linear()), by its saved state |
//! | w, transposed | fprop, with the other in one pass if a dgrad read the last weight and both are cast alike | by the weight, so until the optimizer replaces it |
//! | w, sharded | when a GEMM first reads it, that orientation alone, from the casts of all ranks' rows | by the weight; with [`Reshard::AfterForward`](crate::Reshard) by the GEMM |
//! | w, by rows | fprop or dgrad | by the weight, unless no dgrad follows; with `force_recompute_fp8_weight_in_bwd` each when it is needed, by nobody |
//! | dy, both orientations in one pass if they are cast alike | dgrad | by dy, so until its node is done |
//!
//! All copies of one cast of a tensor have one scale: what the first of them finds out is kept, also for a tensor of the same
//! elements with zeros between ([`Fp8Cache::inherit`]). A tensor that gradient checkpointing computes again is another
//! one.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::DType;
use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Granularity};
use parking_lot::{Mutex, MutexGuard};

use super::{Float8Tensor, SavedClone};
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::DelayedScaling;
use crate::layer::{Layer, ReadAmax, now};
use crate::shard::{Amax, Gathering};
use crate::step::Observation;
use crate::terms::{Operand, Reason};

/// Fprops that a weight's copy for dgrad outlives without one.
const MAX_UNREAD_FPROPS: u32 = 256;

/// Amaxes of inputs of a frozen weight that wait for its dgrad.
const MAX_UNCONFIRMED: usize = 64;

/// What tells two casts of one tensor apart.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct CastKey {
    pub(super) cast: Cast,
    /// Scaled by a history: the codes then differ from those that the tensor's own amax would give.
    pub(super) delayed: Option<HistoryKey>,
}

impl CastKey {
    /// Whether all copies of this cast have the same scale.
    pub(super) fn has_one_scale(&self) -> bool {
        self.cast.granularity == Granularity::Tensor
    }
}

/// Which history scales a cast: layers of one conversion that read the same tensor share the first one's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct HistoryKey {
    pub(super) scaling: DelayedScaling,
    /// The address of the conversion, alive as long as the layer that asks.
    pub(super) conversion: usize,
}

/// What a cast found out.
pub(crate) struct CastResult<B: Float8Backend> {
    /// The amax that the scale is made of: `[1]`, or an array whose maximum that is.
    pub(super) scaling: FloatTensor<B>,
    /// The tensor's own, where it was looked at.
    pub(super) observed: Option<FloatTensor<B>>,
    /// For the history of the layer that cast the tensor first: sharers have that one too.
    pub(crate) observation: Option<Arc<Observation<B>>>,
}

impl<B: Float8Backend> ReadAmax for CastResult<B> {
    fn read(&self) -> (Option<f32>, f32) {
        let max = |t: &FloatTensor<B>| float8_kernels::reference::amax(&read_f32::<B>(t.clone()));
        (self.observed.as_ref().map(max), max(&self.scaling))
    }
}

/// One FP8 copy.
pub(crate) struct Fp8Copy<B: Float8Backend> {
    pub(crate) operand: B::Operand,
    pub(crate) cast: Cast,
    pub(crate) result: Arc<CastResult<B>>,
    /// The layer on whose behalf it was made, which the ring of recent casts must not keep alive.
    layer: Weak<Layer>,
    bytes: i64,
}

impl<B: Float8Backend> Fp8Copy<B> {
    pub(super) fn new(operand: B::Operand, cast: Cast, result: Arc<CastResult<B>>, layer: &Arc<Layer>) -> Arc<Self> {
        let bytes = B::fp8_size(&operand).bytes as i64;
        layer.count_copy(1, bytes);
        Arc::new(Self { operand, cast, result, layer: Arc::downgrade(layer), bytes })
    }
}

impl<B: Float8Backend> Drop for Fp8Copy<B> {
    fn drop(&mut self) {
        if let Some(layer) = self.layer.upgrade() {
            layer.count_copy(-1, self.bytes);
        }
    }
}

impl<B: Float8Backend> core::fmt::Debug for Fp8Copy<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.operand.fmt(f)
    }
}

/// As which matrix a tensor is cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `[.., C]` as `[rows, C]`.
    #[default]
    Matrix,
    /// Weights of experts `[G, K, N]` as `[K, G·N]`.
    ExpertsAlongN,
}

/// Which copy of which cast.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyKey {
    pub(super) cast: CastKey,
    pub(super) layout: Layout,
    pub(super) operand: Operand,
}

pub(super) enum Held<B: Float8Backend> {
    Strong(Arc<Fp8Copy<B>>),
    Weak(Weak<Fp8Copy<B>>),
}

/// A linear that read a tensor, for the GEMMs that come later and are not given the weight.
#[derive(Clone)]
pub(crate) struct LinearUse<B: Float8Backend> {
    pub(crate) layer: Arc<Layer>,
    /// Why it runs in high precision, whatever the layer is configured for.
    pub(crate) off: Option<Reason>,
    pub(crate) weight_dtype: DType,
    /// `[K, N]`
    pub(crate) weight_shape: [usize; 2],
    /// Whether the weight gradient of this use is still to come.
    pub(crate) pending: bool,
    /// What Autodiff saved of x for it: nothing in an evaluation, nor with a frozen weight.
    pub(crate) saved: Option<SavedClone>,
    /// The bias' dtype, where fprop left this record: dgrad is given no bias.
    pub(crate) bias_dtype: Option<DType>,
    /// What fprop's cast of w has to tell its history, once backward follows.
    pub(crate) weight_observation: Option<Arc<Observation<B>>>,
    /// The weight, in a step whose operands are sampled: there may be no dgrad that is given it.
    pub(crate) sampled_weight: Option<Float8Tensor<B>>,
}

impl<B: Float8Backend> LinearUse<B> {
    pub(crate) fn new(layer: Arc<Layer>, off: Option<Reason>, weight_dtype: DType, weight_shape: [usize; 2]) -> Self {
        Self {
            layer,
            off,
            weight_dtype,
            weight_shape,
            pending: true,
            saved: None,
            bias_dtype: None,
            weight_observation: None,
            sampled_weight: None,
        }
    }

    /// Whether both are the same linear.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.layer, &other.layer)
            && self.off == other.off
            && self.weight_dtype == other.weight_dtype
            && self.weight_shape == other.weight_shape
    }
}

/// The amax of an x that fprop read with a frozen weight: Autodiff saves no such x, so that dgrad alone can confirm it.
struct Unconfirmed<B: Float8Backend> {
    rows: usize,
    /// Alive as long as something keeps x, as a backward pass to come may; the x of an evaluation is gone.
    x: Weak<dyn Send + Sync>,
    observation: Arc<Observation<B>>,
}

/// An fprop whose dgrad is still to come.
pub(super) struct Forward {
    /// What Autodiff saved of the weight for it.
    pub(super) saved: SavedClone,
    pub(super) rows: usize,
    pub(super) is_autocast_off: bool,
}

/// See the module.
pub(crate) struct Fp8Cache<B: Float8Backend> {
    entries: Mutex<Entries<B>>,
    /// Whether a linear read this tensor as its weight.
    is_weight: AtomicBool,
    /// The newest stamp when Autodiff last saved an x for its gradient.
    trained_at: AtomicU64,
    /// How many of its elements are those of another tensor, where others are zeros.
    elements: OnceLock<u64>,
}

pub(super) struct Entries<B: Float8Backend> {
    pub(super) copies: Vec<(CopyKey, Held<B>)>,
    pub(super) results: Vec<(CastKey, Arc<CastResult<B>>)>,
    uses: Vec<LinearUse<B>>,
    unconfirmed: Vec<Unconfirmed<B>>,
    /// Fprops in the order that they ran: all where matmuls run in FP8, else those since the first with FP8 switched off.
    pub(super) forwards: Vec<Forward>,
    fprops_since_dgrad: u32,
    /// Amaxes of a sharded weight over all ranks.
    pub(super) reduced: Vec<(AmaxOf, Amax<B>)>,
    /// A sharded weight's values from all ranks, by dtype.
    pub(super) gathered: Vec<FloatTensor<B>>,
    /// Copies of a sharded weight that are on their way.
    pub(super) started: Vec<(CopyKey, Started<B>)>,
}

/// A copy of a sharded weight that is on its way from all ranks, and what the cast of this rank's rows found out.
pub(super) struct Started<B: Float8Backend> {
    pub(super) gathering: Gathering<B>,
    pub(super) result: Arc<CastResult<B>>,
}

/// What amaxes are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AmaxOf {
    /// All elements.
    Tensor,
    /// Each column.
    Columns,
}

impl<B: Float8Backend> Default for Fp8Cache<B> {
    fn default() -> Self {
        let (copies, results, uses, unconfirmed, forwards) = Default::default();
        let (reduced, gathered, started) = Default::default();
        let fprops_since_dgrad = 0;
        let entries =
            Entries { copies, results, uses, unconfirmed, forwards, fprops_since_dgrad, reduced, gathered, started };
        Self {
            entries: Mutex::new(entries),
            is_weight: AtomicBool::new(false),
            trained_at: AtomicU64::new(0),
            elements: OnceLock::new(),
        }
    }
}

impl<B: Float8Backend> Fp8Cache<B> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Entries<B>> {
        self.entries.lock()
    }

    /// Takes over what is known of casts of `other` with one scale, whose `elements` this tensor has, and zeros beside them, which
    /// no share counts.
    pub(crate) fn inherit(&self, other: &Self, elements: u64) {
        self.elements.get_or_init(|| elements);
        let results = other.lock().results.iter().filter(|(key, _)| key.has_one_scale()).cloned().collect();
        self.lock().results = results;
    }

    /// How many elements count in shares, of so many.
    pub(super) fn elements(&self, all: usize) -> u64 {
        self.elements.get().copied().unwrap_or(all as u64)
    }

    /// Notes that fprop reads this tensor as a weight.
    pub(crate) fn note_fprop(&self) {
        self.is_weight.store(true, Relaxed);
        let mut entries = self.lock();
        entries.fprops_since_dgrad += 1;
        // Evaluations: nobody reads the copy for dgrad. Dropped after the lock is released.
        let _unread: Vec<_> = if entries.fprops_since_dgrad == MAX_UNREAD_FPROPS {
            entries.copies.extract_if(.., |(key, _)| key.operand == Operand::WEIGHT).collect()
        } else {
            vec![]
        };
    }

    /// Notes that dgrad reads this tensor as a weight.
    pub(crate) fn note_dgrad(&self) {
        self.lock().fprops_since_dgrad = 0;
    }

    /// Notes that Autodiff has saved an x for this weight's gradient.
    pub(crate) fn set_trained(&self) {
        self.trained_at.store(now(), Relaxed);
    }

    /// The newest stamp when an x was last saved.
    pub(crate) fn trained_at(&self) -> u64 {
        self.trained_at.load(Relaxed)
    }

    /// Forgets what casts with delayed scaling have made: a step begins that has other scales.
    pub(crate) fn forget_delayed(&self) {
        let mut entries = self.lock();
        let _copies: Vec<_> = entries.copies.extract_if(.., |(key, _)| key.cast.delayed.is_some()).collect();
        entries.results.retain(|(key, _)| key.delayed.is_none());
        entries.started.retain(|(key, _)| key.cast.delayed.is_none());
    }

    /// Lets go of copies that are on their way.
    pub(super) fn forget_started(&self) {
        self.lock().started.clear();
    }

    /// Keeps amaxes of a sharded weight over all ranks, for the casts to come.
    pub(crate) fn set_reduced(&self, of: AmaxOf, amax: Amax<B>) {
        let mut entries = self.lock();
        entries.reduced.retain(|(known, _)| *known != of);
        entries.reduced.push((of, amax));
    }

    pub(crate) fn is_weight(&self) -> bool {
        self.is_weight.load(Relaxed)
    }

    /// Notes that `new` is the linear whose backward read this tensor last.
    pub(crate) fn set_use(&self, new: LinearUse<B>) {
        self.lock().uses = vec![new];
    }

    /// Reads or changes the linears that read this tensor.
    pub(crate) fn with_uses<T>(&self, f: impl FnOnce(&mut Vec<LinearUse<B>>) -> T) -> T {
        f(&mut self.lock().uses)
    }

    /// Keeps what an x that a frozen weight read has to tell, until dgrad comes to the weight.
    pub(crate) fn push_unconfirmed(&self, x: &Float8Tensor<B>, rows: usize, observation: Arc<Observation<B>>) {
        let unconfirmed = &mut self.lock().unconfirmed;
        if unconfirmed.len() == MAX_UNCONFIRMED {
            unconfirmed.remove(0);
        }
        unconfirmed.push(Unconfirmed { rows, x: x.liveness(), observation });
    }

    /// What the x that belongs to a dy of so many rows has to tell: backward visits the last first, and passes over
    /// evaluations.
    pub(crate) fn pop_unconfirmed(&self, rows: usize) -> Option<Arc<Observation<B>>> {
        let unconfirmed = &mut self.lock().unconfirmed;
        let alive = unconfirmed.iter().rposition(|u| u.rows == rows && u.x.strong_count() > 0);
        let at = alive.or_else(|| unconfirmed.iter().rposition(|u| u.rows == rows))?;
        Some(unconfirmed.remove(at).observation)
    }
}
