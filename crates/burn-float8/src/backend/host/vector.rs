//! Slice functions vectorized for the detected processor, with the same bits on every processor.

use burn_std::bf16;

/// Evaluates an expression with the widest vectors of the processor. Every function and closure in
/// it must be `#[inline(always)]`: others are compiled once, for the baseline processor.
macro_rules! vectorized {
    ($run:expr) => {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || $run,
        )
    };
}
pub(super) use vectorized;

/// eˣ within 2 ulp, for x up to 88. Results below 2⁻¹²⁶ are 0; NaN stays.
///
/// `x = n ln 2 + r`, `|r| ≤ ln 2 / 2`, and Cephes' polynomial of `e^r`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 · 2²³: adding it rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = p * r + coefficient;
    }
    let e_to_r = p * r * r + r + 1.0;
    // 2ⁿ from its bits: the low bits of `shifted` are n.
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x < -87.33654 { 0.0 } else { e_to_r * power }
}

/// Number of interleaved partial sums, added at the end. The order of summation is the same on
/// every processor.
const LANES: usize = 16;

/// Replaces x by `exp(x - max)` and returns the sum.
#[inline(always)]
pub(super) fn exp_minus(values: &mut [f32], max: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (parts, rest) = values.as_chunks_mut::<LANES>();
    for part in parts {
        for (value, sum) in part.iter_mut().zip(&mut sums) {
            *value = exp(*value - max);
            *sum += *value;
        }
    }
    let mut of_rest = 0.0;
    for value in rest {
        *value = exp(*value - max);
        of_rest += *value;
    }
    sums.iter().sum::<f32>() + of_rest
}

/// Largest value that is not NaN, or `-inf`.
#[inline(always)]
pub(super) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let (parts, rest) = values.as_chunks::<LANES>();
    for part in parts {
        for (value, max) in part.iter().zip(&mut maxima) {
            *max = larger(*max, *value);
        }
    }
    maxima.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger)
}

/// Widens values to f32.
#[inline(always)]
pub(super) fn widen(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Rounds values to the nearest bf16.
#[inline(always)]
pub(super) fn narrow(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = bf16::from_bits(nearest(*from) as u16);
    }
}

/// Bits of the nearest bf16, ties to even. NaN stays NaN.
#[inline(always)]
pub(super) fn nearest(x: f32) -> u32 {
    let bits = x.to_bits();
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if is_nan { bits >> 16 | 0x40 } else { rounded }
}

/// Σ aᵢ bᵢ.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (exp(x), f64::from(x).exp());
            let ulp = f64::from((want as f32).next_up()) - f64::from(want as f32);
            assert!((f64::from(got) - want).abs() <= 2.0 * ulp, "exp({x}) is {got:e}, not {want:e}");
        }
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!([-88.0, -1e30, f32::NEG_INFINITY].map(exp), [0.0; 3]);
        assert_eq!([0.0, -0.0].map(exp), [1.0; 2]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn the_nearest_is_that_of_half() {
        let odd =
            [0.0, -0.0, 1e-40, -1e-45, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3.389_531_4e38];
        let many = (0..1_000_003_u32).map(|i| f32::from_bits(i.wrapping_mul(4_294_967)));
        for x in many.chain(odd) {
            assert_eq!(nearest(x) as u16, bf16::from_f32(x).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn vectors_of_any_length() {
        for len in [0, 1, 15, 16, 17, 100] {
            let values: Vec<f32> = (0..len).map(|i| (i * 7 % 13) as f32 - 5.0).collect();
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&values), largest);
            let mut got = values.clone();
            let sum = vectorized!(exp_minus(&mut got, 2.0));
            assert!(got.iter().zip(&values).all(|(got, x)| *got == exp(x - 2.0)));
            let want: f64 = got.iter().copied().map(f64::from).sum();
            assert!((f64::from(sum) - want).abs() <= 1e-6 * want);
            let want: f64 = values.iter().zip(&got).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(dot(&values, &got)) - want).abs() <= 1e-5 * want.abs().max(1.0));
        }
        assert_eq!(max(&[f32::NAN, 1.0, f32::NAN]), 1.0);
    }
}
