//! Accumulation of FP8 products by tensor cores: exact, or with the limited bits of real hardware.

use super::convert::exponent;
use super::operand::ElementType;

/// Addition of one instruction's FP8 products to the accumulator. Products of wider types are
/// always added in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulator {
    /// The sum is computed in f64 and rounded once to f32.
    #[default]
    Full,
    /// Model of real tensor cores, for all products of one instruction along the contraction:
    ///
    /// ```text
    /// e    = the largest exponent of the accumulator and of the products that are not zero
    /// sum  = Σ cut(addend, e)                   the accumulator and the products
    /// cut(x, e)                                 x without the bits below 2^(e - fraction_bits)
    /// d    = cut(sum, exponent of sum)          at most 23 bits, and no exponent below -126
    /// ```
    ///
    /// The exponent of a product is the sum of its codes' exponents. Subnormal codes have the
    /// format's smallest exponent.
    ///
    /// DeepSeek-V3 (arXiv:2412.19437, 3.3.2 and 3.5.2) reports for Hopper that products are aligned
    /// to the largest exponent. 14 bits are kept after a "sign-fill" shift, which rounds down.
    /// MMA-Sim (arXiv:2511.10909) matches Hopper's `wgmma` bit for bit with 13 bits toward zero,
    /// and Blackwell with 25. It matches Ada's `mma.sync` with 13 bits for 16 products at a time,
    /// which is not modelled here.
    Truncated {
        /// Bits kept below the largest exponent.
        fraction_bits: u32,
        /// Rounding of the dropped bits.
        rounding: Rounding,
    },
}

impl Accumulator {
    /// Published models of Hopper and Ada.
    pub const HOPPER: [Self; 4] = [
        Self::Truncated { fraction_bits: 13, rounding: Rounding::ToZero },
        Self::Truncated { fraction_bits: 13, rounding: Rounding::Floor },
        Self::Truncated { fraction_bits: 14, rounding: Rounding::ToZero },
        Self::Truncated { fraction_bits: 14, rounding: Rounding::Floor },
    ];

    /// Published model of Blackwell.
    pub const BLACKWELL: Self = Self::Truncated { fraction_bits: 25, rounding: Rounding::ToZero };
}

/// Rounding when bits are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Drops the magnitude's last bits: toward zero.
    ToZero,
    /// Drops the last bits of the two's complement, as an arithmetic shift does: down.
    Floor,
}

impl Rounding {
    /// Rounds a value below 2^63 to an integer.
    fn whole(self, value: f64) -> f64 {
        let toward_zero = value as i64 as f64;
        match self {
            Self::Floor if toward_zero > value => toward_zero - 1.0,
            _ => toward_zero,
        }
    }
}

/// `2^exponent`; the result must be normal.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Element of A or B.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factor {
    value: f64,
    /// Exponent of the code. For a subnormal value this is not the value's exponent.
    exponent: i32,
}

impl Factor {
    pub(crate) fn new(value: f64, ty: ElementType) -> Self {
        let least = match ty {
            ElementType::E4m3 => -6,
            ElementType::E5m2 | ElementType::F16 => -14,
            ElementType::Bf16 | ElementType::F32 | ElementType::Tf32 => -126,
        };
        Self { value, exponent: exponent(value).max(least) }
    }

    /// Scales by a power of two or NaN.
    pub(crate) fn scaled(self, scale: f64) -> Self {
        Self { value: self.value * scale, exponent: self.exponent + exponent(scale) }
    }
}

/// B of one instruction.
pub(crate) struct Right {
    /// `[n][k]`.
    rows: Vec<Factor>,
    /// `[k][n]`.
    columns: Vec<f64>,
}

impl Right {
    /// Right operand from `[n][k]` elements.
    pub(crate) fn new(rows: Vec<Factor>, k: usize) -> Self {
        let n = rows.len() / k;
        let mut columns = vec![0.0; rows.len()];
        for (column, row) in rows.chunks(k).enumerate() {
            row.iter().enumerate().for_each(|(i, factor)| columns[i * n + column] = factor.value);
        }
        Self { rows, columns }
    }
}

