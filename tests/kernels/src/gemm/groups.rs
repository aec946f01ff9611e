//! Groups of a grouped GEMM: along the rows or the contraction, of any size, with empty groups and
//! elements in no group.
//!
//! Rows in no group and products of empty groups must be zero, even next to NaN.

use core::ops::Range;

use cubecl::prelude::*;
use float8_kernels::{GROUP_ALIGN, Grouping, Groups};

use super::Gemm;
use crate::case::kebab;
use crate::matrix::HostMatrix;

/// Sizes of groups, and the length after the last group.
pub type GroupSizes = (&'static [usize], usize);

/// Groups of a grouped GEMM.
#[derive(Clone, Copy, Debug)]
pub struct GroupsCase {
    /// Axis that the groups divide.
    pub grouping: Grouping,
    /// Sizes of the groups.
    pub sizes: &'static [usize],
    /// Whether some ends are past the axis or below the previous end.
    pub wild: bool,
}

/// Part of a product.
pub(super) struct Part {
    /// Its first row in the output, whose matrices are stacked.
    pub(super) row: usize,
    /// Rows of A.
    pub(super) a: Range<usize>,
    /// Rows of B.
    pub(super) b: Range<usize>,
    /// Part of the contraction. The output is zero if it is empty.
    pub(super) k: Range<usize>,
}

impl GroupsCase {
    /// Ends of the groups. Along the contraction, groups begin at multiples of [`GROUP_ALIGN`]. An
    /// empty group may end there or at the end of the previous group.
    fn ends(self) -> Vec<usize> {
        let mut last = 0usize;
        let end = |(g, size): (usize, &usize)| {
            if self.grouping == Grouping::Contraction && (*size > 0 || g % 2 == 0) {
                last = last.next_multiple_of(GROUP_ALIGN);
            }
            last += size;
            last
        };
        self.sizes.iter().enumerate().map(end).collect()
    }

    /// Length of the axis.
    const fn axis(self, [m, _, k]: [usize; 3]) -> usize {
        if matches!(self.grouping, Grouping::Rows) { m } else { k }
    }

    /// Ends of the groups, as passed to the kernel.
    fn given_ends(self, shape: [usize; 3]) -> Vec<i32> {
        let ends = self.ends();
        let last = self.sizes.iter().rposition(|size| *size > 0);
        let end = |(g, end): (usize, &usize)| match self.wild {
            true if self.sizes[g] == 0 => [0, i32::MIN, -1][g / 2 % 3],
            true if Some(g) == last && ends.last() == Some(&self.axis(shape)) => i32::MAX,
            _ => *end as i32,
        };
        ends.iter().enumerate().map(end).collect()
    }

    fn spans(self, shape: [usize; 3]) -> Vec<Range<usize>> {
        self.grouping.spans(&self.given_ends(shape), self.axis(shape))
    }

    pub(super) fn name(self, shape: [usize; 3]) -> String {
        let runs = self.sizes.chunk_by(|a, b| a == b).map(|run| match run {
            [size] => size.to_string(),
            run => format!("{}*{}", run.len(), run[0]),
        });
        let after = self.axis(shape) - self.ends().last().unwrap_or(&0);
        let wild = if self.wild { " wild" } else { "" };
        format!("{} {}:{after}{wild}", kebab(&self.grouping), runs.collect::<Vec<_>>().join("+"))
    }

    pub(super) fn upload<R: Runtime>(self, client: &ComputeClient<R>, shape: [usize; 3]) -> Groups {
        let ends = client.create_from_slice(i32::as_bytes(&self.given_ends(shape)));
        Groups { ends, count: self.sizes.len(), grouping: self.grouping }
    }

    /// Number of matrices of B.
    pub(super) const fn matrices_of_b(self) -> usize {
        if matches!(self.grouping, Grouping::Rows) { self.sizes.len() } else { 1 }
    }

    /// Number of matrices of the output.
    pub(super) const fn products(self) -> usize {
        if matches!(self.grouping, Grouping::Rows) { 1 } else { self.sizes.len() }
    }

    /// Puts NaN or infinity into the first, the last and an empty group, and into elements in no
    /// group. Along the contraction, codes up to the next group become zero.
    pub(super) fn change(self, gemm: &Gemm, matrices: &mut [HostMatrix; 2]) {
        let ([m, n, k], spans) = (gemm.shape, self.spans(gemm.shape));
        let is_full = |span: &Range<usize>| !span.is_empty();
        if let (Some(first), Some(last)) = (spans.iter().position(is_full), spans.iter().rposition(is_full)) {
            let of_empty = spans.iter().position(Range::is_empty).unwrap_or(first) * n;
            let (start, end) = (spans[last].start, spans[first].end);
            // Operand, row and column.
            let places = match self.grouping {
                Grouping::Rows => {
                    vec![[0, start, k / 2], [0, m - 1, 0], [1, first * n + n - 1, k - 1], [1, of_empty, 0]]
                }
                Grouping::Contraction => vec![[0, m - 1, end - 1], [0, 0, k - 1], [1, n / 2, start]],
            };
            for [side, row, col] in places {
                if let Some(code) = gemm.codes.special(gemm.formats[side]) {
                    matrices[side].codes[row * k + col] = code;
                }
            }
        }
        if self.grouping == Grouping::Contraction {
            // Columns after the last group and its padding are in no group.
            let end = spans.last().map_or(0, |last| last.end).next_multiple_of(GROUP_ALIGN).min(k);
            let cols: Vec<_> = (0..end).filter(|col| !spans.iter().any(|span| span.contains(col))).collect();
            for row in matrices.iter_mut().flat_map(|matrix| matrix.codes.chunks_exact_mut(k)) {
                cols.iter().for_each(|&col| row[col] = 0);
            }
        }
    }
}

impl Gemm {
    /// [`new`](Self::new) with groups of these sizes. `[x, y]` is N and K; with groups along the
    /// contraction, M and N.
    pub fn grouped(grouping: Grouping, (sizes, after): GroupSizes, [x, y]: [usize; 2]) -> Self {
        let groups = GroupsCase { grouping, sizes, wild: false };
        let axis = groups.ends().last().unwrap_or(&0) + after;
        let shape = if grouping == Grouping::Rows { [axis, x, y] } else { [x, y, axis] };
        Self { groups: Some(groups), ..Self::new(shape) }
    }

    /// Parts of the product that together are the output.
    pub(super) fn parts(&self) -> Vec<Part> {
        let [m, n, k] = self.shape;
        let Some(groups) = self.groups else { return vec![Part { row: 0, a: 0..m, b: 0..n, k: 0..k }] };
        let spans = groups.spans(self.shape);
        let end = spans.last().map_or(0, |last| last.end);
        let part = |(g, span): (usize, Range<usize>)| match groups.grouping {
            Grouping::Rows => Part { row: span.start, a: span, b: g * n..(g + 1) * n, k: 0..k },
            Grouping::Contraction => Part { row: g * m, a: 0..m, b: 0..n, k: span },
        };
        let mut parts: Vec<_> = spans.into_iter().enumerate().map(part).collect();
        if groups.grouping == Grouping::Rows {
            parts.push(Part { row: end, a: end..m, b: 0..n, k: 0..0 });
        }
        parts.retain(|part| !part.a.is_empty());
        parts
    }
}

#[cfg(test)]
mod tests {
    use float8_kernels::Granularity;
    use float8_kernels::reference::grouped_scaled_gemm_f64;

    use super::super::grouped_cases::{GROUPINGS, MIXED, SIZES};
    use super::*;
    use crate::compare::elements;
    use crate::matrix::Codes;
    use crate::oracle::Factor;

    /// Products of the parts equal the library's definition, also for impossible ends.
    #[test]
    fn parts_are_the_definition() {
        let sizes = [MIXED, (MIXED.0, 0), (&[3; 24], 1), (&[0, 0], 33), (&[300, 5, 260], 0)];
        for (grouping, sizes) in GROUPINGS.into_iter().flat_map(|grouping| sizes.map(|sizes| (grouping, sizes))) {
            for (wild, granularity) in [false, true].into_iter().flat_map(|wild| Granularity::ALL.map(|g| (wild, g))) {
                let new = Gemm::grouped(grouping, sizes, [9, 14]);
                let groups = GroupsCase { grouping, sizes: sizes.0, wild };
                let case = Gemm { groups: Some(groups), granularities: [granularity; 2], ..new };
                let ([a, b], n) = (case.matrices(), case.shape[1]);
                let ends = groups.given_ends(case.shape);
                let want = grouped_scaled_gemm_f64(&a.view(), &b.view(), &ends, grouping);
                let size = grouped_scaled_gemm_f64(&a.magnitudes().view(), &b.magnitudes().view(), &ends, grouping);
                let [a, b] = [&a, &b].map(Factor::of);
                for part in case.parts() {
                    let (left, right) = (a.part(part.a, part.k.clone()), b.part(part.b, part.k));
                    for ([row, col], element) in elements(&left, &right, true) {
                        let at = (part.row + row) * n + col;
                        let error = (element.want - want[at]).abs();
                        assert!(error <= 1e-12 * size[at], "{sizes:?} {wild} {granularity} {at}: {element:?}");
                    }
                }
            }
        }
    }

    /// Every output row is in exactly one part. NaN reaches some elements but not all.
    #[test]
    fn parts_are_the_output() {
        for (grouping, sizes) in GROUPINGS.into_iter().flat_map(|grouping| SIZES.map(|sizes| (grouping, sizes))) {
            let case = Gemm { codes: Codes::NanCode, ..Gemm::grouped(grouping, sizes, [20, 30]) };
            let ([m, n, _], [a, b]) = (case.shape, case.matrices().each_ref().map(Factor::of));
            let parts = case.parts();
            let rows: Vec<_> = parts.iter().flat_map(|part| part.row..part.row + part.a.len()).collect();
            let matrices = if grouping == Grouping::Rows { 1 } else { sizes.0.len() };
            assert_eq!(rows, (0..m * matrices).collect::<Vec<_>>(), "{:?}", sizes.0);
            let full: Vec<_> = parts.into_iter().filter(|part| !part.k.is_empty()).collect();
            assert_eq!(full.len(), sizes.0.iter().filter(|size| **size > 0).count());
            let has_groups = !full.is_empty();
            let products = full
                .into_iter()
                .flat_map(|part| elements(&a.part(part.a, part.k.clone()), &b.part(part.b, part.k), true));
            let nan = products.filter(|(_, element)| element.want.is_nan()).count();
            assert_eq!(nan > 0, has_groups, "{grouping:?} {:?}", sizes.0);
            assert!(nan < rows.len() * n, "{grouping:?} {:?}", sizes.0);
        }
    }
}
