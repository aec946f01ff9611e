//! [`Float8Tensor`]: the inner backend's float tensor plus what only linear layers touch.
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::copies::Companion;
use crate::layer::Layer;

/// The float primitive of [`Float8<B>`](crate::Float8): the full-precision tensor, the layer it belongs to if it is a
/// linear's weight, and the FP8 copies that all clones of it share.
///
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
pub struct Float8Tensor<B: Float8Backend> {
    full: FloatTensor<B>,
    layer: Option<Arc<Layer>>,
    /// Filled by the first linear that reads the tensor: any other tensor pays one small allocation.
    companion: Arc<OnceLock<Box<Companion<B>>>>,
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// Wraps a tensor that no linear has seen.
    #[inline]
    pub fn new(full: FloatTensor<B>) -> Self {
        Self { full, layer: None, companion: Arc::default() }
    }

    /// The full-precision tensor.
    #[inline]
    pub fn full(&self) -> &FloatTensor<B> {
        &self.full
    }

    /// The full-precision tensor, without the rest.
    #[inline]
    pub fn into_full(self) -> FloatTensor<B> {
        self.full
    }

    /// The layer whose weight this is.
    #[inline]
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.layer.as_ref()
    }

    /// The same tensor as the weight of a layer that has not seen it. Copies that another layer's linears made stay with that:
    /// a history that counts them would be the other's.
    pub(crate) fn tagged(self, layer: Arc<Layer>) -> Self {
        Self { layer: Some(layer), ..Self::new(self.full) }
    }

    /// The result of an operation on the weight of `layer`.
    #[inline]
    pub(crate) fn with_layer(mut self, layer: Option<Arc<Layer>>) -> Self {
        self.layer = layer;
        self
    }

    /// The result of an operation that changes no value: everything stays.
    #[inline]
    pub(crate) fn map(self, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self { full: f(self.full), ..self }
    }

    /// Whether this is the weight of a linear, tagged or not.
    pub(crate) fn is_weight(&self) -> bool {
        self.layer.is_some() || self.companion.get().is_some_and(|c| c.is_weight())
    }

    pub(crate) fn companion(&self) -> &Companion<B> {
        self.companion.get_or_init(Box::default)
    }
}

impl<B: Float8Backend> Clone for Float8Tensor<B> {
    #[inline]
    fn clone(&self) -> Self {
        Self { full: self.full.clone(), layer: self.layer.clone(), companion: self.companion.clone() }
    }
}

impl<B: Float8Backend> core::fmt::Debug for Float8Tensor<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.full.fmt(f)
    }
}

impl<B: Float8Backend> TensorMetadata for Float8Tensor<B> {
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
