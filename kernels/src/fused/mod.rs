//! What stands beside the linears of a transformer, forward and backward, each in one kernel that writes no tensor between.
//!
//! ```text
//! SwiGLU     y = a s b,               s = σ(a)             da = dy b s (a (1 - s) + 1),     db = dy a s
//! RMSNorm    y = (x r) γ,             r = 1 / √(mean x² + ε)
//!            dx = r (g - n mean(g n)),   g = dy γ,  n = x r   dγ = Σ_rows dy n
//! rotary     y₁ = x₁ c - x₂ s,        y₂ = x₂ c + x₁ s     back: the same with -s
//! ```
//! Computed in f32; what comes out has the dtype of what goes in. What a linear reads, forward or backward, leaves with its maxima: an FP8 cast
//! with one scale for the tensor ([`quantize_with_maxima`](crate::quantize_with_maxima)) then does not read it for its amax.

mod prologue;
mod rms_norm;
mod rotary;
mod swiglu;

pub(crate) use prologue::{Beside, Loaded, Prologue};
pub use prologue::{FusedInputs, casts_fused};
pub use rms_norm::{inverse_rms, rms_norm, rms_norm_backward};
pub use rotary::rotary;
pub use swiglu::{swiglu, swiglu_backward};

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::denylist::{disable, is_disabled};
use crate::grid::{UNITS, cube_max};
use crate::load::element;
use crate::ptx::cvt::Isa;
use crate::source::Source;
use crate::view::Checked;
use crate::{KernelError, MatrixView, supports};

/// An operation of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FusedKernel {
    /// [`swiglu`] and [`swiglu_backward`].
    SwiGlu,
    /// [`quantize_fused`](crate::quantize_fused) of SwiGLU.
    SwiGluCast,
    /// [`rms_norm`] and [`rms_norm_backward`].
    RmsNorm,
    /// [`quantize_fused`](crate::quantize_fused) of RMSNorm, and [`inverse_rms`] for it.
    RmsNormCast,
    /// [`rotary`], both ways.
    Rotary,
}

/// What comes of an operation, and the maxima of its magnitudes.
#[derive(Clone, Debug)]
pub struct WithMaxima {
    /// In the shape and dtype of what went in.
    pub y: Handle,
    /// f32, as many as [`maxima_len`] says: the largest of them is max |y|, NaN if y holds one. None where they were not asked for.
    pub maxima: Option<Handle>,
}

/// Elements of a unit in one round.
const EACH: usize = 8;

/// Most cubes of a kernel that leaves maxima: each cube of a cast folds as many in one round.
const MOST_CUBES: usize = 1024;

/// How many maxima an operation leaves of a tensor `[rows, cols]`.
pub fn maxima_len(kernel: FusedKernel, [rows, cols]: [usize; 2]) -> usize {
    match kernel {
        FusedKernel::SwiGlu | FusedKernel::SwiGluCast | FusedKernel::Rotary => {
            (rows * cols).div_ceil(UNITS as usize * EACH).min(MOST_CUBES)
        }
        FusedKernel::RmsNorm | FusedKernel::RmsNormCast => rms_norm::cubes(rows, cols, MOST_CUBES),
    }
}

/// From here on the operation returns [`KernelError::Disabled`] on this device.
pub fn disable_fused<R: Runtime>(client: &ComputeClient<R>, kernel: FusedKernel) {
    disable(client, kernel);
}

/// Tensors of one dtype whose elements follow each other in memory.
struct Dense<const N: usize> {
    tensors: [Checked; N],
    dtype: StorageType,
    /// Elements in a vector that is loaded at once.
    width: usize,
}

