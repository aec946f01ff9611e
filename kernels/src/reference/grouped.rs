//! Grouped GEMM in f64.

use core::ops::Range;

use super::HostOperand;
use crate::Grouping;

/// Products of each group, as defined by [`grouped_scaled_gemm`](crate::grouped_scaled_gemm) and
/// [`Groups::ends`](crate::Groups::ends): `[M, N]` for [`Grouping::Rows`], `[G, M, N]` for
/// [`Grouping::Contraction`].
///
/// # Panics
/// If the contraction lengths differ, codes or scales are too short, or the rows of B do not divide
/// among the groups.
pub fn grouped_scaled_gemm_f64(a: &HostOperand<'_>, b: &HostOperand<'_>, ends: &[i32], grouping: Grouping) -> Vec<f64> {
    assert_eq!(a.k, b.k, "grouped_scaled_gemm: contraction lengths");
    let (left, right, k) = (a.values(), b.values(), a.k);
    let product = |i: usize, j: usize, along: &Range<usize>| -> f64 {
        left[i * k..][along.clone()].iter().zip(&right[j * k..][along.clone()]).map(|(x, y)| x * y).sum()
    };
    match grouping {
        Grouping::Rows => {
            assert_eq!(b.rows % ends.len(), 0, "grouped_scaled_gemm: rows of B in {} groups", ends.len());
            let n = b.rows / ends.len();
            let mut out = vec![0.0; a.rows * n];
            for (g, rows) in grouping.spans(ends, a.rows).into_iter().enumerate() {
                for (i, j) in rows.flat_map(|i| (0..n).map(move |j| (i, j))) {
                    out[i * n + j] = product(i, g * n + j, &(0..k));
                }
            }
            out
        }
        Grouping::Contraction => {
            let pairs = || (0..a.rows).flat_map(|i| (0..b.rows).map(move |j| (i, j)));
            let spans = grouping.spans(ends, k);
            spans.iter().flat_map(|along| pairs().map(move |(i, j)| product(i, j, along))).collect()
        }
    }
}
