//! The cast with scales that are on the device: of the tensor, or of each row for one copy and each column for the other.
//!
//! A cube takes a tile of 64x64. Each of its 16x16 units casts 4x4 elements: four words along the rows, written at once,
//! and by exchanging the bytes four words along the columns, which pass through shared memory so that both copies are
//! written in runs of 64 bytes.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Copies, Copy, optional, words};
use crate::amax::Scaling;
use crate::format::encode_scaled;
use crate::grid::{UNITS, cube_max, fold, tile_origin};
use crate::view::{Checked, Geometry, Source, load_quad, magnitude, widen};
use crate::{Format, Orientation, row_words};

/// Rows and columns of a cube's tile.
const TILE: u32 = 64;

/// Words of one row of a tile.
const TILE_WORDS: u32 = TILE / 4;

/// Pitch of the staged transpose: one word more than a row, so that neighbouring columns start in different banks.
const STAGE_PITCH: u32 = TILE_WORDS + 1;

/// What scales the copies.
pub(super) enum Scales {
    /// One scale for both.
    Tensor(Scaling),
    /// A scale per column, for the copy by columns alone.
    Cols(Scaling),
    /// A scale per row for the copy by rows, and per column for the copy by columns.
    RowsAndCols(Scaling, Scaling),
}

/// Tiles of `x`, so many partial maxima are observed.
pub(super) fn tiles(x: &Checked) -> usize {
    x.rows.div_ceil(TILE as usize) * x.cols.div_ceil(TILE as usize)
}

