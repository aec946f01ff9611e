//! The cast with one scale, which each cube makes of the tensor's maxima, or with scales that are on the device: of each row for
//! one copy and of each column for the other.
//!
//! By rows with one scale it is elementwise: units take sectors of 32 bytes as they follow each other. Else a cube takes a
//! tile ([`tile`](super::tile)) and writes it in the orientations that are asked for.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::encode::{Encoding, encode_quad, lanes_scale, zero_past_end};
use super::tile::{
    SECTOR_WORDS, SectorCast, TILE_ROWS, Tile, UNIT_ROWS, UNITS_X, cast_sector, load_unit, sector_col, stage_words,
    store_cols, store_rows, store_words,
};
use super::{Copies, Copy, optional, words};
use crate::amax::{Maxima, MaximaArray};
use crate::grid::{UNITS, cube_max, fold};
use crate::ptx::cvt::Isa;
use crate::ptx::memory::load_global;
use crate::scale::inverse_bits;
use crate::version::{VERSION, Version};
use crate::view::{Checked, Cursor, Geometry, Source, all_loaded, load_sector, max_magnitude};
use crate::{Format, Orientation, ScaleMode, row_words};

/// Sectors that a unit has in flight, 128 bytes of `x`.
const SECTORS: u32 = 4;

/// Columns of a tile: one sector for each unit along a row.
const fn tile_cols(source: Source) -> u32 {
    UNITS_X * source.sector_len()
}

/// One scale, made of an amax by the kernel that casts with it.
pub(super) struct TensorScale {
    pub(super) maxima: Maxima,
    pub(super) mode: ScaleMode,
    /// The amax, if it is known: then the kernel writes none.
    pub(super) amax: Option<Handle>,
}

impl TensorScale {
    /// Where amax and inverse scale come to lie, and the kernel's argument.
    fn launch<R: Runtime>(&self, client: &ComputeClient<R>) -> (Handle, Handle, TensorScaleArgLaunch<R>) {
        let (amax, inv_scale) = (self.amax.clone().unwrap_or_else(|| words(client, 1)), words(client, 1));
        let new_amax = optional(self.amax.is_none().then_some(&amax), 1);
        // SAFETY: allocated above.
        let new_inv_scale = unsafe { ArrayArg::from_raw_parts(inv_scale.clone(), 1) };
        let arg = TensorScaleArgLaunch::new(self.maxima.arg(), new_amax, new_inv_scale, self.mode);
        (amax, inv_scale, arg)
    }
}

/// [`TensorScale`] in a kernel.
#[derive(CubeType, CubeLaunch)]
struct TensorScaleArg {
    maxima: MaximaArray,
    amax: ComptimeOption<Array<u32>>,
    inv_scale: Array<u32>,
    #[cube(comptime)]
    mode: ScaleMode,
}

#[cube]
impl TensorScaleArg {
    /// The scale, in every unit; the first cube writes amax and inverse scale. All units of a cube must call it.
    fn make(&mut self, #[comptime] encoding: Encoding) -> Array<f32> {
        let amax = self.maxima.amax(encoding.isa);
        let scale = lanes_scale(amax, UNITS, encoding, comptime!(self.mode));
        if UNIT_POS == 0 && CUBE_POS == 0 {
            #[comptime]
            if let ComptimeOption::Some(to) = &mut self.amax {
                to[0] = amax;
            }
            self.inv_scale[0] = inverse_bits(scale, encoding.isa);
        }
        let mut scales = Array::<f32>::new(1usize);
        scales[0] = f32::reinterpret(scale);
        scales
    }
}

/// amax, scale and inverse scale of every line on the device, f32.
pub(super) struct LineScales {
    pub(super) amax: Handle,
    pub(super) scale: Handle,
    pub(super) inv_scale: Handle,
}

