//! One scale per block: 1x32 or 1x128 along the contraction, or 128x128, from the maxima of a
//! 128x128 tile.
//!
//! A cube keeps its tile in registers, 64 elements per unit. The maxima of its blocks, and then
//! their scales, pass through shared memory. Each row has one block of 128 or four of 32, and each
//! column too. A 128x128 block is the same for both orientations. The E8M0 bytes of each
//! orientation are one tile of [`mod@crate::mx`], which the cube writes whole.

use cubecl::prelude::*;

use super::encode::Encoding;
use super::maxima::{col_maximum, col_stage, line_col, row_maximum, row_stage, stage_maxima};
use super::tile::{TILE_ROWS, Tile, TileCast, UNIT_ROWS, UNITS_X, UnitScales};
use super::{Copies, array, optional, words};
use crate::amax::amax_bits;
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::grid::cube_max;
use crate::mx::{ScaleCalculationMode, e8m0_of_amax, e8m0_scale_bits};
use crate::scale::{inverse_bits, scale_bits, scale_index};
use crate::view::Checked;
use crate::{Cast, Granularity, Orientation, ScaleMode};

/// Rows and columns of a tile.
pub(super) const TILE: u32 = BLOCK as u32;

const _: () = assert!(TILE == TILE_ROWS);

/// Calculation mode of E8M0 scales, if blocks have 32 elements.
fn mx(encoding: Encoding) -> Option<ScaleCalculationMode> {
    match encoding.cast.scale_mode {
        ScaleMode::E8m0(mode) | ScaleMode::E8m0Square(mode) => Some(mode),
        ScaleMode::F32 | ScaleMode::PowerOfTwo => None,
    }
}

/// Blocks per line of a tile.
fn per_line(encoding: Encoding) -> u32 {
    if mx(encoding).is_some() { TILE / MX_BLOCK as u32 } else { 1 }
}

/// Words that stage the maxima of columns.
pub(super) fn col_stage_words(cast: TileCast) -> u32 {
    let has_maxima = matches!(cast.encoding.cast.granularity, Granularity::Block1x128 | Granularity::Block1x32);
    if cast.by_cols && has_maxima && !cast.one_scale { col_stage(TILE) } else { 1 }
}

/// Allocates the copies. Returns them with the kernel argument.
pub(super) fn scales<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> (Copies, BlockScalesLaunch<R>) {
    let amax = words(client, x.rows.div_ceil(BLOCK) * x.cols.div_ceil(BLOCK));
    let copies = Copies::new(client, x, orientation, |by_rows| {
        let (rows, k) = if by_rows { (x.rows, x.cols) } else { (x.cols, x.rows) };
        (words(client, cast.granularity.scale_words(rows, k)), amax.clone())
    });
    let [rows, cols] = [&copies.rows, &copies.cols].map(|copy| optional(copy.as_ref().map(|copy| &copy.inv_scale)));
    let scales = BlockScalesLaunch::new(array(&amax), rows, cols);
    (copies, scales)
}

/// Outputs of block scaling: the amax of each tile, and inverse scales or E8M0 bytes per
/// orientation.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockScales {
    pub(super) amax: Array<u32>,
    pub(super) rows: ComptimeOption<Array<u32>>,
    pub(super) cols: ComptimeOption<Array<u32>>,
}

