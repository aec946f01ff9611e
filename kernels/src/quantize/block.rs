//! One scale per block: 1x128 along the contraction, or 128x128. One launch and one read of `x` for both orientations.
//!
//! A cube takes a tile of 128x128 and keeps it in registers, 64 elements per unit, while the maxima of its groups and then
//! their scales pass through shared memory. A block of one orientation is a part of a row, of the other a part of a
//! column; the square is the same for both.

use cubecl::prelude::*;

use super::cast::cast_piece;
use super::tile::{
    COL_STAGE, ROW_STAGE, STAGE_PITCH, TILE, TILE_ROWS, TILE_WORDS, col_stage_place, line_maximum, row_stage_place,
};
use super::{Copies, Copy, optional, words};
use crate::amax::amax_bits;
use crate::grid::{UNITS, cube_max, fold, tile_origin};
use crate::scale::{inverse_bits, scale_bits};
use crate::view::{Checked, Geometry, Source, load_quad, magnitude};
use crate::{Cast, Format, Granularity, Orientation, ScaleMode, row_words};

/// 4x4 pieces that a unit holds, one below the other.
const PIECES: u32 = TILE_ROWS / 4;

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
    // SAFETY: `x` is checked and `load_quad` reads only inside it; stores of codes and scales are guarded by the rows,
    // columns and pitches that the outputs were allocated with, and cube `i` writes word `i` of `amax`.
    unsafe {
        cast_blocks::launch_unchecked::<R>(
            client,
            fold(client, tiles as u32),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            optional(rows.as_ref().map(|copy| &copy.codes), row_lens.0),
            optional(rows.as_ref().map(|copy| &copy.inv_scale), row_lens.1),
            optional(cols.as_ref().map(|copy| &copy.codes), col_lens.0),
            optional(cols.as_ref().map(|copy| &copy.inv_scale), col_lens.1),
            ArrayArg::from_raw_parts(amax, tiles),
            x.geometry(),
            row_words(x.cols) as u32,
            row_words(x.rows) as u32,
            x.source,
            cast.format,
            cast.scale_mode,
            orientation,
            cast.granularity == Granularity::Block128x128,
        );
    }
    Copies { rows, cols }
}

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_blocks<N: Size>(
    x: &Array<Vector<u32, N>>,
    rows: &mut ComptimeOption<Array<u32>>,
    row_inverses: &mut ComptimeOption<Array<u32>>,
    cols: &mut ComptimeOption<Array<u32>>,
    col_inverses: &mut ComptimeOption<Array<u32>>,
    amax: &mut Array<u32>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
    #[comptime] orientation: Orientation,
    #[comptime] square: bool,
) {
    let (row0, col0) = tile_origin(geometry.cols, TILE);
    if row0 >= geometry.rows {
        terminate!();
    }
    let tile_row = row0 / TILE;
    let tile_col = col0 / TILE;
    let tile_rows = geometry.rows.div_ceil(TILE);
    let tile_cols = geometry.cols.div_ceil(TILE);
    let unit_x = UNIT_POS % TILE_WORDS;
    let unit_y = UNIT_POS / TILE_WORDS;
    let by_rows = comptime!(orientation.rows() && !square);
    let by_cols = comptime!(orientation.cols() && !square);
    // First for the maxima of rows, then for the codes of columns.
    let mut stage = SharedMemory::<u32>::new(comptime!(ROW_STAGE as usize));
    let mut col_stage = SharedMemory::<u32>::new(comptime!((if by_cols { COL_STAGE } else { 1 }) as usize));
    // Of the rows, then of the columns; of the square, the first alone.
    let mut scales = SharedMemory::<f32>::new(comptime!(2 * TILE as usize));

    let mut raw = Array::<u32>::new(comptime!(4 * TILE_ROWS as usize));
    let mut along_cols = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        along_cols[j] = 0u32;
    }
    #[unroll]
    for i in 0..TILE_ROWS {
        let local_row = unit_y * TILE_ROWS + i;
        let quad = load_quad(x, &geometry, row0 + local_row, col0 + unit_x * 4, source);
        let mut along_row = 0u32.runtime();
        #[unroll]
        for j in 0..4u32 {
            let mag = magnitude(quad[j as usize], source);
            raw[comptime!((4 * i + j) as usize)] = quad[j as usize];
            along_cols[j as usize] = max(along_cols[j as usize], mag);
            along_row = max(along_row, mag);
        }
        if comptime!(by_rows) {
            stage[row_stage_place(local_row, unit_x) as usize] = along_row;
        }
    }
    if comptime!(by_cols) {
        #[unroll]
        for j in 0..4u32 {
            col_stage[col_stage_place(unit_y, unit_x * 4 + j) as usize] = along_cols[j as usize];
        }
    }
    // This synchronizes the stages too.
    let largest = cube_max(max(max(along_cols[0], along_cols[1]), max(along_cols[2], along_cols[3])));
    let largest = amax_bits(largest, source);
    if UNIT_POS == 0 {
        amax[CUBE_POS] = largest;
    }
    let line = UNIT_POS % TILE;
    if comptime!(square) {
        if UNIT_POS == 0 {
            let multiplier = scale_bits(largest, format, mode);
            let inverse = inverse_bits(multiplier);
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
        let maximum = amax_bits(line_maximum(&stage, &col_stage, by_rows, by_cols), source);
        let multiplier = scale_bits(maximum, format, mode);
        let inverse = inverse_bits(multiplier);
        scales[UNIT_POS as usize] = f32::reinterpret(multiplier);
        if UNIT_POS < TILE {
            #[comptime]
            if let ComptimeOption::Some(inverses) = row_inverses {
                if row0 + line < geometry.rows {
                    inverses[((row0 + line) * tile_cols + tile_col) as usize] = inverse;
                }
            }
        } else {
            #[comptime]
            if let ComptimeOption::Some(inverses) = col_inverses {
                if col0 + line < geometry.cols {
                    inverses[((col0 + line) * tile_rows + tile_row) as usize] = inverse;
                }
            }
        }
    }
    sync_cube();

    let col = col0 + unit_x * 4;
    let mut col_scales = Array::<f32>::new(4usize);
    if comptime!(by_cols) {
        #[unroll]
        for j in 0..4u32 {
            col_scales[j as usize] = scales[(unit_x * 4 + comptime!(TILE + j)) as usize];
        }
    }
    #[unroll]
    for piece in 0..PIECES {
        let local_row = unit_y * TILE_ROWS + comptime!(4 * piece);
        let row = row0 + local_row;
        let mut row_scales = Array::<f32>::new(4usize);
        if comptime!(square) {
            row_scales[0] = scales[0];
        } else if comptime!(by_rows) {
            #[unroll]
            for i in 0..4u32 {
                row_scales[i as usize] = scales[(local_row + i) as usize];
            }
        }
        let first = comptime!(16 * piece);
        let words =
            cast_piece(&raw, first, row, col, &geometry, &row_scales, &col_scales, source, format, orientation, square);
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            #[unroll]
            for i in 0..4u32 {
                if row + i < geometry.rows && col / 4 < row_pitch {
                    rows[((row + i) * row_pitch + col / 4) as usize] = words[i as usize];
                }
            }
        }
        if comptime!(orientation.cols()) {
            #[unroll]
            for j in 0..4u32 {
                let place = (unit_x * 4 + j) * STAGE_PITCH + local_row / 4;
                stage[place as usize] = words[comptime!((4 + j) as usize)];
            }
        }
    }

    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        sync_cube();
        let word = row0 / 4 + unit_x;
        for i in 0..TILE_ROWS {
            let local_col = unit_y * TILE_ROWS + i;
            let col = col0 + local_col;
            if col < geometry.cols && word < col_pitch {
                cols[(col * col_pitch + word) as usize] = stage[(local_col * STAGE_PITCH + unit_x) as usize];
            }
        }
    }
}
