//! E8M0 scales for blocks of 32 along the contraction. One launch and one read of `x` for both orientations.
//!
//! A cube takes a tile of 128x128 ([`tile`](super::tile)), kept in registers while the maxima of its blocks and then their
//! scales pass through shared memory: 128 rows of four blocks, and as many columns. The scale bytes of each orientation are one
//! tile of [`mod@crate::mx`], which the cube writes whole.

use cubecl::prelude::*;

use super::encode::Encoding;
use super::tile::{
    LINE_PITCH, SECTOR_WORDS, UNIT_ROWS, UNITS_X, cast_sector, col_stage, line_col, load_unit, origin, sector_col,
    stage_words, store_cols, store_words,
};
use super::{Copies, Copy, optional, words};
use crate::amax::amax_bits;
use crate::grid::{UNITS, cube_max, fold};
use crate::mx::{MX_BLOCK, ScaleCalculationMode, TILE_WORDS, e8m0_of_amax, e8m0_scale_bits, tile_row_word};
use crate::operand::BLOCK;
use crate::ptx::cvt::Isa;
use crate::version::{VERSION, Version};
use crate::view::{Checked, Geometry, Source, magnitude, max_magnitude};
use crate::{Format, Granularity, Orientation, row_words};

/// Rows and columns of a tile.
const TILE: u32 = BLOCK as u32;

/// Blocks in a line of a tile.
const BLOCKS: u32 = TILE / MX_BLOCK as u32;

/// Units along the rows in a block of a column.
const UNITS_PER_COL_BLOCK: u32 = MX_BLOCK as u32 / UNIT_ROWS;

/// Sectors of a row of the tile that a unit holds: two of f32, one of 16-bit floats.
const fn sectors(source: Source) -> u32 {
    TILE / (UNITS_X * source.sector_len())
}

