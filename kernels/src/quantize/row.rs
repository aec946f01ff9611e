//! One scale per row of the contraction.
//!
//! By rows: amax and cast in one launch, the row kept in registers between the two ([`Plan`]). By columns, or both: the
//! maxima of all lines that are asked for in one read of `x`, tile by tile, then the cast in a second.

use cubecl::prelude::*;

use super::cast::{self, Scales};
use super::tile::{COL_STAGE, ROW_STAGE, TILE, TILE_ROWS, TILE_WORDS, col_stage_place, line_maximum, row_stage_place};
use super::{Copies, Copy, optional, words};
use crate::amax::{Scaling, amax_bits};
use crate::format::encode_scaled;
use crate::grid::{UNITS, fold, lanes_max, tile_origin};
use crate::scale::{inverse_bits, scale_bits};
use crate::view::{Checked, Geometry, Source, load_quad, magnitude, widen};
use crate::{Cast, Format, Orientation, ScaleMode, row_words};

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> Copies {
    if orientation == Orientation::Rows {
        return Copies { rows: Some(launch_rows(client, x, cast)), cols: None };
    }
    let (rows, cols) = launch_maxima(client, x, cast, orientation);
    let scales = match rows {
        Some(rows) => Scales::RowsAndCols(rows, cols),
        None => Scales::Cols(cols),
    };
    cast::launch(client, x, &scales, cast.format, orientation, None)
}

/// How many units work on a row and how many words each of them keeps in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Units per row, a power of two; a cube takes `UNITS / lanes` rows.
    lanes: u32,
    /// Words of four elements per unit; zero for rows too long to keep, which the cube reads twice.
    held: u32,
}

impl Plan {
    /// The fewest units that keep a row of `words` words in 32 registers each, so that few of them wait for each other;
    /// from the whole cube on in as many as it takes, up to 64.
    fn new(words: usize) -> Self {
        let words = words as u32;
        let lanes = words.div_ceil(8).next_power_of_two().clamp(4, UNITS);
        let held = words.div_ceil(lanes);
        Plan { lanes, held: if held <= 16 { held } else { 0 } }
    }
}

fn launch_rows<R: Runtime>(client: &ComputeClient<R>, x: &Checked, cast: Cast) -> Copy {
    let pitch = row_words(x.cols);
    let plan = Plan::new(pitch);
    let copy =
        Copy { codes: words(client, x.rows * pitch), inv_scale: words(client, x.rows), amax: words(client, x.rows) };
    // SAFETY: `x` is checked and `load_quad` reads only inside it; stores are guarded by the rows and the pitch.
    unsafe {
        cast_rows::launch_unchecked::<R>(
            client,
            fold(client, (x.rows as u32).div_ceil(UNITS / plan.lanes)),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            ArrayArg::from_raw_parts(copy.codes.clone(), x.rows * pitch),
            ArrayArg::from_raw_parts(copy.amax.clone(), x.rows),
            ArrayArg::from_raw_parts(copy.inv_scale.clone(), x.rows),
            x.geometry(),
            pitch as u32,
            x.source,
            cast.format,
            cast.scale_mode,
            plan,
        );
    }
    copy
}

