//! GEMMs: sampled elements against f64 dot products of the decoded codes, within [`GemmPath::error_bound`].
use std::collections::BTreeSet;
use std::ops::Range;

use burn_backend::{DType, DeviceId};
use cubecl::client::ComputeClient;
use cubecl::prelude::Runtime;
use cubecl::server::Handle;
use float8_kernels::{
    GROUP_ALIGN, GemmConfig, GemmPath, Grouping, Groups, KernelError, Operand, VectorView, gemm_path,
    grouped_scaled_gemm, scaled_gemm, strike_gemm,
};

use super::read::{Rows, bytes, floats, parts_of, whole};
use super::{DeviceChecks, recorded};

/// A product, as [`scaled_gemm`] and [`grouped_scaled_gemm`] take it.
pub(in crate::backend) struct Product<'a> {
    pub(in crate::backend) a: &'a Operand,
    pub(in crate::backend) b: &'a Operand,
    pub(in crate::backend) bias: Option<VectorView>,
    /// The bias's dtype.
    pub(in crate::backend) bias_dtype: DType,
    pub(in crate::backend) groups: Option<Groups>,
    pub(in crate::backend) dtype: DType,
    pub(in crate::backend) config: GemmConfig,
    /// All of the output, where every bit is known.
    pub(in crate::backend) exact: Option<&'a [f32]>,
}

/// The product on the first path whose kernels are right.
///
/// # Errors
///
/// [`KernelError::StruckOff`] if none is.
pub(in crate::backend) fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    checks: &DeviceChecks,
    device: DeviceId,
    product: &Product<'_>,
) -> Result<Handle, KernelError> {
    let &Product { a, b, config, dtype, .. } = product;
    let granularities = [a.granularity, b.granularity];
    loop {
        let path = gemm_path(client, granularities, config);
        let (y, launched) = recorded(checks, || match &product.groups {
            None => scaled_gemm(client, a, b, product.bias.as_ref(), dtype.into(), config),
            Some(groups) => grouped_scaled_gemm(client, a, b, groups, dtype.into(), config),
        });
        let y = y?;
        let name = || [product.describe(), path.to_string()];
        if checks
            .is_right((client, device), &launched, (Some(granularities), name), || product.compare(client, &y, path))
        {
            return Ok(y);
        }
        // Unless another thread has done so meanwhile.
        if gemm_path(client, granularities, config) == path {
            strike_gemm(client, path, granularities);
        }
    }
}

/// An element of the output, and what it is the product of.
struct Sample {
    /// Row of the output, its matrices stacked, and column.
    place: [usize; 2],
    a: usize,
    b: usize,
    along: Range<usize>,
}