/// Sectors in a block of a row.
const fn sectors_per_block(source: Source) -> u32 {
    MX_BLOCK as u32 / source.sector_len()
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    format: Format,
    mode: ScaleCalculationMode,
    orientation: Orientation,
) -> Copies {
    let tiles = x.rows.div_ceil(TILE as usize) * x.cols.div_ceil(TILE as usize);
    let amax = words(client, tiles);
    let lens = |rows, k| (rows * row_words(k), Granularity::Block1x32.scale_words(rows, k));
    let copy =
        |(codes, scales)| Copy { codes: words(client, codes), inv_scale: words(client, scales), amax: amax.clone() };
    let (row_lens, col_lens) = (lens(x.rows, x.cols), lens(x.cols, x.rows));
    let rows = orientation.rows().then(|| copy(row_lens));
    let cols = orientation.cols().then(|| copy(col_lens));
    let per_sector = x.source.sector_len() / 4;
    let isa = Isa::of(client);
    // SAFETY: `x` is checked and `load_unit` reads only inside it; stores of codes are guarded by the rows, columns and
    // pitches that the outputs were allocated with. Cube `i` writes word `i` of `amax`, and tile `i` of the scales or its mirror
    // image, of which there are as many.
    unsafe {
        cast_mx::launch_unchecked::<R>(
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
            Encoding { source: x.source, format, isa, has_subnormals: true },
            mode,
            orientation,
            VERSION,
        );
    }
    Copies { rows, cols }
}

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_mx<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    rows: &mut ComptimeOption<Array<Vector<u32, M>>>,
    row_tiles: &mut ComptimeOption<Array<u32>>,
    cols: &mut ComptimeOption<Array<Vector<u32, Const<4>>>>,
    col_tiles: &mut ComptimeOption<Array<u32>>,
    amax: &mut Array<u32>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] encoding: Encoding,
    #[comptime] mode: ScaleCalculationMode,
    #[comptime] orientation: Orientation,
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
    let (by_rows, by_cols) = comptime!((orientation.rows(), orientation.cols()));
    // For the maxima of columns and then for their codes.
    let stage_len = comptime!(match by_cols {
        true if col_stage(TILE) > stage_words(TILE) => col_stage(TILE),
        true => stage_words(TILE),
        false => 1,
    });
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!(stage_len as usize), 16usize);
    let mut row_stage =
        SharedMemory::<u32>::new(comptime!(if by_rows { (sectors * UNIT_ROWS * LINE_PITCH) as usize } else { 1 }));
    // Of block `b` of row `r` at `BLOCKS · r + b`, then of block `b` of column `c` at `TILE · b + c`.
    let mut scales = SharedMemory::<f32>::new(comptime!((2 * BLOCKS * TILE) as usize));

    let raw = load_unit(x, &geometry, row0, col0, sectors, source, isa);
    let largest = stage_block_maxima(&raw, &mut row_stage, &mut stage, by_rows, by_cols, sectors, source);
    // This synchronizes the stages too.
    let largest = amax_bits(cube_max(largest, isa), source);
    if UNIT_POS == 0 {
        amax[CUBE_POS] = largest;
    }
    if UNIT_POS < TILE {
        if comptime!(by_rows) {
            // Lanes read neighbouring units, which hold rows four apart.
            let local_row = UNIT_POS % 32 * UNIT_ROWS + UNIT_POS / 32;
            let mut word = 0u32.runtime();
            #[unroll]
            for b in 0..BLOCKS {
                let maximum = row_block_maximum(&row_stage, local_row, b, source);
                let byte = e8m0_of_amax(amax_bits(maximum, source), format, mode);
                scales[(local_row * BLOCKS + b) as usize] = f32::reinterpret(e8m0_scale_bits(byte));
                let exists = row0 + local_row < geometry.rows && col0 + comptime!(b * MX_BLOCK as u32) < geometry.cols;
                word |= select(exists, byte << comptime!(8 * b), 0u32.runtime());
            }
            #[comptime]
            if let ComptimeOption::Some(tiles) = row_tiles {
                let tile = tile_row * geometry.cols.div_ceil(TILE) + tile_col;
                tiles[(tile * comptime!(TILE_WORDS as u32) + tile_row_word(local_row)) as usize] = word;
            }
        }
    } else if comptime!(by_cols) {
        let line = UNIT_POS - TILE;
        let local_col = line_col(line, source);
        let mut word = 0u32.runtime();
        #[unroll]
        for b in 0..BLOCKS {
            let maximum = col_block_maximum(&stage, line, b);
            let byte = e8m0_of_amax(amax_bits(maximum, source), format, mode);
            scales[(local_col + comptime!((BLOCKS + b) * TILE)) as usize] = f32::reinterpret(e8m0_scale_bits(byte));
            let exists = col0 + local_col < geometry.cols && row0 + comptime!(b * MX_BLOCK as u32) < geometry.rows;
            word |= select(exists, byte << comptime!(8 * b), 0u32.runtime());
        }
        #[comptime]
        if let ComptimeOption::Some(tiles) = col_tiles {
            let tile = tile_col * geometry.rows.div_ceil(TILE) + tile_row;
            tiles[(tile * comptime!(TILE_WORDS as u32) + tile_row_word(local_col)) as usize] = word;
        }
    }
    sync_cube();

    let local_row = UNIT_POS / UNITS_X * UNIT_ROWS;
    let row = row0 + local_row;
    let width = N::value();
    let aligned = comptime!(width > 1);
    #[unroll]
    for s in 0..sectors {
        let local_col = sector_col(s, source);
        let mut row_scales = Array::<f32>::new(comptime!(UNIT_ROWS as usize));
        if comptime!(by_rows) {
            let block = local_col / comptime!(MX_BLOCK as u32);
            #[unroll]
            for i in 0..UNIT_ROWS {
                row_scales[i as usize] = scales[((local_row + i) * BLOCKS + block) as usize];
            }
        }
        let mut col_scales = Array::<f32>::new(comptime!(len as usize));
        if comptime!(by_cols) {
            let first = (BLOCKS + local_row / comptime!(MX_BLOCK as u32)) * TILE + local_col;
            #[unroll]
            for c in 0..len {
                col_scales[c as usize] = scales[(first + c) as usize];
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
            by_rows,
            by_cols,
            false,
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

/// Puts the maximum of each row of each of this unit's sectors, and of each of its columns, where [`row_block_maximum`] and
/// [`col_block_maximum`] look for them, and returns the largest of all.
#[cube]
fn stage_block_maxima(
    raw: &Array<u32>,
    rows: &mut SharedMemory<u32>,
    cols: &mut SharedMemory<u32>,
    #[comptime] by_rows: bool,
    #[comptime] by_cols: bool,
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
        if comptime!(by_rows) {
            rows[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_row;
        }
        largest = max(largest, along_row);
    }
    if comptime!(by_cols) {
        let len = comptime!(source.sector_len());
        let per_word = comptime!(source.per_word());
        #[unroll]
        for line in 0..comptime!(sectors * len) {
            let (s, c) = comptime!((line / len, line % len));
            let mut along_col = 0u32.runtime();
            #[unroll]
            for i in 0..UNIT_ROWS {
                let place = comptime!(((s * UNIT_ROWS + i) * SECTOR_WORDS + c / per_word) as usize);
                let bits = raw[place] >> comptime!(16 * (c % per_word));
                along_col = max(along_col, magnitude(bits, source));
            }
            cols[(UNIT_POS + comptime!(line * LINE_PITCH)) as usize] = along_col;
        }
    }
    largest
}

/// The maximum of block `block` of row `row` of the tile.
#[cube]
fn row_block_maximum(rows: &SharedMemory<u32>, row: u32, #[comptime] block: u32, #[comptime] source: Source) -> u32 {
    let count = comptime!(sectors_per_block(source));
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

/// The maximum of block `block` of the column `line`, lines being counted as by [`line_col`].
#[cube]
fn col_block_maximum(cols: &SharedMemory<u32>, line: u32, #[comptime] block: u32) -> u32 {
    let first = line / UNITS_X * LINE_PITCH + line % UNITS_X;
    let mut largest = 0u32.runtime();
    #[unroll]
    for y in 0..UNITS_PER_COL_BLOCK {
        largest = max(largest, cols[(first + comptime!((block * UNITS_PER_COL_BLOCK + y) * UNITS_X)) as usize]);
    }
    largest
}
