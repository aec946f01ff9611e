//! Maxima of a tile's rows and columns. Each unit stages the maxima of its elements in shared
//! memory. Then one unit folds each line, or each block of a line.

use cubecl::prelude::*;

use super::tile::{Tile, UNIT_ROWS, UNITS_X, UNITS_Y};
use crate::amax::largest_magnitude;
use crate::element_type::ElementType;
use crate::granularity::MX_BLOCK;
use crate::load::{SECTOR_WORDS, magnitude};

/// Words between the units' maxima of one line and the next: the number of units, plus eight. So
/// adjacent readers, which read other lines, use different banks.
const LINE_PITCH: u32 = UNITS_X * UNITS_Y + 8;

/// Words that stage the maxima of the rows, `parts` per row.
pub(super) const fn row_stage(parts: u32) -> u32 {
    parts * UNIT_ROWS * LINE_PITCH
}

/// Words that stage the maxima of `cols` columns.
pub(super) const fn col_stage(cols: u32) -> u32 {
    cols / UNITS_X * LINE_PITCH
}

/// Stages the maximum of each of this unit's columns for [`col_maximum`], and of each of its rows,
/// or row sectors, for [`row_maximum`]. Returns the maximum of all.
#[cube]
pub(super) fn stage_maxima(
    tile: &Tile,
    raw: &Array<u32>,
    rows: &mut SharedMemory<u32>,
    cols: &mut SharedMemory<u32>,
    #[comptime] by_rows: bool,
    #[comptime] by_cols: bool,
    #[comptime] parts: u32,
) -> u32 {
    let element_type = comptime!(tile.element_type);
    let joined = comptime!(tile.sectors / parts);
    let mut largest = 0u32.runtime();
    #[unroll]
    for line in 0..comptime!(parts * UNIT_ROWS) {
        let (part, i) = comptime!((line / UNIT_ROWS, line % UNIT_ROWS));
        let mut along_row = 0u32.runtime();
        #[unroll]
        for s in 0..joined {
            let first = comptime!(((part * joined + s) * UNIT_ROWS + i) * SECTOR_WORDS);
            along_row = largest_magnitude(along_row, raw, first, SECTOR_WORDS, element_type);
        }
        if comptime!(by_rows) {
            rows[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_row;
        }
        largest = max(largest, along_row);
    }
    if comptime!(by_cols) {
        let (len, per_word) = comptime!((element_type.sector_len(), element_type.per_word()));
        #[unroll]
        for line in 0..comptime!(tile.sectors * len) {
            let (s, c) = comptime!((line / len, line % len));
            let mut along_col = 0u32.runtime();
            #[unroll]
            for i in 0..UNIT_ROWS {
                let place = comptime!(((s * UNIT_ROWS + i) * SECTOR_WORDS + c / per_word) as usize);
                let bits = raw[place] >> comptime!(16 * (c % per_word));
                along_col = max(along_col, magnitude(bits, element_type));
            }
            cols[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_col;
        }
    }
    largest
}

/// Maximum of row `row` of a tile, or of block `block` of its `blocks` blocks of 32.
#[cube]
pub(super) fn row_maximum(
    rows: &SharedMemory<u32>,
    row: u32,
    #[comptime] block: u32,
    #[comptime] blocks: u32,
    #[comptime] element_type: ElementType,
) -> u32 {
    let units = comptime!(if blocks == 1 { UNITS_X } else { MX_BLOCK as u32 / element_type.sector_len() });
    let sector = comptime!(block * units);
    // Sector `s` of a unit is `UNITS_X · s` sectors further.
    let line = row % UNIT_ROWS + comptime!(sector / UNITS_X * UNIT_ROWS);
    let y = row / UNIT_ROWS;
    let first = line * LINE_PITCH + y * UNITS_X + comptime!(sector % UNITS_X);
    // Rows start in few banks, so adjacent rows start with different units.
    let unit = y + y / 4;
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..units {
        largest = max(largest, rows[(first + (unit + i) % units) as usize]);
    }
    largest
}

/// Maximum of column `line` of a tile, or of block `block` of its `blocks`. Lines are counted by
/// unit; [`line_col`] is the column.
#[cube]
pub(super) fn col_maximum(cols: &SharedMemory<u32>, line: u32, #[comptime] block: u32, #[comptime] blocks: u32) -> u32 {
    let first = line / UNITS_X * LINE_PITCH + line % UNITS_X;
    let units = comptime!(UNITS_Y / blocks);
    let mut largest = 0u32.runtime();
    #[unroll]
    for y in 0..units {
        largest = max(largest, cols[(first + comptime!((block * units + y) * UNITS_X)) as usize]);
    }
    largest
}

/// Column of line `line` in the tile.
#[cube]
pub(super) fn line_col(line: u32, #[comptime] element_type: ElementType) -> u32 {
    let len = comptime!(element_type.sector_len());
    let of_unit = line / UNITS_X;
    (of_unit / len * UNITS_X + line % UNITS_X) * len + of_unit % len
}
