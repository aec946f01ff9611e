//! Blocks of 1x32 and 1x128 by rows on a CPU's vectors: a unit finds the maxima of a piece of a row, 128 elements, and casts it, so that
//! no unit waits for another. GPUs take [`tiles`](super::tiles): here each unit of a warp reads from a piece of its own.

use cubecl::prelude::*;

use super::blocks::{Side, TILE, block_scale, copies, per_line, store_inverse};
use super::encode::{Encoding, encode_sector};
use super::tile::store_words;
use super::{Copies, array, optional, words};
use crate::amax::{amax_bits, largest_magnitude};
use crate::granularity::BLOCK;
use crate::grid::{UNITS, cube_first, fold};
use crate::load::{Geometry, SECTOR_WORDS, load_sector};
use crate::source::Source;
use crate::version::Version;
use crate::view::Checked;
use crate::{Orientation, row_words};

/// Launches the cast into the copy by rows, then what folds the maxima of the pieces into those of the tiles.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, x: &Checked, encoding: Encoding) -> Copies {
    let (tiles, across) = (x.rows.div_ceil(BLOCK), x.cols.div_ceil(BLOCK));
    let copies = copies(client, x, encoding.cast.granularity, Orientation::Rows);
    let copy = copies.rows.as_ref().expect("the copy by rows");
    let pieces = tiles * BLOCK * across;
    let maxima = words(client, pieces);
    let per_sector = x.source.sector_len() / 4;
    // SAFETY: `x` is checked and `load_sector` reads only inside it; stores of codes are guarded by the rows and the pitch of the copy,
    // of maxima by the number of pieces, of scales by the rows, or for E8M0 by the number of pieces: there is a word for each. `fold_tiles`
    // reads the `TILE` maxima of each tile, and writes as many amaxes as there are tiles.
    unsafe {
        cast_pieces::launch_unchecked::<R>(
            client,
            fold(client, (pieces as u32).div_ceil(UNITS)),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            per_sector as usize,
            x.array(),
            array(&copy.codes),
            optional(Some(&copy.inv_scale)),
            array(&maxima),
            x.geometry(),
            pieces as u32,
            row_words(x.cols) as u32 / per_sector,
            encoding,
            Version::of(client),
        );
        fold_tiles::launch_unchecked::<R>(
            client,
            fold(client, ((tiles * across) as u32).div_ceil(UNITS)),
            CubeDim::new_1d(UNITS),
            array(&maxima),
            array(&copy.amax),
            (tiles * across) as u32,
            across as u32,
            x.source,
            Version::of(client),
        );
    }
    copies
}

/// Pieces are counted row by row. The last tiles have all of their rows, as E8M0 scales do: what lies past the end of `x` is padding.
#[cube(launch_unchecked)]
fn cast_pieces<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    codes: &mut Array<Vector<u32, M>>,
    scales: &mut ComptimeOption<Array<u32>>,
    maxima: &mut Array<u32>,
    geometry: Geometry,
    pieces: u32,
    pitch: u32,
    #[comptime] encoding: Encoding,
    #[comptime] _version: Version,
) {
    let Encoding { source, isa, .. } = comptime!(encoding);
    let (blocks, len) = comptime!((per_line(encoding), source.sector_len()));
    let held = comptime!(TILE / blocks / len);
    let across = geometry.cols.div_ceil(TILE);
    let piece = cube_first(UNITS) + UNIT_POS;
    if piece >= pieces {
        terminate!();
    }
    let (row, col0) = (piece / across, piece % across * TILE);
    let side = Side { line0: row, lines: geometry.rows, k0: col0, k: geometry.cols };

    let mut word = 0u32.runtime();
    let mut largest = 0u32.runtime();
    #[unroll]
    for b in 0..blocks {
        let first = col0 + comptime!(b * held * len);
        let mut raw = Array::<u32>::new(comptime!((held * SECTOR_WORDS) as usize));
        #[unroll]
        for s in 0..held {
            let at = comptime!(s * SECTOR_WORDS);
            load_sector(x, &geometry, row, first + comptime!(s * len), &mut raw, at, source, isa);
        }
        let of_block = largest_magnitude(0u32.runtime(), &raw, 0u32, comptime!(held * SECTOR_WORDS), source);
        largest = max(largest, of_block);
        let (scale, stored) = block_scale(amax_bits(of_block, source), encoding);
        if comptime!(blocks == 1) {
            word = stored;
        } else {
            word |= side.e8m0_byte(0u32.runtime(), stored, b);
        }
        let mut scale_of_block = Array::<f32>::new(1usize);
        scale_of_block[0] = scale;
        #[unroll]
        for s in 0..held {
            let col = first + comptime!(s * len);
            let words = encode_sector(&raw, comptime!(s * SECTOR_WORDS), &scale_of_block, col, geometry.cols, encoding);
            if row < geometry.rows && col / len < pitch {
                store_words(codes, row * pitch + col / len, &words, 0u32);
            }
        }
    }
    store_inverse(scales, word, 0u32.runtime(), &side, encoding);
    maxima[piece as usize] = largest;
}

/// A unit finds the amax of a tile of 128 by 128.
#[cube(launch_unchecked)]
fn fold_tiles(
    maxima: &Array<u32>,
    amax: &mut Array<u32>,
    tiles: u32,
    across: u32,
    #[comptime] source: Source,
    #[comptime] _version: Version,
) {
    let tile = ABSOLUTE_POS as u32;
    if tile >= tiles {
        terminate!();
    }
    let first = tile / across * TILE * across + tile % across;
    let mut largest = 0u32.runtime();
    for row in 0..TILE {
        largest = max(largest, maxima[(first + row * across) as usize]);
    }
    amax[tile as usize] = amax_bits(largest, source);
}