impl Product<'_> {
    fn describe(&self) -> String {
        let Self { a, b, groups, dtype, .. } = self;
        let groups = groups.as_ref().map_or(String::new(), |groups| format!(", {} groups", groups.count));
        let ([m, k, n], [left, right]) = ([a.rows, a.k, b.rows], [a.granularity, b.granularity]);
        format!("[{m}, {k}] · [{n}, {k}]ᵀ{groups}, {}, {} {left}, {right} to {dtype:?}", a.format, b.format)
    }

    /// Columns of the output.
    fn width(&self) -> usize {
        match &self.groups {
            Some(Groups { grouping: Grouping::Rows, count, .. }) => self.b.rows / count,
            _ => self.b.rows,
        }
    }

    /// Whether sampled elements of `y`, which this path has computed, are right.
    fn compare<R: Runtime>(&self, client: &ComputeClient<R>, y: &Handle, path: GemmPath) -> Result<(), String> {
        if let Some(want) = self.exact {
            let got = floats(&bytes(client, &[whole(y)])?.remove(0), self.dtype);
            let wrong = got.iter().zip(want).position(|(got, want)| got != want);
            return wrong.map_or(Ok(()), |i| Err(format!("element {i} is {:e}, not {:e}", got[i], want[i])));
        }
        let &Self { a, b, dtype, config, .. } = self;
        let ends = match &self.groups {
            None => vec![],
            Some(groups) => {
                let ends = bytes(client, &[(&groups.ends, 0..4 * groups.count as u64)])?.remove(0);
                ends.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
            }
        };
        let (samples, zeros) = self.samples(&ends);
        let unique = |row: &dyn Fn(&Sample) -> usize| {
            samples.iter().map(row).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
        };
        let (rows_a, rows_b) = (unique(&|sample| sample.a), unique(&|sample| sample.b));
        let out: BTreeSet<usize> = samples.iter().map(|sample| sample.place[0]).chain(zeros.iter().copied()).collect();
        let (width, size) = (self.width(), dtype.size() as u64);
        let mut parts = parts_of(a, &rows_a);
        parts.extend(parts_of(b, &rows_b));
        let pitch = width as u64 * size;
        parts.extend(out.iter().map(|row| (y, *row as u64 * pitch..(*row as u64 + 1) * pitch)));
        parts.extend(self.bias.as_ref().map(|bias| whole(&bias.handle)));
        let mut read = bytes(client, &parts)?.into_iter();
        let left = Rows::new(a, &rows_a, &mut read.by_ref().take(rows_a.len() + 1));
        let right = Rows::new(b, &rows_b, &mut read.by_ref().take(rows_b.len() + 1));
        let got: Vec<Vec<f32>> = read.by_ref().take(out.len()).map(|row| floats(&row, dtype)).collect();
        let bias = read.next().map(|bias| floats(&bias, self.bias_dtype));
        let at = |row: usize| out.range(..row).count();

        let bound = path.error_bound(config, [a.granularity, b.granularity], a.k);
        let mut wrong = vec![];
        for Sample { place: [row, col], a: i, b: j, along } in &samples {
            let products = left.values(a, *i, along).into_iter().zip(right.values(b, *j, along)).map(|(x, y)| x * y);
            let (sum, terms) = products.fold((0.0, 0.0), |(sum, terms), x| (sum + x, terms + x.abs()));
            let added = match (&bias, &self.bias) {
                (Some(values), Some(view)) => f64::from(values[col * view.stride]),
                _ => 0.0,
            };
            let (want, terms) = (sum + added, terms + added.abs());
            let got = f64::from(got[at(*row)][*col]);
            if !is_close(got, want, bound * terms, dtype) {
                wrong.push(format!("[{row}, {col}] is {got:e}, not {want:e} (terms {terms:e})"));
            }
        }
        for row in zeros {
            if let Some(col) = got[at(row)].iter().position(|x| *x != 0.0) {
                wrong.push(format!("[{row}, {col}] is {:e}, not 0, as no group has the row", got[at(row)][col]));
            }
        }
        match wrong.first() {
            Some(first) => Err(format!("{} of {} samples wrong: {first}", wrong.len(), samples.len())),
            None => Ok(()),
        }
    }

    /// Elements to look at, in each group those at both ends; and rows that must be zero.
    fn samples(&self, ends: &[i32]) -> (Vec<Sample>, Vec<usize>) {
        let (m, k, width) = (self.a.rows, self.a.k, self.width());
        let each = |rows: Vec<usize>, cols: Vec<usize>, sample: &dyn Fn(usize, usize) -> Sample| -> Vec<Sample> {
            rows.iter().flat_map(|i| cols.iter().map(|j| sample(*i, *j))).collect()
        };
        let Some(groups) = &self.groups else {
            let sample = |i, j| Sample { place: [i, j], a: i, b: j, along: 0..k };
            return (each(edges(m, 24), edges(width, 24), &sample), vec![]);
        };
        // As `Groups::ends` says.
        let (limit, align) = match groups.grouping {
            Grouping::Rows => (m, 1),
            Grouping::Contraction => (k, GROUP_ALIGN),
        };
        let mut last = 0usize;
        let spans: Vec<Range<usize>> = ends
            .iter()
            .map(|end| {
                let start = last.next_multiple_of(align).min(limit);
                last = last.max(usize::try_from(*end).unwrap_or(0).min(limit));
                start..last.max(start)
            })
            .collect();
        let of_group = |(g, span): (usize, &Range<usize>)| match groups.grouping {
            Grouping::Rows => {
                let rows = edges(span.len(), 4).into_iter().map(|row| span.start + row).collect();
                let sample = |i, j| Sample { place: [i, j], a: i, b: g * width + j, along: 0..k };
                each(rows, edges(width, 8), &sample)
            }
            Grouping::Contraction => {
                let sample = |i, j| Sample { place: [g * m + i, j], a: i, b: j, along: span.clone() };
                each(edges(m, 6), edges(width, 8), &sample)
            }
        };
        let samples = spans.iter().enumerate().take(MOST_GROUPS).flat_map(of_group).collect();
        let nobodys = match groups.grouping {
            Grouping::Rows => edges(m - last.min(m), 2).into_iter().map(|row| last + row).collect(),
            Grouping::Contraction => vec![],
        };
        (samples, nobodys)
    }
}

