//! One scale per row of the contraction.
//!
//! By rows: amax and cast in one launch, the row kept in registers between the two ([`RowSplit`]). By columns, or both: the
//! maxima of all lines that are asked for in one read of `x`, tile by tile, then the cast in a second.

use cubecl::prelude::*;

use super::cast::{self, LineScales, SCALE_VECTOR, Scales, sectors_per_row};
use super::encode::{Encoding, encode_quad, lanes_scale, zero_past_end};
use super::tile::{
    ROW_STAGE, SECTOR_WORDS, TILE_ROWS, Tile, UNITS_X, col_maximum, col_stage, line_col, load_unit, row_maximum,
    stage_maxima, store_words,
};
use super::{Copies, Copy, optional, words};
use crate::amax::amax_bits;
use crate::grid::{UNITS, fold, is_cpu, lanes_max};
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::version::{VERSION, Version};
use crate::view::{Checked, Geometry, Source, all_loaded, load_sector, max_magnitude};
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

/// How many units work on a row and how many sectors of 32 bytes each of them keeps in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RowSplit {
    /// Units per row, a power of two; a cube takes `UNITS / lanes` rows.
    lanes: u32,
    /// Sectors per unit; zero for rows too long to keep, which the cube reads twice.
    held: u32,
}

impl RowSplit {
    /// The fewest units that keep a row of so many sectors four to each, so that few of them wait for each other and four
    /// cubes fit on an SM; from the whole cube on in as many as it takes, up to [`MOST_HELD`]. On a CPU the fewest that keep
    /// [`MOST_HELD`]: the maximum of fewer units is found sooner.
    fn new(sectors: usize, cpu: bool) -> Self {
        let sectors = sectors as u32;
        let each = if cpu { MOST_HELD } else { 4 };
        let lanes = sectors.div_ceil(each).next_power_of_two().clamp(4, UNITS);
        let held = sectors.div_ceil(lanes);
        RowSplit { lanes, held: if held <= MOST_HELD { held } else { 0 } }
    }
}

/// Most sectors that a unit keeps in registers.
const MOST_HELD: u32 = 8;

/// Sectors that a unit has in flight in a row too long to keep.
const IN_FLIGHT: u32 = 4;

fn launch_rows<R: Runtime>(client: &ComputeClient<R>, x: &Checked, cast: Cast) -> Copy {
    let pitch = row_words(x.cols);
    let per_row = sectors_per_row(x);
    let plan = RowSplit::new(per_row, is_cpu(client));
    let copy =
        Copy { codes: words(client, x.rows * pitch), inv_scale: words(client, x.rows), amax: words(client, x.rows) };
    // SAFETY: `x` is checked and `load_sector` reads only inside it; stores are guarded by the rows and by the sectors of a
    // row, whose codes fill the pitch.
    unsafe {
        cast_rows::launch_unchecked::<R>(
            client,
            fold(client, (x.rows as u32).div_ceil(UNITS / plan.lanes)),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            (x.source.sector_len() / 4) as usize,
            x.array(),
            ArrayArg::from_raw_parts(copy.codes.clone(), x.rows * pitch),
            ArrayArg::from_raw_parts(copy.amax.clone(), x.rows),
            ArrayArg::from_raw_parts(copy.inv_scale.clone(), x.rows),
            x.geometry(),
            per_row as u32,
            Encoding { source: x.source, format: cast.format, isa: Isa::of(client), has_subnormals: false },
            cast.scale_mode,
            plan,
            VERSION,
        );
    }
    copy
}

