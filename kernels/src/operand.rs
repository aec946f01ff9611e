//! What a cast is asked for and what it leaves on the device.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::view::{MAX_INDEX, check_aligned};
use crate::{Format, Granularity, KernelError, ScaleMode};

/// How a matrix becomes FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    /// Format of the codes.
    pub format: Format,
    /// What shares one scale.
    pub granularity: Granularity,
    /// Which scales are allowed.
    pub scale_mode: ScaleMode,
}

impl Cast {
    /// Whether the scale mode goes with the granularity.
    pub(crate) fn check(self) -> Result<(), KernelError> {
        let Cast { granularity, scale_mode, .. } = self;
        if granularity.is_mx() == matches!(scale_mode, ScaleMode::E8m0(_) | ScaleMode::E8m0Square(_)) {
            Ok(())
        } else {
            Err(KernelError::ScaleModeMismatch { granularity, scale_mode })
        }
    }

    /// Whether the scales are those of squares of 32 by 32.
    pub(crate) const fn is_square(self) -> bool {
        matches!(self.scale_mode, ScaleMode::E8m0Square(_))
    }
}

/// Which contraction-major copies of a matrix `x [R, C]` a cast writes.
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

    /// What the same copies are called by a caller who holds the transpose of `x`.
    pub(crate) const fn transposed(self) -> Self {
        match self {
            Orientation::Rows => Orientation::Cols,
            Orientation::Cols => Orientation::Rows,
            Orientation::Both => Orientation::Both,
        }
    }
}

/// Codes in one padded row of contraction length `k`: the next multiple of 16.
const ROW_ALIGN: usize = 16;

/// Words of one row of codes: `ceil(k / 16) · 4`.
///
/// Rows are padded with zero codes to 16 bytes, what TMA and 128-bit loads ask of a row pitch. A zero code adds nothing
/// to a dot product.
pub const fn row_words(k: usize) -> usize {
    k.div_ceil(ROW_ALIGN) * (ROW_ALIGN / 4)
}

/// FP8 codes of a `[rows, k]` matrix, contraction-major, and what dequantizes them.
#[derive(Clone, Debug)]
pub struct Operand {
    /// `u32` words `[rows, row_words(k)]`, four codes each, the first in the low byte.
    pub codes: Handle,
    /// f32 [`scale_dims`](Granularity::scale_dims), row-major: the [`InvScale`](crate::InvScale) of each group. For
    /// [`Block1x32`](Granularity::Block1x32) E8M0 bytes in tiles instead, [`scale_words`](Granularity::scale_words) words of them
    /// ([`to_blocked`](crate::mx::to_blocked)).
    pub inv_scale: Handle,
    /// Rows of the matrix.
    pub rows: usize,
    /// Contraction length, without the padding.
    pub k: usize,
    /// Format of the codes.
    pub format: Format,
    /// What shares one scale.
    pub granularity: Granularity,
    /// Whether every scale is a power of two that an E8M0 byte can be, or NaN: casts with [`ScaleMode::PowerOfTwo`] and
    /// [`ScaleMode::E8m0`] write no others. Blackwell's tensor cores apply such scales.
    pub power_of_two: bool,
}

impl Operand {
    /// Bytes of the codes, padding included.
    pub const fn bytes(&self) -> u64 {
        self.rows as u64 * row_words(self.k) as u64 * 4
    }

    /// Words of the scales.
    pub(crate) const fn scales(&self) -> usize {
        self.granularity.scale_words(self.rows, self.k)
    }

    /// The kernel's argument for the codes, `words` words to an element.
    ///
    /// # Safety
    /// The operand is checked.
    pub(crate) unsafe fn codes_array<R: Runtime>(&self, words: usize) -> ArrayArg<R> {
        // SAFETY: by the caller, the codes are as many.
        unsafe { ArrayArg::from_raw_parts(self.codes.clone(), self.rows * row_words(self.k) / words) }
    }

    /// The kernel's argument for the scales.
    ///
    /// # Safety
    /// The operand is checked.
    pub(crate) unsafe fn scales_array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: by the caller, the scales are as many.
        unsafe { ArrayArg::from_raw_parts(self.inv_scale.clone(), self.scales()) }
    }

    /// Whether the kernels can read what the operand claims to be.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let &Operand { rows, k, format, granularity, .. } = self;
        if rows == 0 || k == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols: k });
        }
        check_size(rows, row_words(k), k)?;
        // What TMA, asynchronous copies and vectors of words ask for.
        let scale_align = if granularity.is_mx() { ROW_ALIGN } else { 4 };
        for (handle, size) in [(&self.codes, ROW_ALIGN), (&self.inv_scale, scale_align)] {
            check_aligned(handle, size)?;
        }
        let available = self.codes.size_in_used();
        if available < self.bytes() {
            return Err(KernelError::BadOperand { format, rows, k, needed: self.bytes(), available });
        }
        let (needed, available) = (self.scales() as u64 * 4, self.inv_scale.size_in_used());
        if available < needed {
            return Err(KernelError::BadScales { granularity, rows, k, needed, available });
        }
        Ok(())
    }
}

/// Whether a `[rows, pitch]` array is within reach of u32 indices.
pub(crate) fn check_size(rows: usize, pitch: usize, cols: usize) -> Result<(), KernelError> {
    match (rows as u64).checked_mul(pitch as u64) {
        Some(len) if len <= MAX_INDEX => Ok(()),
        _ => Err(KernelError::TooLarge { rows, cols, strides: [pitch, 1], limit: MAX_INDEX }),
    }
}

/// What [`quantize`](crate::quantize) returns for `x [R, C]`.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[R, C]`, contraction over C, if asked for.
    pub rows: Option<Operand>,
    /// The transpose `[C, R]`, contraction over R, if asked for.
    pub cols: Option<Operand>,
    /// f32 of length [`amax_len`](Granularity::amax_len): `max |x|` of each of the parts that it names. Its maximum is that
    /// of `x`, where NaN wins.
    pub amax: Handle,
}