/// What scales the copies.
pub(super) enum Scales {
    /// One scale for both.
    Tensor(TensorScale),
    /// A scale per column, for the copy by columns alone.
    Cols(LineScales),
    /// A scale per row for the copy by rows, and per column for the copy by columns.
    RowsAndCols(LineScales, LineScales),
}

/// Cubes that cast `x` with one scale, so many partial maxima are observed.
pub(super) fn cubes(x: &Checked, orientation: Orientation) -> usize {
    if orientation == Orientation::Rows {
        sectors(x).div_ceil((UNITS * SECTORS) as usize)
    } else {
        x.rows.div_ceil(TILE_ROWS as usize) * x.cols.div_ceil(tile_cols(x.source) as usize)
    }
}

/// Sectors of `x`, its rows padded like those of the codes.
fn sectors(x: &Checked) -> usize {
    x.rows * sectors_per_row(x)
}

/// Sectors of a row that is padded like one of codes.
pub(super) fn sectors_per_row(x: &Checked) -> usize {
    row_words(x.cols) * 4 / x.source.sector_len() as usize
}

/// Launches the cast. `observed` holds a word per cube, for the largest raw magnitude that it saw.
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scales: &Scales,
    format: Format,
    orientation: Orientation,
    observed: Option<&Handle>,
) -> Copies {
    match scales {
        Scales::Tensor(scale) if orientation == Orientation::Rows => {
            Copies { rows: Some(launch_linear(client, x, scale, format, observed)), cols: None }
        }
        _ => launch_tiles(client, x, scales, format, orientation, observed),
    }
}

