//! Converts power-of-two f32 scales to the 1x32 E8M0 scales that the tensor cores apply.
//!
//! ```text
//! byte(row, block of 32) = exponent of inv_scale(row, block / 4)
//! ```

use cubecl::prelude::*;

use crate::granularity::{BLOCK, TILE_WORDS};
use crate::grid::{UNITS, fold};
use crate::scale::scale_word;
use crate::version::Version;
use crate::{Granularity, Operand};

/// Replaces the operands' f32 scales, which are powers of two, by scales of
/// [`Granularity::Block1x32`]. Both operands are checked and have the same contraction length.
pub(super) fn with_e8m0_scales<R: Runtime>(client: &ComputeClient<R>, operands: [&Operand; 2]) -> [Operand; 2] {
    let granularity = Granularity::Block1x32;
    let [a, b] = operands;
    let [words_a, words_b] = operands.map(|operand| granularity.scale_words(operand.rows, operand.k));
    let words = words_a + words_b;
    let out = client.empty(4 * words);
    let granularities = operands.map(|operand| operand.granularity);
    // SAFETY: the operands have a scale for each of their rows and blocks. A unit stays below
    // `words`.
    unsafe {
        scales_to_e8m0::launch_unchecked::<R>(
            client,
            fold(client, words.div_ceil(UNITS as usize) as u32),
            CubeDim::new_1d(UNITS),
            a.scales_array(),
            b.scales_array(),
            ArrayArg::from_raw_parts(out.clone(), words),
            a.rows as u32,
            b.rows as u32,
            words_a as u32,
            words as u32,
            a.k.div_ceil(BLOCK) as u32,
            granularities,
            Version::of(client),
        );
    }
    let scales_b = out.clone().offset_start(4 * words_a as u64);
    [(a, out), (b, scales_b)].map(|(operand, inv_scale)| Operand { inv_scale, granularity, ..operand.clone() })
}

#[cube(launch_unchecked)]
fn scales_to_e8m0(
    inv_scale_a: &Array<u32>,
    inv_scale_b: &Array<u32>,
    out: &mut Array<u32>,
    rows_a: u32,
    rows_b: u32,
    words_a: u32,
    words: u32,
    blocks: u32,
    #[comptime] granularities: [Granularity; 2],
    #[comptime] _version: Version,
) {
    let index = ABSOLUTE_POS as u32;
    if index >= words {
        terminate!();
    }
    out[index as usize] = if index < words_a {
        e8m0_word(inv_scale_a, index, rows_a, blocks, comptime!(granularities[0]))
    } else {
        e8m0_word(inv_scale_b, index - words_a, rows_b, blocks, comptime!(granularities[1]))
    };
}

/// Word `word` of the tiles: a row's four equal bytes for 128 of the contraction. Zero past the
/// last row.
#[cube]
fn e8m0_word(inv_scales: &Array<u32>, word: u32, rows: u32, blocks: u32, #[comptime] granularity: Granularity) -> u32 {
    let (tile, place) = (word / comptime!(TILE_WORDS as u32), word % comptime!(TILE_WORDS as u32));
    let row = tile / blocks * comptime!(BLOCK as u32) + place % 4 * 32 + place / 4;
    let scale = scale_word(inv_scales, min(row, rows - 1), tile % blocks, blocks, granularity);
    // The exponent bits of a NaN are 255, the E8M0 NaN.
    let byte = (scale >> 23u32) & 0xffu32;
    select(row < rows, byte * 0x0101_0101u32, 0u32)
}
