//! [`Float8Tensor`], and [`Wrapped`]: what [`Float8`](crate::Float8) can wrap.
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::Shape;

use super::cache::Fp8Cache;
use crate::backend::{Attention, Float8Backend, Fused};
use crate::layer::{Layer, Mark, Tag};

/// What [`Float8`](crate::Float8) can wrap: a backend that computes, any [`Float8Backend`], or `Autodiff` of one. There is nothing to
/// implement.
#[diagnostic::on_unimplemented(
    message = "`Float8<{Self}>` is no backend: `{Self}` neither computes in FP8 nor is `Autodiff` of what does",
    note = "Float8 wraps the backend that you train with: `Float8<Autodiff<B>>`"
)]
pub trait Wrapped: Backend {
    /// The backend that computes.
    type Plain: Float8Backend<Device = Self::Device>;

    /// The tensor below autodiff.
    #[doc(hidden)]
    fn plain(tensor: &FloatTensor<Self>) -> &FloatTensor<Self::Plain>;
    /// The tensor of integers on the backend that computes.
    #[doc(hidden)]
    fn plain_int(tensor: IntTensor<Self>) -> IntTensor<Self::Plain>;
    /// This leaf with another value.
    #[doc(hidden)]
    fn replace(leaf: FloatTensor<Self>, value: FloatTensor<Self::Plain>) -> FloatTensor<Self>;
    /// y `[.., N]` = x `[.., K]` · w `[K, N]` + bias `[N]`.
    #[doc(hidden)]
    fn fp8_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self>;
    /// See [`grouped_linear`](crate::grouped_linear).
    #[doc(hidden)]
    fn fp8_grouped_linear(x: Float8Tensor<Self>, w: Float8Tensor<Self>, ends: IntTensor<Self>) -> FloatTensor<Self>;
    /// Scaled dot-product attention as one node.
    #[doc(hidden)]
    fn attention_node(attention: Attention<Self>) -> FloatTensor<Self>;
    /// An operation beside linears as one node.
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
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
pub struct Float8Tensor<W: Wrapped> {
    full: FloatTensor<W>,
    mark: Option<Mark>,
    /// Filled by the first linear that reads the tensor: any other tensor pays one small allocation.
    cache: Arc<OnceLock<Box<Fp8Cache<W::Plain>>>>,
}

impl<W: Wrapped> Float8Tensor<W> {
    /// Wraps a tensor that no linear has seen.
    #[inline]
    pub fn new(full: FloatTensor<W>) -> Self {
        Self { full, mark: None, cache: Arc::default() }
    }

    /// The full-precision tensor.
    #[inline]
    pub fn full(&self) -> &FloatTensor<W> {
        &self.full
    }

    /// The full-precision tensor, without the rest.
    #[inline]
    pub fn into_full(self) -> FloatTensor<W> {
        self.full
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
        Self { mark: Some(Mark::Weight(tag)), ..Self::new(self.full) }
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
        f: impl FnOnce(FloatTensor<W>) -> FloatTensor<V>,
    ) -> Float8Tensor<V> {
        Float8Tensor { full: f(self.full), mark: self.mark, cache: self.cache }
    }

    /// The tensor below autodiff, with all that its clones share.
    pub(crate) fn plain(&self) -> Float8Tensor<W::Plain> {
        Float8Tensor { full: W::plain(&self.full).clone(), mark: self.mark.clone(), cache: self.cache.clone() }
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
        Self { full: self.full.clone(), mark: self.mark.clone(), cache: self.cache.clone() }
    }
}

impl<W: Wrapped> core::fmt::Debug for Float8Tensor<W> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.full.fmt(f)
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
