//! One scale per row and per column. One read of `x` finds partial maxima tile by tile, and a
//! second launch folds them.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::maxima::{col_maximum, col_stage, line_col, row_maximum, row_stage, stage_maxima};
use super::tile::{TILE_ROWS, Tile, UNIT_ROWS, UNITS_X, UnitScales, tile_cols};
use super::{Copies, array, optional, words};
use crate::amax::amax_bits;
use crate::element_type::ElementType;
use crate::grid::{UNITS, cube_first, fold};
use crate::load::{Geometry, load_pinned};
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::version::Version;
use crate::view::Checked;
use crate::{Cast, Orientation};

/// Adjacent scales that are read at once. Arrays of scales are allocated in multiples of this.
const SCALE_VECTOR: usize = 4;

/// Scales of a matrix's rows and columns, depending on the orientation.
#[derive(CubeType, CubeLaunch)]
pub(super) struct LineScales {
    rows: ComptimeOption<Array<Vector<f32, Const<SCALE_VECTOR>>>>,
    cols: ComptimeOption<Array<Vector<f32, Const<SCALE_VECTOR>>>>,
}

#[cube]
impl LineScales {
    /// Loads the scales of this unit's rows and columns.
    pub(super) fn load(&self, tile: &Tile, #[comptime] isa: Isa) -> UnitScales {
        let row = tile.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
        let col = tile.col0 + tile.sector_col(0u32);
        let len = comptime!(tile.element_type.sector_len());
        UnitScales {
            rows: load_scales(&self.rows, row, tile.geometry.rows, UNIT_ROWS, isa),
            cols: load_scales(&self.cols, col, tile.geometry.cols, len, isa),
        }
    }
}

/// Scales of the `count` lines from `first` on, a multiple of four. Past the last line they are
/// arbitrary. If `scales` is `None`, the result must not be read.
#[cube]
fn load_scales(
    scales: &ComptimeOption<Array<Vector<f32, Const<SCALE_VECTOR>>>>,
    first: u32,
    lines: u32,
    #[comptime] count: u32,
    #[comptime] isa: Isa,
) -> Array<f32> {
    let mut of_lines = Array::<f32>::new(comptime!(count as usize));
    #[comptime]
    if let ComptimeOption::Some(scales) = scales {
        let width = comptime!(SCALE_VECTOR as u32);
        #[unroll]
        for v in 0..comptime!(count / width) {
            // Past the last line there is only padding, which needs no scale.
            let index = min(first / width + v, (lines - 1) / width);
            load_pinned(scales, index, &mut of_lines, comptime!(v * width), isa);
        }
    }
    of_lines
}

/// amax, scale and inverse scale of every line on the device, f32.
struct Folded {
    amax: Handle,
    scale: Handle,
    inv_scale: Handle,
}

/// Launches the kernels that compute the scales. Returns allocated copies and the kernel argument.
pub(super) fn scales<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> (Copies, LineScalesLaunch<R>) {
    let tiles_x = x.cols.div_ceil(tile_cols(x.element_type, 1) as usize);
    let tiles_y = x.rows.div_ceil(TILE_ROWS as usize);
    let row_partials = orientation.rows().then(|| words(client, tiles_x * x.rows));
    let col_partials = words(client, tiles_y * x.cols);
    let isa = Isa::of(client);
    // SAFETY: `x` is checked. `Tile::load` reads only inside it, and stores are guarded by its rows
    // and columns.
    unsafe {
        line_maxima::launch_unchecked::<R>(
            client,
            fold(client, (tiles_x * tiles_y) as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            x.array(),
            optional(row_partials.as_ref()),
            array(&col_partials),
            x.geometry(),
            x.element_type,
            isa,
            Version::of(client),
        );
    }
    let folded = |partials: &Handle, lines: usize, count: usize| {
        let padded = lines.next_multiple_of(SCALE_VECTOR);
        let out = Folded { amax: words(client, lines), scale: words(client, padded), inv_scale: words(client, lines) };
        let [amax, scales, inv_scales] = [&out.amax, &out.scale, &out.inv_scale].map(array);
        let lines = LinesLaunch::new(array(partials), amax, scales, inv_scales, lines as u32, count as u32);
        (out, lines)
    };
    let (rows, row_lines) = row_partials.map(|partials| folded(&partials, x.rows, tiles_x)).unzip();
    let (cols, col_lines) = folded(&col_partials, x.cols, tiles_y);
    let row_cubes = if rows.is_some() { (x.rows as u32).div_ceil(FOLD_LINES) } else { 0 };
    // SAFETY: the kernel reads `count · lines` words of each input and writes `lines` words of each
    // output.
    unsafe {
        fold_lines::launch_unchecked::<R>(
            client,
            fold(client, row_cubes + (x.cols as u32).div_ceil(FOLD_LINES)),
            CubeDim::new_1d(UNITS),
            row_lines.into(),
            col_lines,
            row_cubes,
            x.element_type,
            cast,
            isa,
            Version::of(client),
        );
    }
    let scales = LineScalesLaunch::new(optional(rows.as_ref().map(|rows| &rows.scale)), optional(Some(&cols.scale)));
    let copies = Copies::new(client, x, orientation, |by_rows| {
        let Folded { amax, inv_scale, .. } = rows.as_ref().filter(|_| by_rows).unwrap_or(&cols);
        (inv_scale.clone(), amax.clone())
    });
    (copies, scales)
}

/// Largest raw magnitudes of the columns of each tile, `[tiles_y, C]`, and of its rows,
/// `[tiles_x, R]`.
#[cube(launch_unchecked)]
fn line_maxima<N: Size>(
    x: &Array<Vector<u32, N>>,
    rows: &mut ComptimeOption<Array<u32>>,
    cols: &mut Array<u32>,
    geometry: Geometry,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let tile_cols = comptime!(tile_cols(element_type, 1));
    let tile = Tile::of_cube(geometry, element_type, 1u32);
    let (row0, col0) = (tile.row0, tile.col0);
    if row0 >= geometry.rows {
        terminate!();
    }
    let by_rows = comptime!(rows.is_some());
    let mut of_rows = SharedMemory::<u32>::new(comptime!((if by_rows { row_stage(1) } else { 1 }) as usize));
    let mut of_cols = SharedMemory::<u32>::new(comptime!(col_stage(tile_cols) as usize));
    let raw = tile.load(x, isa);
    stage_maxima(&tile, &raw, &mut of_rows, &mut of_cols, by_rows, true, 1u32);
    sync_cube();
    // The first units take the columns, the others the rows.
    if UNIT_POS < tile_cols {
        let col = col0 + line_col(UNIT_POS, element_type);
        if col < geometry.cols {
            cols[(row0 / TILE_ROWS * geometry.cols + col) as usize] = col_maximum(&of_cols, UNIT_POS, 0u32, 1u32);
        }
    } else if UNIT_POS >= TILE_ROWS {
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            let row = UNIT_POS - TILE_ROWS;
            if row0 + row < geometry.rows {
                rows[(col0 / tile_cols * geometry.rows + row0 + row) as usize] =
                    row_maximum(&of_rows, row, 0u32, 1u32, element_type);
            }
        }
    }
}

