//! The grouped GEMM, plain and in f64.

use core::ops::Range;

use super::HostOperand;
use crate::{GROUP_ALIGN, Grouping};

/// Products of each group as [`grouped_scaled_gemm`](crate::grouped_scaled_gemm) defines them, with `ends` taken as
/// [`Groups::ends`](crate::Groups::ends) says: `[M, N]` for [`Grouping::Rows`], `[G, M, N]` for [`Grouping::Contraction`].
///
/// # Panics
/// If the contraction lengths differ, codes or scales are too short, or the rows of B are no multiple of the groups.
pub fn grouped_scaled_gemm_f64(a: &HostOperand<'_>, b: &HostOperand<'_>, ends: &[i32], grouping: Grouping) -> Vec<f64> {
    assert_eq!(a.k, b.k, "grouped_scaled_gemm: contraction lengths");
    let (left, right, k) = (a.values(), b.values(), a.k);
    let product = |i: usize, j: usize, along: &Range<usize>| -> f64 {
        left[i * k..][along.clone()].iter().zip(&right[j * k..][along.clone()]).map(|(x, y)| x * y).sum()
    };
    let spans = |limit: usize, align: usize| {
        let mut last = 0usize;
        let span = move |&end: &i32| {
            let start = last.next_multiple_of(align).min(limit);
            last = last.max(usize::try_from(end).unwrap_or(0).min(limit));
            start..last.max(start)
        };
        ends.iter().map(span)
    };
    match grouping {
        Grouping::Rows => {
            assert_eq!(b.rows % ends.len(), 0, "grouped_scaled_gemm: rows of B in {} groups", ends.len());
            let n = b.rows / ends.len();
            let mut out = vec![0.0; a.rows * n];
            for (g, rows) in spans(a.rows, 1).enumerate() {
                for (i, j) in rows.flat_map(|i| (0..n).map(move |j| (i, j))) {
                    out[i * n + j] = product(i, g * n + j, &(0..k));
                }
            }
            out
        }
        Grouping::Contraction => {
            let pairs = || (0..a.rows).flat_map(|i| (0..b.rows).map(move |j| (i, j)));
            let all =
                spans(k, GROUP_ALIGN).map(|along| pairs().map(|(i, j)| product(i, j, &along)).collect::<Vec<_>>());
            all.flatten().collect()
        }
    }
}
