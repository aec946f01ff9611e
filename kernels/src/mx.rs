//! OCP MX scales: E8M0 bytes for blocks of 32, their computation from an amax, and their tiled
//! layout.
//!
//! ```text
//! value = code · 2^(byte - 127)          byte 255 is NaN
//! byte  = clamp(e - e_max, -127, 127) + 127,   255 if amax is not finite
//! ```
//!
//! `e_max` is the exponent of the format's largest value (8 for E4M3, 15 for E5M2). `e` is the
//! exponent of the amax by [`ScaleCalculationMode`]. Sources: OCP *Microscaling Formats (MX)
//! Specification* 1.0, sections 5.4.1 and 6.3; for `Rceil` NVIDIA's cuBLAS documentation, *1D block
//! scaling for FP8*. All four modes are torchao's.
//!
//! Blackwell's tensor cores and cuBLASLt take the bytes of 128 rows by 4 blocks as a tile of 512
//! bytes:
//!
//! ```text
//! place(r, b) = 512 · (r / 128 · ceil(blocks / 4) + b / 4) + 16 · (r mod 32) + 4 · (r mod 128 / 32) + b mod 4
//! ```
//!
//! So a row's four bytes in a tile are one little-endian word. Bytes of rows and blocks that do not
//! exist are zero.

use core::fmt;

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use crate::format::{F32_INF, F32_NAN};
use crate::granularity::{BLOCK, MX_BLOCK, TILE_WORDS};
use crate::{Format, InvScale};

/// Blocks per row of a tile, and bytes per word.
const TILE_BLOCKS: usize = BLOCK / MX_BLOCK;

/// Rounding from an amax to the exponent of an E8M0 scale, with torchao's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum ScaleCalculationMode {
    /// `floor(log2(amax))`, as in the OCP specification. The largest elements may saturate.
    Floor,
    /// `ceil(log2(amax))`. Nothing saturates, but a binade is lost where `Floor` would not saturate
    /// either.
    Ceil,
    /// `floor(log2(amax'))` of the amax rounded to the format's mantissa, ties up.
    Even,
    /// `e - e_max = ceil(log2(amax / FMAX))`, with the quotient `amax · f32(1 / FMAX)` rounded to
    /// f32. The smallest scale that saturates nothing (NVIDIA's).
    #[default]
    Rceil,
}

impl ScaleCalculationMode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Floor, Self::Ceil, Self::Even, Self::Rceil];
}

impl fmt::Display for ScaleCalculationMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The same names as in configuration files.
        self.serialize(f)
    }
}

/// Exponent of the format's largest value, `floor(log2(FMAX))`.
const fn max_exponent(format: Format) -> u32 {
    (format.max().to_bits() >> 23) - 127
}

/// `f32(amax · f32(1 / FMAX))` for the bits of a finite amax.
const fn descale(amax: u32, format: Format) -> u32 {
    (f32::from_bits(amax) * (1.0 / format.max())).to_bits()
}

/// Largest amax mantissa whose quotient by FMAX does not exceed a power of two. It is FMAX's
/// mantissa or an adjacent one, as the reciprocal of FMAX is rounded. Equal in every binade with
/// normal quotients.
const fn rceil_mantissa(format: Format) -> u32 {
    let largest = format.max().to_bits();
    let mut amax = largest - 2;
    while descale(amax + 1, format) <= 0x3f80_0000 {
        amax += 1;
    }
    amax & 0x007f_ffff
}

/// Bits of the largest amax whose quotient by FMAX is at most 2^-127, the smallest scale.
const fn rceil_least(format: Format) -> u32 {
    // FMAX · 2^-127, from below.
    let mut amax = format.max().to_bits() - (127 << 23) - 4;
    while descale(amax + 1, format) <= 0x0040_0000 {
        amax += 1;
    }
    amax
}

