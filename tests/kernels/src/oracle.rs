//! Products of two matrices in f64, and the sums of the magnitudes of their terms.
//!
//! ```text
//! want = Σ a·b          size = Σ |a·b|          a, b = value(code) · inv_scale
//! ```

use core::ops::Range;

use float8_kernels::reference::decode;

use crate::matrix::HostMatrix;

/// Shortest part of the contraction that has one scale.
const BLOCK: usize = 32;
const LANES: usize = 8;

/// One element of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Σ a·b
    pub want: f64,
    /// Σ |a·b|
    pub size: f64,
}

/// A contraction-major `[rows, k]` matrix of f32 values, with a scale for each `BLOCK` of a row.
#[derive(Clone, Debug)]
pub struct Factor {
    values: Vec<f32>,
    scales: Vec<f64>,
    pub(crate) shape: [usize; 2],
}

impl Factor {
    /// Values without scales.
    pub fn plain(values: &[f32], shape @ [rows, k]: [usize; 2]) -> Self {
        Self { values: values.to_vec(), scales: vec![1.0; rows * k.div_ceil(BLOCK)], shape }
    }

    /// Values of the codes with their scales.
    pub fn of(matrix: &HostMatrix) -> Self {
        let [rows, k] = matrix.shape;
        let scale = |row: usize, at: usize| f64::from(matrix.view().inv_scale(row, at));
        Self {
            values: matrix.codes.iter().map(|&code| decode(code, matrix.format)).collect(),
            scales: (0..rows).flat_map(|row| (0..k).step_by(BLOCK).map(move |at| scale(row, at))).collect(),
            shape: matrix.shape,
        }
    }

    /// Some rows, and a part of the contraction that begins at a `BLOCK`.
    pub fn part(&self, rows: impl Iterator<Item = usize> + Clone, cols: Range<usize>) -> Self {
        let (k, blocks) = (self.shape[1], self.shape[1].div_ceil(BLOCK));
        let own = cols.start / BLOCK..cols.end.div_ceil(BLOCK).max(cols.start / BLOCK);
        Self {
            values: rows.clone().flat_map(|row| &self.values[row * k..][cols.clone()]).copied().collect(),
            scales: rows.clone().flat_map(|row| &self.scales[row * blocks..][own.clone()]).copied().collect(),
            shape: [rows.count(), cols.len()],
        }
    }

    fn row(&self, row: usize) -> (&[f32], &[f64]) {
        let (k, blocks) = (self.shape[1], self.shape[1].div_ceil(BLOCK));
        (&self.values[row * k..][..k], &self.scales[row * blocks..][..blocks])
    }
}

/// `A [M, K] · B [N, K]ᵀ`, row-major, computed on all cores. Sums of 32 products in f64 are scaled
/// and added in f64.
pub fn products(a: &Factor, b: &Factor) -> Vec<Element> {
    let ([m, _], n) = (a.shape, b.shape[0]);
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let mut out = vec![Element { want: 0.0, size: 0.0 }; m * n];
    let share = m.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, out) in out.chunks_mut((share * n).max(1)).enumerate() {
            scope.spawn(move || {
                // Columns are the outer loop: a row of B is read once for all rows of A of this
                // thread.
                for col in 0..n {
                    for (i, out) in out.iter_mut().skip(col).step_by(n).enumerate() {
                        *out = dot(a.row(part * share + i), b.row(col));
                    }
                }
            });
        }
    });
    out
}

fn dot((a, a_scales): (&[f32], &[f64]), (b, b_scales): (&[f32], &[f64])) -> Element {
    let mut element = Element { want: 0.0, size: 0.0 };
    for (block, (a, b)) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).enumerate() {
        let (mut sums, mut sizes) = ([0f64; LANES], [0f64; LANES]);
        for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
            for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
                let term = f64::from(a) * f64::from(b);
                sums[i] += term;
                sizes[i] += term.abs();
            }
        }
        let scale = a_scales[block] * b_scales[block];
        element.want += sums.iter().sum::<f64>() * scale;
        element.size += sizes.iter().sum::<f64>() * scale.abs();
    }
    element
}

#[cfg(test)]
mod tests {
    use float8_kernels::reference::scaled_gemm_f64;
    use float8_kernels::{Format, Granularity};

    use super::*;
    use crate::matrix::Codes;

    /// Products equal the library's definition for all granularities, on some of the rows.
    #[test]
    fn products_are_the_definition() {
        let (m, n, k) = (133, 7, 300);
        for (i, left) in Granularity::ALL.into_iter().enumerate() {
            for (j, right) in Granularity::ALL.into_iter().enumerate() {
                let a = HostMatrix::new(Codes::Random, [m, k], Format::ALL[i % 2], left, 1);
                let b = HostMatrix::new(Codes::Random, [n, k], Format::ALL[j % 2], right, 2);
                let bias: Vec<f32> = (0..n).map(|i| i as f32 - 2.5).collect();
                let want = scaled_gemm_f64(&a.view(), &b.view(), Some(&bias));
                let size = scaled_gemm_f64(&a.magnitudes().view(), &b.magnitudes().view(), None);
                let rows = [132, 0, 5];
                let part = Factor::of(&a).part(rows.into_iter(), 0..k);
                for (place, got) in products(&part, &Factor::of(&b)).iter().enumerate() {
                    let at = rows[place / n] * n + place % n;
                    let sum = got.want + f64::from(bias[place % n]);
                    assert!((sum - want[at]).abs() <= 1e-12 * size[at], "{sum}, not {}", want[at]);
                    assert!((got.size - size[at]).abs() <= 1e-12 * size[at], "{got:?}, not {}", size[at]);
                }
            }
        }
    }
}
