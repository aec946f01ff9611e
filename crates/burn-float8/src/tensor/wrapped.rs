//! [`Float8Tensor`], and [`Wrapped`]: what [`Float8`](crate::Float8) can wrap.
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

use super::adapter::Adapters;
use super::cache::Fp8Cache;
use super::codes::Codes;
use crate::backend::{Float8Backend, Fused};
use crate::layer::{Layer, Mark, Tag};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// What [`Float8`](crate::Float8) can wrap: a backend that computes, any [`Float8Backend`], or `Autodiff` of one. There is nothing to
/// implement.
#[diagnostic::on_unimplemented(
    message = "`Float8<{Self}>` is no backend: `{Self}` neither computes in FP8 nor is `Autodiff` of what does",
    note = "Float8 wraps the backend that you train with: `Float8<Autodiff<B>>`"
)]
pub trait Wrapped: Backend + sealed::Sealed {
    /// The backend that computes.
    type Plain: Float8Backend<
            Device = Self::Device,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
        >;

    /// The tensor below autodiff.
    #[doc(hidden)]
    fn plain(tensor: &FloatTensor<Self>) -> &FloatTensor<Self::Plain>;
    /// This leaf with another value.
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
    /// The whole of a weight of which this process has some rows.
    #[doc(hidden)]
    fn fp8_full_tensor(weight: Float8Tensor<Self>) -> Float8Tensor<Self>;
    /// Rows of a table of which this process has some.
    #[doc(hidden)]
    fn fp8_embedding(weights: Float8Tensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self>;
}

/// The float primitive of [`Float8<W>`](crate::Float8): the full-precision tensor, the layer it belongs to if it is a
/// linear's weight, and the FP8 copies that all clones of it share, above and below autodiff.
///
/// A weight may be [FP8 codes alone](crate::weights), without a full-precision tensor, and it may have [adapters](crate::lora).
///
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
pub struct Float8Tensor<W: Wrapped> {
    /// The full-precision tensor. For an FP8-only weight, a placeholder filled with NaN: only its
    /// shape, dtype, device and autodiff node are valid.
    full: FloatTensor<W>,
    codes: Option<Arc<Codes<W::Plain>>>,
    adapters: Option<Arc<Adapters<W>>>,
    mark: Option<Mark>,
    /// Filled by the first linear that reads the tensor: any other tensor pays one small allocation.
    cache: Arc<OnceLock<Box<Fp8Cache<W::Plain>>>>,
}

impl<W: Wrapped> Float8Tensor<W> {
    /// Wraps a tensor that no linear has seen.
    #[inline]
    pub fn new(full: FloatTensor<W>) -> Self {
        Self { full, codes: None, adapters: None, mark: None, cache: Arc::default() }
    }

    /// A weight that is these codes, in the place of `full`, which says its shape, dtype, device and place in autodiff alone.
    pub(crate) fn of_codes(full: FloatTensor<W>, codes: Arc<Codes<W::Plain>>) -> Self {
        Self { codes: Some(codes), ..Self::new(full) }
    }

    /// The full-precision tensor; of a weight that [is FP8 codes alone](Self::is_fp8_only) only its shape, dtype and device say something.
    #[inline]
    pub fn full(&self) -> &FloatTensor<W> {
        &self.full
    }

    /// Where it is.
    #[inline]
    pub(crate) fn device(&self) -> Device<W> {
        W::float_device(&self.full)
    }

    /// The full-precision tensor, without the rest: decoded if the weight is FP8 codes alone, and with its adapters added.
    #[inline]
    pub fn into_full(self) -> FloatTensor<W> {
        self.into_values("into_full")
    }

    /// [`into_full`](Self::into_full) for an operation, which the report names where codes are decoded.
    #[inline]
    pub(crate) fn into_values(self, operation: &'static str) -> FloatTensor<W> {
        let Self { full, codes, adapters, mark, .. } = self;
        let full = match codes {
            Some(codes) => {
                if let Some(Mark::Weight(Tag { layer, .. })) = mark {
                    layer.count_decode(operation);
                }
                let values = codes.values(full.dtype());
                W::replace(full, values)
            }
            None => full,
        };
        match adapters {
            Some(adapters) => adapters.merged(full),
            None => full,
        }
    }

    /// Whether the weight is FP8 codes alone.
    #[inline]
    pub fn is_fp8_only(&self) -> bool {
        self.codes.is_some()
    }

    /// What the weight is, if it is FP8 codes alone.
    pub(crate) fn codes(&self) -> Option<&Arc<Codes<W::Plain>>> {
        self.codes.as_ref()
    }

    /// The adapters that are added to what a linear makes of the weight.
    pub(crate) fn adapters(&self) -> Option<&Arc<Adapters<W>>> {
        self.adapters.as_ref()
    }

    /// This weight with these adapters, in the place of any.
    pub(crate) fn with_adapters(self, adapters: Option<Arc<Adapters<W>>>) -> Self {
        Self { adapters, ..self }
    }

    #[cfg(feature = "distributed")]
    pub(crate) fn full_mut(&mut self) -> &mut FloatTensor<W> {
        &mut self.full
    }

    /// The layer whose weight this is.
    #[inline]
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.tag().map(|tag| &tag.layer)
    }

    /// This tensor as the weight of a layer that has not seen it. Copies that another layer's linears made stay with that:
    /// a history that counts them would be the other's.
    pub(crate) fn tagged(self, tag: Tag) -> Self {
        let Self { full, codes, adapters, .. } = self;
        Self { mark: Some(Mark::Weight(tag)), codes, adapters, ..Self::new(full) }
    }

    /// The tag of a linear's weight.
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

    /// The result of an operation on marked tensors.
    #[inline]
    pub(crate) fn with_mark(mut self, mark: Option<Mark>) -> Self {
        self.mark = mark;
        self
    }

    /// The result of an operation that changes no value: everything stays.
    #[inline]
    pub(crate) fn map<V: Wrapped<Plain = W::Plain>>(
        self,
        f: impl Fn(FloatTensor<W>) -> FloatTensor<V>,
    ) -> Float8Tensor<V> {
        let adapters = self.adapters.as_ref().map(|adapters| Arc::new(adapters.map(&f)));
        self.placed(f).with_adapters(adapters)
    }

    /// This tensor in another place of autodiff, or below it: all that its clones share, but for adapters.
    pub(crate) fn placed<V: Wrapped<Plain = W::Plain>>(
        self,
        f: impl FnOnce(FloatTensor<W>) -> FloatTensor<V>,
    ) -> Float8Tensor<V> {
        let Self { full, codes, mark, cache, .. } = self;
        Float8Tensor { full: f(full), codes, adapters: None, mark, cache }
    }

    /// The tensor below autodiff, with all that its clones share, but for adapters.
    pub(crate) fn plain(&self) -> Float8Tensor<W::Plain> {
        self.clone().placed(|full| W::plain(&full).clone())
    }

    pub(crate) fn cache(&self) -> &Fp8Cache<W::Plain> {
        self.cache.get_or_init(Box::default)
    }

    /// The cache of a tensor that a linear has read.
    pub(crate) fn known_cache(&self) -> Option<&Fp8Cache<W::Plain>> {
        self.cache.get().map(|cache| &**cache)
    }
}

impl<W: Wrapped> Clone for Float8Tensor<W> {
    #[inline]
    fn clone(&self) -> Self {
        Self {
            full: self.full.clone(),
            codes: self.codes.clone(),
            adapters: self.adapters.clone(),
            mark: self.mark.clone(),
            cache: self.cache.clone(),
        }
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