/// E8M0 byte for the f32 bits of an amax, which is zero, positive or NaN. 255 if it is not finite.
#[cube]
pub(crate) fn e8m0_of_amax(amax: u32, #[comptime] format: Format, #[comptime] mode: ScaleCalculationMode) -> u32 {
    let rounded = if comptime!(mode == ScaleCalculationMode::Even) {
        // May round up to infinity.
        amax + comptime!(1u32 << (22 - format.mantissa_bits()))
    } else {
        amax
    };
    let above = if comptime!(mode == ScaleCalculationMode::Ceil) {
        (rounded & 0x007f_ffffu32) > 0u32
    } else if comptime!(mode == ScaleCalculationMode::Rceil) {
        (rounded & 0x007f_ffffu32) > comptime!(rceil_mantissa(format))
    } else {
        false.runtime()
    };
    let exponent = (rounded >> 23u32) + select(above, 1u32, 0u32);
    let bias = comptime!(max_exponent(format));
    let byte = max(exponent, bias) - bias;
    let byte = if comptime!(mode == ScaleCalculationMode::Rceil) {
        select(amax > comptime!(rceil_least(format)), max(byte, 1u32), 0u32.runtime())
    } else {
        byte
    };
    select(max(rounded, amax) < F32_INF, byte, 255u32.runtime())
}

/// Bits of `2^(127 - byte)`, the factor of a value. No finite amax has byte 254, whose factor is
/// subnormal.
#[cube]
pub(crate) fn e8m0_scale_bits(byte: u32) -> u32 {
    select(byte == 255u32, F32_NAN.runtime(), (254u32 - min(byte, 254u32)) << 23u32)
}

/// Bits of `2^(byte - 127)`, the factor of a code's value.
#[cube]
pub(crate) fn e8m0_inverse_bits(byte: u32) -> u32 {
    let finite = select(byte == 0u32, 0x0040_0000u32.runtime(), byte << 23u32);
    select(byte == 255u32, F32_NAN.runtime(), finite)
}

/// Bits of `2^(byte - 127)` for byte `place` of a word; 0 is the low byte.
#[cube]
pub(crate) fn e8m0_inverse_bits_of(word: u32, #[comptime] place: u32) -> u32 {
    let shifted = if comptime!(place < 3) { word << comptime!(23 - 8 * place) } else { word >> 1u32 };
    let exponent = shifted & F32_INF;
    select(exponent == F32_INF, F32_NAN.runtime(), max(exponent, 0x0040_0000u32))
}

/// Byte of row `row` and block `block` of 32. A row of tiles has `tiles` tiles.
#[cube]
pub(crate) fn e8m0_byte(scales: &Array<u32>, row: u32, block: u32, tiles: u32) -> u32 {
    let four = scales[tile_word(row, block / 4, tiles) as usize];
    (four >> (block % 4 * 8)) & 0xffu32
}

/// Word of row `row` in column `tile` of the scale tiles. A row of tiles has `tiles` tiles.
#[cube]
pub(crate) fn tile_word(row: u32, tile: u32, tiles: u32) -> u32 {
    (row / comptime!(BLOCK as u32) * tiles + tile) * comptime!(TILE_WORDS as u32) + tile_row_word(row)
}

/// Word of row `row` in its tile.
#[cube]
pub(crate) fn tile_row_word(row: u32) -> u32 {
    row % 32u32 * 4u32 + row % comptime!(BLOCK as u32) / 32u32
}

impl InvScale {
    /// `2^(byte - 127)`, NaN for 255.
    pub const fn from_e8m0(byte: u8) -> Self {
        // Without a branch, for loops over scales. 2^-127 is subnormal, and NaN is infinity with a
        // mantissa bit.
        let bits =
            (byte as u32) << 23 | if byte == 0 { 0x0040_0000 } else { 0 } | if byte == 255 { F32_NAN } else { 0 };
        Self::new(f32::from_bits(bits))
    }

    /// E8M0 byte of a power of two from 2^-127 up, or of NaN. `None` for other values.
    pub fn to_e8m0(self) -> Option<u8> {
        let value = self.get();
        let byte = if value.is_nan() { 255 } else { (value.to_bits() >> 23) as u8 };
        (value.is_nan() || Self::from_e8m0(byte).get() == value).then_some(byte)
    }
}

