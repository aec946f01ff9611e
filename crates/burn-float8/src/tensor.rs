//! [`Float8Tensor`]: the inner backend's float tensor plus what only linear layers touch.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::copies::Companion;
use crate::layer::Layer;

/// What a linear's weight carries.
#[derive(Clone)]
pub(crate) struct Tag {
    pub(crate) layer: Arc<Layer>,
    /// When the weight got its value: grows with every operation that mixes a weight with another tensor, as an optimizer's
    /// update does. Casts, transposes and scalar factors keep it: the same weight in another form.
    pub(crate) stamp: u64,
}

static STAMP: AtomicU64 = AtomicU64::new(0);

impl Tag {
    fn new(layer: Arc<Layer>) -> Self {
        Self { layer, stamp: STAMP.fetch_add(1, Relaxed) + 1 }
    }

    /// The tag of an operation's result on this weight and `others` other float tensors.
    pub(crate) fn after(self, others: usize) -> Self {
        if others == 0 { self } else { Self::new(self.layer) }
    }

    /// The stamp that no weight built so far exceeds.
    pub(crate) fn now() -> u64 {
        STAMP.load(Relaxed)
    }
}

/// The float primitive of [`Float8<B>`](crate::Float8): the full-precision tensor, the layer it belongs to if it is a
/// linear's weight, and the FP8 copies that all clones of it share.
///
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
pub struct Float8Tensor<B: Float8Backend> {
    full: FloatTensor<B>,
    tag: Option<Tag>,
    /// Filled by the first linear that reads the tensor: any other tensor pays one small allocation.
    companion: Arc<OnceLock<Box<Companion<B>>>>,
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// Wraps a tensor that no linear has seen.
    #[inline]
    pub fn new(full: FloatTensor<B>) -> Self {
        Self { full, tag: None, companion: Arc::default() }
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
        self.tag.as_ref().map(|tag| &tag.layer)
    }

    /// The same tensor as the weight of a layer that has not seen it. Copies that another layer's linears made stay with that:
    /// a history that counts them would be the other's.
    pub(crate) fn tagged(self, layer: Arc<Layer>) -> Self {
        Self { tag: Some(Tag::new(layer)), ..Self::new(self.full) }
    }

    /// The tag of a linear's weight.
    #[inline]
    pub(crate) fn tag(&self) -> Option<&Tag> {
        self.tag.as_ref()
    }

    /// The result of an operation on a tagged weight.
    #[inline]
    pub(crate) fn with_tag(mut self, tag: Option<Tag>) -> Self {
        self.tag = tag;
        self
    }

    /// The result of an operation that changes no value: everything stays.
    #[inline]
    pub(crate) fn map(self, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self { full: f(self.full), ..self }
    }

    /// Whether this is the weight of a linear, tagged or not.
    pub(crate) fn is_weight(&self) -> bool {
        self.tag.is_some() || self.companion.get().is_some_and(|c| c.is_weight())
    }

    pub(crate) fn companion(&self) -> &Companion<B> {
        self.companion.get_or_init(Box::default)
    }
}

impl<B: Float8Backend> Clone for Float8Tensor<B> {
    #[inline]
    fn clone(&self) -> Self {
        Self { full: self.full.clone(), tag: self.tag.clone(), companion: self.companion.clone() }
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
