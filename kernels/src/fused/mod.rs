//! Fused operations of a transformer, forward and backward, each without intermediate tensors.
//!
//! ```text
//! SwiGLU     y = a s b,               s = σ(a)             da = dy b s (a (1 - s) + 1),     db = dy a s
//! RMSNorm    y = (x r) γ,             r = 1 / √(mean x² + ε)
//!            dx = r (g - n mean(g n)),   g = dy γ,  n = x r   dγ = Σ_rows dy n
//! rotary     y₁ = x₁ c - x₂ s,        y₂ = x₂ c + x₁ s     back: the same with -s
//! ```
//! Computed in f32. Results have the dtype of the first input.

mod rms_norm;
mod rotary;
mod swiglu;

pub use rms_norm::{rms_norm, rms_norm_backward};
pub use rotary::rotary;
pub use swiglu::{swiglu, swiglu_backward};

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::denylist::{disable, is_disabled};
use crate::view::Checked;
use crate::{KernelError, MatrixView};

/// A fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FusedKernel {
    /// [`swiglu`] and [`swiglu_backward`].
    SwiGlu,
    /// [`rms_norm`] and [`rms_norm_backward`].
    RmsNorm,
    /// [`rotary`], forward and backward.
    Rotary,
}

/// Disables the operation on this device. It then returns [`KernelError::Disabled`].
pub fn disable_fused<R: Runtime>(client: &ComputeClient<R>, kernel: FusedKernel) {
    disable(client, kernel);
}

/// Contiguous tensors of one dtype.
struct Dense<const N: usize> {
    tensors: [Checked; N],
    dtype: StorageType,
    /// Elements per vector load.
    width: usize,
}

impl<const N: usize> Dense<N> {
    /// # Errors
    /// The same as for the operations.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        kernel: FusedKernel,
        tensors: [&MatrixView; N],
    ) -> Result<Self, KernelError> {
        if is_disabled(client, kernel) {
            return Err(KernelError::Disabled);
        }
        let dtype = tensors[0].dtype;
        let tensors = Checked::dense(client, tensors, |other| other == dtype)?;
        let width = tensors.iter().map(Checked::dense_width).min().expect("at least one tensor");
        Ok(Self { tensors, dtype, width })
    }

    /// Kernel arrays, and the offset of each tensor in its array, in vectors.
    fn args<R: Runtime>(&self) -> ([ArrayArg<R>; N], [u32; N]) {
        let args = self.tensors.each_ref().map(|tensor| tensor.dense_array(self.width));
        (args, self.tensors.each_ref().map(|tensor| (tensor.memory().1 / self.width) as u32))
    }

    fn elements(&self) -> usize {
        self.tensors[0].rows * self.tensors[0].cols
    }

    fn vectors(&self) -> u32 {
        (self.elements() / self.width) as u32
    }

    /// Allocates a result. Returns its memory and the kernel argument.
    fn output<R: Runtime>(&self, client: &ComputeClient<R>) -> (Handle, ArrayArg<R>) {
        let memory = client.empty(self.elements() * self.dtype.size());
        // SAFETY: the memory has this many elements.
        let arg = unsafe { ArrayArg::from_raw_parts(memory.clone(), self.vectors() as usize) };
        (memory, arg)
    }
}

/// Checks that γ is as long as the rows of x.
fn gamma_of<R: Runtime>(
    client: &ComputeClient<R>,
    kernel: FusedKernel,
    x: &MatrixView,
    gamma: &MatrixView,
) -> Result<Dense<1>, KernelError> {
    if gamma.shape != [1, x.shape[1]] {
        return Err(KernelError::ShapeMismatch { x: x.shape, operand: gamma.shape });
    }
    Dense::new(client, kernel, [gamma])
}

/// Casts a vector to f32.
#[cube]
fn wide<O: Float, N: Size>(values: Vector<O, N>) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(values)
}