impl Accumulator {
    pub(crate) fn check(self) -> Result<(), String> {
        match self {
            // With more bits sums would not be exact in f64.
            Self::Truncated { fraction_bits: bits @ (0 | 41..), .. } => Err(format!("accumulators of {bits} bits")),
            _ => Ok(()),
        }
    }

    /// Accumulator for products of these types.
    pub(crate) fn of(self, types: [ElementType; 2]) -> Self {
        let fp8 = types.iter().all(|ty| matches!(ty, ElementType::E4m3 | ElementType::E5m2));
        if fp8 { self } else { Self::Full }
    }

    /// Adds the products of one instruction to an accumulator. The caller rounds the result to the
    /// accumulator's type, which is exact for f32 unless the sum was full.
    pub(crate) fn add(self, old: f64, products: impl Iterator<Item = [Factor; 2]> + Clone) -> f64 {
        let full = || old + products.clone().map(|[a, b]| a.value * b.value).sum::<f64>();
        let Self::Truncated { fraction_bits, rounding } = self else { return full() };
        let mut finite = old.is_finite();
        let mut largest = if old == 0.0 { i32::MIN } else { exponent(old).max(-126) };
        for [a, b] in products.clone() {
            let product = a.value * b.value;
            finite &= product.is_finite();
            if product != 0.0 {
                largest = largest.max(a.exponent + b.exponent);
            }
        }
        if !finite || largest == i32::MIN {
            return full();
        }
        let fraction_bits = fraction_bits as i32;
        let cut = |value: f64, least: i32| rounding.whole(value * power(-least));
        // Each addend is less than 2^(fraction_bits + 2) units of 2^least, so the sum is exact.
        let least = largest - fraction_bits;
        let units = products.fold(cut(old, least), |sum, [a, b]| sum + cut(a.value * b.value, least));
        let sum = units * power(least);
        let least = exponent(sum).max(-126) - fraction_bits.min(23);
        cut(sum, least) * power(least)
    }

