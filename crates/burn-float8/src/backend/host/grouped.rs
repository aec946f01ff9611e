//! Grouped GEMM on the host: one GEMM per group.
use std::ops::Range;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, FloatDType};
use burn_std::Shape;
use float8_kernels::{GROUP_ALIGN, Granularity, Grouping};

use super::{GroupEnds, HostOperand, product, read_ints, transpose};

/// Rows of each group. Waits for the device. Ends are clamped to the rows and to their
/// predecessors.
pub(crate) fn ranges<B: Backend>(ends: &IntTensor<B>, m: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let range = |end: i64| {
        let end = usize::try_from(end).unwrap_or(0).clamp(start, m);
        core::mem::replace(&mut start, end)..end
    };
    read_ints::<B>(ends).into_iter().map(range).collect()
}

/// Product of each group.
pub(super) fn matmul<B: Backend>(
    [a, b]: [&HostOperand<Device<B>>; 2],
    GroupEnds { ends, grouping }: GroupEnds<IntTensor<B>>,
    shape: Shape,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let ([m, k], [rows_b, _]) = (a.matrix(), b.matrix());
    let zeros = |rows: usize, n: usize| B::float_zeros(Shape::from(vec![rows, n]), &a.device, dtype);
    let product = |a: &HostOperand<_>, b: &HostOperand<_>| {
        let shape = Shape::from(vec![a.matrix()[0], b.matrix()[0]]);
        product::<B>([a, b], None, shape, dtype)
    };
    let mut parts = vec![];
    match grouping {
        Grouping::Rows => {
            let ranges = ranges::<B>(&ends, m);
            let n = rows_b / ranges.len();
            let rest = m - ranges.last().map_or(0, |last| last.end);
            for (g, rows) in ranges.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                parts.push(product(&a.part(rows, 0..k), &b.part(g * n..(g + 1) * n, 0..k)));
            }
            if rest > 0 {
                parts.push(zeros(rest, n));
            }
        }
        Grouping::Contraction => {
            let mut start = 0;
            for range in ranges::<B>(&ends, k) {
                let part = start..range.end.max(start);
                start = range.end.next_multiple_of(GROUP_ALIGN);
                parts.push(match part.is_empty() {
                    true => zeros(m, rows_b),
                    false => product(&a.part(0..m, part.clone()), &b.part(0..rows_b, part)),
                });
            }
        }
    }
    B::float_reshape(B::float_cat(parts, 0), shape)
}

impl<D: Clone> HostOperand<D> {
    /// Operand of some rows and a part of the contraction. The part begins at a multiple of
    /// [`GROUP_ALIGN`].
    fn part(&self, rows: Range<usize>, k: Range<usize>) -> Self {
        let inv_scales = match self.granularity {
            Granularity::Tensor => self.inv_scales.clone(),
            granularity => {
                let [all_rows, all_k] = self.matrix();
                let [high, wide] = granularity.group(all_rows, all_k);
                let ([_, stride], first) = (self.scale_dims(), k.start / wide);
                let [_, blocks] = granularity.scale_dims(1, k.len());
                let of = |(r, block): (usize, usize)| {
                    let (r, block) = (r / high, first + block);
                    if self.transposed { block * stride + r } else { r * stride + block }
                };
                let places = rows.clone().flat_map(|r| (0..blocks).map(move |block| (r, block)));
                let places: Vec<_> = places.map(of).collect();
                let places = if self.transposed { transpose(&places, [rows.len(), blocks]) } else { places };
                Arc::new(self.inv_scales.at(places.into_iter()))
            }
        };
        let [stored_rows, stored_cols] = if self.transposed { [k, rows] } else { [rows, k] };
        let codes =
            stored_rows.clone().flat_map(|r| self.codes[r * self.dims[1]..][stored_cols.clone()].iter().copied());
        Self {
            codes: Arc::new(codes.collect::<Vec<_>>().into()),
            dims: [stored_rows.len(), stored_cols.len()],
            inv_scales,
            // Rows may begin inside a square, so each gets its own scales.
            granularity: match self.granularity {
                Granularity::Block128x128 => Granularity::Block1x128,
                granularity => granularity,
            },
            ..self.clone()
        }
    }
}
