//! AdamW of one element, and stochastic rounding to bf16.

use crate::adamw::AdamWStep;
use crate::format::F32_INF;

/// Parameter, m and v of an element after the step with gradient `g`, in f64 before rounding.
///
/// The scalars of the step are rounded to f32 first, as in [`adamw`](crate::adamw()).
#[must_use]
pub fn adamw(step: &AdamWStep, [w, m, v]: [f32; 3], g: f32) -> [f64; 3] {
    let [[beta_1, factor_1], [beta_2, factor_2]] = step.betas.map(|beta| [beta, 1.0 - beta].map(f64::from));
    let [correction_1, correction_2] = step.corrections().map(f64::from);
    let (w, m, v, g) = (f64::from(w), f64::from(m), f64::from(v), f64::from(g));
    let (mut m_after, mut v_after) = (g * factor_1, g * g * factor_2);
    if step.time > 1 {
        m_after += m * beta_1;
        v_after += v * beta_2;
    }
    let root = (v_after / correction_2).sqrt() + f64::from(step.epsilon);
    let change = m_after / correction_1 / root * f64::from(step.lr);
    [w * f64::from(step.decay.unwrap_or(1.0)) - change, m_after, v_after]
}

/// bf16 bits of x, rounded with random bits `r` as [`RoundingKeys`](crate::adamw::RoundingKeys)
/// defines.
#[inline(always)]
#[must_use]
pub fn round_stochastic(x: f32, r: u16) -> u16 {
    /// Bits of the smallest normal and the largest finite bf16.
    const NORMAL: core::ops::RangeInclusive<u32> = 0x0080..=0x7f7f;
    let bits = x.to_bits();
    let (magnitude, up) = (bits & 0x7fff_ffff, 0x7fff + (bits >> 16 & 1));
    let is_between = NORMAL.contains(&((magnitude + up) >> 16)) & (magnitude <= 0x7f7f_0000);
    let sum = bits.wrapping_add(if is_between { u32::from(r) } else { up });
    if magnitude > F32_INF { 0x7fc0 } else { (sum >> 16) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_between_finite_normal_numbers_is_rounded_by_chance() {
        for (x, r, expected) in [
            (0x3f80_0001, 0xffff, 0x3f81),
            (0x3f80_0001, 0xfffe, 0x3f80),
            (0xbf80_8000, 0x8000, 0xbf81),
            (0xbf80_8000, 0x7fff, 0xbf80),
            // Subnormal numbers, the first one whose nearest bf16 is normal, and values beyond the
            // largest.
            (0x0001_ffff, 0x0000, 0x0002),
            (0x0001_0001, 0xffff, 0x0001),
            (0x007f_7fff, 0xffff, 0x007f),
            (0x007f_8000, 0x7fff, 0x007f),
            (0x7f7f_0000, 0xffff, 0x7f7f),
            (0x7f7f_0001, 0xffff, 0x7f7f),
            (0x7f7f_8000, 0x0000, 0x7f80),
            (0x7f80_0000, 0xffff, 0x7f80),
            (0xff80_0000, 0xffff, 0xff80),
            (0x7fc0_0000, 0xffff, 0x7fc0),
        ] {
            assert_eq!(round_stochastic(f32::from_bits(x), r), expected, "{x:#x} + {r:#x}");
        }
    }
}
