//! One scale per block: 1x32 or 1x128 along the contraction, or 128x128. One launch and one read of `x` for both orientations.
//!
//! A cube takes a tile of 128x128 ([`tile`](super::tile)) and keeps it in registers, 64 elements per unit, while the maxima
//! of its blocks and then their scales pass through shared memory: of each row one block of 128 or four of 32, of each column as
//! many; the square is the same for both orientations. The E8M0 bytes of each orientation are one tile of [`mod@crate::mx`],
//! which the cube writes whole.

use cubecl::prelude::*;

use super::encode::Encoding;
use super::tile::{
    LINE_PITCH, ROW_STAGE, SECTOR_WORDS, SectorCast, TILE_ROWS, Tile, UNIT_ROWS, UNITS_X, UNITS_Y, cast_sector,
    col_maximum, col_stage, line_col, load_unit, row_maximum, sector_col, stage_col_maxima, stage_maxima, stage_words,
    store_cols, store_rows,
};
use super::{Copies, Copy, optional, words};
use crate::amax::amax_bits;
use crate::granularity::{BLOCK, MX_BLOCK, TILE_WORDS};
use crate::grid::{UNITS, cube_max, fold};
use crate::mx::{ScaleCalculationMode, e8m0_of_amax, e8m0_scale_bits, tile_row_word};
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::version::{VERSION, Version};
use crate::view::{Checked, Geometry, Source, max_magnitude};
use crate::{Cast, Granularity, Orientation, ScaleMode, row_words};

/// Rows and columns of a tile.
const TILE: u32 = BLOCK as u32;

const _: () = assert!(TILE == TILE_ROWS);

/// Blocks of 32 in a line of a tile.
const MX_BLOCKS: u32 = TILE / MX_BLOCK as u32;

/// What the kernel is generated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Blocks {
    encoding: Encoding,
    granularity: Granularity,
    mode: ScaleMode,
    orientation: Orientation,
}

impl Blocks {
    /// One scale for the whole tile.
    fn square(self) -> bool {
        self.granularity == Granularity::Block128x128
    }

    /// How E8M0 scales are found, if blocks are of 32.
    fn mx(self) -> Option<ScaleCalculationMode> {
        match self.mode {
            ScaleMode::E8m0(mode) => Some(mode),
            ScaleMode::F32 | ScaleMode::PowerOfTwo => None,
        }
    }

    /// Blocks in a line of a tile.
    fn per_line(self) -> u32 {
        if self.mx().is_some() { MX_BLOCKS } else { 1 }
    }

    /// Length of a block.
    fn len(self) -> u32 {
        TILE / self.per_line()
    }

    /// Whether there are scales of rows.
    fn by_rows(self) -> bool {
        self.orientation.rows() && !self.square()
    }

    /// Whether there are scales of columns.
    fn by_cols(self) -> bool {
        self.orientation.cols() && !self.square()
    }

    /// Sectors of a row of the tile that a unit holds: two of f32, one of 16-bit floats.
    const fn sectors(self) -> u32 {
        TILE / (UNITS_X * self.encoding.source.sector_len())
    }

    /// Words that stage the maxima of rows.
    fn row_stage(self) -> u32 {
        match (self.by_rows(), self.mx()) {
            (false, _) => 1,
            (true, None) => ROW_STAGE,
            (true, Some(_)) => self.sectors() * ROW_STAGE,
        }
    }

