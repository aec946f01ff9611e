//! Tiles: how the units of a cube share one, the maxima of its rows and columns, and its codes in both orientations.
//!
//! 8x32 units stand on a tile, `unit = 8y + x`. Each holds `4 · SECTORS` sectors of 32 bytes: of the four rows from `4y` on,
//! sector `x`, then sector `x + 8` and so on. So a warp reads rows in runs of 256 bytes and every sector once, a unit has
//! four rows of its columns, which make words of the transposed codes, and a tile has 128 rows: its transposed codes are
//! written in runs of 128 bytes.

use cubecl::prelude::*;

use super::encode::{Encoding, encode_quad, mask, transpose, zero_past_end};
use crate::ptx::cvt::Isa;
use crate::view::{Geometry, Source, all_loaded, load_sector, magnitude, max_magnitude};

/// Units along a row of a tile.
pub(super) const UNITS_X: u32 = 8;

/// Units along a column of a tile.
pub(super) const UNITS_Y: u32 = 32;

/// Rows of a unit.
pub(super) const UNIT_ROWS: u32 = 4;

/// Rows of a tile.
pub(super) const TILE_ROWS: u32 = UNITS_Y * UNIT_ROWS;

/// Words of a sector.
pub(super) const SECTOR_WORDS: u32 = 8;

/// Words of transposed codes in a column of a tile.
const COL_WORDS: u32 = TILE_ROWS / 4;

/// Words that stage a transposed tile of `cols` columns.
pub(super) const fn stage_words(cols: u32) -> u32 {
    cols * COL_WORDS
}

/// Words between the maxima of one line of every unit and the next: eight more than there are units, so that a reader's
/// neighbours, who read other lines, meet other banks.
pub(super) const LINE_PITCH: u32 = UNITS_X * UNITS_Y + 8;

/// Words that stage the maxima of the rows.
pub(super) const ROW_STAGE: u32 = UNIT_ROWS * LINE_PITCH;

/// Words that stage the maxima of `cols` columns.
pub(super) const fn col_stage(cols: u32) -> u32 {
    cols / UNITS_X * LINE_PITCH
}

/// A cube's tile of a matrix.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tile {
    pub(super) geometry: Geometry,
    /// Row and column of its first element.
    pub(super) row0: u32,
    pub(super) col0: u32,
}

#[cube]
impl Tile {
    /// That of this cube, tiles of [`TILE_ROWS`] by `cols` being counted row by row. The spare cubes of a folded grid get rows past the
    /// last one.
    pub(super) fn of_cube(geometry: Geometry, #[comptime] cols: u32) -> Tile {
        let across = geometry.cols.div_ceil(cols);
        let number = CUBE_POS as u32;
        // No wrapping around for spare cubes of a matrix of nearly 2^32 rows.
        let tile_row = min(number / across, comptime!(u32::MAX / TILE_ROWS));
        Tile { geometry, row0: tile_row * TILE_ROWS, col0: number % across * cols }
    }
}

/// Column in the tile of sector `sector` of this unit.
#[cube]
pub(super) fn sector_col(#[comptime] sector: u32, #[comptime] source: Source) -> u32 {
    (UNIT_POS % UNITS_X + comptime!(UNITS_X * sector)) * comptime!(source.sector_len())
}

/// This unit's elements as [`load_sector`] leaves them: sector `s` of row `i` is `raw[8 · (4s + i)..]`.
#[cube]
pub(super) fn load_unit<N: Size>(
    x: &Array<Vector<u32, N>>,
    tile: &Tile,
    #[comptime] sectors: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) -> Array<u32> {
    let row = tile.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
    let mut raw = Array::<u32>::new(comptime!((sectors * UNIT_ROWS * SECTOR_WORDS) as usize));
    #[unroll]
    for s in 0..sectors {
        #[unroll]
        for i in 0..UNIT_ROWS {
            let first = comptime!((s * UNIT_ROWS + i) * SECTOR_WORDS);
            let col = tile.col0 + sector_col(s, source);
            load_sector(x, &tile.geometry, row + i, col, &mut raw, first, source, isa);
        }
    }
    all_loaded(isa);
    raw
}

