//! Tile-wise cast, in any orientation and for any granularity. A cube loads a [`Tile`], gets its
//! scales from a [`TileScales`], and writes the requested copies.

use cubecl::prelude::*;

use super::blocks::{self, BlockScales};
use super::encode::Encoding;
use super::lines::LineScales;
use super::tensor::TensorScale;
use super::tile::{COL_WORDS, TILE_ROWS, Tile, TileCast, UNIT_ROWS, UnitScales, tile_cols};
use super::{Copies, optional, squares};
use crate::element_type::ElementType;
use crate::granularity::BLOCK;
use crate::grid::{UNITS, fold};
use crate::load::{Geometry, SECTOR_WORDS};
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::view::Checked;
use crate::{Granularity, row_words};

/// Source of a tile's scales, chosen at compile time.
// Launches construct `TileScalesArgs`, and generated code the expanded type.
#[allow(dead_code)]
#[derive(CubeType, CubeLaunch)]
pub(super) enum TileScales {
    /// One scale, from the maxima of the tensor.
    Tensor(TensorScale),
    /// Scales of rows and columns that are on the device.
    Lines(LineScales),
    /// Scales of blocks or squares, from their maxima in the tile.
    Blocks(BlockScales),
}

#[cube]
impl TileScales {
    /// Scales of this unit's elements `raw`. All units of the cube must call it.
    fn make(
        &mut self,
        tile: &Tile,
        raw: &Array<u32>,
        stage: &mut SharedMemory<u32>,
        #[comptime] cast: TileCast,
    ) -> UnitScales {
        match self {
            TileScales::Tensor(scale) => {
                UnitScales { rows: scale.make(cast.encoding), cols: Array::<f32>::new(1usize) }
            }
            TileScales::Lines(lines) => lines.load(tile, cast.encoding.isa),
            TileScales::Blocks(blocks) => {
                if comptime!(cast.encoding.cast.is_square()) {
                    squares::make(blocks, tile, raw, cast)
                } else {
                    blocks.make(tile, raw, stage, cast)
                }
            }
        }
    }

    /// Largest magnitude in `raw`, if [`observe`](Self::observe) needs it.
    fn largest(&self, raw: &Array<u32>, #[comptime] element_type: ElementType) -> u32 {
        match self {
            TileScales::Tensor(scale) => scale.largest(raw, comptime!(UNIT_ROWS * SECTOR_WORDS), element_type),
            TileScales::Lines(_) => 0u32.runtime(),
            TileScales::Blocks(_) => 0u32.runtime(),
        }
    }

    /// Stores the largest magnitude of the cube, if observed.
    fn observe(&mut self, largest: u32, #[comptime] isa: Isa) {
        match self {
            TileScales::Tensor(scale) => scale.observe(largest, isa),
            TileScales::Lines(_) => {}
            TileScales::Blocks(_) => {}
        }
    }
}

/// Sectors per row that a unit holds: one, or for blocks the number that makes tiles square, two of
/// f32.
fn sectors(element_type: ElementType, granularity: Granularity) -> u32 {
    match granularity {
        Granularity::Tensor | Granularity::Row => 1,
        _ => BLOCK as u32 / tile_cols(element_type, 1),
    }
}

/// Number of cubes that cast `x`.
pub(super) fn cubes(x: &Checked, granularity: Granularity) -> usize {
    let cols = tile_cols(x.element_type, sectors(x.element_type, granularity));
    x.rows.div_ceil(TILE_ROWS as usize) * x.cols.div_ceil(cols as usize)
}

/// Launches the cast into `copies` with these scales.
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    encoding: Encoding,
    scales: TileScalesArgs<R>,
    copies: Copies,
) -> Copies {
    let Copies { rows, cols } = &copies;
    let granularity = encoding.cast.granularity;
    let per_sector = x.element_type.sector_len() / 4;
    let cast = TileCast {
        encoding,
        sectors: sectors(x.element_type, granularity),
        by_rows: rows.is_some(),
        by_cols: cols.is_some(),
        one_scale: matches!(granularity, Granularity::Tensor | Granularity::Block128x128) || encoding.cast.is_square(),
    };
    // SAFETY: `x` is checked and `Tile::load` reads only inside it. Stores of codes are guarded by
    // the pitches and the rows of the copies. `LineScales` reads below the number of lines.
    // `BlockScales` writes word `i` of the amaxes in cube `i`. Its scales are guarded by the number
    // of lines, and there is one tile of E8M0 scales per cube in each orientation. `TensorScale`
    // writes word `i` of the observed maxima in cube `i`.
    unsafe {
        cast_tiles::launch_unchecked::<R>(
            client,
            fold(client, cubes(x, granularity) as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            per_sector as usize,
            x.array(),
            scales,
            optional(rows.as_ref().map(|copy| &copy.codes)),
            optional(cols.as_ref().map(|copy| &copy.codes)),
            x.geometry(),
            row_words(x.cols) as u32 / per_sector,
            row_words(x.rows) as u32 / 4,
            cast,
            Version::of(client),
        );
    }
    copies
}

#[cube(launch_unchecked)]
fn cast_tiles<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    source: &mut TileScales,
    rows: &mut ComptimeOption<Array<Vector<u32, M>>>,
    cols: &mut ComptimeOption<Array<Vector<u32, Const<4>>>>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] cast: TileCast,
    #[comptime] _version: Version,
) {
    let Encoding { element_type: dtype, isa, .. } = comptime!(cast.encoding);
    let tile = Tile::of_cube(geometry, dtype, comptime!(cast.sectors));
    if tile.row0 >= tile.geometry.rows {
        terminate!();
    }
    let raw = tile.load(x, isa);
    // First for the maxima of columns, then for their codes.
    let codes = comptime!(if cast.by_cols { tile_cols(dtype, cast.sectors) * COL_WORDS } else { 1 });
    let words = comptime!(codes.max(blocks::col_stage_words(cast)));
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!(words as usize), 16usize);
    let largest = source.largest(&raw, dtype);
    let scales = source.make(&tile, &raw, &mut stage, cast);
    #[unroll]
    for s in 0..comptime!(cast.sectors) {
        let by_row = tile.cast_sector(&raw, &mut stage, &scales, s, cast);
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            tile.store_rows(&by_row, rows, row_pitch, s);
        }
    }
    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        sync_cube();
        tile.store_cols(&stage, cols, col_pitch);
    }
    source.observe(largest, isa);
}