    /// Words that stage the maxima of columns, and then their codes.
    fn col_stage(self) -> u32 {
        let maxima = if self.by_cols() { col_stage(TILE) } else { 1 };
        let codes = if self.orientation.cols() { stage_words(TILE) } else { 1 };
        maxima.max(codes)
    }
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> Copies {
    let tiles = x.rows.div_ceil(TILE as usize) * x.cols.div_ceil(TILE as usize);
    let amax = words(client, tiles);
    let lens = |rows, k| (rows * row_words(k), cast.granularity.scale_words(rows, k));
    let copy =
        |(codes, scales)| Copy { codes: words(client, codes), inv_scale: words(client, scales), amax: amax.clone() };
    let (row_lens, col_lens) = (lens(x.rows, x.cols), lens(x.cols, x.rows));
    let rows = orientation.rows().then(|| copy(row_lens));
    let cols = orientation.cols().then(|| copy(col_lens));
    let per_sector = x.source.sector_len() / 4;
    let has_subnormals = cast.granularity.is_mx();
    let encoding = Encoding { source: x.source, format: cast.format, isa: Isa::of(client), has_subnormals };
    // SAFETY: `x` is checked and `load_unit` reads only inside it; stores of codes and f32 scales are guarded by the rows,
    // columns and pitches that the outputs were allocated with. Cube `i` writes word `i` of `amax`, and tile `i` of E8M0 scales or
    // its mirror image, of which there are as many.
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
            Blocks { encoding, granularity: cast.granularity, mode: cast.scale_mode, orientation },
            VERSION,
        );
    }
    Copies { rows, cols }
}

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
    #[comptime] blocks: Blocks,
    #[comptime] _version: Version,
) {
    let tile = Tile::of_cube(geometry, TILE);
    if tile.row0 >= tile.geometry.rows {
        terminate!();
    }
    let encoding = comptime!(blocks.encoding);
    let (source, isa) = comptime!((encoding.source, encoding.isa));
    let len = comptime!(source.sector_len());
    let sectors = comptime!(blocks.sectors());
    let (per_line, block_len) = comptime!((blocks.per_line(), blocks.len()));
    let (square, by_rows, by_cols) = comptime!((blocks.square(), blocks.by_rows(), blocks.by_cols()));
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!(blocks.col_stage() as usize), 16usize);
    let mut row_stage = SharedMemory::<u32>::new(comptime!(blocks.row_stage() as usize));
    // Of block `b` of row `r` at `per_line · r + b`, then of block `b` of column `c` at `TILE · b + c`; of the square the first.
    let mut scales = SharedMemory::<f32>::new(comptime!((2 * blocks.per_line() * TILE) as usize));

    let raw = load_unit(x, &tile, sectors, source, isa);
    let largest = if comptime!(blocks.mx().is_some()) {
        let largest = stage_sector_maxima(&raw, &mut row_stage, by_rows, sectors, source);
        if by_cols {
            stage_col_maxima(&raw, &mut stage, sectors, source);
        }
        largest
    } else {
        stage_maxima(&raw, &mut row_stage, &mut stage, by_rows, by_cols, sectors, source)
    };
    // This synchronizes the stages too.
    let largest = amax_bits(cube_max(largest, isa), source);
    if UNIT_POS == 0 {
        amax[CUBE_POS] = largest;
    }
    if square {
        square_scale(largest, &mut scales, row_inverses, col_inverses, &tile, blocks);
    } else if UNIT_POS < TILE {
        if by_rows {
            row_scales(&row_stage, &mut scales, row_inverses, &tile, blocks);
        }
    } else if by_cols {
        col_scales(&stage, &mut scales, col_inverses, &tile, blocks);
    }
    sync_cube();

    let local_row = UNIT_POS / UNITS_X * UNIT_ROWS;
    let width = N::value();
    let aligned = comptime!(width > 1);
    #[unroll]
    for s in 0..sectors {
        let local_col = sector_col(s, source);
        let mut row_scales = Array::<f32>::new(comptime!(UNIT_ROWS as usize));
        if square {
            row_scales[0] = scales[0];
        } else if by_rows {
            #[unroll]
            for i in 0..UNIT_ROWS {
                row_scales[i as usize] = scales[((local_row + i) * per_line + local_col / block_len) as usize];
            }
        }
        let mut col_scales = Array::<f32>::new(comptime!(len as usize));
        if by_cols {
            let first = (per_line + local_row / block_len) * TILE + local_col;
            #[unroll]
            for c in 0..len {
                col_scales[c as usize] = scales[(first + c) as usize];
            }
        }
        let cast = comptime!(SectorCast {
            sector: s,
            by_rows: blocks.orientation.rows(),
            by_cols: blocks.orientation.cols(),
            one_scale: square,
            aligned,
            encoding
        });
        let by_row = cast_sector(&raw, &mut stage, &tile, &row_scales, &col_scales, cast);
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            store_rows(&by_row, rows, &tile, row_pitch, s, encoding);
        }
    }

    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        sync_cube();
        store_cols(&stage, cols, &tile, col_pitch, TILE, source);
    }
}