#[cube(launch_unchecked)]
fn cast_rows<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    codes: &mut Array<Vector<u32, M>>,
    amax: &mut Array<u32>,
    inv_scales: &mut Array<u32>,
    geometry: Geometry,
    per_row: u32,
    #[comptime] encoding: Encoding,
    #[comptime] mode: ScaleMode,
    #[comptime] plan: RowSplit,
    #[comptime] _version: Version,
) {
    let source = comptime!(encoding.source);
    let lanes = comptime!(plan.lanes);
    let kept = comptime!(plan.held > 0);
    let held = comptime!(if kept { plan.held } else { IN_FLIGHT });
    let rows_per_cube = comptime!(UNITS / plan.lanes);
    // No wrapping around for spare cubes of a matrix of nearly 2^32 rows.
    let row0 = min(CUBE_POS as u32, comptime!(u32::MAX / (UNITS / plan.lanes))) * rows_per_cube;
    if row0 >= geometry.rows {
        terminate!();
    }
    let lane = UNIT_POS % lanes;
    let row = row0 + UNIT_POS / lanes;

    let mut raw = Array::<u32>::new(comptime!((held * SECTOR_WORDS) as usize));
    let mut largest = 0u32.runtime();
    let mut sectors = Sectors { geometry, row, first: lane, per_row, held, lanes, encoding };
    if comptime!(kept) {
        sectors.load(x, &mut raw);
        largest = largest_of(&raw, largest, held, source);
    } else {
        while sectors.first - lane < per_row {
            sectors.load(x, &mut raw);
            largest = largest_of(&raw, largest, held, source);
            sectors.first += comptime!(held * lanes);
        }
    }
    let bits = amax_bits(lanes_max(largest, lanes, encoding.isa), source);
    let multiplier = lanes_scale(bits, lanes, encoding, mode);
    let mut scales = Array::<f32>::new(1usize);
    scales[0] = f32::reinterpret(multiplier);
    if lane == 0 && row < geometry.rows {
        amax[row as usize] = bits;
        inv_scales[row as usize] = inverse_bits(multiplier, encoding.isa);
    }

    let width = N::value();
    let aligned = comptime!(width > 1);
    if comptime!(kept) {
        sectors.store(codes, &raw, &scales, aligned);
    } else {
        sectors.first = lane;
        while sectors.first - lane < per_row {
            sectors.load(x, &mut raw);
            sectors.store(codes, &raw, &scales, aligned);
            sectors.first += comptime!(held * lanes);
        }
    }
}

/// Sectors `first`, `first + lanes`, ... of a row, `held` of them.
#[derive(CubeType)]
struct Sectors {
    geometry: Geometry,
    row: u32,
    first: u32,
    per_row: u32,
    #[cube(comptime)]
    held: u32,
    #[cube(comptime)]
    lanes: u32,
    #[cube(comptime)]
    encoding: Encoding,
}

#[cube]
impl Sectors {
    /// Loads them one after another into `raw`.
    fn load<N: Size>(&self, x: &Array<Vector<u32, N>>, raw: &mut Array<u32>) {
        let Encoding { source, isa, .. } = comptime!(self.encoding);
        #[unroll]
        for i in 0..self.held {
            let col = (self.first + comptime!(i * self.lanes)) * comptime!(source.sector_len());
            load_sector(x, &self.geometry, self.row, col, raw, comptime!(i * SECTOR_WORDS), source, isa);
        }
        all_loaded(isa);
    }

    /// Casts what was loaded.
    fn store<M: Size>(
        &self,
        codes: &mut Array<Vector<u32, M>>,
        raw: &Array<u32>,
        scales: &Array<f32>,
        #[comptime] aligned: bool,
    ) {
        let encoding = comptime!(self.encoding);
        let quads = comptime!(encoding.sector_quads());
        #[unroll]
        for i in 0..self.held {
            let sector = self.first + comptime!(i * self.lanes);
            let mut packed = Array::<u32>::new(comptime!(quads as usize));
            #[unroll]
            for q in 0..quads {
                let at = comptime!(i * SECTOR_WORDS + q * encoding.quad_words());
                let word = encode_quad(raw, at, scales, 0u32, true, encoding);
                let col = sector * comptime!(encoding.source.sector_len()) + comptime!(4 * q);
                packed[q as usize] = zero_past_end(word, col, self.geometry.cols, aligned);
            }
            if self.row < self.geometry.rows && sector < self.per_row {
                store_words(codes, self.row * self.per_row + sector, &packed, 0u32);
            }
        }
    }
}

#[cube]
fn largest_of(raw: &Array<u32>, largest: u32, #[comptime] sectors: u32, #[comptime] source: Source) -> u32 {
    let mut largest = largest;
    #[unroll]
    for i in 0..comptime!(sectors * SECTOR_WORDS) {
        largest = max_magnitude(largest, raw[i as usize], source);
    }
    largest
}