#[cube]
impl BlockScales {
    /// Computes the scales of this unit's elements `raw`. Synchronizes the cube: all units must
    /// call it. `stage` is free afterwards.
    pub(super) fn make(
        &mut self,
        tile: &Tile,
        raw: &Array<u32>,
        stage: &mut SharedMemory<u32>,
        #[comptime] cast: TileCast,
    ) -> UnitScales {
        let Encoding { element_type, isa, .. } = comptime!(cast.encoding);
        let (by_rows, by_cols) = comptime!((cast.by_rows && !cast.one_scale, cast.by_cols && !cast.one_scale));
        let per_line = comptime!(per_line(cast.encoding));
        // The two f32 sectors of a unit are in different blocks of 32.
        let parts = comptime!(if per_line == 1 { 1 } else { cast.sectors });
        let mut row_stage = SharedMemory::<u32>::new(comptime!((if by_rows { row_stage(parts) } else { 1 }) as usize));
        // Block `b` of row `r` is at `per_line · r + b`, followed by block `b` of column `c` at
        // `TILE · b + c`. A 128x128 block only uses the first scale.
        let mut scales = SharedMemory::<f32>::new(comptime!((2 * per_line * TILE) as usize));

        let largest = stage_maxima(tile, raw, &mut row_stage, stage, by_rows, by_cols, parts);
        // Also synchronizes the stages.
        let largest = amax_bits(cube_max(largest, isa), element_type);
        if UNIT_POS == 0 {
            self.amax[CUBE_POS] = largest;
        }
        if comptime!(cast.one_scale) {
            if UNIT_POS == 0 {
                let inverse = put_scale(&mut scales, largest, 0u32.runtime(), cast);
                store_inverse(&mut self.rows, inverse, 0u32.runtime(), &Side::new(tile, true), cast.encoding);
                store_inverse(&mut self.cols, inverse, 0u32.runtime(), &Side::new(tile, false), cast.encoding);
            }
        } else if UNIT_POS < TILE {
            if by_rows {
                line_scales(&row_stage, &mut scales, &mut self.rows, tile, true, cast);
            }
        } else if by_cols {
            line_scales(stage, &mut scales, &mut self.cols, tile, false, cast);
        }
        sync_cube();
        unit_scales(tile, &scales, cast)
    }
}

/// Lines of a tile along one contraction: its rows along k, or its columns.
#[derive(CubeType)]
pub(super) struct Side {
    /// First line, and number of lines in the matrix.
    line0: u32,
    lines: u32,
    /// Start of the tile along the lines, and their length.
    k0: u32,
    k: u32,
}

#[cube]
impl Side {
    pub(super) fn new(tile: &Tile, #[comptime] by_rows: bool) -> Side {
        let (row0, col0, geometry) = (tile.row0, tile.col0, tile.geometry);
        if comptime!(by_rows) {
            Side { line0: row0, lines: geometry.rows, k0: col0, k: geometry.cols }
        } else {
            Side { line0: col0, lines: geometry.cols, k0: row0, k: geometry.rows }
        }
    }

    /// E8M0 byte of block `block` of line `line`, shifted to its place in the line's word. Zero
    /// past the end of the matrix.
    pub(super) fn e8m0_byte(&self, line: u32, byte: u32, #[comptime] block: u32) -> u32 {
        let exists = self.line0 + line < self.lines && self.k0 + comptime!(block * MX_BLOCK as u32) < self.k;
        select(exists, byte << comptime!(8 * block), 0u32.runtime())
    }
}

/// Computes the scales of a line of the tile from the staged maxima. Each unit takes one line.
#[cube]
fn line_scales(
    maxima: &SharedMemory<u32>,
    scales: &mut SharedMemory<f32>,
    inverses: &mut ComptimeOption<Array<u32>>,
    tile: &Tile,
    #[comptime] by_rows: bool,
    #[comptime] cast: TileCast,
) {
    let element_type = comptime!(cast.encoding.element_type);
    let blocks = comptime!(per_line(cast.encoding));
    let unit = UNIT_POS % TILE;
    let side = Side::new(tile, by_rows);
    // Lanes read the maxima of adjacent units, whose rows are four apart.
    let line = if comptime!(by_rows) { unit % 32 * UNIT_ROWS + unit / 32 } else { line_col(unit, element_type) };
    let mut word = 0u32.runtime();
    #[unroll]
    for b in 0..blocks {
        let (maximum, place) = if comptime!(by_rows) {
            (row_maximum(maxima, line, b, blocks, element_type), line * blocks + b)
        } else {
            (col_maximum(maxima, unit, b, blocks), line + comptime!((blocks + b) * TILE))
        };
        let inverse = put_scale(scales, amax_bits(maximum, element_type), place, cast);
        if comptime!(blocks == 1) {
            word = inverse;
        } else {
            word |= side.e8m0_byte(line, inverse, b);
        }
    }
    store_inverse(inverses, word, line, &side, cast.encoding);
}