#[cube(launch_unchecked)]
fn cast_rows<N: Size>(
    x: &Array<Vector<u32, N>>,
    codes: &mut Array<u32>,
    amax: &mut Array<u32>,
    inv_scales: &mut Array<u32>,
    geometry: Geometry,
    pitch: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
    #[comptime] plan: Plan,
) {
    let lanes = comptime!(plan.lanes);
    let held = comptime!(plan.held);
    let rows_per_cube = comptime!(UNITS / plan.lanes);
    // No wrapping around for spare cubes of a matrix of nearly 2^32 rows.
    let row0 = min(CUBE_POS as u32, comptime!(u32::MAX / (UNITS / plan.lanes))) * rows_per_cube;
    if row0 >= geometry.rows {
        terminate!();
    }
    let lane = UNIT_POS % lanes;
    let slot = UNIT_POS / lanes;
    let row = row0 + slot;

    let mut raw = Array::<u32>::new(comptime!(4 * (if held > 0 { held } else { 1 }) as usize));
    let mut largest = 0u32.runtime();
    if comptime!(held > 0) {
        #[unroll]
        for i in 0..held {
            let quad = load_quad(x, &geometry, row, (lane + comptime!(i * lanes)) * 4, source);
            #[unroll]
            for j in 0..4u32 {
                raw[comptime!((4 * i + j) as usize)] = quad[j as usize];
                largest = max(largest, magnitude(quad[j as usize], source));
            }
        }
    } else {
        let mut word = lane;
        while word < pitch {
            let quad = load_quad(x, &geometry, row, word * 4, source);
            #[unroll]
            for j in 0..4usize {
                largest = max(largest, magnitude(quad[j], source));
            }
            word += lanes;
        }
    }

    let largest = lanes_max(largest, lanes);
    let mut scales = SharedMemory::<f32>::new(comptime!((UNITS / plan.lanes) as usize));
    if lane == 0 {
        let bits = amax_bits(largest, source);
        let multiplier = scale_bits(bits, format, mode);
        scales[slot as usize] = f32::reinterpret(multiplier);
        if row < geometry.rows {
            amax[row as usize] = bits;
            inv_scales[row as usize] = inverse_bits(multiplier);
        }
    }
    sync_cube();
    let scale = scales[slot as usize];

    if comptime!(held > 0) {
        #[unroll]
        for i in 0..held {
            let word = lane + comptime!(i * lanes);
            if row < geometry.rows && word < pitch {
                let packed = cast_word(&raw, comptime!(4 * i), word * 4, geometry.cols, scale, source, format);
                codes[(row * pitch + word) as usize] = packed;
            }
        }
    } else if row < geometry.rows {
        let mut word = lane;
        while word < pitch {
            let quad = load_quad(x, &geometry, row, word * 4, source);
            let packed = cast_word(&quad, 0u32, word * 4, geometry.cols, scale, source, format);
            codes[(row * pitch + word) as usize] = packed;
            word += lanes;
        }
    }
}

/// Codes of the elements `raw[first..first + 4]` of columns `col..col + 4`, zero past the last column.
#[cube]
fn cast_word(
    raw: &Array<u32>,
    #[comptime] first: u32,
    col: u32,
    cols: u32,
    scale: f32,
    #[comptime] source: Source,
    #[comptime] format: Format,
) -> u32 {
    let mut word = 0u32.runtime();
    #[unroll]
    for j in 0..4u32 {
        let code = encode_scaled(widen(raw[comptime!((first + j) as usize)], source), scale, format);
        // Padding is zero whatever the scale: a NaN scale would make it NaN.
        word |= select(col + j < cols, code, 0u32.runtime()) << comptime!(8 * j);
    }
    word
}

/// amax and scales of the columns, and of the rows if the orientation names them.
fn launch_maxima<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> (Option<Scaling>, Scaling) {
    let tiles_x = x.cols.div_ceil(TILE as usize);
    let tiles_y = x.rows.div_ceil(TILE as usize);
    let row_partials = orientation.rows().then(|| words(client, tiles_x * x.rows));
    let col_partials = words(client, tiles_y * x.cols);
    // SAFETY: `x` is checked and `load_quad` reads only inside it; stores are guarded by the rows and columns of `x`.
    unsafe {
        line_maxima::launch_unchecked::<R>(
            client,
            fold(client, (tiles_x * tiles_y) as u32),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            optional(row_partials.as_ref(), tiles_x * x.rows),
            ArrayArg::from_raw_parts(col_partials.clone(), tiles_y * x.cols),
            x.geometry(),
            x.source,
            orientation.rows(),
        );
    }
    let fold_lines = |partials, lines: usize, count: usize| {
        let out = Scaling { amax: words(client, lines), scale: words(client, lines), inv_scale: words(client, lines) };
        // SAFETY: the kernel reads `count · lines` words and writes `lines` of each output, the sizes given here.
        unsafe {
            fold_lines::launch_unchecked::<R>(
                client,
                fold(client, (lines as u32).div_ceil(UNITS)),
                CubeDim::new_1d(UNITS),
                ArrayArg::from_raw_parts(partials, count * lines),
                ArrayArg::from_raw_parts(out.amax.clone(), lines),
                ArrayArg::from_raw_parts(out.scale.clone(), lines),
                ArrayArg::from_raw_parts(out.inv_scale.clone(), lines),
                lines as u32,
                count as u32,
                x.source,
                cast.format,
                cast.scale_mode,
            );
        }
        out
    };
    (row_partials.map(|partials| fold_lines(partials, x.rows, tiles_x)), fold_lines(col_partials, x.cols, tiles_y))
}

