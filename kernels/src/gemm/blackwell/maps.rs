//! [`Maps`]: what TMA brings to the stages.

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;

use crate::Operand;
use crate::gemm::tma::maps::without_shape;
use crate::granularity::TILE_WORDS;

/// The codes of both operands. In a pair of blocks tiles of E8M0 scales have maps too: plain copies of bytes report to no mbarrier of
/// another block.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Maps {
    pub(super) a: TensorMap<u8, Tiled>,
    pub(super) b: TensorMap<u8, Tiled>,
    pub(super) scales_a: ComptimeOption<TensorMap<u32, Tiled>>,
    pub(super) scales_b: ComptimeOption<TensorMap<u32, Tiled>>,
}

/// The map of an operand's tiles of E8M0 scales, a row each.
///
/// # Safety
/// The operand is checked, and its scales are E8M0.
pub(super) unsafe fn scales_map<R: Runtime>(operand: &Operand) -> TensorMapArg<R, Tiled> {
    let (tiles, word) = (operand.scales() / TILE_WORDS, StorageType::Scalar(ElemType::UInt(UIntKind::U32)));
    let (strides, shape) = ([TILE_WORDS, 1], [tiles, TILE_WORDS]);
    // SAFETY: by the caller, the scales are as many.
    let words = unsafe { TensorArg::from_raw_parts(operand.inv_scale.clone(), strides.into(), shape.into()) };
    let map = TensorMapArg::new(TiledArgs { tile_size: [1, TILE_WORDS].into() }, words, word);
    without_shape(map, &operand.inv_scale)
}
