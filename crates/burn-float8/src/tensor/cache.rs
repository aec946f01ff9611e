//! [`Fp8Cache`]: FP8 copies of a tensor and results of their casts, shared by all of its clones.
//!
//! | operand | cast in | held by |
//! | --- | --- | --- |
//! | x, by rows | fprop | weakly, and `shared_input_cast` |
//! | x, transposed | fprop, if w needs a gradient | weakly, and the node until its backward |
//! | w, transposed | fprop | the weight, until the optimizer replaces it |
//! | w, by rows | fprop or dgrad | the weight, unless no dgrad follows |
//! | w, sharded | its first GEMM, by its source | the weight or the GEMM, as its source decides |
//! | dy, both | the node's backward | the node's backward |
//!
//! Both orientations of a tensor are cast in one pass if both are needed and have the same cast.
//! This does not apply to a sharded weight: its source makes only the orientation that a GEMM
//! reads. With `force_recompute_fp8_weight_in_bwd`, each copy of a weight is cast when a GEMM needs
//! it, and held by the GEMM. Without autodiff, the weight holds it.
//!
//! All copies of one cast of a tensor with one scale share the result of the first. A tensor of the
//! same elements with zeros in between shares it too ([`Fp8Cache::inherit`]).
use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Granularity};
use parking_lot::{Mutex, MutexGuard};

use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::DelayedScaling;
use crate::layer::{AppliedNumber, Layer, ReadAmax};
use crate::step::Observation;
use crate::terms::Operand;

/// Number of forwards without a backward after which a weight drops its dgrad copy. Evaluations
/// read only the other copy.
const MAX_UNREAD_FPROPS: u32 = 256;

/// Key of a tensor's casts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CastKey {
    pub(super) cast: Cast,
    /// The history that scales the cast. Its codes differ from codes scaled by the tensor's own
    /// amax.
    pub(super) delayed: Option<HistoryKey>,
    /// Whether ranks divide the tensor: copies and amaxes are then the whole tensor's.
    pub(super) is_parallel: bool,
}

impl CastKey {
    /// Whether all copies of this cast have the same scale.
    pub(super) fn has_one_scale(&self) -> bool {
        self.cast.granularity == Granularity::Tensor
    }
}

/// History that scales a cast. Layers of one applied configuration that read the same tensor share
/// the first layer's history.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct HistoryKey {
    pub(super) scaling: DelayedScaling,
    pub(super) applied: AppliedNumber,
}

/// Amaxes of a cast.
pub(crate) struct CastResult<B: Float8Backend> {
    /// Amax that sets the scale: `[1]`, or an array with that maximum.
    pub(super) scaling: FloatTensor<B>,
    /// Amax of the tensor itself, if observed.
    pub(super) observed: Option<FloatTensor<B>>,
    /// Observation for the history of the layer that cast the tensor first, shared by other layers.
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
    /// The layer it was cast for. Weak, so that `shared_input_cast` does not keep the layer alive.
    layer: Weak<Layer>,
    bytes: i64,
}

impl<B: Float8Backend> Fp8Copy<B> {
    pub(super) fn new(operand: B::Operand, cast: Cast, result: Arc<CastResult<B>>, layer: &Arc<Layer>) -> Arc<Self> {
        let bytes = B::fp8_size(&operand).bytes as i64;
        layer.count_copy(1, bytes);
        Arc::new(Self { operand, cast, result, layer: Arc::downgrade(layer), bytes })
    }

    /// Counts the amax in this step, for a tensor that backward reads first.
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

/// Matrix form of a tensor for a cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `[.., C]` as `[rows, C]`.
    #[default]
    Matrix,
    /// Weights of experts `[G, K, N]` as `[K, G·N]`.
    ExpertsAlongN,
}

/// Key of a copy: its cast, layout and operand.
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

/// Cache of a tensor; see the module.
#[derive(Default)]
pub(crate) struct Fp8Cache<B: Float8Backend> {
    entries: Mutex<Entries<B>>,
    /// Lock this before `entries` if both are needed.
    sourced: Mutex<Sourced<B>>,
    /// Number of elements from another tensor, if the rest are zeros.
    elements: OnceLock<u64>,
}

#[derive(Default)]
pub(super) struct Entries<B: Float8Backend> {
    pub(super) copies: Vec<(CopyKey, Held<B>)>,
    pub(super) results: Vec<(CastKey, Arc<CastResult<B>>)>,
    fprops_since_dgrad: u32,
}

/// Gathered values of a weight, and the cache of its source.
#[derive(Default)]
pub(super) struct Sourced<B: Float8Backend> {
    pub(super) cache: WeightCache,
    /// The gathered weight in high precision, by dtype.
    pub(super) values: Vec<FloatTensor<B>>,
}

/// Data of a source for one value of a weight.
#[derive(Default)]
pub struct WeightCache(Option<Box<dyn Any + Send>>);

impl WeightCache {
    /// Data of the source's own type, created by the first call.
    pub fn get<T: Any + Default + Send>(&mut self) -> &mut T {
        let kept = self.0.get_or_insert_with(|| Box::new(T::default()));
        kept.downcast_mut().expect("a source keeps one type")
    }
}

impl<B: Float8Backend> Fp8Cache<B> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Entries<B>> {
        self.entries.lock()
    }

    pub(super) fn sourced(&self) -> MutexGuard<'_, Sourced<B>> {
        self.sourced.lock()
    }

    pub(super) fn try_sourced(&self) -> Option<MutexGuard<'_, Sourced<B>>> {
        self.sourced.try_lock()
    }

    /// Takes over the results of `other`'s casts with one scale. This tensor has `elements`
    /// elements of `other`, and zeros that statistics do not count.
    pub(crate) fn inherit(&self, other: &Self, elements: u64) {
        self.elements.get_or_init(|| elements);
        let results = other.lock().results.iter().filter(|(key, _)| key.has_one_scale()).cloned().collect();
        self.lock().results = results;
    }

    /// Casts that were scaled by the amax of the whole tensor.
    pub(super) fn amax_casts(&self) -> Vec<CastKey> {
        let entries = self.lock();
        let keys = entries.results.iter().map(|(key, _)| *key);
        keys.filter(|key| key.has_one_scale() && key.delayed.is_none()).collect()
    }

    /// Gives casts of this tensor its amax, `[1]`.
    pub(crate) fn expect_casts(&self, casts: Vec<CastKey>, amax: &FloatTensor<B>) {
        let observed = Some(amax.clone());
        let result = Arc::new(CastResult { scaling: amax.clone(), observed, observation: None });
        self.lock().results.extend(casts.into_iter().map(|cast| (cast, result.clone())));
    }

    /// Number of elements that count in shares, of `all` elements.
    pub(super) fn elements(&self, all: usize) -> u64 {
        self.elements.get().copied().unwrap_or(all as u64)
    }

    /// Records that fprop reads this tensor as a weight.
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

    /// Records that dgrad reads this tensor as a weight.
    pub(crate) fn note_dgrad(&self) {
        self.lock().fprops_since_dgrad = 0;
    }

    /// Drops copies and results of delayed scaling, because a step with other scales begins.
    pub(super) fn forget_delayed(&self) {
        let mut entries = self.lock();
        let _copies: Vec<_> = entries.copies.extract_if(.., |(key, _)| key.cast.delayed.is_some()).collect();
        entries.results.retain(|(key, _)| key.delayed.is_none());
    }
}