/// Launches the cast. `observed` holds a word per tile, for the largest raw magnitude in it.
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scales: &Scales,
    format: Format,
    orientation: Orientation,
    observed: Option<&Handle>,
) -> Copies {
    // The scales of a copy that is not asked for are not read.
    let (row_scaling, col_scaling) = match scales {
        Scales::Tensor(scaling) | Scales::Cols(scaling) => (scaling, scaling),
        Scales::RowsAndCols(rows, cols) => (rows, cols),
    };
    let one_scale = matches!(scales, Scales::Tensor(_));
    let (row_len, col_len) = (x.rows * row_words(x.cols), x.cols * row_words(x.rows));
    let copy = |len, scaling: &Scaling| Copy {
        codes: words(client, len),
        inv_scale: scaling.inv_scale.clone(),
        amax: scaling.amax.clone(),
    };
    let rows = orientation.rows().then(|| copy(row_len, row_scaling));
    let cols = orientation.cols().then(|| copy(col_len, col_scaling));
    let scale_count = |lines| if one_scale { 1 } else { lines };
    // SAFETY: `x` is checked and `load_quad` reads only inside it; every store is guarded by the pitch and the number of
    // rows that the outputs were allocated with, every scale by the rows and columns of `x`.
    unsafe {
        cast_tiles::launch_unchecked::<R>(
            client,
            fold(client, tiles(x) as u32),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            ArrayArg::from_raw_parts(row_scaling.scale.clone(), scale_count(x.rows)),
            ArrayArg::from_raw_parts(col_scaling.scale.clone(), scale_count(x.cols)),
            optional(rows.as_ref().map(|copy| &copy.codes), row_len),
            optional(cols.as_ref().map(|copy| &copy.codes), col_len),
            optional(observed, tiles(x)),
            x.geometry(),
            row_words(x.cols) as u32,
            row_words(x.rows) as u32,
            x.source,
            format,
            orientation,
            one_scale,
        );
    }
    Copies { rows, cols }
}

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_tiles<N: Size>(
    x: &Array<Vector<u32, N>>,
    row_scales: &Array<f32>,
    col_scales: &Array<f32>,
    rows: &mut ComptimeOption<Array<u32>>,
    cols: &mut ComptimeOption<Array<u32>>,
    observed: &mut ComptimeOption<Array<u32>>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] orientation: Orientation,
    #[comptime] one_scale: bool,
) {
    let (row0, col0) = tile_origin(geometry.cols, TILE);
    if row0 >= geometry.rows {
        terminate!();
    }
    let unit_x = UNIT_POS % TILE_WORDS;
    let unit_y = UNIT_POS / TILE_WORDS;
    let row = row0 + unit_y * 4;
    let col = col0 + unit_x * 4;

    let mut raw = Array::<u32>::new(16usize);
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..4u32 {
        let quad = load_quad(x, &geometry, row + i, col, source);
        #[unroll]
        for j in 0..4u32 {
            raw[comptime!((4 * i + j) as usize)] = quad[j as usize];
            largest = max(largest, magnitude(quad[j as usize], source));
        }
    }

    let by_rows = comptime!(orientation.rows() && !one_scale);
    let by_cols = comptime!(orientation.cols() && !one_scale);
    let row_scales = line_scales(row_scales, row, geometry.rows, by_rows);
    let col_scales = line_scales(col_scales, col, geometry.cols, by_cols);
    let words =
        cast_piece(&raw, 0u32, row, col, &geometry, &row_scales, &col_scales, source, format, orientation, one_scale);

    #[comptime]
    if let ComptimeOption::Some(rows) = rows {
        #[unroll]
        for i in 0..4u32 {
            if row + i < geometry.rows && col / 4 < row_pitch {
                rows[((row + i) * row_pitch + col / 4) as usize] = words[i as usize];
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        let mut stage = SharedMemory::<u32>::new(comptime!((TILE * STAGE_PITCH) as usize));
        #[unroll]
        for j in 0..4u32 {
            stage[((unit_x * 4 + j) * STAGE_PITCH + unit_y) as usize] = words[comptime!((4 + j) as usize)];
        }
        sync_cube();
        #[unroll]
        for pass in 0..4u32 {
            let tile_col = pass * TILE_WORDS + unit_y;
            let col = col0 + tile_col;
            let word = row0 / 4 + unit_x;
            if col < geometry.cols && word < col_pitch {
                cols[(col * col_pitch + word) as usize] = stage[(tile_col * STAGE_PITCH + unit_x) as usize];
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(observed) = observed {
        let largest = cube_max(largest);
        if UNIT_POS == 0 {
            observed[CUBE_POS] = largest;
        }
    }
}

/// Scales of four lines from `first` on, or the first scale if there is no line for it.
#[cube]
fn line_scales(scales: &Array<f32>, first: u32, lines: u32, #[comptime] by_line: bool) -> Array<f32> {
    let mut four = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4u32 {
        // Past the last line there is padding, which no scale touches.
        let line = if comptime!(by_line) { min(first + i, lines - 1) } else { 0u32.runtime() };
        four[i as usize] = scales[line as usize];
    }
    four
}

/// Casts the 4x4 elements from `(row, col)` on, whose raw bits are `raw[first..first + 16]` row by row: four words along
/// the rows, then four along the columns.
///
/// Row `i` is scaled by `row_scales[i]` in the first four and column `j` by `col_scales[j]` in the others, or with
/// `one_scale` everything by `row_scales[0]`.
#[cube]
pub(super) fn cast_piece(
    raw: &Array<u32>,
    #[comptime] first: u32,
    row: u32,
    col: u32,
    geometry: &Geometry,
    row_scales: &Array<f32>,
    col_scales: &Array<f32>,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] orientation: Orientation,
    #[comptime] one_scale: bool,
) -> Array<u32> {
    let mut words = Array::<u32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        words[i] = 0u32;
    }
    #[unroll]
    for i in 0..4u32 {
        #[unroll]
        for j in 0..4u32 {
            let bits = widen(raw[comptime!((first + 4 * i + j) as usize)], source);
            // Padding is zero whatever the scale: a NaN scale would make it NaN.
            let inside = row + i < geometry.rows && col + j < geometry.cols;
            let along_row = comptime!(i as usize);
            let along_col = comptime!((4 + j) as usize);
            if comptime!(one_scale) {
                let code = select(inside, encode_scaled(bits, row_scales[0], format), 0u32.runtime());
                words[along_row] |= code << comptime!(8 * j);
                words[along_col] |= code << comptime!(8 * i);
            } else {
                if comptime!(orientation.rows()) {
                    let code = encode_scaled(bits, row_scales[i as usize], format);
                    words[along_row] |= select(inside, code, 0u32.runtime()) << comptime!(8 * j);
                }
                if comptime!(orientation.cols()) {
                    let code = encode_scaled(bits, col_scales[j as usize], format);
                    words[along_col] |= select(inside, code, 0u32.runtime()) << comptime!(8 * i);
                }
            }
        }
    }
    words
}
