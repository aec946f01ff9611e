//! What a cast is asked for and what it leaves on the device.

use core::fmt;

use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

use crate::mx::{MX_BLOCK, TILE_WORDS};
use crate::view::MAX_INDEX;
use crate::{Format, KernelError, ScaleMode};

/// Length of a block along the contraction, and across it for [`Granularity::Block128x128`].
pub(crate) const BLOCK: usize = 128;

/// What shares one scale in an operand `[rows, k]`.
///
/// `inv_scale` of the element `(r, c)` is that of `(r / height, c / width)` among the scales
/// ([`scale_dims`](Granularity::scale_dims)), with a group of `height` by `width` elements:
///
/// | | group | torchao, others |
/// | --- | --- | --- |
/// | [`Tensor`](Granularity::Tensor) | rows × k | tensorwise |
/// | [`Row`](Granularity::Row) | 1 × k | axiswise ("rowwise" recipes) |
/// | [`Block1x128`](Granularity::Block1x128) | 1 × 128 | DeepSeek-V3's activations |
/// | [`Block128x128`](Granularity::Block128x128) | 128 × 128 | DeepSeek-V3's weights |
/// | [`Block1x32`](Granularity::Block1x32) | 1 × 32 | OCP MX, MXFP8 |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Granularity {
    /// The whole tensor.
    #[serde(rename = "tensorwise")]
    Tensor,
    /// A row of the contraction-major operand.
    #[serde(rename = "rowwise")]
    Row,
    /// 128 neighbours in a row; fewer at its end.
    #[serde(rename = "1x128")]
    Block1x128,
    /// A square of 128 rows and 128 of the contraction; less at the edges.
    #[serde(rename = "128x128")]
    Block128x128,
    /// 32 neighbours in a row, fewer at its end, with an E8M0 scale. Goes with [`ScaleMode::E8m0`] and with nothing else.
    #[serde(rename = "1x32")]
    Block1x32,
}

impl Granularity {
    /// Rows and columns of the scales of an operand `[rows, k]`.
    ///
    /// `[1, 1]`, `[rows, 1]`, `[rows, ceil(k / 128)]`, `[ceil(rows / 128), ceil(k / 128)]` or `[rows, ceil(k / 32)]`.
    pub const fn scale_dims(self, rows: usize, k: usize) -> [usize; 2] {
        match self {
            Granularity::Tensor => [1, 1],
            Granularity::Row => [rows, 1],
            Granularity::Block1x128 => [rows, k.div_ceil(BLOCK)],
            Granularity::Block128x128 => [rows.div_ceil(BLOCK), k.div_ceil(BLOCK)],
            Granularity::Block1x32 => [rows, k.div_ceil(MX_BLOCK)],
        }
    }

    /// Words of memory that the scales of an operand `[rows, k]` take: one f32 each, or for [`Block1x32`](Self::Block1x32)
    /// four E8M0 bytes a word in whole tiles of 128 rows by 4 blocks ([`to_blocked`](crate::mx::to_blocked)).
    pub const fn scale_words(self, rows: usize, k: usize) -> usize {
        match self {
            Granularity::Block1x32 => rows.div_ceil(BLOCK) * k.div_ceil(BLOCK) * TILE_WORDS,
            _ => {
                let [height, width] = self.scale_dims(rows, k);
                height * width
            }
        }
    }

    /// Length of [`Quantized::amax`] for `x [rows, cols]`.
    ///
    /// 1 for the tensor; for rows one per row of `x`, or per column if only the transpose is cast; for blocks one per
    /// tile of 128 by 128.
    pub const fn amax_len(self, rows: usize, cols: usize, orientation: Orientation) -> usize {
        match self {
            Granularity::Tensor => 1,
            Granularity::Row if orientation.rows() => rows,
            Granularity::Row => cols,
            Granularity::Block1x128 | Granularity::Block128x128 | Granularity::Block1x32 => {
                rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK)
            }
        }
    }

    /// Whether neighbouring rows may have different scales, of which otherwise 128 aligned ones share one.
    pub(crate) const fn is_by_row(self) -> bool {
        matches!(self, Granularity::Row | Granularity::Block1x128 | Granularity::Block1x32)
    }

    /// Whether either of two operands has scales that change every 128 of the contraction.
    pub(crate) const fn any_blocks(granularities: [Self; 2]) -> bool {
        granularities[0].is_blocks() || granularities[1].is_blocks()
    }

    /// Whether the scale changes every 128 of the contraction, so that a GEMM cannot apply it after the sum.
    pub(crate) const fn is_blocks(self) -> bool {
        matches!(self, Granularity::Block1x128 | Granularity::Block128x128)
    }

    /// Whether either of two operands has E8M0 scales.
    pub(crate) const fn any_mx(granularities: [Self; 2]) -> bool {
        granularities[0].is_mx() || granularities[1].is_mx()
    }

    /// Whether scales are E8M0 bytes, one for each 32 of the contraction.
    pub(crate) const fn is_mx(self) -> bool {
        matches!(self, Granularity::Block1x32)
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Granularity::Tensor => "tensorwise",
            Granularity::Row => "rowwise",
            Granularity::Block1x128 => "1x128",
            Granularity::Block128x128 => "128x128",
            Granularity::Block1x32 => "1x32",
        })
    }
}

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
        if granularity.is_mx() == matches!(scale_mode, ScaleMode::E8m0(_)) {
            Ok(())
        } else {
            Err(KernelError::ScaleModeMismatch { granularity, scale_mode })
        }
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
            let offset = handle.offset_start.unwrap_or(0);
            if !offset.is_multiple_of(size as u64) {
                return Err(KernelError::Misaligned { offset, size });
            }
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