/// Puts the maximum of each of this unit's rows and columns where [`row_maximum`] and [`col_maximum`] look for them, and
/// returns the largest of all.
#[cube]
pub(super) fn stage_maxima(
    raw: &Array<u32>,
    rows: &mut SharedMemory<u32>,
    cols: &mut SharedMemory<u32>,
    #[comptime] by_rows: bool,
    #[comptime] by_cols: bool,
    #[comptime] sectors: u32,
    #[comptime] source: Source,
) -> u32 {
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..UNIT_ROWS {
        let mut along_row = 0u32.runtime();
        #[unroll]
        for s in 0..sectors {
            #[unroll]
            for w in 0..SECTOR_WORDS {
                let place = comptime!(((s * UNIT_ROWS + i) * SECTOR_WORDS + w) as usize);
                along_row = max_magnitude(along_row, raw[place], source);
            }
        }
        if comptime!(by_rows) {
            rows[(UNIT_POS + comptime!(i * LINE_PITCH)) as usize] = along_row;
        }
        largest = max(largest, along_row);
    }
    if comptime!(by_cols) {
        stage_col_maxima(raw, cols, sectors, source);
    }
    largest
}

/// Puts the maximum of each of this unit's columns where [`col_maximum`] looks for it.
#[cube]
pub(super) fn stage_col_maxima(
    raw: &Array<u32>,
    cols: &mut SharedMemory<u32>,
    #[comptime] sectors: u32,
    #[comptime] source: Source,
) {
    let len = comptime!(source.sector_len());
    let per_word = comptime!(source.per_word());
    #[unroll]
    for line in 0..comptime!(sectors * len) {
        let (s, c) = comptime!((line / len, line % len));
        let mut along_col = 0u32.runtime();
        #[unroll]
        for i in 0..UNIT_ROWS {
            let place = comptime!(((s * UNIT_ROWS + i) * SECTOR_WORDS + c / per_word) as usize);
            let bits = raw[place] >> comptime!(16 * (c % per_word));
            along_col = max(along_col, magnitude(bits, source));
        }
        cols[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_col;
    }
}

/// The maximum of row `row` of the tile.
#[cube]
pub(super) fn row_maximum(rows: &SharedMemory<u32>, row: u32) -> u32 {
    let first = row % UNIT_ROWS * LINE_PITCH + row / UNIT_ROWS * UNITS_X;
    let mut largest = 0u32.runtime();
    #[unroll]
    for x in 0..UNITS_X {
        // Rows begin in few banks: neighbours begin with different units.
        largest = max(largest, rows[(first + (x + row) % UNITS_X) as usize]);
    }
    largest
}

/// The maximum of the column `line` of a tile, lines being counted unit by unit: [`line_col`] is its column.
#[cube]
pub(super) fn col_maximum(cols: &SharedMemory<u32>, line: u32) -> u32 {
    let first = line / UNITS_X * LINE_PITCH + line % UNITS_X;
    let mut largest = 0u32.runtime();
    #[unroll]
    for y in 0..UNITS_Y {
        largest = max(largest, cols[(first + comptime!(y * UNITS_X)) as usize]);
    }
    largest
}

/// Column in the tile of line `line`.
#[cube]
pub(super) fn line_col(line: u32, #[comptime] source: Source) -> u32 {
    let len = comptime!(source.sector_len());
    let of_unit = line / UNITS_X;
    (of_unit / len * UNITS_X + line % UNITS_X) * len + of_unit % len
}

/// Where 16 codes of a column of the transposed tile begin, those of rows `16 · chunk` on. The chunks of a column are
/// exchanged so that the units of a warp, who write one word each, and those who read 16 bytes meet different banks.
#[cube]
fn chunk_place(col: u32, chunk: u32, #[comptime] source: Source) -> u32 {
    let swizzled = chunk ^ (col / comptime!(source.sector_len()) % UNITS_X);
    col * COL_WORDS + swizzled * 4
}

/// Which sector of a unit is cast, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SectorCast {
    pub(super) sector: u32,
    pub(super) by_rows: bool,
    pub(super) by_cols: bool,
    /// Everything is scaled by the first scale of the rows.
    pub(super) one_scale: bool,
    /// Rows begin where vectors do.
    pub(super) aligned: bool,
    pub(super) encoding: Encoding,
}

