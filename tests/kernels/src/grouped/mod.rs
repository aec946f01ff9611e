//! The grouped GEMM: groups of any size along the rows or the contraction, with empty groups and
//! elements in no group.
//!
//! [`compare`](crate::compare) defines the allowed error. Each group is compared with sums of its
//! own operands, so a leak between groups fails. Rows in no group and products of empty groups must
//! be zero, even next to NaN.

mod cases;

use core::ops::Range;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Format, GROUP_ALIGN, GemmConfig, GemmPath, Granularity, Grouping, Groups, gemm_path, grouped_scaled_gemm,
};

use crate::Failure;
use crate::case::{Cases, kebab, wrong};
use crate::compare::{Comparison, EMULATE, Expected, MAX_PRODUCTS, PRECISE};
use crate::data::{F32, from_dtype};
use crate::device::{poison, read};
use crate::matrix::{Codes, HostMatrix};

const GROUPINGS: [Grouping; 2] = [Grouping::Rows, Grouping::Contraction];

/// Sizes of groups, and the length after the last group.
pub type GroupSizes = (&'static [usize], usize);

/// A grouped GEMM with its operands and output.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm {
    /// Axis that the groups divide.
    pub grouping: Grouping,
    /// Sizes of the groups.
    pub sizes: GroupSizes,
    /// N and K; with groups along the contraction, M and N.
    pub rest: [usize; 2],
    /// Formats of A and B.
    pub formats: [Format; 2],
    /// Granularities of A and B.
    pub granularities: [Granularity; 2],
    /// Contents of the operands.
    pub codes: Codes,
    /// Dtype of the output.
    pub out: StorageType,
    /// Whether some ends are past the axis or below the previous end.
    pub wild: bool,
    /// Options of the GEMM.
    pub config: GemmConfig,
}

impl GroupedGemm {
    /// Random e4m3 operands with one scale for each tensor, an f32 output, and [`PRECISE`].
    pub fn new(grouping: Grouping, sizes: GroupSizes, rest: [usize; 2]) -> Self {
        Self {
            grouping,
            sizes,
            rest,
            formats: [Format::E4m3; 2],
            granularities: [Granularity::Tensor; 2],
            codes: Codes::Random,
            out: F32,
            wild: false,
            config: PRECISE,
        }
    }

    fn path<R: Runtime>(&self, client: &ComputeClient<R>) -> GemmPath {
        gemm_path(client, self.granularities, self.config)
    }

    fn name<R: Runtime>(&self, client: &ComputeClient<R>) -> String {
        let Self { sizes: (sizes, after), formats: [a, b], granularities: [left, right], codes, out, .. } = self;
        let [m, n, k] = self.shape();
        let axis = kebab(&self.grouping);
        let runs = sizes.chunk_by(|a, b| a == b).map(|run| match run {
            [size] => size.to_string(),
            run => format!("{}*{}", run.len(), run[0]),
        });
        let sizes = runs.collect::<Vec<_>>().join("+");
        let wild = if self.wild { " wild" } else { "" };
        let fast = if self.config.use_fast_accum { " fast" } else { "" };
        let path = self.path(client);
        format!(
            "grouped_gemm {axis} {sizes}:{after}{wild} {m}x{n}x{k} {a},{b} {left},{right} {codes} {out} {path}{fast}"
        )
    }

    /// Range of each group. Along the contraction, groups begin at multiples of [`GROUP_ALIGN`]. An
    /// empty group may end there or at the end of the previous group.
    fn spans(&self) -> Vec<Range<usize>> {
        let align = match self.grouping {
            Grouping::Rows => 1,
            Grouping::Contraction => GROUP_ALIGN,
        };
        let mut last = 0usize;
        let span = |(g, size): (usize, &usize)| {
            let start = if *size == 0 && g % 2 == 1 { last } else { last.next_multiple_of(align) };
            last = start + size;
            start..last
        };
        self.sizes.0.iter().enumerate().map(span).collect()
    }