/// The scale of the tile, which the first unit makes.
#[cube]
fn square_scale(
    amax: u32,
    scales: &mut SharedMemory<f32>,
    row_inverses: &mut ComptimeOption<Array<u32>>,
    col_inverses: &mut ComptimeOption<Array<u32>>,
    tile: &Tile,
    #[comptime] blocks: Blocks,
) {
    if UNIT_POS == 0 {
        let (tile_row, tile_col) = (tile.row0 / TILE, tile.col0 / TILE);
        let multiplier =
            scale_bits(amax, comptime!(blocks.encoding.format), comptime!(blocks.mode), comptime!(blocks.encoding.isa));
        let inverse = inverse_bits(multiplier, comptime!(blocks.encoding.isa));
        scales[0] = f32::reinterpret(multiplier);
        #[comptime]
        if let ComptimeOption::Some(inverses) = row_inverses {
            inverses[(tile_row * tile.geometry.cols.div_ceil(TILE) + tile_col) as usize] = inverse;
        }
        #[comptime]
        if let ComptimeOption::Some(inverses) = col_inverses {
            inverses[(tile_col * tile.geometry.rows.div_ceil(TILE) + tile_row) as usize] = inverse;
        }
    }
}

/// Scales of the tile's rows, one row a unit.
// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube]
fn row_scales(
    maxima: &SharedMemory<u32>,
    scales: &mut SharedMemory<f32>,
    inverses: &mut ComptimeOption<Array<u32>>,
    tile: &Tile,
    #[comptime] blocks: Blocks,
) {
    let source = comptime!(blocks.encoding.source);
    let across = tile.geometry.cols.div_ceil(TILE);
    if comptime!(blocks.mx().is_some()) {
        // Lanes read neighbouring units, which hold rows four apart.
        let local_row = UNIT_POS % 32 * UNIT_ROWS + UNIT_POS / 32;
        let row_exists = tile.row0 + local_row < tile.geometry.rows;
        let mut word = 0u32.runtime();
        #[unroll]
        for b in 0..MX_BLOCKS {
            let maximum = row_block_maximum(maxima, local_row, b, source);
            let exists = row_exists && tile.col0 + comptime!(b * MX_BLOCK as u32) < tile.geometry.cols;
            word |= mx_scale(scales, maximum, local_row * MX_BLOCKS + b, exists, b, blocks);
        }
        #[comptime]
        if let ComptimeOption::Some(words) = inverses {
            let at = tile.row0 / TILE * across + tile.col0 / TILE;
            words[(at * comptime!(TILE_WORDS as u32) + tile_row_word(local_row)) as usize] = word;
        }
    } else {
        let row = tile.row0 + UNIT_POS;
        let inverse = line_scale(scales, row_maximum(maxima, UNIT_POS), UNIT_POS, blocks);
        #[comptime]
        if let ComptimeOption::Some(inverses) = inverses {
            if row < tile.geometry.rows {
                inverses[(row * across + tile.col0 / TILE) as usize] = inverse;
            }
        }
    }
}

/// Scales of the tile's columns, one column a unit from the [`TILE`]th on.
// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube]
fn col_scales(
    maxima: &SharedMemory<u32>,
    scales: &mut SharedMemory<f32>,
    inverses: &mut ComptimeOption<Array<u32>>,
    tile: &Tile,
    #[comptime] blocks: Blocks,
) {
    let line = UNIT_POS % TILE;
    let local_col = line_col(line, comptime!(blocks.encoding.source));
    let col = tile.col0 + local_col;
    let across = tile.geometry.rows.div_ceil(TILE);
    if comptime!(blocks.mx().is_some()) {
        let mut word = 0u32.runtime();
        #[unroll]
        for b in 0..MX_BLOCKS {
            let maximum = col_block_maximum(maxima, line, b);
            let exists = col < tile.geometry.cols && tile.row0 + comptime!(b * MX_BLOCK as u32) < tile.geometry.rows;
            word |= mx_scale(scales, maximum, local_col + comptime!((MX_BLOCKS + b) * TILE), exists, b, blocks);
        }
        #[comptime]
        if let ComptimeOption::Some(words) = inverses {
            let at = tile.col0 / TILE * across + tile.row0 / TILE;
            words[(at * comptime!(TILE_WORDS as u32) + tile_row_word(local_col)) as usize] = word;
        }
    } else {
        let inverse = line_scale(scales, col_maximum(maxima, line), TILE + local_col, blocks);
        #[comptime]
        if let ComptimeOption::Some(inverses) = inverses {
            if col < tile.geometry.cols {
                inverses[(col * across + tile.row0 / TILE) as usize] = inverse;
            }
        }
    }
}