/// Stores the scale of a block with this amax at `at` of `scales`. Returns the operand's value of
/// it.
#[cube]
fn put_scale(scales: &mut SharedMemory<f32>, amax: u32, at: u32, #[comptime] cast: TileCast) -> u32 {
    let (scale, stored) = block_scale(amax, comptime!(cast.encoding));
    scales[at as usize] = scale;
    stored
}

/// Scale of a block with this amax, and its value in the operand: the inverse, or the E8M0 byte.
#[cube]
pub(super) fn block_scale(amax: u32, #[comptime] encoding: Encoding) -> (f32, u32) {
    let isa = comptime!(encoding.isa);
    let Cast { format, scale_mode, .. } = comptime!(encoding.cast);
    let mx = comptime!(mx(encoding));
    if comptime!(mx.is_some()) {
        let byte = e8m0_of_amax(amax, format, comptime!(mx.expect("blocks of 32")));
        (f32::reinterpret(e8m0_scale_bits(byte)), byte)
    } else {
        let multiplier = scale_bits(amax, format, scale_mode, isa);
        (f32::reinterpret(multiplier), inverse_bits(multiplier, isa))
    }
}

/// Stores the operand's value of the scale of line `line` of the tile. Words of E8M0 bytes fill
/// whole tiles.
#[cube]
pub(super) fn store_inverse(
    inverses: &mut ComptimeOption<Array<u32>>,
    word: u32,
    line: u32,
    side: &Side,
    #[comptime] encoding: Encoding,
) {
    #[comptime]
    if let ComptimeOption::Some(inverses) = inverses {
        let line = side.line0 + line;
        let end = if comptime!(mx(encoding).is_some()) { u32::MAX.runtime() } else { side.lines };
        if line < end {
            let at = scale_index(line, side.k0 / TILE, side.k.div_ceil(TILE), comptime!(encoding.cast.granularity));
            inverses[at as usize] = word;
        }
    }
}

/// Scales of this unit's elements.
#[cube]
fn unit_scales(tile: &Tile, scales: &SharedMemory<f32>, #[comptime] cast: TileCast) -> UnitScales {
    let TileCast { sectors, by_rows, by_cols, one_scale, .. } = comptime!(cast);
    let (per_line, len) = comptime!((per_line(cast.encoding), cast.encoding.element_type.sector_len()));
    let mut rows = Array::<f32>::new(comptime!((sectors * UNIT_ROWS) as usize));
    let mut cols = Array::<f32>::new(comptime!((sectors * len) as usize));
    let local_row = UNIT_POS / UNITS_X * UNIT_ROWS;
    let block_len = comptime!(TILE / per_line);
    if comptime!(one_scale) {
        #[unroll]
        for s in 0..sectors {
            rows[s as usize] = scales[0];
        }
    } else {
        #[unroll]
        for s in 0..sectors {
            let local_col = tile.sector_col(s);
            if comptime!(by_rows) {
                #[unroll]
                for i in 0..UNIT_ROWS {
                    let place = (local_row + i) * per_line + local_col / block_len;
                    rows[comptime!((s * UNIT_ROWS + i) as usize)] = scales[place as usize];
                }
            }
            if comptime!(by_cols) {
                let first = (per_line + local_row / block_len) * TILE + local_col;
                #[unroll]
                for c in 0..len {
                    cols[comptime!((s * len + c) as usize)] = scales[(first + c) as usize];
                }
            }
        }
    }
    UnitScales { rows, cols }
}
