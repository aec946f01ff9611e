//! GEMMs: sampled elements against f64 dot products of the decoded codes, within [`GemmPath::error_bound`].
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn_backend::{DType, DeviceId};
use cubecl::client::ComputeClient;
use cubecl::prelude::Runtime;
use cubecl::server::Handle;
use float8_kernels::{
    GemmConfig, GemmPath, Grouping, Groups, KernelError, Operand, VectorView, gemm_path_of_rows, grouped_scaled_gemm,
    scaled_gemm, strike_gemm,
};

use super::read::{Rows, bytes, floats, parts_of, whole};
use super::{Call, DeviceChecks, Mismatch, Verdict};

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
    let rows = product.groups.is_none().then_some(a.rows);
    let current = || gemm_path_of_rows(client, rows, granularities, config);
    let mut call = Call::new();
    loop {
        let path = current();
        let y = call.record(checks, device, || match &product.groups {
            None => scaled_gemm(client, a, b, product.bias.as_ref(), dtype.into(), config),
            Some(groups) => grouped_scaled_gemm(client, a, b, groups, dtype.into(), config),
        })?;
        let name = || [product.describe(), path.to_string()];
        let compare = || product.compare(client, &y, path);
        match checks.judge((client, device), &mut call, (Some(granularities), name), compare) {
            Verdict::Right => return Ok(y),
            Verdict::Again => {}
            Verdict::Wrong => {
                checks.strike_for_another(granularities, &call.launched, name());
                // Unless another thread has done so meanwhile.
                if current() == path {
                    strike_gemm(client, path, granularities);
                }
            }
        }
    }
}

/// Samples, and what was read for them.
struct Sampled {
    samples: Vec<Sample>,
    /// Rows that no group has.
    zeros: Vec<usize>,
    /// Rows of A and of B, scaled, by their numbers.
    left: BTreeMap<usize, Vec<f64>>,
    right: BTreeMap<usize, Vec<f64>>,
    /// Rows of the output.
    got: BTreeMap<usize, Vec<f32>>,
    bias: Option<Vec<f32>>,
}

/// The sum with another term, and the sum of magnitudes.
fn sum_and_size((sum, size): (f64, f64), term: f64) -> (f64, f64) {
    (sum + term, size + term.abs())
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
    fn compare<R: Runtime>(&self, client: &ComputeClient<R>, y: &Handle, path: GemmPath) -> Result<(), Mismatch> {
        if let Some(want) = self.exact {
            let read = bytes(client, &[whole(y)]).map_err(Mismatch::Unread)?.remove(0);
            let got = floats(&read, self.dtype);
            let Some(i) = got.iter().zip(want).position(|(got, want)| got != want) else { return Ok(()) };
            return Err(Mismatch::Wrong(format!("element {i} is {:e}, not {:e}", got[i], want[i])));
        }
        let read = self.read(client, y).map_err(Mismatch::Unread)?;
        let limits = Limits {
            bound: path.error_bound(self.config, [self.a.granularity, self.b.granularity], self.a.k),
            dtype: self.dtype,
            // Vulkan may do so, and WGSL.
            flushes: R::name(client) != "cuda",
        };
        let mut wrong = vec![];
        for sample in &read.samples {
            let Sample { place: [row, col], a, b, along } = sample;
            let (left, right) = (&read.left[a][along.clone()], &read.right[b][along.clone()]);
            let (mut want, mut terms) = left.iter().zip(right).map(|(x, y)| x * y).fold((0.0, 0.0), sum_and_size);
            if let (Some(values), Some(view)) = (&read.bias, &self.bias) {
                (want, terms) = sum_and_size((want, terms), f64::from(values[col * view.stride]));
            }
            let largest = |values: &[f64]| values.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            let tiny = along.len() as f64 * f64::from(f32::MIN_POSITIVE) * (largest(left) + largest(right));
            let got = f64::from(read.got[row][*col]);
            if !limits.allow(got, want, terms, tiny) {
                wrong.push(format!("[{row}, {col}] is {got:e}, not {want:e} (terms {terms:e})"));
            }
        }
        for row in &read.zeros {
            if let Some(col) = read.got[row].iter().position(|x| *x != 0.0) {
                wrong.push(format!("[{row}, {col}] is {:e}, not 0, as no group has the row", read.got[row][col]));
            }
        }
        match wrong.first() {
            Some(first) => Err(Mismatch::Wrong(format!("{} of {} samples: {first}", wrong.len(), read.samples.len()))),
            None => Ok(()),
        }
    }

    /// What is sampled, read at once; the ends of groups before.
    fn read<R: Runtime>(&self, client: &ComputeClient<R>, y: &Handle) -> Result<Sampled, String> {
        let &Self { a, b, dtype, .. } = self;
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
        let mut parts = parts_of(a, &rows_a);
        parts.extend(parts_of(b, &rows_b));
        let pitch = (self.width() * dtype.size()) as u64;
        parts.extend(out.iter().map(|row| (y, *row as u64 * pitch..(*row as u64 + 1) * pitch)));
        parts.extend(self.bias.as_ref().map(|bias| whole(&bias.handle)));
        let mut read = bytes(client, &parts)?.into_iter();
        let values = |rows: &[usize], of: &Operand, read: &mut dyn Iterator<Item = Vec<u8>>| {
            let read = Rows::new(of, rows, &mut read.take(rows.len() + 1));
            rows.iter().map(|row| (*row, read.values(of, *row))).collect()
        };
        Ok(Sampled {
            left: values(&rows_a, a, &mut read),
            right: values(&rows_b, b, &mut read),
            got: out.into_iter().zip(read.by_ref()).map(|(row, read)| (row, floats(&read, dtype))).collect(),
            bias: read.next().map(|bias| floats(&bias, self.bias_dtype)),
            samples,
            zeros,
        })
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
        let spans = groups.grouping.spans(ends, if groups.grouping == Grouping::Rows { m } else { k });
        let [rows, cols] = if groups.count > 64 { [2; 2] } else { [4, 8] };
        let of_group = |(g, span): (usize, &Range<usize>)| match groups.grouping {
            Grouping::Rows => {
                let rows = edges(span.len(), rows).into_iter().map(|row| span.start + row).collect();
                let sample = |i, j| Sample { place: [i, j], a: i, b: g * width + j, along: 0..k };
                each(rows, edges(width, cols), &sample)
            }
            Grouping::Contraction => {
                let sample = |i, j| Sample { place: [g * m + i, j], a: i, b: j, along: span.clone() };
                each(edges(m, rows), edges(width, cols), &sample)
            }
        };
        let samples = spans.iter().enumerate().flat_map(of_group).collect();
        let nobodys = match groups.grouping {
            Grouping::Rows => {
                let last = spans.last().map_or(0, |span| span.end);
                edges(m - last, 2).into_iter().map(|row| last + row).collect()
            }
            Grouping::Contraction => vec![],
        };
        (samples, nobodys)
    }
}

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