/// Puts the scale of a block of 128 with this largest raw magnitude at `at` of `scales`; its inverse.
#[cube]
fn line_scale(scales: &mut SharedMemory<f32>, maximum: u32, at: u32, #[comptime] blocks: Blocks) -> u32 {
    let Encoding { source, format, isa, .. } = comptime!(blocks.encoding);
    let multiplier = scale_bits(amax_bits(maximum, source), format, comptime!(blocks.mode), isa);
    scales[at as usize] = f32::reinterpret(multiplier);
    inverse_bits(multiplier, isa)
}

/// Puts the scale of a block of 32 with this largest raw magnitude at `at` of `scales`; its byte, as byte `byte` of a word, or zero
/// where no such block exists.
#[cube]
fn mx_scale(
    scales: &mut SharedMemory<f32>,
    maximum: u32,
    at: u32,
    exists: bool,
    #[comptime] byte: u32,
    #[comptime] blocks: Blocks,
) -> u32 {
    let mode = comptime!(blocks.mx().expect("blocks of 32"));
    let Encoding { source, format, .. } = comptime!(blocks.encoding);
    let scale = e8m0_of_amax(amax_bits(maximum, source), format, mode);
    scales[at as usize] = f32::reinterpret(e8m0_scale_bits(scale));
    select(exists, scale << comptime!(8 * byte), 0u32.runtime())
}

/// Puts the maximum of each row of each of this unit's sectors where [`row_block_maximum`] looks for it, and returns the largest of
/// all.
#[cube]
fn stage_sector_maxima(
    raw: &Array<u32>,
    rows: &mut SharedMemory<u32>,
    #[comptime] by_rows: bool,
    #[comptime] sectors: u32,
    #[comptime] source: Source,
) -> u32 {
    let mut largest = 0u32.runtime();
    #[unroll]
    for line in 0..comptime!(sectors * UNIT_ROWS) {
        let mut along_row = 0u32.runtime();
        #[unroll]
        for w in 0..SECTOR_WORDS {
            along_row = max_magnitude(along_row, raw[comptime!((line * SECTOR_WORDS + w) as usize)], source);
        }
        if by_rows {
            rows[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_row;
        }
        largest = max(largest, along_row);
    }
    largest
}

/// The maximum of block `block` of 32 of row `row` of the tile.
#[cube]
fn row_block_maximum(rows: &SharedMemory<u32>, row: u32, #[comptime] block: u32, #[comptime] source: Source) -> u32 {
    let count = comptime!(MX_BLOCK as u32 / source.sector_len());
    let sector = comptime!(block * count);
    // Sector `s` of a unit is `UNITS_X · s` further.
    let line = row % UNIT_ROWS + comptime!(sector / UNITS_X * UNIT_ROWS);
    let y = row / UNIT_ROWS;
    let first = line * LINE_PITCH + y * UNITS_X + comptime!(sector % UNITS_X);
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..count {
        // Rows begin in few banks: neighbours begin with different units.
        largest = max(largest, rows[(first + (y / 4 + i) % count) as usize]);
    }
    largest
}

/// The maximum of block `block` of 32 of the column `line`, lines being counted as by [`line_col`].
#[cube]
fn col_block_maximum(cols: &SharedMemory<u32>, line: u32, #[comptime] block: u32) -> u32 {
    let first = line / UNITS_X * LINE_PITCH + line % UNITS_X;
    let units = comptime!(UNITS_Y / MX_BLOCKS);
    let mut largest = 0u32.runtime();
    #[unroll]
    for y in 0..units {
        largest = max(largest, cols[(first + comptime!((block * units + y) * UNITS_X)) as usize]);
    }
    largest
}
