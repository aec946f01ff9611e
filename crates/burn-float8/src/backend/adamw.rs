//! AdamW in one pass: inputs and outputs of a backend's step.
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};
pub use float8_kernels::adamw::{AdamWStep, RoundingKeys};

/// Tensors before or after a step: the parameter, m and v.
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The parameter, in any float dtype.
    pub param: FloatTensor<B>,
    /// m and v, in any float dtype.
    pub moments: [FloatTensor<B>; 2],
}

/// Dtypes of a step's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdamWDtypes {
    /// The parameter.
    pub param: DType,
    /// m and v.
    pub moments: DType,
    /// The gradient.
    pub grad: DType,
}

/// A step to run.
#[derive(Clone, Debug)]
pub struct AdamWRequest<B: Backend> {
    /// Scalars of the step.
    pub step: AdamWStep,
    /// Tensors before the step, of one shape. At the first step the values of the moments are not
    /// read.
    pub tensors: AdamWTensors<B>,
    /// The gradient.
    pub grad: FloatTensor<B>,
    /// Whether the next cast of the parameter wants its amax.
    pub wants_amax: bool,
}

impl<B: Backend> AdamWRequest<B> {
    /// Dtypes of the tensors.
    pub(crate) fn dtypes(&self) -> AdamWDtypes {
        let AdamWTensors { param, moments: [first, _] } = &self.tensors;
        AdamWDtypes { param: param.dtype(), moments: first.dtype(), grad: self.grad.dtype() }
    }
}

/// Result of a step.
#[derive(Clone, Debug)]
pub struct AdamWResult<B: Backend> {
    /// Tensors after the step.
    pub tensors: AdamWTensors<B>,
    /// max |w| of the new parameter, f32 `[1]`, if it was wanted and the backend computes it.
    pub amax: Option<FloatTensor<B>>,
}

/// Runs a step.
pub type AdamWFn<B> = fn(AdamWRequest<B>) -> AdamWResult<B>;