impl<const N: usize> Dense<N> {
    /// # Errors
    /// As the operations: what cannot be computed here.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        kernel: FusedKernel,
        tensors: [&MatrixView; N],
    ) -> Result<Self, KernelError> {
        if is_disabled(client, kernel) {
            return Err(KernelError::Disabled);
        }
        let dtype = tensors[0].dtype;
        for tensor in tensors {
            if tensor.dtype != dtype || !supports(client, dtype) {
                return Err(KernelError::UnsupportedDtype { dtype: tensor.dtype });
            }
            if tensor.shape != tensors[0].shape {
                return Err(KernelError::ShapeMismatch { x: tensors[0].shape, operand: tensor.shape });
            }
        }
        let mut checked = Vec::with_capacity(N);
        for tensor in tensors {
            let one = Checked::new(client, tensor)?;
            if !one.is_dense() {
                return Err(KernelError::NotContiguous { shape: tensor.shape, strides: tensor.strides });
            }
            checked.push(one);
        }
        let width = checked.iter().map(Checked::dense_width).min().expect("at least one tensor");
        let Ok(tensors) = checked.try_into() else { unreachable!("as many as were given") };
        Ok(Self { tensors, dtype, width })
    }

    /// The kernel's arrays, and where each tensor begins in its own, in vectors.
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

    /// Memory for a result, and a kernel's argument that fills it.
    fn output<R: Runtime>(&self, client: &ComputeClient<R>) -> (Handle, ArrayArg<R>) {
        let memory = client.empty(self.elements() * self.dtype.size());
        // SAFETY: it has as many elements.
        let arg = unsafe { ArrayArg::from_raw_parts(memory.clone(), self.vectors() as usize) };
        (memory, arg)
    }
}

/// γ, if it is as long as the rows of x.
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

/// Memory for a maximum of each of so many cubes, if they are asked for.
fn maxima<R: Runtime>(client: &ComputeClient<R>, cubes: usize, wanted: bool) -> Option<Handle> {
    wanted.then(|| client.empty(cubes * 4))
}

/// Memory from [`maxima`], as a kernel's argument.
fn maxima_arg<R: Runtime>(memory: Option<&Handle>, cubes: usize) -> ComptimeOptionArgs<Array<u32>, R> {
    // SAFETY: it has as many words.
    memory.map(|memory| unsafe { ArrayArg::from_raw_parts(memory.clone(), cubes) }).into()
}

/// Leaves the largest of the cube's where it is asked for. All units of the cube must call it; it synchronizes them.
#[cube]
fn leave(maxima: &mut ComptimeOption<Array<u32>>, largest: u32, #[comptime] isa: Isa) {
    #[comptime]
    if let ComptimeOption::Some(maxima) = maxima {
        let largest = cube_max(largest, isa);
        if UNIT_POS == 0 {
            maxima[CUBE_POS] = largest;
        }
        // What the maximum went through may be used again.
        sync_cube();
    }
}

/// In f32.
#[cube]
fn wide<O: Float, N: Size>(values: Vector<O, N>) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(values)
}

/// The largest of `largest` and of the bits of the magnitudes of `values`.
#[cube]
fn largest_of<O: Float, N: Size>(largest: u32, values: Vector<O, N>) -> u32 {
    let values = wide::<O, N>(values);
    let mut largest = largest;
    let width = N::value();
    #[unroll]
    for i in 0..width {
        largest = max(largest, u32::reinterpret(values[i]) & 0x7fff_ffffu32);
    }
    largest
}

/// The elements that a word of `source` has place for, one or two, from that of word `word` on: of those in the words `raw[first..]`, which
/// have the dtype `of`.
#[cube]
fn unpacked(
    raw: &Array<u32>,
    #[comptime] first: u32,
    #[comptime] word: u32,
    #[comptime] source: Source,
    #[comptime] of: Source,
    #[comptime] isa: Isa,
) -> Vector<f32, Const<2>> {
    let each = comptime!(source.per_word());
    let mut values = Vector::<f32, Const<2>>::new(0.0f32);
    #[unroll]
    for i in 0..each {
        values[comptime!(i as usize)] = f32::reinterpret(element(raw, first, comptime!(word * each + i), of, isa));
    }
    values
}

/// The elements of a word, rounded to their dtype; of f32 the first alone.
#[cube]
fn packed(values: Vector<f32, Const<2>>, #[comptime] source: Source) -> u32 {
    if comptime!(source == Source::F32) {
        u32::reinterpret(values[0])
    } else if comptime!(source == Source::Bf16) {
        u32::reinterpret(Vector::<bf16, Const<2>>::cast_from(values))
    } else {
        u32::reinterpret(Vector::<f16, Const<2>>::cast_from(values))
    }
}