/// Groups that are looked at.
const MOST_GROUPS: usize = 64;

/// Up to about `most` of `len` places: the ends, both sides of the edges of tiles, and some between.
pub(super) fn edges(len: usize, most: usize) -> Vec<usize> {
    let ends = [0, len.wrapping_sub(1), len / 2, 1, 127, 128, 63, 64, 255, 256, 7, 8, 191, 192];
    // A step that has no factor in common with tiles.
    let between = (0..most).map(|i| (i * 2_654_435_761 + 12_345) % len.max(1));
    let mut places = BTreeSet::new();
    for place in ends.into_iter().chain(between) {
        if place < len && places.len() < most {
            places.insert(place);
        }
    }
    places.into_iter().collect()
}

/// Whether `got` is `want` up to `allowed` and the rounding to `dtype`, and as little finite.
fn is_close(got: f64, want: f64, allowed: f64, dtype: DType) -> bool {
    if !want.is_finite() {
        return (want.is_nan() && got.is_nan()) || got == want;
    }
    let (rounding, most) = match dtype {
        DType::F16 => ((want.abs() * 2f64.powi(-11)).max(2f64.powi(-25)), 65_520.0),
        DType::BF16 => (want.abs() * 2f64.powi(-8), f64::from(f32::MAX)),
        _ => (want.abs() * 2f64.powi(-23), f64::from(f32::MAX)),
    };
    let allowed = allowed + rounding;
    if got.is_infinite() {
        // What is beyond the dtype is infinite.
        return got.signum() == want.signum() && want.abs() + allowed >= most;
    }
    (got - want).abs() <= allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_hold_both_ends_and_lie_inside() {
        for len in [1, 2, 3, 63, 64, 129, 4096, 128_256] {
            for most in [2, 4, 8, 24] {
                let places = edges(len, most);
                assert!(places.contains(&0) && places.contains(&(len - 1)), "{len} {most}: {places:?}");
                assert!(places.len() <= most && places.iter().all(|place| *place < len), "{len} {most}: {places:?}");
            }
        }
        assert!(edges(0, 4).is_empty());
    }

    #[test]
    fn what_is_not_finite_must_be_so() {
        let close = |got: f64, want: f64| is_close(got, want, 1e-3, DType::F16);
        assert!(close(f64::NAN, f64::NAN) && close(f64::INFINITY, f64::INFINITY) && close(f64::INFINITY, 7e4));
        assert!(close(1.0, 1.001) && close(0.0, 0.0));
        for (got, want) in
            [(0.0, f64::NAN), (f64::NAN, 0.0), (f64::INFINITY, 1e4), (f64::NEG_INFINITY, 7e4), (1.1, 1.0)]
        {
            assert!(!close(got, want), "{got} for {want}");
        }
    }
}