/// Byte offset of the scale of row `row` and block `block` in the tiles of an operand with `blocks`
/// blocks per row.
pub(crate) const fn place(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / BLOCK * blocks.div_ceil(TILE_BLOCKS) + block / TILE_BLOCKS;
    4 * TILE_WORDS * tile + row % 32 * 16 + row % BLOCK / 32 * 4 + block % TILE_BLOCKS
}

/// Scales `[rows, blocks]` in tiles of 128 by 4, padded with zeros: 512 · ceil(rows / 128) ·
/// ceil(blocks / 4) bytes.
///
/// The layout of cuBLASLt and of `tcgen05` (PTX ISA, *Scale factor layout*), and of torchao's
/// function of this name.
///
/// # Panics
/// If there are not `rows · blocks` scales.
pub fn to_blocked<T: Copy + Default>(scales: &[T], rows: usize, blocks: usize) -> Vec<T> {
    assert_eq!(scales.len(), rows * blocks, "to_blocked: the scales are not [{rows}, {blocks}]");
    let mut tiles = vec![T::default(); rows.div_ceil(BLOCK) * blocks.div_ceil(TILE_BLOCKS) * 4 * TILE_WORDS];
    for row in 0..rows {
        for block in 0..blocks {
            tiles[place(row, block, blocks)] = scales[row * blocks + block];
        }
    }
    tiles
}

/// Inverse of [`to_blocked`].
///
/// # Panics
/// If the number of bytes does not match the tiles of `[rows, blocks]`.
pub fn from_blocked<T: Copy>(tiles: &[T], rows: usize, blocks: usize) -> Vec<T> {
    let len = rows.div_ceil(BLOCK) * blocks.div_ceil(TILE_BLOCKS) * 4 * TILE_WORDS;
    assert_eq!(tiles.len(), len, "from_blocked: not the tiles of [{rows}, {blocks}]");
    (0..rows).flat_map(|row| (0..blocks).map(move |block| tiles[place(row, block, blocks)])).collect()
}

/// `2^(127 - byte)`, NaN for 255. No finite amax has byte 254, whose factor is subnormal.
#[inline(always)]
pub(crate) fn e8m0_scale(byte: u32) -> f32 {
    f32::from_bits(if byte == 255 { F32_NAN } else { (254 - byte.min(254)) << 23 })
}

/// E8M0 byte for an amax that is zero, positive, infinite or NaN. See the module docs.
#[inline(always)]
pub(crate) fn amax_to_e8m0(amax: f32, format: Format, mode: ScaleCalculationMode) -> u32 {
    let bits = match mode {
        ScaleCalculationMode::Even => amax.to_bits() + (1 << (22 - format.mantissa_bits())),
        _ => amax.to_bits(),
    };
    let ceil = |bits: u32, above: u32| (bits >> 23) + u32::from(bits & 0x007f_ffff > above);
    let byte = match mode {
        // Uses the quotient itself, whose subnormals may be above or below 2^-127.
        ScaleCalculationMode::Rceil => {
            let quotient = descale(bits, format);
            ceil(quotient, if quotient < 0x0080_0000 { 0x0040_0000 } else { 0 })
        }
        ScaleCalculationMode::Ceil => ceil(bits, 0).saturating_sub(max_exponent(format)),
        ScaleCalculationMode::Floor | ScaleCalculationMode::Even => (bits >> 23).saturating_sub(max_exponent(format)),
    };
    if amax.is_nan() || bits >= F32_INF { 255 } else { byte }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rceil_constants_are_where_the_quotient_steps() {
        for format in [Format::E4m3, Format::E5m2] {
            let one = rceil_mantissa(format) | (format.max().to_bits() & 0x7f80_0000);
            assert_eq!(descale(one, format), 0x3f80_0000);
            assert_eq!(descale(one + 1, format), 0x3f80_0001);
            let least = rceil_least(format);
            assert_eq!((descale(least, format), descale(least + 1, format)), (0x0040_0000, 0x0040_0001));
        }
    }
}
