//! [`Granularity`]: the elements that share a scale, and the number of scales.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::Orientation;

/// Length of a block along the contraction, and across it for [`Granularity::Block128x128`].
pub(crate) const BLOCK: usize = 128;

/// Elements that share an E8M0 scale.
pub(crate) const MX_BLOCK: usize = 32;

/// Words of a tile of E8M0 scales: 128 rows by 4 blocks.
pub(crate) const TILE_WORDS: usize = 128;

/// Granularity of the scales of an operand `[rows, k]`.
///
/// Groups of `height` by `width` elements share a scale. Element `(r, c)` has scale
/// `(r / height, c / width)` of `inv_scale` ([`scale_dims`](Granularity::scale_dims)):
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
    /// One row of the contraction-major operand.
    #[serde(rename = "rowwise")]
    Row,
    /// 128 adjacent elements of a row, fewer at its end.
    #[serde(rename = "1x128")]
    Block1x128,
    /// 128 rows by 128 of the contraction, fewer at the edges.
    #[serde(rename = "128x128")]
    Block128x128,
    /// 32 adjacent elements of a row, fewer at its end, with an E8M0 scale. Requires an E8M0
    /// [`ScaleMode`](crate::ScaleMode).
    #[serde(rename = "1x32")]
    Block1x32,
}

impl Granularity {
    /// All granularities.
    pub const ALL: [Self; 5] = [Self::Tensor, Self::Row, Self::Block1x128, Self::Block128x128, Self::Block1x32];

    /// Rows and columns of the elements of an operand `[rows, k]` that share a scale, at least 1.
    /// Groups at the edges have fewer.
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
    /// `[1, 1]`, `[rows, 1]`, `[rows, ceil(k / 128)]`, `[ceil(rows / 128), ceil(k / 128)]` or
    /// `[rows, ceil(k / 32)]`.
    pub const fn scale_dims(self, rows: usize, k: usize) -> [usize; 2] {
        let [height, width] = self.group(rows, k);
        match self {
            // Also for a matrix without elements.
            Granularity::Tensor => [1, 1],
            Granularity::Row => [rows, 1],
            _ => [rows.div_ceil(height), k.div_ceil(width)],
        }
    }

    /// Words of memory for the scales of an operand `[rows, k]`: one f32 each. For
    /// [`Block1x32`](Self::Block1x32), four E8M0 bytes per word in whole tiles of 128 rows by 4
    /// blocks ([`to_blocked`](crate::mx::to_blocked)).
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
    /// 1 for per-tensor scales. For rows, one per row of `x`, or per column if only the transpose
    /// is cast. For blocks, one per tile of 128 by 128.
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

    /// Whether GEMMs with these granularities of A and B have kernels for FP8 tensor cores: the
    /// pairs that recipes, FP8 checkpoints and LoRA need. Other pairs use
    /// [`GemmPath::F16Mma`](crate::GemmPath::F16Mma).
    pub const fn on_tensor_cores(pair: [Self; 2]) -> bool {
        use Granularity::{Block1x32, Block1x128, Block128x128, Row, Tensor};
        matches!(pair, [Tensor | Row, Tensor | Row] | [Block1x128, Block128x128 | Block1x128] | [Block1x32, Block1x32])
    }

    /// Whether adjacent rows may have different scales. Otherwise each 128 aligned rows share one.
    pub(crate) const fn is_by_row(self) -> bool {
        matches!(self, Granularity::Row | Granularity::Block1x128 | Granularity::Block1x32)
    }

    /// Whether either operand has scales that change every 128 of the contraction.
    pub(crate) const fn any_blocks(granularities: [Self; 2]) -> bool {
        granularities[0].is_blocks() || granularities[1].is_blocks()
    }

    /// Whether the scale changes every 128 of the contraction. A GEMM then cannot apply it after
    /// the sum.
    pub(crate) const fn is_blocks(self) -> bool {
        matches!(self, Granularity::Block1x128 | Granularity::Block128x128)
    }

    /// Whether either operand has E8M0 scales.
    pub(crate) const fn any_mx(granularities: [Self; 2]) -> bool {
        granularities[0].is_mx() || granularities[1].is_mx()
    }

    /// Whether scales are E8M0 bytes, one per 32 of the contraction.
    pub(crate) const fn is_mx(self) -> bool {
        matches!(self, Granularity::Block1x32)
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The same names as in configuration files.
        self.serialize(f)
    }
}
