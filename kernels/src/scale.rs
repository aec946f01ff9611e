//! Scales: one type for each direction, and `scale = f32(FMAX / max(f64(amax), 1e-12))`, the same
//! bits on every device.
//!
//! WGSL allows a division to be off by ulps and has no f64. So the device divides integers, unless
//! it has PTX's `div.rn`. One f32 division is enough: FMAX and amax are f32 values. A quotient of
//! two 24-bit significands that is first rounded to f64 (53 ≥ 2·24 + 2 bits) rounds to the same
//! f32. Source: Figueroa, *When is double rounding innocuous?* (1995).

use core::fmt;

use cubecl::prelude::*;

use crate::format::{F32_INF, F32_NAN};
use crate::granularity::BLOCK;
use crate::mx::{ScaleCalculationMode, tile_word};
use crate::ptx::cvt::{Isa, div_rn};
use crate::{Format, Granularity};

/// Factor that quantizes a value: `code = cast(x · scale)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale(f32);

/// Factor that dequantizes a code's value: `x ≈ value(code) · inv_scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InvScale(f32);

impl Scale {
    /// A scale from a device or a file: positive, or NaN.
    pub const fn new(scale: f32) -> Self {
        Self(scale)
    }

    /// The multiplier.
    pub const fn get(self) -> f32 {
        self.0
    }

    /// `1 / scale`, correctly rounded.
    pub const fn inverse(self) -> InvScale {
        InvScale(1.0 / self.0)
    }
}

impl InvScale {
    /// An inverse scale from a device or a file: positive, or NaN.
    pub const fn new(inv_scale: f32) -> Self {
        Self(inv_scale)
    }

    /// The multiplier.
    pub const fn get(self) -> f32 {
        self.0
    }
}

/// Scales that a cast may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    /// Any f32. The amax maps to FMAX.
    #[default]
    F32,
    /// The f32 scale rounded down to a power of two, `2^floor(log2(scale))`. Scaling is exact.
    PowerOfTwo,
    /// A power of two that fits an E8M0 byte, by the rules of OCP MX and its refinements. For
    /// blocks of 32.
    E8m0(ScaleCalculationMode),
    /// Like [`E8m0`](Self::E8m0), but squares of 32 rows by 32 of the contraction share the scale
    /// of their largest element. The codes then serve both orientations
    /// ([`transpose`](crate::transpose)). Operands have ordinary
    /// [`Block1x32`](crate::Granularity::Block1x32) scales.
    E8m0Square(ScaleCalculationMode),
}

impl ScaleMode {
    /// Whether every scale is a power of two, or NaN.
    pub const fn is_power_of_two(self) -> bool {
        !matches!(self, ScaleMode::F32)
    }
}

impl fmt::Display for ScaleMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScaleMode::F32 => f.write_str("f32"),
            ScaleMode::PowerOfTwo => f.write_str("powers of two"),
            ScaleMode::E8m0(mode) => write!(f, "e8m0 ({mode})"),
            ScaleMode::E8m0Square(mode) => write!(f, "e8m0 of squares ({mode})"),
        }
    }
}

/// Smallest amax that is used unchanged (torchao's `EPS`). Smaller ones use the scale of 1e-12.
pub(crate) const MIN_AMAX: f64 = 1e-12;

/// Bits of the smallest f32 that is at least [`MIN_AMAX`] in f64. f32(1e-12) may be below or above
/// it.
pub(crate) const MIN_AMAX_BITS: u32 = {
    let nearest = MIN_AMAX as f32;
    if (nearest as f64) < MIN_AMAX { nearest.to_bits() + 1 } else { nearest.to_bits() }
};

/// Bits of the scale of every amax below [`MIN_AMAX`].
const fn largest_scale_bits(format: Format) -> u32 {
    ((format.max() as f64 / MIN_AMAX) as f32).to_bits()
}