fn launch_linear<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scale: &TensorScale,
    format: Format,
    observed: Option<&Handle>,
) -> Copy {
    let len = x.rows * row_words(x.cols);
    let (amax, inv_scale, scale) = scale.launch(client);
    let copy = Copy { codes: words(client, len), inv_scale, amax };
    let cubes = cubes(x, Orientation::Rows);
    // Without padding between them, rows of codes follow each other as those of a dense `x` do.
    let dense = x.clone().flatten();
    let x = if x.cols == row_words(x.cols) * 4 { &dense } else { x };
    let (sectors, per_row) = (sectors(x) as u32, sectors_per_row(x) as u32);
    // SAFETY: `x` is checked and `load_sector` reads only inside it; a sector's codes are as many as `codes` was allocated
    // with, and stores are guarded by the number of sectors. Cube `i` of `cubes` writes word `i` of `observed`.
    unsafe {
        cast_linear::launch_unchecked::<R>(
            client,
            fold(client, cubes as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            (x.source.sector_len() / 4) as usize,
            x.array(),
            scale,
            ArrayArg::from_raw_parts(copy.codes.clone(), len),
            optional(observed, cubes),
            x.geometry(),
            sectors,
            per_row,
            x.rows == 1,
            Encoding { source: x.source, format, isa: Isa::of(client), has_subnormals: false },
            VERSION,
        );
    }
    copy
}

/// Sector `i` of `x` becomes vector `i` of the codes.
#[cube(launch_unchecked)]
fn cast_linear<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    scale: &mut TensorScaleArg,
    codes: &mut Array<Vector<u32, M>>,
    observed: &mut ComptimeOption<Array<u32>>,
    geometry: Geometry,
    sectors: u32,
    per_row: u32,
    #[comptime] one_row: bool,
    #[comptime] encoding: Encoding,
    #[comptime] _version: Version,
) {
    let source = comptime!(encoding.source);
    let len = comptime!(source.sector_len());
    let cube_first = CUBE_POS as u32 * comptime!(UNITS * SECTORS);
    if cube_first >= sectors {
        terminate!();
    }
    let first = cube_first + UNIT_POS;
    let mut raw = Array::<u32>::new(comptime!((SECTORS * SECTOR_WORDS) as usize));
    let mut cols = Array::<u32>::new(comptime!(SECTORS as usize));
    let mut at = Cursor::new(first, UNITS, per_row, one_row);
    #[unroll]
    for i in 0..SECTORS {
        let col = at.piece * len;
        cols[i as usize] = col;
        load_sector(x, &geometry, at.row, col, &mut raw, comptime!(i * SECTOR_WORDS), source, encoding.isa);
        at.advance();
    }
    all_loaded(encoding.isa);
    let scales = scale.make(encoding);
    let quads = comptime!(encoding.sector_quads());
    let mut packed = Array::<u32>::new(comptime!(quads as usize));
    let width = N::value();
    let aligned = comptime!(width > 1);
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..SECTORS {
        #[unroll]
        for q in 0..quads {
            let at = comptime!(i * SECTOR_WORDS + q * encoding.quad_words());
            let word = encode_quad(&raw, at, &scales, 0u32, true, encoding);
            packed[q as usize] = zero_past_end(word, cols[i as usize] + comptime!(4 * q), geometry.cols, aligned);
        }
        let to = first + comptime!(i * UNITS);
        if to < sectors {
            store_words(codes, to, &packed, 0u32);
        }
        if comptime!(observed.is_some()) {
            #[unroll]
            for w in 0..SECTOR_WORDS {
                largest = max_magnitude(largest, raw[comptime!((i * SECTOR_WORDS + w) as usize)], source);
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(observed) = observed {
        let largest = cube_max(largest, encoding.isa);
        if UNIT_POS == 0 {
            observed[CUBE_POS] = largest;
        }
    }
}

fn launch_tiles<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scales: &Scales,
    format: Format,
    orientation: Orientation,
    observed: Option<&Handle>,
) -> Copies {
    let (row_len, col_len) = (x.rows * row_words(x.cols), x.cols * row_words(x.rows));
    let copy = |len, inv_scale: &Handle, amax: &Handle| Copy {
        codes: words(client, len),
        inv_scale: inv_scale.clone(),
        amax: amax.clone(),
    };
    let of_lines = |len, lines: &LineScales| copy(len, &lines.inv_scale, &lines.amax);
    let (rows, cols, scale, row_scales, col_scales) = match scales {
        Scales::Tensor(scale) => {
            let (amax, inv_scale, scale) = scale.launch(client);
            let rows = orientation.rows().then(|| copy(row_len, &inv_scale, &amax));
            (rows, copy(col_len, &inv_scale, &amax), Some(scale), None, None)
        }
        Scales::Cols(cols) => (None, of_lines(col_len, cols), None, None, Some(&cols.scale)),
        Scales::RowsAndCols(rows, cols) => {
            let (row_copy, col_copy) = (of_lines(row_len, rows), of_lines(col_len, cols));
            (Some(row_copy), col_copy, None, Some(&rows.scale), Some(&cols.scale))
        }
    };
    let cubes = cubes(x, orientation);
    let per_sector = x.source.sector_len() / 4;
    // SAFETY: `x` is checked and `load_unit` reads only inside it; every store is guarded by the pitch and the number of
    // rows that the outputs were allocated with, and reads of scales stay below the counts given here, which is how many
    // `fold_lines` has allocated. Cube `i` of `cubes` writes word `i` of `observed`.
    unsafe {
        cast_tiles::launch_unchecked::<R>(
            client,
            fold(client, cubes as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            per_sector as usize,
            SCALE_VECTOR,
            x.array(),
            scale.into(),
            optional(row_scales, x.rows.next_multiple_of(SCALE_VECTOR)),
            optional(col_scales, x.cols.next_multiple_of(SCALE_VECTOR)),
            optional(rows.as_ref().map(|copy| &copy.codes), row_len),
            ArrayArg::from_raw_parts(cols.codes.clone(), col_len),
            optional(observed, cubes),
            x.geometry(),
            row_words(x.cols) as u32 / per_sector,
            row_words(x.rows) as u32 / 4,
            Encoding { source: x.source, format, isa: Isa::of(client), has_subnormals: false },
            orientation.rows(),
            VERSION,
        );
    }
    Copies { rows, cols: Some(cols) }
}

/// Scales of neighbouring lines that are read at once. Arrays of scales are allocated in multiples of so many.
pub(super) const SCALE_VECTOR: usize = 4;

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_tiles<N: Size, M: Size, S: Size>(
    x: &Array<Vector<u32, N>>,
    scale: &mut ComptimeOption<TensorScaleArg>,
    row_scales: &ComptimeOption<Array<Vector<f32, S>>>,
    col_scales: &ComptimeOption<Array<Vector<f32, S>>>,
    rows: &mut ComptimeOption<Array<Vector<u32, M>>>,
    cols: &mut Array<Vector<u32, Const<4>>>,
    observed: &mut ComptimeOption<Array<u32>>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] encoding: Encoding,
    #[comptime] by_rows: bool,
    #[comptime] _version: Version,
) {
    let source = comptime!(encoding.source);
    let len = comptime!(source.sector_len());
    let tile = Tile::of_cube(geometry, comptime!(tile_cols(source)));
    if tile.row0 >= tile.geometry.rows {
        terminate!();
    }
    let raw = load_unit(x, &tile, 1u32, source, encoding.isa);
    let row = tile.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
    let col = tile.col0 + sector_col(0u32, source);
    let mut largest = 0u32.runtime();
    if comptime!(observed.is_some()) {
        #[unroll]
        for w in 0..comptime!(UNIT_ROWS * SECTOR_WORDS) {
            largest = max_magnitude(largest, raw[w as usize], source);
        }
    }

    let one_scale = comptime!(scale.is_some());
    let row_scales = #[comptime]
    match scale {
        ComptimeOption::Some(scale) => scale.make(encoding),
        ComptimeOption::None => line_scales(row_scales, row, tile.geometry.rows, UNIT_ROWS, encoding.isa),
    };
    let col_scales = line_scales(col_scales, col, tile.geometry.cols, len, encoding.isa);
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!(stage_words(tile_cols(source)) as usize), 16usize);
    let width = N::value();
    let aligned = comptime!(width > 1);
    let cast = comptime!(SectorCast { sector: 0, by_rows, by_cols: true, one_scale, aligned, encoding });
    let by_row = cast_sector(&raw, &mut stage, &tile, &row_scales, &col_scales, cast);
    #[comptime]
    if let ComptimeOption::Some(rows) = rows {
        store_rows(&by_row, rows, &tile, row_pitch, 0u32, encoding);
    }
    sync_cube();
    store_cols(&stage, cols, &tile, col_pitch, comptime!(tile_cols(source)), source);
    #[comptime]
    if let ComptimeOption::Some(observed) = observed {
        let largest = cube_max(largest, encoding.isa);
        if UNIT_POS == 0 {
            observed[CUBE_POS] = largest;
        }
    }
}

/// Scales of the `count` lines from `first` on, a multiple of four; past the last line, any. Without scales the result is not to
/// be read.
#[cube]
fn line_scales<S: Size>(
    scales: &ComptimeOption<Array<Vector<f32, S>>>,
    first: u32,
    lines: u32,
    #[comptime] count: u32,
    #[comptime] isa: Isa,
) -> Array<f32> {
    let mut of_lines = Array::<f32>::new(comptime!(count as usize));
    #[comptime]
    if let ComptimeOption::Some(scales) = scales {
        let width = S::value();
        #[unroll]
        for v in 0..comptime!(count / width as u32) {
            // Past the last line there is padding, which no scale touches.
            let index = min(first / width as u32 + v, (lines - 1) / width as u32);
            if comptime!(isa.has_ptx()) {
                load_global(scales, index, &mut of_lines, comptime!(v * width as u32));
            } else {
                let vector = scales[index as usize];
                #[unroll]
                for j in 0..width {
                    of_lines[comptime!(v as usize * width + j)] = vector[j];
                }
            }
        }
    }
    of_lines
}