/// amax and scales of the columns, and of the rows if the orientation names them.
fn launch_maxima<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> (Option<LineScales>, LineScales) {
    let tiles_x = x.cols.div_ceil(maxima_cols(x.source) as usize);
    let tiles_y = x.rows.div_ceil(TILE_ROWS as usize);
    let row_partials = orientation.rows().then(|| words(client, tiles_x * x.rows));
    let col_partials = words(client, tiles_y * x.cols);
    // SAFETY: `x` is checked and `load_unit` reads only inside it; stores are guarded by the rows and columns of `x`.
    unsafe {
        line_maxima::launch_unchecked::<R>(
            client,
            fold(client, (tiles_x * tiles_y) as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            x.array(),
            optional(row_partials.as_ref(), tiles_x * x.rows),
            ArrayArg::from_raw_parts(col_partials.clone(), tiles_y * x.cols),
            x.geometry(),
            x.source,
            Isa::of(client),
            orientation.rows(),
            VERSION,
        );
    }
    let fold_lines = |partials, lines: usize, count: usize| {
        let padded = lines.next_multiple_of(SCALE_VECTOR);
        let out =
            LineScales { amax: words(client, lines), scale: words(client, padded), inv_scale: words(client, lines) };
        // SAFETY: the kernel reads `count · lines` words and writes `lines` of each output, the sizes given here.
        unsafe {
            fold_lines::launch_unchecked::<R>(
                client,
                fold(client, (lines as u32).div_ceil(FOLD_LINES)),
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
                Isa::of(client),
                VERSION,
            );
        }
        out
    };
    (row_partials.map(|partials| fold_lines(partials, x.rows, tiles_x)), fold_lines(col_partials, x.cols, tiles_y))
}

/// Columns of a tile of `line_maxima`: one sector for each unit along a row.
const fn maxima_cols(source: Source) -> u32 {
    UNITS_X * source.sector_len()
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
    #[comptime] isa: Isa,
    #[comptime] by_rows: bool,
    #[comptime] _version: Version,
) {
    let tile_cols = comptime!(maxima_cols(source));
    let tile = Tile::of_cube(geometry, tile_cols);
    let (row0, col0) = (tile.row0, tile.col0);
    if row0 >= geometry.rows {
        terminate!();
    }
    let mut row_stage = SharedMemory::<u32>::new(comptime!((if by_rows { ROW_STAGE } else { 1 }) as usize));
    let mut of_cols = SharedMemory::<u32>::new(comptime!(col_stage(tile_cols) as usize));
    let raw = load_unit(x, &tile, 1u32, source, isa);
    stage_maxima(&raw, &mut row_stage, &mut of_cols, by_rows, true, 1u32, source);
    sync_cube();
    // The first units take the columns, the others the rows.
    if UNIT_POS < tile_cols {
        let col = col0 + line_col(UNIT_POS, source);
        if col < geometry.cols {
            cols[(row0 / TILE_ROWS * geometry.cols + col) as usize] = col_maximum(&of_cols, UNIT_POS);
        }
    } else if UNIT_POS >= TILE_ROWS {
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            let row = UNIT_POS - TILE_ROWS;
            if row0 + row < geometry.rows {
                rows[(col0 / tile_cols * geometry.rows + row0 + row) as usize] = row_maximum(&row_stage, row);
            }
        }
    }
}

/// Lines that a cube of `fold_lines` takes, neighbours in memory; the other units share the partial maxima of each.
const FOLD_LINES: u32 = 32;

/// Partial maxima that a unit has in flight.
const FOLDED: u32 = 4;

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
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let groups = comptime!(UNITS / FOLD_LINES);
    let line0 = min(CUBE_POS as u32, comptime!(u32::MAX / FOLD_LINES)) * FOLD_LINES;
    if line0 >= lines {
        terminate!();
    }
    let line = line0 + UNIT_POS % FOLD_LINES;
    let mut largest = 0u32.runtime();
    let mut first = UNIT_POS / FOLD_LINES;
    while first < count {
        #[unroll]
        for i in 0..FOLDED {
            let partial = min(first + comptime!(i * groups), count - 1);
            largest = max(largest, partials[(partial * lines + min(line, lines - 1)) as usize]);
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
        let bits = amax_bits(largest, source);
        let multiplier = scale_bits(bits, format, mode, isa);
        amax[line as usize] = bits;
        scales[line as usize] = multiplier;
        inv_scales[line as usize] = inverse_bits(multiplier, isa);
    }
}