/// Casts a sector of this unit: its codes by rows, those of row `i` in words `i · sector_quads` on of the result, and those by
/// columns in `stage`. Row `i` is scaled by `row_scales[i]` in the first, and column `c` of the sector by `col_scales[c]` in the
/// second.
#[cube]
pub(super) fn cast_sector(
    raw: &Array<u32>,
    stage: &mut SharedMemory<u32>,
    tile: &Tile,
    row_scales: &Array<f32>,
    col_scales: &Array<f32>,
    #[comptime] cast: SectorCast,
) -> Array<u32> {
    let SectorCast { sector, by_rows, by_cols, one_scale, aligned, encoding } = comptime!(cast);
    let quads = comptime!(encoding.sector_quads());
    let quad_words = comptime!(encoding.quad_words());
    let source = comptime!(encoding.source);
    let unit_y = UNIT_POS / UNITS_X;
    let local_col = sector_col(sector, source);
    let row_mask = mask(tile.row0 + unit_y * UNIT_ROWS, tile.geometry.rows);
    let mut by_row = Array::<u32>::new(comptime!((UNIT_ROWS * quads) as usize));
    #[unroll]
    for q in 0..quads {
        let col = tile.col0 + local_col + comptime!(4 * q);
        let mut along = Array::<u32>::new(comptime!(UNIT_ROWS as usize));
        #[unroll]
        for i in 0..UNIT_ROWS {
            let first = comptime!((sector * UNIT_ROWS + i) * SECTOR_WORDS + q * quad_words);
            if comptime!(by_rows || one_scale) {
                let scale = comptime!(if one_scale { 0 } else { i });
                let word = encode_quad(raw, first, row_scales, scale, true, encoding);
                along[i as usize] = word;
                by_row[comptime!((i * quads + q) as usize)] = zero_past_end(word, col, tile.geometry.cols, aligned);
            }
            if comptime!(by_cols && !one_scale) {
                along[i as usize] = encode_quad(raw, first, col_scales, comptime!(4 * q), false, encoding);
            }
        }
        if comptime!(by_cols) {
            let columns = transpose(&along, comptime!(encoding.isa));
            #[unroll]
            for j in 0..4u32 {
                let place = chunk_place(local_col + comptime!(4 * q + j), unit_y / 4, source) + unit_y % 4;
                stage[place as usize] = columns[j as usize] & row_mask;
            }
        }
    }
    by_row
}

/// Writes a vector of the codes by rows: words `first..` of `words`.
#[cube]
pub(super) fn store_words<M: Size>(
    codes: &mut Array<Vector<u32, M>>,
    at: u32,
    words: &Array<u32>,
    #[comptime] first: u32,
) {
    let mut vector = Vector::<u32, M>::empty();
    let width = M::value();
    #[unroll]
    for w in 0..width {
        vector[w] = words[comptime!(first as usize + w)];
    }
    codes[at as usize] = vector;
}

/// Writes what [`cast_sector`] gives of the codes by rows of a sector.
#[cube]
pub(super) fn store_rows<M: Size>(
    words: &Array<u32>,
    codes: &mut Array<Vector<u32, M>>,
    tile: &Tile,
    pitch: u32,
    #[comptime] sector: u32,
    #[comptime] encoding: Encoding,
) {
    let source = comptime!(encoding.source);
    let row = tile.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
    let at = (tile.col0 + sector_col(sector, source)) / comptime!(source.sector_len());
    #[unroll]
    for i in 0..UNIT_ROWS {
        if row + i < tile.geometry.rows && at < pitch {
            store_words(codes, (row + i) * pitch + at, words, comptime!(i * encoding.sector_quads()));
        }
    }
}

/// Writes the staged codes by columns, 16 bytes a unit. The stage must have been synchronized.
#[cube]
pub(super) fn store_cols(
    stage: &SharedMemory<u32>,
    codes: &mut Array<Vector<u32, Const<4>>>,
    tile: &Tile,
    pitch: u32,
    #[comptime] tile_cols: u32,
    #[comptime] source: Source,
) {
    let chunk = UNIT_POS % UNITS_X;
    let at = tile.row0 / 16 + chunk;
    #[unroll]
    for pass in 0..comptime!(tile_cols / UNITS_Y) {
        let local_col = UNIT_POS / UNITS_X + comptime!(pass * UNITS_Y);
        let col = tile.col0 + local_col;
        let place = chunk_place(local_col, chunk, source);
        let mut vector = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for w in 0..4usize {
            vector[w] = stage[place as usize + w];
        }
        if col < tile.geometry.cols && at < pitch {
            codes[(col * pitch + at) as usize] = vector;
        }
    }
}
