//! [`Maps`]: tensor maps of the TMA loads.

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;

use crate::Operand;
use crate::gemm::tma::maps::without_shape;
use crate::granularity::TILE_WORDS;

/// Maps of both operands' codes. In a pair of blocks, tiles of E8M0 scales have maps too, because
/// bulk copies cannot report to an mbarrier of another block.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Maps {
    pub(super) a: TensorMap<u8, Tiled>,
    pub(super) b: TensorMap<u8, Tiled>,
    pub(super) scales_a: ComptimeOption<TensorMap<u32, Tiled>>,
    pub(super) scales_b: ComptimeOption<TensorMap<u32, Tiled>>,
}

/// Map of an operand's tiles of E8M0 scales, one row per tile.
///
/// # Safety
/// The operand is checked, and its scales are E8M0.
pub(super) unsafe fn scales_map<R: Runtime>(operand: &Operand) -> TensorMapArg<R, Tiled> {
    let (tiles, word) = (operand.scales() / TILE_WORDS, StorageType::Scalar(ElemType::UInt(UIntKind::U32)));
    let (strides, shape) = ([TILE_WORDS, 1], [tiles, TILE_WORDS]);
    // SAFETY: the caller guarantees the number of scales.
    let words = unsafe { TensorArg::from_raw_parts(operand.inv_scale.clone(), strides.into(), shape.into()) };
    let map = TensorMapArg::new(TiledArgs { tile_size: [1, TILE_WORDS].into() }, words, word);
    without_shape(map, &operand.inv_scale)
}
