//! [`Fp8Cache`]: the FP8 copies of a tensor and the results of their casts, shared by all of its clones.
//!
//! | operand | made | held |
//! | --- | --- | --- |
//! | x, by rows | fprop, with the transpose in one pass if the weight wants a gradient and both are cast alike | weakly, plus by `shared_input_cast` |
//! | x, transposed | fprop, if the weight wants a gradient | weakly, plus by the linear's node until its backward |
//! | w, transposed | fprop, with the other in one pass if x wants a gradient and both are cast alike | by the weight, so until the optimizer replaces it |
//! | w, of which this process has some rows | when a GEMM first reads it, only that orientation, by its source | by the weight, or by the GEMM, as the source says |
//! | w, by rows | fprop or dgrad | by the weight, unless no dgrad follows; with `force_recompute_fp8_weight_in_bwd` each when it is needed, by the GEMM; without autodiff by the weight |
//! | dy, both orientations in one pass if they are cast alike | the node's backward | by that |
//!
//! All copies of one cast of a tensor have one scale. The first one's result is kept, also for a
//! tensor of the same elements with zeros between ([`Fp8Cache::inherit`]).
use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Granularity};
use parking_lot::{Mutex, MutexGuard};

use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::DelayedScaling;
use crate::layer::{ConversionNumber, Layer, ReadAmax};
use crate::step::Observation;
use crate::terms::Operand;

/// Drops a weight's copy for dgrad after this many forwards without a backward: evaluations read the other one.
const MAX_UNREAD_FPROPS: u32 = 256;

/// Distinguishes the casts of one tensor.
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
    pub(super) conversion: ConversionNumber,
}

/// The amaxes of a cast.
pub(crate) struct CastResult<B: Float8Backend> {
    /// The amax that the scale is made of: `[1]`, or an array with that maximum.
    pub(super) scaling: FloatTensor<B>,
    /// The tensor's own, if observed.
    pub(super) observed: Option<FloatTensor<B>>,
    /// For the history of the layer that cast the tensor first, shared by the other layers.
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
    /// The layer that it was made for. `shared_input_cast` must not keep that alive.
    layer: Weak<Layer>,
    bytes: i64,
}

impl<B: Float8Backend> Fp8Copy<B> {
    pub(super) fn new(operand: B::Operand, cast: Cast, result: Arc<CastResult<B>>, layer: &Arc<Layer>) -> Arc<Self> {
        let bytes = B::fp8_size(&operand).bytes as i64;
        layer.count_copy(1, bytes);
        Arc::new(Self { operand, cast, result, layer: Arc::downgrade(layer), bytes })
    }

    /// This copy of a tensor that backward reads first: its amax counts in this step.
    pub(crate) fn confirmed(self: Arc<Self>) -> Arc<Self> {
        self.result.observation.iter().for_each(|observation| observation.confirm());
        self
    }
}

impl<B: Float8Backend> Drop for Fp8Copy<B> {
    fn drop(&mut self) {
        if let Some(layer) = self.layer.upgrade() {
            layer.count_copy(-1, self.bytes);
        }
    }
}

/// The matrix of a tensor that is cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `[.., C]` as `[rows, C]`.
    #[default]
    Matrix,
    /// Weights of experts `[G, K, N]` as `[K, G·N]`.
    ExpertsAlongN,
}

/// A copy, and its cast.
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

/// See the module.
pub(crate) struct Fp8Cache<B: Float8Backend> {
    entries: Mutex<Entries<B>>,
    /// Locked before `entries`, where both are.
    sourced: Mutex<Sourced<B>>,
    /// Elements that come from another tensor, if the rest are zeros.
    elements: OnceLock<u64>,
}

pub(super) struct Entries<B: Float8Backend> {
    pub(super) copies: Vec<(CopyKey, Held<B>)>,
    pub(super) results: Vec<(CastKey, Arc<CastResult<B>>)>,
    fprops_since_dgrad: u32,
}

/// The data of a weight that its source made.
pub(super) struct Sourced<B: Float8Backend> {
    pub(super) cache: WeightCache,
    /// The whole in high precision, by dtype.
    pub(super) values: Vec<FloatTensor<B>>,
}

/// A source's own data for one value of a weight.
#[derive(Default)]
pub struct WeightCache(Option<Box<dyn Any + Send>>);

impl WeightCache {
    /// The data in the source's own type, created by the first call.
    pub fn get<T: Any + Default + Send>(&mut self) -> &mut T {
        let kept = self.0.get_or_insert_with(|| Box::new(T::default()));
        kept.downcast_mut().expect("a source keeps one type")
    }
}

impl<B: Float8Backend> Default for Fp8Cache<B> {
    fn default() -> Self {
        let (copies, results, fprops_since_dgrad) = Default::default();
        Self {
            entries: Mutex::new(Entries { copies, results, fprops_since_dgrad }),
            sourced: Mutex::new(Sourced { cache: WeightCache::default(), values: vec![] }),
            elements: OnceLock::new(),
        }
    }
}

impl<B: Float8Backend> Fp8Cache<B> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Entries<B>> {
        self.entries.lock()
    }

    pub(super) fn sourced(&self) -> MutexGuard<'_, Sourced<B>> {
        self.sourced.lock()
    }

    /// Takes the results of casts of `other` with one scale. This tensor has its `elements`, and zeros
    /// that no share counts.
    pub(crate) fn inherit(&self, other: &Self, elements: u64) {
        self.elements.get_or_init(|| elements);
        let results = other.lock().results.iter().filter(|(key, _)| key.has_one_scale()).cloned().collect();
        self.lock().results = results;
    }

    /// Elements of `all` that count in shares.
    pub(super) fn elements(&self, all: usize) -> u64 {
        self.elements.get().copied().unwrap_or(all as u64)
    }

    /// Notes that fprop reads this tensor as a weight.
    pub(crate) fn note_fprop(&self) {
        let mut entries = self.lock();
        entries.fprops_since_dgrad += 1;
        // Dropped after the lock is released.
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

    /// Drops copies and results of delayed scaling: a step begins that has other scales.
    pub(super) fn forget_delayed(&self) {
        let mut entries = self.lock();
        let _copies: Vec<_> = entries.copies.extract_if(.., |(key, _)| key.cast.delayed.is_some()).collect();
        entries.results.retain(|(key, _)| key.delayed.is_none());
    }
}
