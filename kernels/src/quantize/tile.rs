//! Maxima of the rows and columns of a 128x128 tile: each of 32x8 units loads 16 rows of four columns, and what they found
//! meets in shared memory.

use cubecl::prelude::*;

use crate::operand::BLOCK;

/// Rows and columns of a tile.
pub(super) const TILE: u32 = BLOCK as u32;

/// Words of four elements in a row of a tile, and units that share a row.
pub(super) const TILE_WORDS: u32 = TILE / 4;

/// Rows that a unit loads.
pub(super) const TILE_ROWS: u32 = 16;

/// Units along a column of a tile.
const UNITS_Y: u32 = TILE / TILE_ROWS;

/// Pitch of staged rows: one word more than a row, so that neighbouring rows start in different banks.
pub(super) const STAGE_PITCH: u32 = TILE_WORDS + 1;

/// Words that stage the maxima of rows, one per unit that shares the row; or a transposed tile of codes.
pub(super) const ROW_STAGE: u32 = TILE * STAGE_PITCH;

/// Words that stage the maxima of columns, one per unit that shares the column.
pub(super) const COL_STAGE: u32 = UNITS_Y * TILE;

/// Where unit `unit_x` puts its maximum of a row.
#[cube]
pub(super) fn row_stage_place(row: u32, unit_x: u32) -> u32 {
    row * STAGE_PITCH + unit_x
}

/// Where unit `unit_y` puts its maximum of a column.
#[cube]
pub(super) fn col_stage_place(unit_y: u32, col: u32) -> u32 {
    // The four columns of a unit lie apart, so that neighbouring units write neighbouring words.
    unit_y * TILE + col % 4 * TILE_WORDS + col / 4
}

/// The maximum of row `UNIT_POS` in the first 128 units and of column `UNIT_POS - 128` in the others, each if asked for
/// and otherwise zero. The stages must have been written and synchronized.
#[cube]
pub(super) fn line_maximum(
    row_stage: &SharedMemory<u32>,
    col_stage: &SharedMemory<u32>,
    #[comptime] rows: bool,
    #[comptime] cols: bool,
) -> u32 {
    let mut largest = 0u32.runtime();
    if UNIT_POS < TILE {
        if comptime!(rows) {
            for unit_x in 0..TILE_WORDS {
                largest = max(largest, row_stage[row_stage_place(UNIT_POS, unit_x) as usize]);
            }
        }
    } else if comptime!(cols) {
        for unit_y in 0..UNITS_Y {
            largest = max(largest, col_stage[col_stage_place(unit_y, UNIT_POS - TILE) as usize]);
        }
    }
    largest
}