/// Bits of the scale for the f32 bits of an amax. For E8M0 scales see
/// [`e8m0_of_amax`](crate::mx::e8m0_of_amax).
///
/// A NaN gives NaN. An infinite amax counts as `f32::MAX`, so that the scale stays positive and an
/// infinity saturates instead of becoming `inf · 0 = NaN`.
#[cube]
pub(crate) fn scale_bits(
    amax: u32,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
    #[comptime] isa: Isa,
) -> u32 {
    let largest_finite = comptime!(F32_INF - 1);
    let divisor = clamp(amax, comptime!(MIN_AMAX_BITS), largest_finite);
    let quotient = divide_bits(comptime!(format.max()), divisor, isa);
    let scale = select(amax < MIN_AMAX_BITS, comptime!(largest_scale_bits(format)).runtime(), quotient);
    let scale = if comptime!(matches!(mode, ScaleMode::PowerOfTwo)) { scale & 0x7f80_0000u32 } else { scale };
    select(amax > F32_INF, F32_NAN.runtime(), scale)
}

/// Bits of `1 / scale` for the bits of a scale from [`scale_bits`].
#[cube]
pub(crate) fn inverse_bits(scale: u32, #[comptime] isa: Isa) -> u32 {
    let one = comptime!(1f32.to_bits());
    let is_nan = scale > F32_INF;
    let divisor = select(is_nan, one.runtime(), scale);
    let inverse = divide_bits(1.0f32, divisor, isa);
    select(is_nan, F32_NAN.runtime(), inverse)
}

/// Index of the scale of row `row` and block `block` of 128 of the contraction. `blocks` are the
/// blocks of a whole row. For E8M0 scales, the index of the word with the block's four scales.
#[cube]
pub(crate) fn scale_index(row: u32, block: u32, blocks: u32, #[comptime] granularity: Granularity) -> u32 {
    if comptime!(matches!(granularity, Granularity::Tensor)) {
        0u32.runtime()
    } else if comptime!(matches!(granularity, Granularity::Row)) {
        row
    } else if comptime!(matches!(granularity, Granularity::Block1x128)) {
        row * blocks + block
    } else if comptime!(granularity.is_mx()) {
        tile_word(row, block, blocks)
    } else {
        row / comptime!(BLOCK as u32) * blocks + block
    }
}

/// Word of the scale of a row's block of 128: its f32 bits, or the four E8M0 bytes of the block.
#[cube]
pub(crate) fn scale_word(
    scales: &Array<u32>,
    row: u32,
    block: u32,
    blocks: u32,
    #[comptime] granularity: Granularity,
) -> u32 {
    scales[scale_index(row, block, blocks, granularity) as usize]
}

/// Bits of `num / den`, rounded to nearest even. Both must be positive normal f32 with a normal
/// quotient.
#[cube]
fn divide_bits(#[comptime] num: f32, den: u32, #[comptime] isa: Isa) -> u32 {
    if comptime!(isa.has_ptx()) {
        u32::reinterpret(div_rn(num.runtime(), f32::reinterpret(den)))
    } else {
        divide_integers(comptime!(num.to_bits()).runtime(), den)
    }
}

#[cube]
fn divide_integers(num: u32, den: u32) -> u32 {
    let num_significand = (num & 0x007f_ffffu32) | 0x0080_0000u32;
    let divisor = (den & 0x007f_ffffu32) | 0x0080_0000u32;
    // Shift the dividend so that the quotient of significands is in [1, 2).
    let borrow = select(num_significand < divisor, 1u32.runtime(), 0u32.runtime());
    let mut remainder = num_significand << borrow;
    let mut quotient = 0u32.runtime();
    // Restoring division, one bit per step. remainder < 2 · divisor < 2^25 always holds. Unrolled,
    // because a CPU's vectors keep a mask of the units that are still in a loop, which takes longer
    // than its body.
    #[unroll]
    for _ in 0..24u32 {
        let fits = remainder >= divisor;
        quotient = (quotient << 1u32) | select(fits, 1u32.runtime(), 0u32.runtime());
        remainder = (remainder - select(fits, divisor, 0u32.runtime())) << 1u32;
    }
    // The remainder has been doubled once more. So it compares to the divisor like the lost part to
    // one half.
    let odd = quotient & 1u32;
    let tie_up = select(remainder == divisor, odd, 0u32.runtime());
    let round_up = select(remainder > divisor, 1u32.runtime(), tie_up);
    let exponent = (num >> 23u32) + 127u32 - (den >> 23u32) - borrow;
    // Adding the significand with its leading one raises the exponent field by one. A carry from
    // rounding raises it by one more.
    ((exponent - 1u32) << 23u32) + quotient + round_up
}
