//! One E8M0 scale per square of 32 by 32, from its maximum in a 128x128 tile. The scale is the same
//! for both orientations.
//!
//! A unit's four rows of a sector are in one square, so each unit stages one maximum per sector in
//! shared memory. Sixteen units compute the scales of the tile's squares. 128 units write the E8M0
//! bytes of each orientation, one line of the tile each.

use cubecl::prelude::*;

use super::blocks::{BlockScales, Side, TILE, block_scale, store_inverse};
use super::encode::Encoding;
use super::tile::{Tile, TileCast, UNIT_ROWS, UNITS_X, UnitScales};
use crate::amax::{amax_bits, largest_magnitude};
use crate::element_type::ElementType;
use crate::granularity::MX_BLOCK;
use crate::grid::{UNITS, cube_max};
use crate::load::SECTOR_WORDS;

/// Rows and columns of a square.
const SQUARE: u32 = MX_BLOCK as u32;

/// Squares per line of a tile.
const PER_LINE: u32 = TILE / SQUARE;

/// Rows of units in a square. Each row has [`UNITS_X`] units.
const SQUARE_Y: u32 = SQUARE / UNIT_ROWS;

/// Computes the scales and returns the scale of each of this unit's sectors. All units of the cube
/// must call it.
#[cube]
pub(super) fn make(made: &mut BlockScales, tile: &Tile, raw: &Array<u32>, #[comptime] cast: TileCast) -> UnitScales {
    let Encoding { element_type, isa, .. } = comptime!(cast.encoding);
    let sectors = comptime!(cast.sectors);
    let mut maxima = SharedMemory::<u32>::new(comptime!((sectors * UNITS) as usize));
    // Square `c` of band `r` is at `PER_LINE · r + c`.
    let mut scales = SharedMemory::<f32>::new(comptime!((PER_LINE * PER_LINE) as usize));
    let mut bytes = SharedMemory::<u32>::new(comptime!((PER_LINE * PER_LINE) as usize));
    let mut largest = 0u32.runtime();
    #[unroll]
    for s in 0..sectors {
        let count = comptime!(UNIT_ROWS * SECTOR_WORDS);
        let maximum = largest_magnitude(0u32.runtime(), raw, comptime!(s * count), count, element_type);
        maxima[(UNIT_POS + comptime!(s * UNITS)) as usize] = maximum;
        largest = max(largest, maximum);
    }
    // Also synchronizes the maxima.
    let largest = amax_bits(cube_max(largest, isa), element_type);
    if UNIT_POS == 0 {
        made.amax[CUBE_POS] = largest;
    }
    if UNIT_POS < comptime!(PER_LINE * PER_LINE) {
        let maximum = square_maximum(&maxima, UNIT_POS / PER_LINE, UNIT_POS % PER_LINE, element_type);
        let (scale, byte) = block_scale(amax_bits(maximum, element_type), comptime!(cast.encoding));
        scales[UNIT_POS as usize] = scale;
        bytes[UNIT_POS as usize] = byte;
    }
    sync_cube();
    if UNIT_POS < TILE {
        if comptime!(cast.by_rows) {
            store_line(&mut made.rows, &bytes, tile, true, comptime!(cast.encoding));
        }
    } else if comptime!(cast.by_cols) {
        store_line(&mut made.cols, &bytes, tile, false, comptime!(cast.encoding));
    }
    let mut of_sectors = Array::<f32>::new(comptime!(sectors as usize));
    let band = UNIT_POS / comptime!(UNITS_X * SQUARE_Y);
    #[unroll]
    for s in 0..sectors {
        of_sectors[s as usize] = scales[(band * PER_LINE + tile.sector_col(s) / SQUARE) as usize];
    }
    UnitScales { rows: of_sectors, cols: Array::<f32>::new(1usize) }
}

/// Maximum of square `square` of band `band`. Sector `s` of all units is staged from `s · UNITS`
/// on.
#[cube]
fn square_maximum(maxima: &SharedMemory<u32>, band: u32, square: u32, #[comptime] element_type: ElementType) -> u32 {
    let across = comptime!(SQUARE / element_type.sector_len());
    let sector = square * across;
    let first = sector / UNITS_X * UNITS + sector % UNITS_X + band * comptime!(UNITS_X * SQUARE_Y);
    let mut largest = 0u32.runtime();
    #[unroll]
    for y in 0..SQUARE_Y {
        #[unroll]
        for x in 0..across {
            largest = max(largest, maxima[(first + comptime!(y * UNITS_X + x)) as usize]);
        }
    }
    largest
}

/// Stores the word of E8M0 bytes of a line of the tile. Each unit takes one line.
#[cube]
fn store_line(
    inverses: &mut ComptimeOption<Array<u32>>,
    bytes: &SharedMemory<u32>,
    tile: &Tile,
    #[comptime] by_rows: bool,
    #[comptime] encoding: Encoding,
) {
    let side = Side::new(tile, by_rows);
    let line = UNIT_POS % TILE;
    let across = line / SQUARE;
    let mut word = 0u32.runtime();
    #[unroll]
    for b in 0..PER_LINE {
        let square = if comptime!(by_rows) { across * PER_LINE + b } else { across + comptime!(b * PER_LINE) };
        word |= side.e8m0_byte(line, bytes[square as usize], b);
    }
    store_inverse(inverses, word, line, &side, encoding);
}