/// Largest raw magnitudes of the columns of each tile, `[tiles_y, C]`, and of its rows, `[tiles_x, R]`.
// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn line_maxima<N: Size>(
    x: &Array<Vector<u32, N>>,
    rows: &mut ComptimeOption<Array<u32>>,
    cols: &mut Array<u32>,
    geometry: Geometry,
    #[comptime] source: Source,
    #[comptime] by_rows: bool,
) {
    let (row0, col0) = tile_origin(geometry.cols, TILE);
    if row0 >= geometry.rows {
        terminate!();
    }
    let unit_x = UNIT_POS % TILE_WORDS;
    let unit_y = UNIT_POS / TILE_WORDS;
    let mut row_stage = SharedMemory::<u32>::new(comptime!((if by_rows { ROW_STAGE } else { 1 }) as usize));
    let mut col_stage = SharedMemory::<u32>::new(comptime!(COL_STAGE as usize));
    let mut largest = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        largest[j] = 0u32;
    }
    for i in 0..TILE_ROWS {
        let local_row = unit_y * TILE_ROWS + i;
        let quad = load_quad(x, &geometry, row0 + local_row, col0 + unit_x * 4, source);
        let mut along_row = 0u32.runtime();
        #[unroll]
        for j in 0..4usize {
            let mag = magnitude(quad[j], source);
            largest[j] = max(largest[j], mag);
            along_row = max(along_row, mag);
        }
        if comptime!(by_rows) {
            row_stage[row_stage_place(local_row, unit_x) as usize] = along_row;
        }
    }
    #[unroll]
    for j in 0..4u32 {
        col_stage[col_stage_place(unit_y, unit_x * 4 + j) as usize] = largest[j as usize];
    }
    sync_cube();
    let maximum = line_maximum(&row_stage, &col_stage, by_rows, true);
    let line = UNIT_POS % TILE;
    if UNIT_POS < TILE {
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            if row0 + line < geometry.rows {
                rows[(col0 / TILE * geometry.rows + row0 + line) as usize] = maximum;
            }
        }
    } else if col0 + line < geometry.cols {
        cols[(row0 / TILE * geometry.cols + col0 + line) as usize] = maximum;
    }
}

/// amax and scales of each line from `count` partial maxima.
#[cube(launch_unchecked)]
fn fold_lines(
    partials: &Array<u32>,
    amax: &mut Array<u32>,
    scales: &mut Array<u32>,
    inv_scales: &mut Array<u32>,
    lines: u32,
    count: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
) {
    let line = CUBE_POS as u32 * UNITS + UNIT_POS;
    if line < lines {
        let mut largest = 0u32.runtime();
        for i in 0..count {
            largest = max(largest, partials[(i * lines + line) as usize]);
        }
        let bits = amax_bits(largest, source);
        let multiplier = scale_bits(bits, format, mode);
        amax[line as usize] = bits;
        scales[line as usize] = multiplier;
        inv_scales[line as usize] = inverse_bits(multiplier);
    }
}
