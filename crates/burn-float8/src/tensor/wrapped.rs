//! [`Float8Tensor`], and [`Wrapped`]: backends that [`Float8`](crate::Float8) can wrap.
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

use super::adapter::Adapters;
use super::cache::{CastKey, Fp8Cache};
use super::codes::Codes;
use super::expert_route::{Direction, Route};
use super::linear_part::LinearPart;
use crate::backend::{Float8Backend, Fused};
use crate::layer::{Layer, Mark, Tag};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Backends that [`Float8`](crate::Float8) can wrap: a compute backend, which is any
/// [`Float8Backend`], or `Autodiff` of one. The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`Float8<{Self}>` is no backend: `{Self}` neither computes in FP8 nor is `Autodiff` of what does",
    note = "Float8 wraps the backend that you train with: `Float8<Autodiff<B>>`"
)]
pub trait Wrapped: Backend + sealed::Sealed {
    /// The compute backend.
    type Plain: Float8Backend<
            Device = Self::Device,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
        >;

    /// The tensor below autodiff.
    #[doc(hidden)]
    fn plain(tensor: &FloatTensor<Self>) -> &FloatTensor<Self::Plain>;
    /// Replaces the value of this leaf.
    #[doc(hidden)]
    fn replace(leaf: FloatTensor<Self>, value: FloatTensor<Self::Plain>) -> FloatTensor<Self>;
    /// y `[.., N]` = x `[.., K]` · w `[K, N]` + bias `[N]`.
    #[doc(hidden)]
    fn fp8_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self>;
    /// See [`grouped_linear`](crate::grouped_linear).
    #[doc(hidden)]
    fn fp8_grouped_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, ends: IntTensor<Self>) -> FloatTensor<Self>;
    /// A fused operation as one node.
    #[doc(hidden)]
    fn fused_node(op: Fused<Self::Plain>, inputs: Vec<FloatTensor<Self>>) -> FloatTensor<Self>;
    /// Whether a gradient of this tensor is wanted.
    #[doc(hidden)]
    fn is_tracked(tensor: &FloatTensor<Self>) -> bool;
    /// Gathers a sharded weight.
    #[doc(hidden)]
    fn fp8_full_tensor(weight: Float8Tensor<Self>) -> Float8Tensor<Self>;
    /// Part of a layer's linear on this rank; None if ranks do not divide it.
    #[doc(hidden)]
    fn linear_part(layer: &Layer) -> Option<LinearPart>;
    /// For a layer that ranks divide, `Dispatch` gathers the tokens of all ranks, and `Combine` returns this
    /// rank's tokens of the sum over ranks.
    #[doc(hidden)]
    fn parallel_tokens(x: FloatTensor<Self>, layer: &Arc<Layer>, direction: Direction) -> FloatTensor<Self>;
    /// Log-likelihood of logits whose vocabulary ranks divide.
    #[doc(hidden)]
    fn parallel_log_likelihood(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        layer: &Arc<Layer>,
    ) -> FloatTensor<Self>;
    /// Rows on the way of their route.
    #[doc(hidden)]
    fn expert_rows(rows: FloatTensor<Self>, route: &Arc<Route<Self::Plain>>, direction: Direction)
    -> FloatTensor<Self>;
    /// Rows of a table, which may be sharded.
    #[doc(hidden)]
    fn fp8_embedding(weights: Float8Tensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self>;
}

/// Float primitive of [`Float8<W>`](crate::Float8): the full-precision tensor, its layer if it is a
/// linear's weight, and its FP8 copies. All clones share the copies, above and below autodiff.
///
/// A weight may be [FP8-only](crate::weights), without a full-precision tensor, and it may have
/// [adapters](crate::lora).
///
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
#[derive(Clone)]
pub struct Float8Tensor<W: Wrapped> {
    /// The full-precision tensor. For an FP8-only weight, a placeholder filled with NaN: only its
    /// shape, dtype, device and autodiff node are valid.
    full: FloatTensor<W>,
    codes: Option<Arc<Codes<W::Plain>>>,
    adapters: Option<Arc<Adapters<W>>>,
    mark: Option<Mark>,
    /// Filled by the first linear that reads the tensor. Other tensors cost one small allocation.
    cache: Arc<OnceLock<Box<Fp8Cache<W::Plain>>>>,
}

impl<W: Wrapped> Float8Tensor<W> {
    /// Wraps a tensor that no linear has read.
    #[inline]
    pub fn new(full: FloatTensor<W>) -> Self {
        Self { full, codes: None, adapters: None, mark: None, cache: Arc::default() }
    }

    /// An FP8-only weight. Only shape, dtype, device and autodiff node of `full` are valid.
    pub(crate) fn of_codes(full: FloatTensor<W>, codes: Arc<Codes<W::Plain>>) -> Self {
        Self { codes: Some(codes), ..Self::new(full) }
    }

    /// The full-precision tensor. For an [FP8-only](Self::is_fp8_only) weight, only its shape,
    /// dtype and device are valid.
    #[inline]
    pub fn full(&self) -> &FloatTensor<W> {
        &self.full
    }

    /// Device of the tensor.
    #[inline]
    pub(crate) fn device(&self) -> Device<W> {
        W::float_device(&self.full)
    }

