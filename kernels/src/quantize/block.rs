//! One scale per block: 1x128 along the contraction, or 128x128. One launch and one read of `x` for both orientations.
//!
//! A cube takes a tile of 128x128 ([`tile`](super::tile)) and keeps it in registers, 64 elements per unit, while the maxima
//! of its groups and then their scales pass through shared memory. A block of one orientation is a part of a row, of the
//! other a part of a column; the square is the same for both.

use cubecl::prelude::*;

use super::encode::Encoding;
use super::tile::{
    ROW_STAGE, TILE_ROWS, UNIT_ROWS, UNITS_X, cast_sector, col_maximum, col_stage, line_col, load_unit, origin,
    row_maximum, sector_col, stage_maxima, stage_words, store_cols, store_words,
};
use super::{Copies, Copy, optional, words};
use crate::amax::amax_bits;
use crate::grid::{UNITS, cube_max, fold};
use crate::operand::BLOCK;
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::version::{VERSION, Version};
use crate::view::{Checked, Geometry, Source};
use crate::{Cast, Granularity, Orientation, ScaleMode, row_words};

/// Rows and columns of a tile, a block of each orientation.
const TILE: u32 = BLOCK as u32;

const _: () = assert!(TILE == TILE_ROWS);

/// Sectors of a row of the tile that a unit holds: two of f32, one of 16-bit floats.
const fn sectors(source: Source) -> u32 {
    TILE / (UNITS_X * source.sector_len())
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> Copies {
    let tiles = x.rows.div_ceil(TILE as usize) * x.cols.div_ceil(TILE as usize);
    let amax = words(client, tiles);
    let lens = |rows, k| {
        let [height, width] = cast.granularity.scale_dims(rows, k);
        (rows * row_words(k), height * width)
    };
    let copy =
        |(codes, scales)| Copy { codes: words(client, codes), inv_scale: words(client, scales), amax: amax.clone() };
    let (row_lens, col_lens) = (lens(x.rows, x.cols), lens(x.cols, x.rows));
    let rows = orientation.rows().then(|| copy(row_lens));
    let cols = orientation.cols().then(|| copy(col_lens));
    let per_sector = x.source.sector_len() / 4;
    // SAFETY: `x` is checked and `load_unit` reads only inside it; stores of codes and scales are guarded by the rows,
    // columns and pitches that the outputs were allocated with, and cube `i` writes word `i` of `amax`.
    unsafe {
        cast_blocks::launch_unchecked::<R>(
            client,
            fold(client, tiles as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            per_sector as usize,
            x.array(),
            optional(rows.as_ref().map(|copy| &copy.codes), row_lens.0),
            optional(rows.as_ref().map(|copy| &copy.inv_scale), row_lens.1),
            optional(cols.as_ref().map(|copy| &copy.codes), col_lens.0),
            optional(cols.as_ref().map(|copy| &copy.inv_scale), col_lens.1),
            ArrayArg::from_raw_parts(amax, tiles),
            x.geometry(),
            row_words(x.cols) as u32 / per_sector,
            row_words(x.rows) as u32 / 4,
            Encoding { source: x.source, format: cast.format, isa: Isa::of(client), has_subnormals: false },
            cast.scale_mode,
            orientation,
            cast.granularity == Granularity::Block128x128,
            VERSION,
        );
    }
    Copies { rows, cols }
}

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_blocks<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    rows: &mut ComptimeOption<Array<Vector<u32, M>>>,
    row_inverses: &mut ComptimeOption<Array<u32>>,
    cols: &mut ComptimeOption<Array<Vector<u32, Const<4>>>>,
    col_inverses: &mut ComptimeOption<Array<u32>>,
    amax: &mut Array<u32>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] encoding: Encoding,
    #[comptime] mode: ScaleMode,
    #[comptime] orientation: Orientation,
    #[comptime] square: bool,
    #[comptime] _version: Version,
) {
    let (row0, col0) = origin(geometry.cols, TILE);
    if row0 >= geometry.rows {
        terminate!();
    }
    let (source, format, isa) = comptime!((encoding.source, encoding.format, encoding.isa));
    let len = comptime!(source.sector_len());
    let sectors = comptime!(sectors(source));
    let tile_row = row0 / TILE;
    let tile_col = col0 / TILE;
    let tile_rows = geometry.rows.div_ceil(TILE);
    let tile_cols = geometry.cols.div_ceil(TILE);
    let by_rows = comptime!(orientation.rows() && !square);
    let by_cols = comptime!(orientation.cols() && !square);
    // For the maxima of columns and then for their codes.
    let stage_len = comptime!({
        let maxima = if by_cols { col_stage(TILE) } else { 1 };
        let codes = if orientation.cols() { stage_words(TILE) } else { 1 };
        if maxima > codes { maxima } else { codes }
    });
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!(stage_len as usize), 16usize);
    let mut row_stage = SharedMemory::<u32>::new(comptime!((if by_rows { ROW_STAGE } else { 1 }) as usize));
    // Of the rows, then of the columns; of the square, the first alone.
    let mut scales = SharedMemory::<f32>::new(comptime!(2 * TILE as usize));

    let raw = load_unit(x, &geometry, row0, col0, sectors, source, isa);
    let largest = stage_maxima(&raw, &mut row_stage, &mut stage, by_rows, by_cols, sectors, source);
    // This synchronizes the stages too.
    let largest = amax_bits(cube_max(largest, isa), source);
    if UNIT_POS == 0 {
        amax[CUBE_POS] = largest;
    }
    if comptime!(square) {
        if UNIT_POS == 0 {
            let multiplier = scale_bits(largest, format, mode, isa);
            let inverse = inverse_bits(multiplier, isa);
            scales[0] = f32::reinterpret(multiplier);
            #[comptime]
            if let ComptimeOption::Some(inverses) = row_inverses {
                inverses[(tile_row * tile_cols + tile_col) as usize] = inverse;
            }
            #[comptime]
            if let ComptimeOption::Some(inverses) = col_inverses {
                inverses[(tile_col * tile_rows + tile_row) as usize] = inverse;
            }
        }
    } else {
        let line = UNIT_POS % TILE;
        let mut maximum = 0u32.runtime();
        if UNIT_POS < TILE {
            if comptime!(by_rows) {
                maximum = row_maximum(&row_stage, line);
            }
        } else if comptime!(by_cols) {
            maximum = col_maximum(&stage, line);
        }
        let multiplier = scale_bits(amax_bits(maximum, source), format, mode, isa);
        let inverse = inverse_bits(multiplier, isa);
        if UNIT_POS < TILE {
            scales[line as usize] = f32::reinterpret(multiplier);
            #[comptime]
            if let ComptimeOption::Some(inverses) = row_inverses {
                if row0 + line < geometry.rows {
                    inverses[((row0 + line) * tile_cols + tile_col) as usize] = inverse;
                }
            }
        } else {
            let local_col = line_col(line, source);
            scales[(TILE + local_col) as usize] = f32::reinterpret(multiplier);
            #[comptime]
            if let ComptimeOption::Some(inverses) = col_inverses {
                if col0 + local_col < geometry.cols {
                    inverses[((col0 + local_col) * tile_rows + tile_row) as usize] = inverse;
                }
            }
        }
    }
    sync_cube();

    let local_row = UNIT_POS / UNITS_X * UNIT_ROWS;
    let row = row0 + local_row;
    let mut row_scales = Array::<f32>::new(comptime!(UNIT_ROWS as usize));
    if comptime!(square) {
        row_scales[0] = scales[0];
    } else if comptime!(by_rows) {
        #[unroll]
        for i in 0..UNIT_ROWS {
            row_scales[i as usize] = scales[(local_row + i) as usize];
        }
    }
    let width = N::value();
    let aligned = comptime!(width > 1);
    #[unroll]
    for s in 0..sectors {
        let local_col = sector_col(s, source);
        let mut col_scales = Array::<f32>::new(comptime!(len as usize));
        if comptime!(by_cols) {
            #[unroll]
            for c in 0..len {
                col_scales[c as usize] = scales[(TILE + local_col + c) as usize];
            }
        }
        let by_row = cast_sector(
            &raw,
            &mut stage,
            &geometry,
            row0,
            col0,
            &row_scales,
            &col_scales,
            s,
            orientation.rows(),
            orientation.cols(),
            square,
            aligned,
            encoding,
        );
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            let at = (col0 + local_col) / len;
            #[unroll]
            for i in 0..UNIT_ROWS {
                if row + i < geometry.rows && at < row_pitch {
                    store_words(rows, (row + i) * row_pitch + at, &by_row, comptime!(i * encoding.sector_quads()));
                }
            }
        }
    }

    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        sync_cube();
        store_cols(&stage, cols, &geometry, row0, col0, col_pitch, TILE, source);
    }
}
