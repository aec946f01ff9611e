//! [`View`]: values of a tensor of four axes, with strides.
use std::borrow::Cow;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use super::floats;

/// Rows of f32 with strides of three axes in any order. The elements of a row are contiguous.
pub(super) struct View<'a> {
    pub(super) values: Cow<'a, [f32]>,
    pub(super) strides: [usize; 3],
}

impl<'a> View<'a> {
    /// Values in f32, borrowed if the backend exposes them with contiguous rows.
    pub(super) fn new<B: Backend>(x: &'a FloatTensor<B>) -> Self {
        #[cfg(feature = "flex")]
        if let Some(x) = (x as &dyn core::any::Any).downcast_ref::<burn_flex::FlexTensor>()
            && x.dtype() == burn_backend::DType::F32
            && let Ok(&[i, j, k, 1]) = <&[isize; 4]>::try_from(x.layout().strides())
            && let [Ok(i), Ok(j), Ok(k)] = [i, j, k].map(usize::try_from)
        {
            let values = Cow::Borrowed(&x.storage::<f32>()[x.layout().start_offset()..]);
            return View { values, strides: [i, j, k] };
        }
        let [_, j, k, width] = x.shape().dims();
        Self { values: floats::<B>(x), strides: [j * k * width, k * width, width] }
    }

    /// Values, starting at a row.
    #[inline(always)]
    pub(super) fn from(&self, at: [usize; 3]) -> &[f32] {
        let offset: usize = self.strides.iter().zip(at).map(|(stride, at)| stride * at).sum();
        &self.values[offset..]
    }
}
