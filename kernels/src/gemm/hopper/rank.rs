//! Part of a tile that a consumer warpgroup computes.

use cubecl::prelude::*;

use super::plan::{CONSUMERS, MMA_ROWS, group_cols, row_groups};
use super::{GROUP, HopperConfig};

/// Index of this consumer warpgroup.
#[cube]
pub(super) fn consumer() -> u32 {
    (UNIT_POS / GROUP + comptime!(CONSUMERS as u32 - 1)) % comptime!(CONSUMERS as u32)
}

/// Row and column of the tile where this warpgroup's part starts.
#[cube]
pub(super) fn group_origin(#[comptime] config: HopperConfig) -> (u32, u32) {
    let group = consumer();
    let above = comptime!(row_groups(config.tile) as u32);
    (group % above * comptime!(MMA_ROWS as u32), group / above * comptime!(group_cols(config.tile) as u32))
}
