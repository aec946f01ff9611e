//! Compares outputs of GEMMs with sums in f64, for all elements or a sample.
//!
//! An element passes if `|got - want| ≤ bound · Σ |a·b| + rounding`. It must be NaN or infinite
//! exactly where the f64 product is. `bound` is
//! [`GemmPath::error_bound`](float8_kernels::GemmPath::error_bound), and `rounding` is half a step
//! of a 16-bit output. For codes that [are exact](crate::Codes::is_exact) every bit must be right.

use cubecl::ir::StorageType;
use float8_kernels::GemmConfig;

use crate::Failure;
use crate::case::wrong;
use crate::data::{BF16, F16, Random, to_dtype};
use crate::oracle::{Element, Factor, products};

/// Sums move to f32 registers after every 128 products of the contraction.
pub const PRECISE: GemmConfig = GemmConfig { use_fast_accum: false, emulate: false };
/// Sums stay in the tensor core's accumulators.
pub const FAST: GemmConfig = GemmConfig { use_fast_accum: true, emulate: false };
/// f32 units only.
pub const EMULATE: GemmConfig = GemmConfig { use_fast_accum: false, emulate: true };

/// Largest M · N · K for which the host computes the whole product.
pub(crate) const MAX_PRODUCTS: usize = 1 << 31;

/// Elements of `A · Bᵀ` in f64, with their rows and columns: all of them, or all elements of sampled
/// rows and of sampled columns, which include the edges of tiles.
pub(crate) fn elements(a: &Factor, b: &Factor, full: bool) -> Vec<([usize; 2], Element)> {
    let [all_rows, all_cols] = [a, b].map(|factor| (0..factor.shape[0]).collect::<Vec<_>>());
    let of = |rows: &[usize], cols: &[usize]| {
        let part = |factor: &Factor, rows: &[usize]| factor.part(rows.iter().copied(), 0..factor.shape[1]);
        let elements = products(&part(a, rows), &part(b, cols)).into_iter().enumerate();
        elements.map(|(i, element)| ([rows[i / cols.len()], cols[i % cols.len()]], element)).collect::<Vec<_>>()
    };
    if full {
        return of(&all_rows, &all_cols);
    }
    [of(&sample(all_rows.len()), &all_cols), of(&all_rows, &sample(all_cols.len()))].concat()
}

/// Samples rows: both ends, both sides of the edges of tiles, and some between.
fn sample(rows: usize) -> Vec<usize> {
    let mut random = Random::new(rows as u64);
    let ends = [rows - 1, rows.saturating_sub(2), rows / 128 * 128, (rows - 1) / 256 * 256, rows / 2];
    let mut sample = [&[0, 1, 63, 64, 127, 128, 191, 192, 255, 256, 257], &ends[..]].concat();
    sample.extend((0..8).map(|_| random.below(rows)));
    sample.retain(|&row| row < rows);
    sample.sort_unstable();
    sample.dedup();
    sample
}

/// Half a step of `dtype` at `x`: the largest error of rounding the f32 result.
fn rounding(x: f64, dtype: StorageType) -> f64 {
    if dtype == F16 {
        (x.abs() * 2f64.powi(-11)).max(2f64.powi(-25))
    } else if dtype == BF16 {
        x.abs() * 2f64.powi(-8)
    } else {
        0.0
    }
}

/// Running result of a comparison.
pub(crate) struct Comparison {
    /// Whether every bit must be right.
    exact: bool,
    /// Dtype of the output.
    out: StorageType,
    elements: usize,
    failures: usize,
    first: Option<String>,
    worst: f64,
}

impl Comparison {
    pub(crate) fn new(exact: bool, out: StorageType) -> Self {
        Self { exact, out, elements: 0, failures: 0, first: None, worst: 0.0 }
    }

    /// Compares the element at `place`. It may be wrong by `bound · size` plus the rounding to the
    /// output.
    pub(crate) fn add(&mut self, place: [usize; 2], got: f32, Element { want, size }: Element, bound: f64) {
        let got = f64::from(got);
        let share = |right: bool| if right { 0.0 } else { f64::INFINITY };
        let error = if !want.is_finite() {
            share((want.is_nan() && got.is_nan()) || got == want)
        } else if self.exact {
            share(got == f64::from(to_dtype(&[want as f32], self.out).1[0]))
        } else {
            let allowed = bound * size + rounding(want, self.out);
            let error = (got - want).abs();
            if error == 0.0 {
                0.0
            } else if error <= allowed {
                error / allowed
            } else {
                f64::INFINITY
            }
        };
        self.elements += 1;
        if error > 1.0 {
            let [row, col] = place;
            self.failures += 1;
            self.first.get_or_insert_with(|| format!("[{row}, {col}] is {got:e}, not {want:e} (terms {size:e})"));
        }
        self.worst = self.worst.max(error);
    }

    /// Largest error as a share of the allowed error.
    pub(crate) fn finish(self) -> Result<f64, Failure> {
        match self.first {
            Some(first) => Err(wrong!("{} of {} wrong: {first}", self.failures, self.elements)),
            None => Ok(self.worst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A NaN or an infinity must not be replaced by another value.
    #[test]
    fn repairs_are_noticed() {
        let passes = |got: [f32; 2]| {
            let mut comparison = Comparison::new(false, crate::data::F32);
            for (i, want) in [f64::NAN, f64::INFINITY].into_iter().enumerate() {
                comparison.add([i, 0], got[i], Element { want, size: 1.0 }, 1e-3);
            }
            comparison.finish().is_ok()
        };
        assert!(passes([f32::NAN, f32::INFINITY]));
        for wrong in [[0.0, f32::INFINITY], [f32::NAN, 3e38], [f32::NAN, f32::NEG_INFINITY], [f32::NAN, f32::NAN]] {
            assert!(!passes(wrong), "{wrong:?}");
        }
    }

    /// The smallest value of each dtype must fail where a zero is expected.
    #[test]
    fn zeros_are_exact() {
        for (out, least) in [(crate::data::F32, 1e-45), (BF16, 9.3e-41), (F16, 2f32.powi(-24))] {
            for exact in [false, true] {
                let passes = |got: f32| {
                    let mut comparison = Comparison::new(exact, out);
                    comparison.add([0, 0], got, Element { want: 0.0, size: 0.0 }, 1e-3);
                    comparison.finish().is_ok()
                };
                assert!(passes(0.0) && passes(-0.0) && !passes(least) && !passes(f32::NAN), "{exact} {out}");
            }
        }
    }

    /// Samples of any size contain both ends and stay inside.
    #[test]
    fn samples_are_rows() {
        for rows in [1, 2, 64, 129, 4096] {
            let sample = sample(rows);
            assert!(sample.contains(&0) && sample.contains(&(rows - 1)), "{rows}");
            assert!(sample.is_sorted_by(|a, b| a < b) && sample.iter().all(|&row| row < rows), "{rows}");
        }
    }
}
