//! GEMM and grouped GEMM in f64 against explicit sums.

use core::ops::Range;

use float8_kernels::{Format, Granularity, Grouping, reference};

use crate::common::HostMatrix;

/// Compares the f64 reference with explicit sums that look up each element's scale by row and
/// column.
#[test]
fn the_reference_is_the_definition() {
    let (m, n, k) = (131, 3, 260);
    let scale_at = |matrix: &HostMatrix, r: usize, c: usize| {
        let place = match matrix.granularity {
            Granularity::Tensor => 0,
            Granularity::Row => r,
            Granularity::Block1x128 => r * 3 + c / 128,
            Granularity::Block128x128 => r / 128 * 3 + c / 128,
            Granularity::Block1x32 => r * 9 + c / 32,
        };
        f64::from(matrix.inv_scales[place].get())
    };
    let value = |matrix: &HostMatrix, r: usize, c: usize| {
        f64::from(reference::decode(matrix.codes[r * k + c], matrix.format)) * scale_at(matrix, r, c)
    };
    for left in Granularity::ALL {
        for right in Granularity::ALL {
            let a = HostMatrix::random([m, k], Format::E4m3, left, 43);
            let b = HostMatrix::random([n, k], Format::E5m2, right, 44);
            let got = reference::scaled_gemm_f64(&a.view(), &b.view(), Some(&[1.0, -2.0, 0.5]));
            for (i, got) in got.iter().enumerate() {
                let (r, c) = (i / n, i % n);
                let terms: Vec<f64> = (0..k).map(|j| value(&a, r, j) * value(&b, c, j)).collect();
                let want = terms.iter().sum::<f64>() + [1.0, -2.0, 0.5][c];
                let size = terms.iter().map(|term| term.abs()).sum::<f64>();
                assert!((got - want).abs() <= 1e-12 * size, "{left} by {right} [{r}, {c}]: {got}, not {want}");
            }
        }
    }
}

/// Ends beyond the axis, or below the previous end or zero, give the spans listed here. The scale
/// of each element is the one of its position in the operand.
#[test]
fn groups_are_sums_of_their_own() {
    type Spans<'a> = &'a [Range<usize>];
    let cases: [(Grouping, &[i32], Spans<'_>); 5] = [
        (Grouping::Rows, &[3, 7, 7, 10], &[0..3, 3..7, 7..7, 7..10]),
        (Grouping::Rows, &[4, 2, 100], &[0..4, 4..4, 4..12]),
        (Grouping::Rows, &[i32::MIN, 5, -1], &[0..0, 0..5, 5..5]),
        (Grouping::Contraction, &[20, 10, 1000], &[0..20, 128..128, 128..300]),
        (Grouping::Contraction, &[-7, 130, 280], &[0..0, 0..130, 256..280]),
    ];
    let (m, n, k) = (12, 2, 300);
    for ((grouping, ends, spans), granularity) in cases.into_iter().flat_map(|case| Granularity::ALL.map(|g| (case, g)))
    {
        let of_rows = grouping == Grouping::Rows;
        let a = HostMatrix::random([m, k], Format::E4m3, granularity, 45);
        let b = HostMatrix::random([if of_rows { n * ends.len() } else { n }, k], Format::E5m2, granularity, 46);
        // Products with ones give the scaled values of each operand.
        let values = |matrix: &HostMatrix| {
            let ones = |at: usize| {
                let mut one = HostMatrix::random([1, k], Format::E4m3, Granularity::Tensor, 47);
                one.codes.fill(0);
                one.codes[at] = reference::encode(1.0, Format::E4m3);
                one.inv_scales.fill(float8_kernels::InvScale::new(1.0));
                reference::scaled_gemm_f64(&matrix.view(), &one.view(), None)
            };
            (0..k).map(ones).collect::<Vec<_>>()
        };
        // By element of the contraction, then by row.
        let (left, right) = (values(&a), values(&b));
        let mut want = vec![0.0; if of_rows { m * n } else { ends.len() * m * n }];
        for (g, span) in spans.iter().enumerate() {
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                if of_rows && span.contains(&i) {
                    want[i * n + j] = (0..k).map(|c| left[c][i] * right[c][g * n + j]).sum();
                } else if !of_rows {
                    want[(g * m + i) * n + j] = span.clone().map(|c| left[c][i] * right[c][j]).sum();
                }
            }
        }
        let got = reference::grouped_scaled_gemm_f64(&a.view(), &b.view(), ends, grouping);
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{ends:?} {granularity} {i}: {got}, not {want}");
        }
    }
}
