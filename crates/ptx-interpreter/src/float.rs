//! Floats as the bits of a register, rounded once, and what minimum and maximum are of NaN and of zeros.

use half::{bf16, f16};

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Bits of an arithmetic result: every NaN is the canonical one.
pub(crate) fn f32_bits(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
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

/// Rounded once: through f32 with round-to-odd.
fn bf16_of_f64(value: f64) -> u16 {
    let mut near = value as f32;
    if f64::from(near) != value && near.is_finite() {
        let toward_zero = if f64::from(near.abs()) > value.abs() { near.to_bits() - 1 } else { near.to_bits() };
        near = f32::from_bits(toward_zero | 1);
    }
    bf16::from_f32(near).to_bits()
}

/// IEEE 754 minimumNumber and maximumNumber: a number wins over NaN, −0 is below +0.
pub(crate) fn smaller(a: f64, b: f64) -> f64 {
    if a.is_nan() || (!b.is_nan() && (b < a || (a == b && b.is_sign_negative()))) { b } else { a }
}

pub(crate) fn larger(a: f64, b: f64) -> f64 {
    -smaller(-a, -b)
}

pub(crate) fn nan_or(a: f64, b: f64, value: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { value }
}
