//! Parameters and results of a cast.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::view::{MAX_INDEX, check_aligned, check_bytes};
use crate::{Format, Granularity, KernelError, ScaleMode};

/// Parameters of a cast to FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    /// Format of the codes.
    pub format: Format,
    /// Elements that share a scale.
    pub granularity: Granularity,
    /// Allowed scales.
    pub scale_mode: ScaleMode,
}

impl Cast {
    /// Checks that the scale mode matches the granularity.
    pub(crate) fn check(self) -> Result<(), KernelError> {
        let Cast { granularity, scale_mode, .. } = self;
        if granularity.is_mx() == matches!(scale_mode, ScaleMode::E8m0(_) | ScaleMode::E8m0Square(_)) {
            Ok(())
        } else {
            Err(KernelError::ScaleModeMismatch { granularity, scale_mode })
        }
    }

    /// Whether squares of 32 by 32 share a scale.
    pub(crate) const fn is_square(self) -> bool {
        matches!(self.scale_mode, ScaleMode::E8m0Square(_))
    }
}

/// Contraction-major copies of a matrix `x [R, C]` that a cast writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// `x [R, C]`, contraction over C.
    Rows,
    /// `xᵀ [C, R]`, contraction over R.
    Cols,
    /// Both, in one pass over `x`.
    Both,
}

impl Orientation {
    /// Whether `x` itself is written.
    pub const fn rows(self) -> bool {
        matches!(self, Orientation::Rows | Orientation::Both)
    }

    /// Whether the transpose is written.
    pub const fn cols(self) -> bool {
        matches!(self, Orientation::Cols | Orientation::Both)
    }

    /// The same copies, seen from the transpose of `x`.
    pub(crate) const fn transposed(self) -> Self {
        match self {
            Orientation::Rows => Orientation::Cols,
            Orientation::Cols => Orientation::Rows,
            Orientation::Both => Orientation::Both,
        }
    }
}

/// Alignment of a row of codes: rows are padded to a multiple of 16.
const ROW_ALIGN: usize = 16;

/// Words of one row of codes: `ceil(k / 16) · 4`.
///
/// Rows are padded with zero codes to 16 bytes, which TMA and 128-bit loads require of a row pitch.
/// A zero code adds nothing to a dot product.
pub const fn row_words(k: usize) -> usize {
    k.div_ceil(ROW_ALIGN) * (ROW_ALIGN / 4)
}

/// FP8 codes of a `[rows, k]` matrix, contraction-major, with their scales.
#[derive(Clone, Debug)]
pub struct Operand {
    /// `u32` words `[rows, row_words(k)]`, four codes each, the first in the low byte.
    pub codes: Handle,
    /// f32 [`scale_dims`](Granularity::scale_dims), row-major: the [`InvScale`](crate::InvScale) of
    /// each group. For [`Block1x32`](Granularity::Block1x32), E8M0 bytes in tiles
    /// ([`to_blocked`](crate::mx::to_blocked)) of [`scale_words`](Granularity::scale_words) words.
    pub inv_scale: Handle,
    /// Rows of the matrix.
    pub rows: usize,
    /// Contraction length without padding.
    pub k: usize,
    /// Format of the codes.
    pub format: Format,
    /// Elements that share a scale.
    pub granularity: Granularity,
    /// Whether every scale is a power of two that fits an E8M0 byte, or NaN. Casts with
    /// [`ScaleMode::PowerOfTwo`] and [`ScaleMode::E8m0`] write only such scales. Blackwell's tensor
    /// cores apply them.
    pub power_of_two: bool,
}

impl Operand {
    /// Bytes of the codes, including padding.
    pub const fn bytes(&self) -> u64 {
        self.rows as u64 * row_words(self.k) as u64 * 4
    }

    /// Words of the scales.
    pub(crate) const fn scales(&self) -> usize {
        self.granularity.scale_words(self.rows, self.k)
    }

    /// Kernel argument for the codes, with `words` words per element.
    ///
    /// # Safety
    /// The operand is checked.
    pub(crate) unsafe fn codes_array<R: Runtime>(&self, words: usize) -> ArrayArg<R> {
        // SAFETY: the caller guarantees the number of codes.
        unsafe { ArrayArg::from_raw_parts(self.codes.clone(), self.rows * row_words(self.k) / words) }
    }

    /// Kernel argument for the scales.
    ///
    /// # Safety
    /// The operand is checked.
    pub(crate) unsafe fn scales_array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: the caller guarantees the number of scales.
        unsafe { ArrayArg::from_raw_parts(self.inv_scale.clone(), self.scales()) }
    }

    /// Checks that the kernels can read the operand.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let &Operand { rows, k, format, granularity, .. } = self;
        if rows == 0 || k == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols: k });
        }
        check_size(rows, row_words(k), k)?;
        // Required by TMA, asynchronous copies and vectors of words.
        let scale_align = if granularity.is_mx() { ROW_ALIGN } else { 4 };
        for (handle, size) in [(&self.codes, ROW_ALIGN), (&self.inv_scale, scale_align)] {
            check_aligned(handle, size)?;
        }
        let scales = self.scales() as u64 * 4;
        check_bytes(&self.codes, self.bytes(), || format!("{format} codes [{rows}, {k}]"))?;
        check_bytes(&self.inv_scale, scales, || format!("{granularity} scales of codes [{rows}, {k}]"))
    }
}

/// Checks that u32 indices reach a `[rows, pitch]` array.
pub(crate) fn check_size(rows: usize, pitch: usize, cols: usize) -> Result<(), KernelError> {
    match (rows as u64).checked_mul(pitch as u64) {
        Some(len) if len <= MAX_INDEX => Ok(()),
        _ => Err(KernelError::TooLarge { rows, cols, strides: [pitch, 1], limit: MAX_INDEX }),
    }
}

/// Result of [`quantize`](crate::quantize) for `x [R, C]`.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[R, C]`, contraction over C, if requested.
    pub rows: Option<Operand>,
    /// Transpose `[C, R]`, contraction over R, if requested.
    pub cols: Option<Operand>,
    /// f32 of length [`amax_len`](Granularity::amax_len): `max |x|` of each of its parts. The
    /// maximum of all is the amax of `x`, where NaN is the largest.
    pub amax: Handle,
}