    /// M, N and K.
    fn shape(&self) -> [usize; 3] {
        let end = self.spans().last().map_or(0, |last| last.end);
        let (along, [x, y]) = (end + self.sizes.1, self.rest);
        match self.grouping {
            Grouping::Rows => [along, x, y],
            Grouping::Contraction => [x, y, along],
        }
    }

    /// Ends of the groups, as passed to the kernel.
    fn ends(&self) -> Vec<u32> {
        let spans = self.spans();
        let last = spans.iter().rposition(|span| !span.is_empty());
        let end = |(g, span): (usize, &Range<usize>)| match self.wild {
            // Below the previous end or, as a signed number, below 0.
            true if span.is_empty() => [0, 1 << 31, u32::MAX][g / 2 % 3],
            true if Some(g) == last && self.sizes.1 == 0 => i32::MAX as u32,
            _ => span.end as u32,
        };
        spans.iter().enumerate().map(end).collect()
    }

    fn matrices(&self) -> [HostMatrix; 2] {
        let [m, n, k] = self.shape();
        let rows_b = match self.grouping {
            Grouping::Rows => n * self.sizes.0.len(),
            Grouping::Contraction => n,
        };
        let matrix = |i: usize, rows: usize| {
            HostMatrix::new(self.codes, [rows, k], self.formats[i], self.granularities[i], 61 + i as u64)
        };
        let mut matrices = [matrix(0, m), matrix(1, rows_b)];
        self.spoil(&mut matrices);
        if self.grouping == Grouping::Contraction {
            // Zeros up to the next group. Columns after the last group and its padding are in no
            // group.
            let spans = self.spans();
            let end = spans.last().map_or(0, |last| last.end).next_multiple_of(GROUP_ALIGN);
            let between = |col: usize| col < end && !spans.iter().any(|span| span.contains(&col));
            let cols: Vec<_> = (0..k).filter(|col| between(*col)).collect();
            for row in matrices.iter_mut().flat_map(|matrix| matrix.codes.chunks_exact_mut(k)) {
                cols.iter().for_each(|&col| row[col] = 0);
            }
        }
        matrices
    }

    /// Puts NaN or infinity into the first, the last and an empty group, and into elements in no
    /// group.
    fn spoil(&self, [a, b]: &mut [HostMatrix; 2]) {
        let code = |matrix: &HostMatrix| match (self.codes, matrix.format) {
            (Codes::NanCode, _) => Some(0xff),
            (Codes::InfCode, Format::E5m2) => Some(0xfc),
            _ => None,
        };
        let put = |matrix: &mut HostMatrix, row: usize, col: usize| {
            if let Some(code) = code(matrix) {
                let [_, k] = matrix.shape;
                matrix.codes[row * k + col] = code;
            }
        };
        let ([m, n, k], spans) = (self.shape(), self.spans());
        let full = |span: &Range<usize>| !span.is_empty();
        let (Some(first), Some(last)) = (spans.iter().position(full), spans.iter().rposition(full)) else { return };
        match self.grouping {
            Grouping::Rows => {
                put(a, spans[last].start, k / 2);
                put(a, m - 1, 0);
                put(b, first * n + n - 1, k - 1);
                if let Some(empty) = spans.iter().position(Range::is_empty) {
                    put(b, empty * n, 0);
                }
            }
            Grouping::Contraction => {
                put(a, m - 1, spans[first].end - 1);
                put(a, 0, k - 1);
                put(b, n / 2, spans[last].start);
            }
        }
    }

