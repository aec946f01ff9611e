//! What a cast is asked for and what it leaves on the device.

use cubecl::server::Handle;

use crate::{Format, ScaleMode};

/// What shares one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// The whole tensor.
    Tensor,
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
    /// f32 `[1]`: the [`InvScale`](crate::InvScale).
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
}

/// What [`quantize`](crate::quantize) returns for `x [R, C]`.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[R, C]`, contraction over C, if asked for.
    pub rows: Option<Operand>,
    /// The transpose `[C, R]`, contraction over R, if asked for.
    pub cols: Option<Operand>,
    /// f32 `[1]`: max |x|.
    pub amax: Handle,
    /// f32 `[1]`: the [`Scale`](crate::Scale) that was used.
    pub scale: Handle,
}