    /// Adds the products of a row of A with each row of B.
    pub(crate) fn add_row(self, d: &mut [f64], a: &[Factor], b: &Right) {
        if self != Self::Full {
            for (d, b) in d.iter_mut().zip(b.rows.chunks(a.len())) {
                *d = self.add(*d, a.iter().zip(b).map(|(a, b)| [*a, *b]));
            }
            return;
        }
        // Eight sums stay in registers.
        let n = d.len();
        for (first, d) in (0..n).step_by(8).zip(d.chunks_mut(8)) {
            let mut sums = [0.0; 8];
            for (a, columns) in a.iter().zip(b.columns.chunks(n)) {
                let columns = &columns[first..first + d.len()];
                match <&[f64; 8]>::try_from(columns) {
                    Ok(columns) => (0..8).for_each(|i| sums[i] += a.value * columns[i]),
                    Err(_) => sums.iter_mut().zip(columns).for_each(|(sum, b)| *sum += a.value * b),
                }
            }
            d.iter_mut().zip(sums).for_each(|(d, sum)| *d += sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Rounding::{Floor, ToZero};
    use super::*;

    fn bits(fraction_bits: u32, rounding: Rounding) -> Accumulator {
        Accumulator::Truncated { fraction_bits, rounding }
    }

    fn product(a: f64, b: f64) -> [Factor; 2] {
        [a, b].map(|value| Factor::new(value, ElementType::E4m3))
    }

    /// Adds `old` and these values times 1.
    fn add(accumulator: Accumulator, old: f64, values: &[f64]) -> f64 {
        accumulator.add(old, values.iter().map(|value| product(*value, 1.0)))
    }

    /// Results toward zero, down, and in full.
    fn three(fraction_bits: u32, old: f64, values: &[f64]) -> [f64; 3] {
        [bits(fraction_bits, ToZero), bits(fraction_bits, Floor), Accumulator::Full].map(|mode| add(mode, old, values))
    }

    #[test]
    fn addends_are_cut_below_the_largest() {
        // 8 = 2^3 with four bits: multiples of 1/2.
        assert_eq!(three(4, 0.0, &[8.0, 0.75]), [8.5, 8.5, 8.75]);
        assert_eq!(three(4, 0.0, &[8.0, -0.75]), [7.5, 7.0, 7.25]);
        assert_eq!(three(4, 0.0, &[-8.0, 0.75, 0.25, 0.25]), [-7.5, -7.5, -6.75]);
        assert_eq!(three(4, 0.0, &[0.25, -0.25, -0.25, 8.0]), [8.0, 7.0, 7.75]);
        // Enough bits for the exact result.
        assert_eq!(three(5, 0.0, &[8.0, -0.75]), [7.25; 3]);
        // The accumulator is an addend, and may be the largest.
        assert_eq!(three(4, 8.0, &[-0.75]), [7.5, 7.0, 7.25]);
        assert_eq!(three(4, -0.75, &[8.0]), [7.5, 7.0, 7.25]);
    }

    /// 1.5 · 1.5 counts as 2^0, and subnormal E4M3 codes as 2^-6.
    #[test]
    fn exponents_are_those_of_codes() {
        let add = |products: &[[f64; 2]]| bits(4, ToZero).add(0.0, products.iter().map(|[a, b]| product(*a, *b)));
        // Multiples of 2^-4; they would be of 2^-3 if 2.25 counted as 2^1.
        assert_eq!(add(&[[1.5, 1.5], [0.0625, 1.0], [-1.0, 1.0]]), 1.3125);
        let (small, lost) = (2f64.powi(-9), 1.5 * 2f64.powi(-11));
        assert_eq!(add(&[[0.015625, 0.125], [0.015625, lost * 64.0]]), small + lost);
        assert_eq!(add(&[[small, 1.0], [0.015625, lost * 64.0]]), small);
    }

    #[test]
    fn sums_are_cut_below_their_own_exponent() {
        // 9 = 2^3 + 1 with two bits: multiples of 2.
        assert_eq!(three(2, 0.0, &[4.0, 4.0, 1.0]), [8.0, 8.0, 9.0]);
        assert_eq!(three(2, 0.0, &[-4.0, -4.0, -1.0]), [-8.0, -10.0, -9.0]);
        // Rounding down may reach the next power of two.
        assert_eq!(three(2, 0.0, &[-4.0, -4.0, -4.0, -3.0]), [-14.0, -16.0, -15.0]);
        // More than 23 bits, the precision of f32.
        let tiny = 2f64.powi(-24);
        assert_eq!(three(25, 1.0, &[tiny * 64.0, tiny]), [1.0 + 64.0 * tiny, 1.0 + 64.0 * tiny, 1.0 + 65.0 * tiny]);
    }

    #[test]
    fn what_was_cut_does_not_come_back_when_sums_cancel() {
        assert_eq!(three(4, 0.0, &[8.0, 0.75, -8.0]), [0.5, 0.5, 0.75]);
        assert_eq!(three(4, 0.0, &[8.0, -0.75, -8.0]), [-0.5, -1.0, -0.75]);
        assert_eq!(three(4, 8.0, &[-0.25, -8.0]), [0.0, -0.5, -0.25]);
        assert_eq!(add(bits(4, ToZero), 0.0, &[8.0, -8.0]).to_bits(), 0);
    }

    /// An accumulator with more bits loses them even if nothing is added.
    #[test]
    fn accumulators_are_cut() {
        let old = 1.0 + 2f64.powi(-13) + 2f64.powi(-14);
        assert_eq!(three(13, old, &[0.0]), [1.0 + 2f64.powi(-13), 1.0 + 2f64.powi(-13), old]);
        assert_eq!(three(13, -old, &[0.0]), [-1.0 - 2f64.powi(-13), -1.0 - 2f64.powi(-12), -old]);
        assert_eq!(three(14, old, &[0.0]), [old; 3]);
        assert_eq!(three(13, 0.0, &[0.0, 0.0]), [0.0; 3]);
    }

    #[test]
    fn subnormal_accumulators_have_the_least_exponent() {
        let least = 2f64.powi(-149);
        assert_eq!(three(13, least, &[0.0]), [0.0, 0.0, least]);
        assert_eq!(three(13, -least, &[0.0]), [0.0, -(2f64.powi(-139)), -least]);
        assert_eq!(three(25, least, &[0.0]), [least; 3]);
        // Products far below it, as scales produce, and one that is larger.
        let scaled = |value: f64, exponent: i32| product(value, 1.0).map(|x| x.scaled(2f64.powi(exponent)));
        let products = [scaled(1.0, -70), scaled(1.0, -75)].into_iter();
        assert_eq!(bits(13, ToZero).add(0.0, products.clone()), 0.0);
        assert_eq!(bits(13, Floor).add(least, [scaled(-1.0, -70)].into_iter()), -(2f64.powi(-139)));
        assert_eq!(bits(25, ToZero).add(0.0, products), 2f64.powi(-140));
    }

    #[test]
    fn scales_change_exponents_alone() {
        for (power, mode) in [(40, bits(4, ToZero)), (-50, bits(4, Floor))] {
            let scale = 2f64.powi(power);
            let products = [8.0, -0.75, 0.3125].map(|value| product(value, 1.0));
            let scaled = products.map(|[a, b]| [a.scaled(scale), b]);
            assert_eq!(mode.add(0.0, scaled.into_iter()), mode.add(0.0, products.into_iter()) * scale);
        }
        let [a, b] = product(1.0, 1.0);
        assert!(bits(4, Floor).add(0.0, [[a.scaled(f64::NAN), b]].into_iter()).is_nan());
    }

    #[test]
    fn infinities_and_nan_are_those_of_full_sums() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for (old, values) in [
            (0.0, vec![inf, 1.0]),
            (0.0, vec![-1.0, -inf]),
            (inf, vec![1.0]),
            (-inf, vec![-1.0, -inf]),
            (inf, vec![-inf]),
            (0.0, vec![inf, -inf]),
            (nan, vec![0.0]),
            (1.0, vec![1.0, nan]),
        ] {
            let [to_zero, floor, full] = three(13, old, &values);
            assert!(
                [to_zero, floor].iter().all(|sum| sum.to_bits() == full.to_bits() || (sum.is_nan() && full.is_nan()))
            );
            assert!(!full.is_finite(), "{old} {values:?}");
        }
        assert!(bits(13, ToZero).add(0.0, [product(0.0, inf)].into_iter()).is_nan());
    }

    /// Rows of a matrix use the same addition; wider types are added in full.
    #[test]
    fn rows_are_sums_of_their_elements() {
        let values = [8.0, -0.75, 0.4375, 3.0, 0.1875, -7.0];
        let factors = |ty| values.map(|value| Factor::new(value, ty));
        for ty in [ElementType::E4m3, ElementType::Bf16] {
            let a = &factors(ty)[..3];
            for mode in [bits(4, ToZero), bits(4, Floor), Accumulator::Full].map(|mode| mode.of([ty; 2])) {
                let mut d = [0.5, -100.0];
                let want = [0, 1].map(|row| {
                    mode.add(
                        d[row],
                        a.iter().copied().zip(factors(ty)[3 * row..][..3].iter().copied()).map(<[_; 2]>::from),
                    )
                });
                mode.add_row(&mut d, a, &Right::new(factors(ty).to_vec(), 3));
                assert_eq!(d, want, "{ty:?} {mode:?}");
                assert_eq!(mode == Accumulator::Full, d[0] == 0.5 + 64.0 + 0.5625 + 0.4375 * 0.4375, "{mode:?} {d:?}");
            }
        }
    }

    #[test]
    fn sums_that_would_not_be_exact_are_refused() {
        assert!(bits(0, Floor).check().is_err() && bits(41, Floor).check().is_err());
        assert!(bits(1, Floor).check().is_ok() && bits(40, Floor).check().is_ok());
    }
}
