//! Tiles: their split among the units of a cube, and their codes in both orientations.
//!
//! 8x32 units share a tile, `unit = 8y + x`. Each holds `4 · SECTORS` sectors of 32 bytes: of the
//! four rows from `4y` on, sector `x`, then sector `x + 8` and so on. So a warp reads rows in runs
//! of 256 bytes and every sector once. A unit has four rows of its columns, which make words of the
//! transposed codes. A tile has 128 rows, so its transposed codes are written in runs of 128 bytes.

use cubecl::prelude::*;

use super::encode::{Encoding, encode_quad, mask, transpose, zero_past_end};
use crate::element_type::ElementType;
use crate::load::{Geometry, SECTOR_WORDS, all_loaded, load_sector};
use crate::ptx::cvt::Isa;

/// Units along a row of a tile.
pub(super) const UNITS_X: u32 = 8;

/// Units along a column of a tile.
pub(super) const UNITS_Y: u32 = 32;

/// Rows of a unit.
pub(super) const UNIT_ROWS: u32 = 4;

/// Rows of a tile.
pub(super) const TILE_ROWS: u32 = UNITS_Y * UNIT_ROWS;

/// Words of transposed codes in a column of a tile.
pub(super) const COL_WORDS: u32 = TILE_ROWS / 4;

/// Columns of a tile whose units hold `sectors` sectors per row.
pub(super) const fn tile_cols(element_type: ElementType, sectors: u32) -> u32 {
    UNITS_X * element_type.sector_len() * sectors
}

/// A cube's tile of a matrix.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tile {
    pub(super) geometry: Geometry,
    /// Row and column of the first element.
    pub(super) row0: u32,
    pub(super) col0: u32,
    #[cube(comptime)]
    pub(super) element_type: ElementType,
    /// Sectors per row that a unit holds.
    #[cube(comptime)]
    pub(super) sectors: u32,
}

/// Scales of a unit's elements. Row `i` of sector `s` is at `4s + i` of `rows`, column `c` of that
/// sector at `s · sector_len + c` of `cols`. If a sector has one scale, it is at `s` of `rows`.
#[derive(CubeType)]
pub(super) struct UnitScales {
    pub(super) rows: Array<f32>,
    pub(super) cols: Array<f32>,
}

/// Compile-time parameters of the cast of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TileCast {
    pub(super) encoding: Encoding,
    /// Sectors per row that a unit holds.
    pub(super) sectors: u32,
    /// Copies to write.
    pub(super) by_rows: bool,
    pub(super) by_cols: bool,
    /// Whether all elements of a sector have one scale, in both orientations.
    pub(super) one_scale: bool,
}

#[cube]
impl Tile {
    /// Tile of this cube, counted row by row. Spare cubes of a folded grid get rows past the last
    /// one.
    pub(super) fn of_cube(geometry: Geometry, #[comptime] element_type: ElementType, #[comptime] sectors: u32) -> Tile {
        let cols = comptime!(tile_cols(element_type, sectors));
        let across = geometry.cols.div_ceil(cols);
        let number = CUBE_POS as u32;
        // Keeps spare cubes from wrapping around in a matrix of nearly 2^32 rows.
        let tile_row = min(number / across, comptime!(u32::MAX / TILE_ROWS));
        Tile { geometry, row0: tile_row * TILE_ROWS, col0: number % across * cols, element_type, sectors }
    }

    /// Column in the tile of sector `sector` of this unit.
    pub(super) fn sector_col(&self, #[comptime] sector: u32) -> u32 {
        (UNIT_POS % UNITS_X + comptime!(UNITS_X * sector)) * comptime!(self.element_type.sector_len())
    }

    /// Loads this unit's elements by [`load_sector`]: sector `s` of row `i` is
    /// `raw[8 · (4s + i)..]`.
    pub(super) fn load<N: Size>(&self, x: &Array<Vector<u32, N>>, #[comptime] isa: Isa) -> Array<u32> {
        let mut raw = Array::<u32>::new(comptime!((self.sectors * UNIT_ROWS * SECTOR_WORDS) as usize));
        let row = self.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
        #[unroll]
        for s in 0..self.sectors {
            let col = self.col0 + self.sector_col(s);
            #[unroll]
            for i in 0..UNIT_ROWS {
                let to = comptime!((s * UNIT_ROWS + i) * SECTOR_WORDS);
                load_sector(x, &self.geometry, row + i, col, &mut raw, to, self.element_type, isa);
            }
        }
        all_loaded(isa);
        raw
    }

