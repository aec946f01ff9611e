//! FP8 amax, quantize, scaled GEMM and health kernels, written once in CubeCL for all of its
//! runtimes.
//!
//! ```text
//! amax  = max |x|
//! scale = f32(FMAX / max(f64(amax), 1e-12))        code = cast_rne(clamp(f32(x) · scale, ±FMAX))
//! out   = (A · Bᵀ) · (1/scale_a · 1/scale_b) + bias
//! ```
//!
//! There is one amax and scale per tensor, per row of the contraction, or per block of 128
//! ([`Granularity`]). Blocks of 32 have E8M0 scales ([`mod@mx`]).
//!
//! Scales and codes have the same bits on every device and in [`mod@reference`], the scalar host
//! oracle of the kernels. Codes are stored four per `u32` word, with rows padded to 16 bytes by
//! zero codes ([`row_words`]). They are always *contraction-major*: the axis that a GEMM sums over
//! is the contiguous one.

#![warn(missing_docs)]
// In kernels the outer of two nested `if`s is often resolved at compile time and the inner one at
// run time.
#![allow(clippy::collapsible_if)]

pub mod adamw;
mod amax;
mod arch;
pub mod attention;
#[doc(hidden)]
pub mod check;
mod denylist;
mod dequantize;
mod element_type;
mod error;
mod format;
pub mod fused;
mod gemm;
mod granularity;
mod grid;
mod health;
mod load;
pub mod mx;
mod operand;
mod ptx;
mod quad;
mod quantize;
pub mod reference;
mod scale;
mod version;
mod view;
mod words;

pub use adamw::adamw;
pub use amax::amax;
pub use arch::{CudaArch, cuda_arch};
pub use denylist::{Disabled, device_key, disabled_count};
pub use dequantize::{dequantize_mx, dequantize_to_f32};
pub use error::KernelError;
pub use format::Format;
pub use gemm::{
    FixedPlan, GEMV_ROWS, GROUP_ALIGN, GemmArgs, GemmConfig, GemmDevice, GemmPath, GemmPlan, GemmProblem, GemmShape,
    GemmTile, GemmVariant, Grouping, Groups, HalfGemm, HalfGemmProblem, HalfGemmVariant, disable_half_gemm,
    disable_path, fix_gemm_plan, gemm_path, gemm_plan, grouped_scaled_gemm, has_half_gemm, scaled_gemm, select,
};
pub use granularity::Granularity;
pub use health::{Health, health, health_len};
pub use mx::ScaleCalculationMode;
pub use operand::{Cast, Operand, Orientation, Quantized, row_words};
pub use quantize::{cast_instructions, disable_casts, quantize, quantize_with_amax, transpose};
pub use scale::{InvScale, Scale, ScaleMode};
pub use view::{MAX_INDEX, MatrixView, VectorView, supports};
