//! [`Deferred`]: SwiGLU of two tensors that is made when something reads it. A cast does not: it reads the two.
//!
//! ```text
//! gate ─┐           ┌─ cast of many scales, or of a given amax ──► codes      reads gate and up; nothing else is written
//!       ├─ SwiGLU ──┤
//!  up ──┘           └─ whatever else ──► the tensor, with its maxima          once for all clones, above and below autodiff
//! ```
use std::sync::{Arc, OnceLock};

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Granularity, Orientation};

use crate::backend::{Float8Backend, Fused, FusedOutput, Quantized, ScaleFrom};
use crate::profile::operation;

/// SwiGLU of two tensors, made once something has read it.
pub(crate) struct Deferred<B: Float8Backend> {
    /// Gate and up, which the node of SwiGLU keeps anyway.
    inputs: [FloatTensor<B>; 2],
    made: OnceLock<FusedOutput<B>>,
}

impl<B: Float8Backend> Deferred<B> {
    /// If the operation is one that its cast can do.
    pub(crate) fn new(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> Option<Arc<Self>> {
        let (Fused::SwiGlu, [a, b]) = (op, inputs) else { return None };
        let defers = B::swiglu_defers(&B::float_device(a), &a.shape(), a.dtype());
        defers.then(|| Arc::new(Self { inputs: [a.clone(), b.clone()], made: OnceLock::new() }))
    }

    /// The tensor, and its maxima.
    pub(super) fn made(&self) -> &FusedOutput<B> {
        self.made.get_or_init(|| {
            let _timer = operation(Fused::<B>::SwiGlu.name());
            B::fused_forward(&Fused::SwiGlu, &self.inputs)
        })
    }

    /// [`Float8Backend::fp8_quantize`] of the tensor.
    pub(super) fn cast(&self, cast: Cast, orientation: Orientation, scale: ScaleFrom<FloatTensor<B>>) -> Quantized<B> {
        let has_scale = cast.granularity != Granularity::Tensor || matches!(scale, ScaleFrom::Amax { .. });
        if self.made.get().is_none() && has_scale {
            B::swiglu_quantize(self.inputs.clone(), cast, orientation, scale)
        } else {
            B::fp8_quantize(self.made().y.clone(), cast, orientation, scale)
        }
    }
}
