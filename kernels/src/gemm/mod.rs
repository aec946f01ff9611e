//! `out = (A · Bᵀ) · (inv_scale_a · inv_scale_b) + bias`: checks, then the kernel that fits the device.

mod emulated;

use core::fmt;

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::view::{Checked, MAX_INDEX, Source};
use crate::{KernelError, Operand, VectorView, row_words, supports};

/// Which kernel runs a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmPath {
    /// Decode in the tile, f32 multiply and add: any device.
    Emulated,
}

impl fmt::Display for GemmPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GemmPath::Emulated => "emulated",
        })
    }
}

/// The kernel that [`scaled_gemm`] dispatches to on this device.
pub fn gemm_path<R: Runtime>(_client: &ComputeClient<R>) -> GemmPath {
    GemmPath::Emulated
}

/// `out [M, N] = (A [M, K] · B [N, K]ᵀ) · (inv_scale_a · inv_scale_b) + bias [N]`, contiguous, in the dtype `out`.
///
/// Products are exact, sums are f32, the scales and the bias are applied to the f32 sum, and the result is rounded once.
/// The two inverse scales are multiplied with each other first. A NaN code makes every output that it meets NaN. The bias
/// may have another dtype than the output.
///
/// # Errors
/// [`KernelError::EmptyMatrix`] for a zero M, N or K, [`ContractionMismatch`](KernelError::ContractionMismatch),
/// [`BiasMismatch`](KernelError::BiasMismatch), [`UnsupportedDtype`](KernelError::UnsupportedDtype) for an `out` that the
/// device cannot write, [`BadOperand`](KernelError::BadOperand) if codes or scales are too short,
/// [`OutOfBounds`](KernelError::OutOfBounds) and [`Misaligned`](KernelError::Misaligned) for the bias,
/// [`TooLarge`](KernelError::TooLarge).
pub fn scaled_gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    bias: Option<&VectorView>,
    out: StorageType,
) -> Result<Handle, KernelError> {
    check_operand(a)?;
    check_operand(b)?;
    if a.k != b.k {
        return Err(KernelError::ContractionMismatch { a: a.k, b: b.k });
    }
    if !supports(client, out) {
        return Err(KernelError::UnsupportedDtype { dtype: out });
    }
    check_size(a.rows, b.rows, b.rows)?;
    let bias = match bias {
        Some(bias) if bias.len != b.rows => {
            return Err(KernelError::BiasMismatch { bias: bias.len, n: b.rows });
        }
        Some(bias) => Some(Checked::vector(client, bias)?),
        None => None,
    };
    let source = Source::of(out)?;
    let out = match source {
        // Flex32 is stored as f32; not every device has it under its own name.
        Source::F32 => StorageType::Scalar(ElemType::Float(FloatKind::F32)),
        Source::F16 | Source::Bf16 => out,
    };
    let handle = client.empty(a.rows * b.rows * source.size());
    match gemm_path(client) {
        GemmPath::Emulated => emulated::launch(client, a, b, bias.as_ref(), &handle, out),
    }
    Ok(handle)
}

fn check_operand(operand: &Operand) -> Result<(), KernelError> {
    let &Operand { rows, k, format, .. } = operand;
    if rows == 0 || k == 0 {
        return Err(KernelError::EmptyMatrix { rows, cols: k });
    }
    check_size(rows, row_words(k), k)?;
    let bad = |needed, available| KernelError::BadOperand { format, rows, k, needed, available };
    let (codes, scale) = (operand.codes.size_in_used(), operand.inv_scale.size_in_used());
    if codes < operand.bytes() {
        return Err(bad(operand.bytes(), codes));
    }
    if scale < 4 {
        return Err(bad(4, scale));
    }
    Ok(())
}

/// Whether a `[rows, pitch]` array is within reach of u32 indices.
fn check_size(rows: usize, pitch: usize, cols: usize) -> Result<(), KernelError> {
    match (rows as u64).checked_mul(pitch as u64) {
        Some(len) if len <= MAX_INDEX => Ok(()),
        _ => Err(KernelError::TooLarge { rows, cols, strides: [pitch, 1], limit: MAX_INDEX }),
    }
}
