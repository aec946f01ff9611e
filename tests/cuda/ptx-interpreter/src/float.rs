//! Floats as register bits, rounded once; minimum and maximum of NaN and zeros.

use half::{bf16, f16};

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Bits of an arithmetic result, with the canonical NaN.
pub(crate) fn f32_bits(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

/// `a · b + c`, rounded down once.
pub(crate) fn fma_down(a: f32, b: f32, c: f32) -> f32 {
    let near = a.mul_add(b, c);
    // The product is exact, and so is `sum + lost`.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let back = sum - product;
    let lost = (product - (sum - back)) + (c - back);
    let is_above = f64::from(near) > sum || f64::from(near) == sum && lost < 0.0;
    if sum == 0.0 && product != 0.0 {
        -0.0
    } else if is_above {
        near.next_down()
    } else {
        near
    }
}

pub(crate) fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

pub(crate) fn f16_bits(value: f64) -> u16 {
    if value.is_nan() { 0x7fff } else { f16::from_f64(value).to_bits() }
}

pub(crate) fn bf16_bits(value: f64) -> u16 {
    if value.is_nan() { 0x7fff } else { bf16_of_f64(value) }
}

/// Rounds once: through f32 with round-to-odd.
fn bf16_of_f64(value: f64) -> u16 {
    let mut near = value as f32;
    if f64::from(near) != value && near.is_finite() {
        let toward_zero = if f64::from(near.abs()) > value.abs() { near.to_bits() - 1 } else { near.to_bits() };
        near = f32::from_bits(toward_zero | 1);
    }
    bf16::from_f32(near).to_bits()
}

/// IEEE 754 minimumNumber and maximumNumber: a number wins over NaN, and −0 is below +0.
pub(crate) fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || (!b.is_nan() && (b < a || (a == b && b.is_sign_negative()))) { b } else { a }
}

pub(crate) fn larger(a: f64, b: f64) -> f64 {
    -smaller(-a, -b)
}

pub(crate) fn nan_or(a: f64, b: f64, value: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fma_down_is_the_largest_value_that_is_not_above() {
        let tiny = 2f32.powi(-60);
        assert_eq!(fma_down(tiny, tiny, 1.0), 1.0);
        assert_eq!(fma_down(tiny, -tiny, 1.0), 1f32.next_down());
        assert_eq!(fma_down(tiny, -tiny, -1.0), (-1f32).next_down());
        assert_eq!(fma_down(1.5, 2.0, 0.25), 3.25);
        // The f32 is above 1/3, so three times it exceeds 1, but by less than an f32 can represent.
        assert_eq!(fma_down(1.0 / 3.0, 3.0, 0.0), 1.0);
        assert_eq!(fma_down(f32::MAX, 2.0, 0.0), f32::MAX);
        assert_eq!(fma_down(f32::INFINITY, 2.0, 0.0), f32::INFINITY);
        assert_eq!(fma_down(2.0, 3.0, -6.0).to_bits(), (-0f32).to_bits());
        assert!(fma_down(f32::NAN, 2.0, 0.0).is_nan());
    }
}