/// What an element may be wrong by.
struct Limits {
    /// As a share of its terms.
    bound: f64,
    dtype: DType,
    /// Whether the device may take subnormal numbers for zero.
    flushes: bool,
}

impl Limits {
    /// Whether `got` may stand for `want`, of terms of this size in all, of which subnormal ones are lost up to `tiny`. Where partial
    /// sums may go beyond f32, so may the result.
    fn allow(&self, got: f64, want: f64, terms: f64, tiny: f64) -> bool {
        if !want.is_finite() {
            return (want.is_nan() && got.is_nan()) || got == want;
        }
        let least = f64::from(f32::MIN_POSITIVE);
        let (rounding, most) = match self.dtype {
            DType::F16 => {
                let least = if self.flushes { 2f64.powi(-14) } else { 2f64.powi(-25) };
                ((want.abs() * 2f64.powi(-11)).max(least), 65_520.0)
            }
            DType::BF16 => ((want.abs() * 2f64.powi(-8)).max(least), f64::from(f32::MAX)),
            _ => ((want.abs() * 2f64.powi(-23)).max(least), f64::from(f32::MAX)),
        };
        let allowed = self.bound * terms + tiny + rounding;
        if !got.is_finite() {
            let overflows = got.is_infinite() && got.signum() == want.signum() && want.abs() + allowed >= most;
            return overflows || terms * 1.01 >= f64::from(f32::MAX);
        }
        (got - want).abs() <= allowed
    }
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
        let limits = Limits { bound: 1e-3, dtype: DType::F16, flushes: false };
        let close = |got: f64, want: f64| limits.allow(got, want, want.abs(), 0.0);
        assert!(close(f64::NAN, f64::NAN) && close(f64::INFINITY, f64::INFINITY) && close(f64::INFINITY, 7e4));
        assert!(close(1.0, 1.001) && close(0.0, 0.0));
        for (got, want) in
            [(0.0, f64::NAN), (f64::NAN, 0.0), (f64::INFINITY, 1e4), (f64::NEG_INFINITY, 7e4), (1.1, 1.0)]
        {
            assert!(!close(got, want), "{got} for {want}");
        }
        // Terms whose sums leave f32 on the way.
        assert!(limits.allow(f64::NAN, 1.0, 1e39, 0.0) && !limits.allow(f64::NAN, 1.0, 1e30, 0.0));
    }

    /// A correctly rounded subnormal number is right.
    #[test]
    fn subnormal_numbers_are_rounded() {
        for (dtype, want, got) in [(DType::BF16, 1e-39, 0.995e-39), (DType::F32, 3e-46, 0.0), (DType::F16, 1e-8, 0.0)] {
            let limits = Limits { bound: 0.0, dtype, flushes: false };
            assert!(limits.allow(got, want, want, 0.0), "{dtype:?}");
        }
        let flushed = |flushes| Limits { bound: 0.0, dtype: DType::F16, flushes }.allow(0.0, 5e-5, 5e-5, 0.0);
        assert!(flushed(true) && !flushed(false));
    }
}