    /// The full-precision values: decoded if the weight is FP8-only, and with its adapters added.
    #[inline]
    pub fn into_full(self) -> FloatTensor<W> {
        self.into_values("into_full")
    }

    /// [`into_full`](Self::into_full) for an operation, which the report names if codes are
    /// decoded.
    #[inline]
    pub(crate) fn into_values(self, operation: &'static str) -> FloatTensor<W> {
        let Self { full, codes, adapters, mark, .. } = self;
        let full = match codes {
            Some(codes) => {
                if let Some(Mark::Weight(Tag { layer, .. })) = &mark {
                    layer.count_decode(operation);
                }
                let values = codes.values(full.dtype());
                W::replace(full, values)
            }
            None => full,
        };
        match adapters {
            Some(adapters) => {
                let part = match &mark {
                    Some(Mark::Weight(Tag { layer, .. })) => W::linear_part(layer),
                    _ => None,
                };
                adapters.merged(full, part)
            }
            None => full,
        }
    }

    /// Whether the weight is FP8-only.
    #[inline]
    pub fn is_fp8_only(&self) -> bool {
        self.codes.is_some()
    }

    /// Codes of an FP8-only weight.
    pub(crate) fn codes(&self) -> Option<&Arc<Codes<W::Plain>>> {
        self.codes.as_ref()
    }

    /// Adapters of the weight.
    pub(crate) fn adapters(&self) -> Option<&Arc<Adapters<W>>> {
        self.adapters.as_ref()
    }

    /// Replaces the adapters of this weight.
    pub(crate) fn with_adapters(self, adapters: Option<Arc<Adapters<W>>>) -> Self {
        Self { adapters, ..self }
    }

    #[cfg(feature = "distributed")]
    pub(crate) fn full_mut(&mut self) -> &mut FloatTensor<W> {
        &mut self.full
    }

    /// Layer of this weight.
    #[inline]
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.tag().map(|tag| &tag.layer)
    }

    /// Tags this tensor as the weight of a layer that has not read it. The result starts without
    /// FP8 copies, since the amaxes of existing copies belong to another layer's history.
    pub(crate) fn tagged(self, tag: Tag) -> Self {
        let Self { full, codes, adapters, .. } = self;
        Self { mark: Some(Mark::Weight(tag)), codes, adapters, ..Self::new(full) }
    }

    /// Tag of a linear's weight.
    #[inline]
    pub(crate) fn tag(&self) -> Option<&Tag> {
        match &self.mark {
            Some(Mark::Weight(tag)) => Some(tag),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn mark(&self) -> Option<&Mark> {
        self.mark.as_ref()
    }

    /// Sets the mark of an operation's result.
    #[inline]
    pub(crate) fn with_mark(mut self, mark: Option<Mark>) -> Self {
        self.mark = mark;
        self
    }

    /// Applies an operation that changes no value. Everything else stays.
    #[inline]
    pub(crate) fn map<V: Wrapped<Plain = W::Plain>>(
        self,
        f: impl Fn(FloatTensor<W>) -> FloatTensor<V>,
    ) -> Float8Tensor<V> {
        let adapters = self.adapters.as_ref().map(|adapters| Arc::new(adapters.map(&f)));
        self.placed(f).with_adapters(adapters)
    }

    /// Moves this tensor to another autodiff node, or below autodiff. Keeps everything that clones
    /// share, but no adapters.
    pub(crate) fn placed<V: Wrapped<Plain = W::Plain>>(
        self,
        f: impl FnOnce(FloatTensor<W>) -> FloatTensor<V>,
    ) -> Float8Tensor<V> {
        let Self { full, codes, mark, cache, .. } = self;
        Float8Tensor { full: f(full), codes, adapters: None, mark, cache }
    }

    /// The tensor below autodiff. Keeps everything that clones share, but no adapters.
    pub(crate) fn plain(&self) -> Float8Tensor<W::Plain> {
        self.clone().placed(|full| W::plain(&full).clone())
    }

    pub(crate) fn cache(&self) -> &Fp8Cache<W::Plain> {
        self.cache.get_or_init(Box::default)
    }

    /// Casts of this weight that wanted its amax. None for a sharded weight, whose amax takes all
    /// processes.
    pub(crate) fn amax_casts(&self) -> Vec<CastKey> {
        let is_sharded = self.layer().is_some_and(|layer| layer.is_divided());
        match self.known_cache() {
            Some(cache) if !is_sharded => cache.amax_casts(),
            _ => vec![],
        }
    }

    /// Cache of the tensor, if a linear has read it.
    pub(crate) fn known_cache(&self) -> Option<&Fp8Cache<W::Plain>> {
        self.cache.get().map(|cache| &**cache)
    }
}

impl<W: Wrapped> core::fmt::Debug for Float8Tensor<W> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.full().fmt(f)
    }
}

impl<W: Wrapped> TensorMetadata for Float8Tensor<W> {
    fn dtype(&self) -> DType {
        self.full.dtype()
    }

    fn shape(&self) -> Shape {
        self.full.shape()
    }

    fn rank(&self) -> usize {
        self.full.rank()
    }
}
