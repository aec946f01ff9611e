//! [`Granularity`]: what shares one scale, and how many scales there are.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::Orientation;

/// Length of a block along the contraction, and across it for [`Granularity::Block128x128`].
pub(crate) const BLOCK: usize = 128;

/// Elements that share an E8M0 scale.
pub(crate) const MX_BLOCK: usize = 32;

/// Words of a tile of E8M0 scales: of 128 rows by 4 blocks.
pub(crate) const TILE_WORDS: usize = 128;

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
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
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
    /// 32 neighbours in a row, fewer at its end, with an E8M0 scale. Goes with [`ScaleMode::E8m0`](crate::ScaleMode::E8m0) and with nothing else.
    #[serde(rename = "1x32")]
    Block1x32,
}

impl Granularity {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::Tensor, Self::Row, Self::Block1x128, Self::Block128x128, Self::Block1x32];

    /// Rows and columns of the elements of an operand `[rows, k]` that share one scale; fewer at its edges. At least 1.
    pub const fn group(self, rows: usize, k: usize) -> [usize; 2] {
        let [rows, k] = [if rows == 0 { 1 } else { rows }, if k == 0 { 1 } else { k }];
        match self {
            Granularity::Tensor => [rows, k],
            Granularity::Row => [1, k],
            Granularity::Block1x128 => [1, BLOCK],
            Granularity::Block128x128 => [BLOCK, BLOCK],
            Granularity::Block1x32 => [1, MX_BLOCK],
        }
    }

    /// Rows and columns of the scales of an operand `[rows, k]`.
    ///
    /// `[1, 1]`, `[rows, 1]`, `[rows, ceil(k / 128)]`, `[ceil(rows / 128), ceil(k / 128)]` or `[rows, ceil(k / 32)]`.
    pub const fn scale_dims(self, rows: usize, k: usize) -> [usize; 2] {
        let [height, width] = self.group(rows, k);
        match self {
            // Also of a matrix without elements.
            Granularity::Tensor => [1, 1],
            Granularity::Row => [rows, 1],
            _ => [rows.div_ceil(height), k.div_ceil(width)],
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

    /// Length of [`Quantized::amax`](crate::Quantized::amax) for `x [rows, cols]`.
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

    /// Whether GEMMs of such operands A and B have kernels for FP8 tensor cores: the pairs that recipes, FP8 folders and LoRA ask for. Other
    /// pairs take [`GemmPath::F16Mma`](crate::GemmPath::F16Mma).
    pub const fn on_tensor_cores(pair: [Self; 2]) -> bool {
        use Granularity::{Block1x32, Block1x128, Block128x128, Row, Tensor};
        matches!(pair, [Tensor | Row, Tensor | Row] | [Block1x128, Block128x128 | Block1x128] | [Block1x32, Block1x32])
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
        // The names of configuration files.
        self.serialize(f)
    }
}