    /// Casts sector `sector` of this unit. Returns its codes by rows, row `i` in words from
    /// `i · sector_quads` on, and stages its codes by columns in `stage`.
    pub(super) fn cast_sector(
        &self,
        raw: &Array<u32>,
        stage: &mut SharedMemory<u32>,
        scales: &UnitScales,
        #[comptime] sector: u32,
        #[comptime] cast: TileCast,
    ) -> Array<u32> {
        let TileCast { encoding, by_rows, by_cols, one_scale, .. } = comptime!(cast);
        let quads = comptime!(encoding.sector_quads());
        let quad_words = comptime!(encoding.quad_words());
        let local_col = self.sector_col(sector);
        let mut by_row = Array::<u32>::new(comptime!((UNIT_ROWS * quads) as usize));
        #[unroll]
        for q in 0..quads {
            let col = self.col0 + local_col + comptime!(4 * q);
            let mut along = Array::<u32>::new(comptime!(UNIT_ROWS as usize));
            #[unroll]
            for i in 0..UNIT_ROWS {
                let first = comptime!((sector * UNIT_ROWS + i) * SECTOR_WORDS + q * quad_words);
                if comptime!(by_rows || one_scale) {
                    let scale = comptime!(if one_scale { sector } else { sector * UNIT_ROWS + i });
                    let word = encode_quad(raw, first, &scales.rows, scale, true, encoding);
                    along[i as usize] = word;
                    by_row[comptime!((i * quads + q) as usize)] =
                        zero_past_end(word, col, self.geometry.cols, encoding);
                }
                if comptime!(by_cols && !one_scale) {
                    let scale = comptime!(4 * (sector * quads + q));
                    along[i as usize] = encode_quad(raw, first, &scales.cols, scale, false, encoding);
                }
            }
            if comptime!(by_cols) {
                self.stage_cols(stage, &along, sector, q, comptime!(encoding.isa));
            }
        }
        by_row
    }

    /// Stages the codes of quad `quad` of a sector by columns. Word `i` of `along` has the codes of
    /// row `i`.
    pub(super) fn stage_cols(
        &self,
        stage: &mut SharedMemory<u32>,
        along: &Array<u32>,
        #[comptime] sector: u32,
        #[comptime] quad: u32,
        #[comptime] isa: Isa,
    ) {
        let unit_y = UNIT_POS / UNITS_X;
        let row_mask = mask(self.row0 + unit_y * UNIT_ROWS, self.geometry.rows);
        let columns = transpose(along, isa);
        #[unroll]
        for j in 0..4u32 {
            let col = self.sector_col(sector) + comptime!(4 * quad + j);
            let place = chunk_place(col, unit_y / 4, self.element_type) + unit_y % 4;
            stage[place as usize] = columns[j as usize] & row_mask;
        }
    }

    /// Stores the codes by rows of a sector from [`cast_sector`](Self::cast_sector).
    pub(super) fn store_rows<M: Size>(
        &self,
        words: &Array<u32>,
        codes: &mut Array<Vector<u32, M>>,
        pitch: u32,
        #[comptime] sector: u32,
    ) {
        let len = comptime!(self.element_type.sector_len());
        let row = self.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
        let at = (self.col0 + self.sector_col(sector)) / len;
        #[unroll]
        for i in 0..UNIT_ROWS {
            if row + i < self.geometry.rows && at < pitch {
                store_words(codes, (row + i) * pitch + at, words, comptime!(i * len / 4));
            }
        }
    }

    /// Stores the staged codes by columns, 16 bytes per unit. The stage must be synchronized
    /// before.
    pub(super) fn store_cols(&self, stage: &SharedMemory<u32>, codes: &mut Array<Vector<u32, Const<4>>>, pitch: u32) {
        let chunk = UNIT_POS % UNITS_X;
        let at = self.row0 / 16 + chunk;
        #[unroll]
        for pass in 0..comptime!(tile_cols(self.element_type, self.sectors) / UNITS_Y) {
            let local_col = UNIT_POS / UNITS_X + comptime!(pass * UNITS_Y);
            let col = self.col0 + local_col;
            let place = chunk_place(local_col, chunk, self.element_type);
            let mut vector = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for w in 0..4usize {
                vector[w] = stage[place as usize + w];
            }
            if col < self.geometry.cols && at < pitch {
                codes[(col * pitch + at) as usize] = vector;
            }
        }
    }
}

/// Start of 16 codes in a column of the transposed tile, for rows starting at `16 · chunk`. The chunks
/// of a column are swizzled. So units of a warp that write one word each use different banks, and
/// also units that read 16 bytes.
#[cube]
fn chunk_place(col: u32, chunk: u32, #[comptime] element_type: ElementType) -> u32 {
    let swizzled = chunk ^ (col / comptime!(element_type.sector_len()) % UNITS_X);
    col * COL_WORDS + swizzled * 4
}

/// Stores a vector of the codes by rows: words `first..` of `words`.
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
