//! Product of two FP8 matrices in f64, and the sum of the magnitudes of its terms.
//!
//! ```text
//! want = Σ a·b          size = Σ |a·b|          a, b = value(code) · inv_scale
//! ```

use float8_kernels::reference::decode;

use crate::matrix::HostMatrix;

/// Shortest part of the contraction that has one scale.
const BLOCK: usize = 32;
const LANES: usize = 8;

/// One element of the product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Element {
    pub(crate) want: f64,
    pub(crate) size: f64,
}

/// Rows `rows` of `A [M, K] · B [N, K]ᵀ`, row-major, computed on all cores. Sums of 32 products in
/// f64 are scaled and added in f64.
pub(crate) fn product(a: &HostMatrix, b: &HostMatrix, rows: &[usize]) -> Vec<Element> {
    let ([_, k], n) = (a.shape, b.shape[0]);
    let right = values(b, &(0..n).collect::<Vec<_>>());
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let mut out = vec![Element { want: 0.0, size: 0.0 }; rows.len() * n];
    let share = rows.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (out, rows) in out.chunks_mut(share * n).zip(rows.chunks(share)) {
            let right = &right;
            scope.spawn(move || {
                let left = values(a, rows);
                // Columns are the outer loop: a row of B is read once for all rows of A of this
                // thread.
                for col in 0..n {
                    for (i, &row) in rows.iter().enumerate() {
                        let scale = |at| f64::from(a.inv_scale(row, at)) * f64::from(b.inv_scale(col, at));
                        out[i * n + col] = dot(&left[i * k..][..k], &right[col * k..][..k], scale);
                    }
                }
            });
        }
    });
    out
}

/// Values of the codes of these rows, without scales.
fn values(matrix: &HostMatrix, rows: &[usize]) -> Vec<f32> {
    let k = matrix.shape[1];
    let codes = rows.iter().flat_map(|row| &matrix.codes[row * k..][..k]);
    codes.map(|&code| decode(code, matrix.format)).collect()
}

fn dot(a: &[f32], b: &[f32], scale: impl Fn(usize) -> f64) -> Element {
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
        let scale = scale(block * BLOCK);
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
                let want = scaled_gemm_f64(&a.view(), &b.view(), None);
                let size = scaled_gemm_f64(&a.magnitudes().view(), &b.magnitudes().view(), None);
                let rows = [132, 0, 5];
                for (place, got) in product(&a, &b, &rows).iter().enumerate() {
                    let at = rows[place / n] * n + place % n;
                    assert!((got.want - want[at]).abs() <= 1e-12 * size[at], "{got:?}, not {}", want[at]);
                    assert!((got.size - size[at]).abs() <= 1e-12 * size[at], "{got:?}, not {}", size[at]);
                }
            }
        }
    }
}