/// Adjacent lines that a cube of `fold_lines` takes. Units of the same line share its partial
/// maxima.
const FOLD_LINES: u32 = 32;

/// Partial maxima that a unit has in flight.
const FOLDED: u32 = 4;

/// Partial maxima of lines, `[count, lines]`, and the outputs of the fold.
#[derive(CubeType, CubeLaunch)]
struct Lines {
    partials: Array<u32>,
    amax: Array<u32>,
    scales: Array<u32>,
    inv_scales: Array<u32>,
    lines: u32,
    count: u32,
}

/// Computes amax and scales of each row, by the first `row_cubes` cubes, and of each column.
#[cube(launch_unchecked)]
fn fold_lines(
    rows: &mut ComptimeOption<Lines>,
    cols: &mut Lines,
    row_cubes: u32,
    #[comptime] element_type: ElementType,
    #[comptime] cast: Cast,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let line0 = cube_first(FOLD_LINES);
    let first_col = row_cubes * FOLD_LINES;
    #[comptime]
    if let ComptimeOption::Some(rows) = rows {
        if line0 < first_col {
            fold_cube(rows, line0, element_type, cast, isa);
            terminate!();
        }
    }
    if line0 - first_col < cols.lines {
        fold_cube(cols, line0 - first_col, element_type, cast, isa);
    }
}

/// Computes amax and scales of a cube's lines, starting at `line0`.
#[cube]
fn fold_cube(
    of: &mut Lines,
    line0: u32,
    #[comptime] element_type: ElementType,
    #[comptime] cast: Cast,
    #[comptime] isa: Isa,
) {
    let groups = comptime!(UNITS / FOLD_LINES);
    let (lines, count) = (of.lines, of.count);
    let mut largest = 0u32.runtime();
    let line = line0 + UNIT_POS % FOLD_LINES;
    let mut first = UNIT_POS / FOLD_LINES;
    while first < count {
        #[unroll]
        for i in 0..FOLDED {
            let partial = min(first + comptime!(i * groups), count - 1);
            largest = max(largest, of.partials[(partial * lines + min(line, lines - 1)) as usize]);
        }
        first += comptime!(FOLDED * groups);
    }
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    shared[UNIT_POS as usize] = largest;
    sync_cube();
    if UNIT_POS < FOLD_LINES && line < lines {
        #[unroll]
        for i in 0..groups {
            largest = max(largest, shared[(UNIT_POS + comptime!(i * FOLD_LINES)) as usize]);
        }
        let bits = amax_bits(largest, element_type);
        let multiplier = scale_bits(bits, cast.format, cast.scale_mode, isa);
        of.amax[line as usize] = bits;
        of.scales[line as usize] = multiplier;
        of.inv_scales[line as usize] = inverse_bits(multiplier, isa);
    }
}