    /// Row ranges of the output, stacked over its matrices, with the operands of their group.
    /// `None` marks rows that must be zero.
    fn parts(&self, [a, b]: [&HostMatrix; 2]) -> Vec<(Range<usize>, Option<[HostMatrix; 2]>)> {
        let ([m, n, k], spans) = (self.shape(), self.spans());
        let of_group = |(g, span): (usize, &Range<usize>)| {
            let (rows, all_k) = (span.clone(), 0..k);
            match self.grouping {
                _ if span.is_empty() && self.grouping == Grouping::Rows => (rows, None),
                _ if span.is_empty() => (g * m..(g + 1) * m, None),
                Grouping::Rows => {
                    (rows.clone(), Some([a.part(rows, all_k.clone()), b.part(g * n..(g + 1) * n, all_k)]))
                }
                Grouping::Contraction => {
                    (g * m..(g + 1) * m, Some([a.part(0..m, span.clone()), b.part(0..n, span.clone())]))
                }
            }
        };
        let mut parts: Vec<_> = spans.iter().enumerate().map(of_group).collect();
        if self.grouping == Grouping::Rows {
            parts.push((spans.last().map_or(0, |last| last.end)..m, None));
        }
        parts
    }

    /// Multiplies and compares every element with sums in f64 of its group.
    ///
    /// Returns the largest error as a share of the rounding to the output plus
    /// `bound(path, k) · Σ |terms|`. `k` is the length of a group's contraction.
    ///
    /// # Errors
    /// An element exceeds its bound, or the library or the device fails.
    pub fn compare<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        bound: impl Fn(GemmPath, usize) -> f64,
    ) -> Result<f64, Failure> {
        let &Self { codes, out, granularities, .. } = self;
        let ([m, n, k], path) = (self.shape(), self.path(client));
        let [a, b] = self.matrices();
        let got = multiply(client, [&a, &b], self)?;
        let full = m * n * k <= MAX_PRODUCTS;
        let mut comparison = Comparison::new(codes, out);
        for (rows, factors) in self.parts([&a, &b]) {
            let (expected, k) = match &factors {
                Some([a, b]) => (Expected::of(a, b, full), a.shape[1]),
                None => (vec![Expected::zeros(rows.len(), n)], 0),
            };
            for ([row, col], element) in expected.iter().flat_map(Expected::iter) {
                let row = rows.start + row;
                comparison.add([row, col], got[row * n + col], element, bound(path, k));
            }
        }
        if !full && path != GemmPath::Emulated {
            let emulate = Self { config: EMULATE, out: F32, ..*self };
            let want = multiply(client, [&a, &b], &emulate)?;
            let size = multiply(client, [&a.magnitudes(), &b.magnitudes()], &emulate)?;
            let emulated = GemmPath::Emulated.error_bound(EMULATE, granularities, k);
            let bound = bound(path, k) + if codes.is_exact() { 0.0 } else { emulated };
            for ([row, col], element) in Expected::given(&want, &size, n).iter() {
                comparison.add([row, col], got[row * n + col], element, bound);
            }
        }
        comparison.finish()
    }
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases::all(all) {
        all.add(case.name(all.client), |client| check(client, &case));
    }
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: &GroupedGemm) -> Result<f64, Failure> {
    case.compare(client, |path, k| path.error_bound(case.config, case.granularities, k))
}

fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    [a, b]: [&HostMatrix; 2],
    case: &GroupedGemm,
) -> Result<Vec<f32>, Failure> {
    let &GroupedGemm { grouping, out, config, .. } = case;
    let ([m, n, _], count) = (case.shape(), case.sizes.0.len());
    let len = match grouping {
        Grouping::Rows => m * n,
        Grouping::Contraction => count * m * n,
    };
    let ends = client.create_from_slice(u32::as_bytes(&case.ends()));
    let groups = Groups { ends, count, grouping };
    let (a, b) = (a.upload(client), b.upload(client));
    poison(client, &[len * out.size(); 2])?;
    let got = from_dtype(&read(client, grouped_scaled_gemm(client, &a, &b, &groups, out, config)?)?, out);
    if got.len() != len {
        return Err(wrong!("{} elements, not {len}", got.len()));
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use float8_kernels::reference::grouped_scaled_gemm_f64;

    use super::*;

    /// A group's part of an operand has the operand's values.
    #[test]
    fn parts_are_the_operand() {
        let (m, k) = (300, 500);
        for granularity in Granularity::ALL {
            let matrix = HostMatrix::new(Codes::Random, [m, k], Format::E4m3, granularity, 9);
            for (rows, cols) in [(0..m, 0..k), (0..1, 128..129), (70..201, 384..500), (130..300, 128..410)] {
                let part = matrix.part(rows.clone(), cols.clone());
                let dims = part.granularity.scale_dims(rows.len(), cols.len());
                assert_eq!(part.inv_scales.len(), dims[0] * dims[1], "{granularity} {rows:?} {cols:?}");
                for (row, col) in rows.clone().flat_map(|row| cols.clone().map(move |col| (row, col))) {
                    let (i, j) = (row - rows.start, col - cols.start);
                    assert_eq!(part.codes[i * cols.len() + j], matrix.codes[row * k + col]);
                    assert_eq!(part.inv_scale(i, j), matrix.inv_scale(row, col), "{granularity} [{row}, {col}]");
                }
            }
        }
    }

    /// Products of the parts equal the library's definition, also for impossible ends.
    #[test]
    fn parts_are_the_definition() {
        let sizes = [cases::MIXED, (cases::MIXED.0, 0), (&[3; 24], 1), (&[0, 0], 33), (&[300, 5, 260], 0)];
        for (grouping, sizes) in GROUPINGS.into_iter().flat_map(|grouping| sizes.map(|sizes| (grouping, sizes))) {
            for (wild, granularity) in [false, true].into_iter().flat_map(|wild| Granularity::ALL.map(|g| (wild, g))) {
                let case =
                    GroupedGemm { wild, granularities: [granularity; 2], ..GroupedGemm::new(grouping, sizes, [9, 14]) };
                let ([a, b], n) = (case.matrices(), case.shape()[1]);
                let ends: Vec<_> = case.ends().iter().map(|&end| end as i32).collect();
                let want = grouped_scaled_gemm_f64(&a.view(), &b.view(), &ends, grouping);
                let size = grouped_scaled_gemm_f64(&a.magnitudes().view(), &b.magnitudes().view(), &ends, grouping);
                for (rows, factors) in case.parts([&a, &b]) {
                    let expected = match &factors {
                        Some([a, b]) => Expected::all(a, b),
                        None => Expected::zeros(rows.len(), n),
                    };
                    for ([row, col], element) in expected.iter() {
                        let at = (rows.start + row) * n + col;
                        let error = (element.want - want[at]).abs();
                        assert!(error <= 1e-12 * size[at], "{:?} {wild} {granularity} {at}: {element:?}", case.sizes);
                    }
                }
            }
        }
    }

    /// Every output row is in exactly one part. NaN reaches some elements but not all.
    #[test]
    fn parts_are_the_output() {
        for grouping in GROUPINGS {
            for sizes in cases::SIZES {
                let case = GroupedGemm { codes: Codes::NanCode, ..GroupedGemm::new(grouping, sizes, [20, 30]) };
                let [a, b] = case.matrices();
                let parts = case.parts([&a, &b]);
                let rows: Vec<_> = parts.iter().flat_map(|(rows, _)| rows.clone()).collect();
                let [m, n, _] = case.shape();
                let matrices = if grouping == Grouping::Rows { 1 } else { sizes.0.len() };
                assert_eq!(rows, (0..m * matrices).collect::<Vec<_>>(), "{:?}", sizes.0);
                let full: Vec<_> = parts.iter().filter_map(|(_, factors)| factors.as_ref()).collect();
                assert_eq!(full.len(), sizes.0.iter().filter(|size| **size > 0).count());
                let products = full.iter().flat_map(|[a, b]| Expected::all(a, b).elements);
                let nan = products.filter(|element| element.want.is_nan()).count();
                assert_eq!(nan > 0, !full.is_empty(), "{grouping:?} {:?}", sizes.0);
                assert!(nan < rows.len() * n, "{grouping:?} {:?}", sizes.0);
            }
        }
    }
}
