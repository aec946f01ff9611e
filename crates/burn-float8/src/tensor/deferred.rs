//! [`Deferred`]: SwiGLU or RMSNorm that is made when something reads it. A cast does not: it reads what the operation would.
//!
//! ```text
//! gate, up ── SwiGLU ──┐    ┌─ cast of many scales, or of a given amax ──► codes    writes nothing else
//!                      ├────┤
//! x, γ ── RMSNorm ─────┘    └─ whatever else ──► the tensor, with its maxima        once for all clones, above and below autodiff
//! ```
//! Of RMSNorm a cast reads 1/rms of each row too, which is found before the first, in a read of x.
use std::sync::{Arc, OnceLock};

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use float8_kernels::{Cast, Granularity, Orientation};

use crate::backend::{Float8Backend, Fused, FusedOutput, Quantized, ScaleFrom};
use crate::profile::operation;

/// What an operation makes of two tensors, once something has read it.
pub(crate) struct Deferred<B: Float8Backend> {
    op: Fused<B>,
    /// What the node of the operation keeps anyway.
    inputs: [FloatTensor<B>; 2],
    /// [`Float8Backend::inverse_rms`] of the inputs of RMSNorm.
    inverse_rms: OnceLock<FloatTensor<B>>,
    made: OnceLock<FusedOutput<B>>,
}

impl<B: Float8Backend> Deferred<B> {
    /// If the operation is one that its cast can do.
    pub(crate) fn new(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> Option<Arc<Self>> {
        let (Fused::SwiGlu | Fused::RmsNorm { .. }, [a, b]) = (op, inputs) else { return None };
        let defers = B::fused_defers(op, &B::float_device(a), &a.shape(), [a.dtype(), b.dtype()]);
        let (inverse_rms, made) = (OnceLock::new(), OnceLock::new());
        defers.then(|| Arc::new(Self { op: op.clone(), inputs: [a.clone(), b.clone()], inverse_rms, made }))
    }

    /// The tensor, and its maxima.
    pub(super) fn made(&self) -> &FusedOutput<B> {
        self.made.get_or_init(|| {
            let _timer = operation(self.op.name());
            B::fused_forward(&self.op, &self.inputs)
        })
    }

    /// [`Float8Backend::fp8_quantize`] of the tensor.
    pub(super) fn cast(&self, cast: Cast, orientation: Orientation, scale: ScaleFrom<FloatTensor<B>>) -> Quantized<B> {
        let has_scale = cast.granularity != Granularity::Tensor || matches!(scale, ScaleFrom::Amax { .. });
        if self.made.get().is_some() || !has_scale {
            return B::fp8_quantize(self.made().y.clone(), cast, orientation, scale);
        }
        let mut inputs = self.inputs.to_vec();
        if let Fused::RmsNorm { epsilon } = self.op {
            let [x, gamma] = &self.inputs;
            let find = || B::inverse_rms(x.clone(), gamma.clone(), epsilon);
            inputs.push(self.inverse_rms.get_or_init(find).clone());
        }
        B::fused_quantize(&self.op, inputs, cast, orientation, scale)
    }
}
