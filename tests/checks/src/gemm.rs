//! The scaled GEMM: every pair of formats and granularities, every bias and output, ragged, tiny and large shapes.
//!
//! An element passes if `|got - want| ≤ bound · Σ |a·b| + rounding`, where `rounding` is half a step of a 16-bit output, and
//! if it is NaN or infinite exactly where the f64 product is. Matrices of -1, 0 and 1 must be right to the bit: all their
//! partial sums are exact on every path, so that a single product too many or too few shows at any size.
//!
//! Above [`MAX_PRODUCTS`] the f64 product is taken for a sample of rows and columns, those at edges of tiles among them, and
//! every element is compared with the emulated kernel, whose own samples are checked the same way.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Format, GemmConfig, GemmPath, Granularity, Output, gemm_path, scaled_gemm, scaled_gemm_into, supports,
};

use crate::Failure;
use crate::case::{Runner, wrong};
use crate::data::{BF16, DTYPES, F16, F32, Random, from_dtype, to_dtype};
use crate::device::{poison, read, upload_vector};
use crate::matrix::{Codes, FORMATS, GRANULARITIES, HostMatrix};
use crate::oracle::{Element, product};

/// Products of M, N and K that the host sums in full.
pub const MAX_PRODUCTS: usize = 1 << 31;

/// Around the tiles of 64, 128, 192 and 256, the blocks of 128 and the padding to 16.
const SHAPES: [[usize; 3]; 15] = [
    [1, 1, 1],
    [1, 1, 1000],
    [3, 5, 17],
    [17, 33, 16],
    [64, 64, 64],
    [1, 200, 100],
    [130, 1, 48],
    [65, 129, 15],
    [128, 128, 128],
    [129, 193, 144],
    [193, 65, 257],
    [130, 257, 300],
    [257, 130, 32],
    [192, 256, 384],
    [64, 384, 640],
];

/// Many tiles, long contractions, small M, and the sizes of Llama.
const LARGE: [[usize; 3]; 18] = [
    [1, 4096, 4096],
    [16, 14_336, 4096],
    [33, 2050, 8200],
    [4096, 1, 1024],
    [192, 384, 8192],
    [193, 385, 4112],
    [255, 257, 2047],
    [513, 769, 1025],
    [300, 300, 16_384],
    [1024, 1024, 1024],
    [1536, 1664, 1920],
    [2048, 2048, 2048],
    [4097, 4095, 100],
    [4096, 4096, 4096],
    [4224, 4352, 4000],
    [2000, 6144, 4096],
    [2048, 4096, 14_336],
    [8192, 4112, 1040],
];

/// The error that a path may make, as a share of `Σ |a·b|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound(f64);

impl Bound {
    /// For a contraction of length `k`.
    ///
    /// - Emulated: products are exact and sums f32, so every addition and the four operations after them round by at most
    ///   2^-24 of the terms: a bound that always holds.
    /// - Tensor cores add the 32 products of an instruction to the accumulator after aligning them to the largest and cutting
    ///   them off 13 bits below it (Hopper's accumulators have about 14 bits). Each loses up to 2^-13 of that largest term,
    ///   2^-14 of it on average and with either sign, as the data have either sign. Sums over 128 are then f32, so the losses
    ///   do not grow with `k`: 2^-10 is a few times the worst that a block of 32 terms over a dozen binades gives. With fast
    ///   accumulation each of the `k / 32` instructions also cuts the running sum, which grows as √k: √k · 2^-15 more. Those
    ///   for f16 and bf16 keep more bits.
    pub fn of(path: GemmPath, config: GemmConfig, k: usize) -> Self {
        let k = k as f64;
        Self(if path == GemmPath::Emulated {
            (k + 4.0) * 2f64.powi(-24)
        } else if config.use_fast_accum {
            2f64.powi(-10) + k.sqrt() * 2f64.powi(-15)
        } else {
            2f64.powi(-10)
        })
    }

    /// The share of `Σ |a·b|`.
    pub const fn get(self) -> f64 {
        self.0
    }
}

const PRECISE: GemmConfig = GemmConfig { use_fast_accum: false, emulate: false };
const FAST: GemmConfig = GemmConfig { use_fast_accum: true, emulate: false };
const EMULATE: GemmConfig = GemmConfig { use_fast_accum: false, emulate: true };

#[derive(Clone, Copy)]
struct Case {
    /// M, N and K.
    shape: [usize; 3],
    formats: [Format; 2],
    granularities: [Granularity; 2],
    codes: Codes,
    /// Dtype and stride.
    bias: Option<(StorageType, usize)>,
    out: StorageType,
    /// Whether the output holds values to add to.
    accumulate: bool,
    config: GemmConfig,
}

impl Case {
    fn new(shape: [usize; 3]) -> Self {
        Self {
            shape,
            formats: [Format::E4m3; 2],
            granularities: [Granularity::Tensor; 2],
            codes: Codes::Random,
            bias: None,
            out: F32,
            accumulate: false,
            config: PRECISE,
        }
    }

    fn name<R: Runtime>(&self, client: &ComputeClient<R>) -> String {
        let Self { shape: [m, n, k], formats, granularities, codes, bias, out, accumulate, config } = self;
        let bias = bias.map_or(String::new(), |(dtype, stride)| format!(" bias:{dtype}/{stride}"));
        let fast = if config.use_fast_accum { " fast" } else { "" };
        let added = if *accumulate { " accumulate" } else { "" };
        let ([a, b], [left, right]) = (formats, granularities);
        let path = gemm_path(client, *granularities, *config);
        format!("scaled_gemm {m}x{n}x{k} {a},{b} {left},{right} {codes}{bias} {out}{added} {path}{fast}")
    }

    fn matrices(&self) -> [HostMatrix; 2] {
        let ([m, n, k], [a, b]) = (self.shape, self.granularities);
        [
            HostMatrix::new(self.codes, [m, k], self.formats[0], a, 31),
            HostMatrix::new(self.codes, [n, k], self.formats[1], b, 32),
        ]
    }
}

pub(crate) fn run<R: Runtime>(runner: &mut Runner<'_, R>) {
    for case in cases(runner) {
        runner.case(case.name(runner.client), |client| check(client, &case));
    }
}

fn cases<R: Runtime>(runner: &Runner<'_, R>) -> Vec<Case> {
    let client = runner.client;
    // Where all settings take the same kernel, one of them is enough.
    let native = gemm_path(client, [Granularity::Tensor; 2], PRECISE) != GemmPath::Emulated;
    let configs = if native { vec![PRECISE, FAST, EMULATE] } else { vec![PRECISE] };
    let outs = DTYPES.into_iter().filter(|dtype| supports(client, *dtype)).collect::<Vec<_>>();
    let half = if outs.contains(&BF16) { BF16 } else { *outs.last().unwrap_or(&F32) };
    let mut cases = vec![];
    for config in configs {
        let new = |shape| Case { config, ..Case::new(shape) };
        for shape in runner.sizes(&SHAPES, &LARGE) {
            cases.push(new(shape));
            cases.push(Case { codes: Codes::Exact, out: half, bias: Some((F32, 1)), ..new(shape) });
        }
        for formats in FORMATS.into_iter().flat_map(|a| FORMATS.map(|b| [a, b])) {
            for codes in [Codes::Random, Codes::Exact, Codes::Zeros, Codes::NanCode, Codes::InfCode] {
                cases.push(Case { formats, codes, ..new([70, 133, 200]) });
            }
        }
        for granularities in GRANULARITIES.into_iter().flat_map(|a| GRANULARITIES.map(|b| [a, b])) {
            for shape in runner.sizes(&[[130, 137, 300]], &[[1025, 1100, 2060], [300, 260, 128], [2048, 2304, 2560]]) {
                for codes in [Codes::Random, Codes::Exact] {
                    cases.push(Case { granularities, codes, ..new(shape) });
                }
            }
        }
        for granularity in GRANULARITIES {
            for codes in [Codes::NanCode, Codes::NanScale, Codes::Zeros] {
                cases.push(Case { granularities: [granularity, Granularity::Row], codes, ..new([140, 6, 300]) });
                cases.push(Case { granularities: [Granularity::Row, granularity], codes, ..new([6, 140, 300]) });
            }
        }
        for &out in &outs {
            for (i, bias) in [None, Some(F32), Some(F16), Some(BF16)].into_iter().enumerate() {
                for shape in [[66, 70, 48], [129, 133, 272]] {
                    let case = Case { out, bias: bias.map(|dtype| (dtype, i)), ..new(shape) };
                    cases.extend([case, Case { codes: Codes::Exact, ..case }]);
                    cases.push(Case { accumulate: true, ..case });
                }
            }
        }
    }
    cases
}

/// What to compare: elements of the output, or those of its transpose.
struct Expected {
    rows: Vec<usize>,
    elements: Vec<Element>,
    transposed: bool,
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case) -> Result<f64, Failure> {
    let &Case { shape: [m, n, k], codes, granularities, config, .. } = case;
    let path = gemm_path(client, granularities, config);
    let [a, b] = case.matrices();
    let bias = bias(case);
    let added = Added { bias, old: old(case), n };
    let got = multiply(client, [&a, &b], &added, case)?;
    let bound = Bound::of(path, config, k).get();
    if m * n * k <= MAX_PRODUCTS {
        let rows: Vec<_> = (0..m).collect();
        let expected = Expected { elements: product(&a, &b, &rows), rows, transposed: false };
        return compare(&got, &expected, &added, case, bound);
    }
    let mut worst = 0f64;
    for (left, right, transposed) in [(&a, &b, false), (&b, &a, true)] {
        let rows = sample(left.shape[0]);
        let expected = Expected { elements: product(left, right, &rows), rows, transposed };
        worst = worst.max(compare(&got, &expected, &added, case, bound)?);
    }
    if path != GemmPath::Emulated {
        let emulate = Case { config: EMULATE, out: F32, ..*case };
        let plain = Case { bias: None, accumulate: false, ..emulate };
        let want = multiply(client, [&a, &b], &Added::default(), &plain)?;
        let size = multiply(client, [&a.magnitudes(), &b.magnitudes()], &Added::default(), &plain)?;
        let element = |(want, size): (&f32, &f32)| Element { want: f64::from(*want), size: f64::from(*size) };
        let elements = want.iter().zip(&size).map(element).collect();
        let expected = Expected { elements, rows: (0..m).collect(), transposed: false };
        let slack = if codes == Codes::Exact { 0.0 } else { Bound::of(GemmPath::Emulated, EMULATE, k).get() };
        worst = worst.max(compare(&got, &expected, &added, case, bound + slack)?);
    }
    Ok(worst)
}

/// The bias as the kernel sees it; empty without one.
fn bias(case: &Case) -> Vec<f32> {
    let mut random = Random::new(35);
    let mut value = || match case.codes {
        Codes::Exact => (random.below(9) as f32 - 4.0) / 4.0,
        _ => random.value(),
    };
    match case.bias {
        Some((dtype, _)) => to_dtype(&(0..case.shape[1]).map(|_| value()).collect::<Vec<_>>(), dtype).1,
        None => vec![],
    }
}

/// What the output held, as the kernel sees it; empty if that is not to be added to.
fn old(case: &Case) -> Vec<f32> {
    let [m, n, _] = case.shape;
    let mut random = Random::new(36);
    let values: Vec<_> = (0..if case.accumulate { m * n } else { 0 }).map(|_| random.value()).collect();
    to_dtype(&values, case.out).1
}

/// What is added to the products.
#[derive(Default)]
struct Added {
    /// By column, or empty.
    bias: Vec<f32>,
    /// By element, or empty.
    old: Vec<f32>,
    n: usize,
}

impl Added {
    /// Sum and sum of magnitudes.
    fn at(&self, row: usize, col: usize) -> [f64; 2] {
        let terms = [self.bias.get(col), self.old.get(row * self.n + col)];
        let terms = terms.map(|term| term.map_or(0.0, |&x| f64::from(x)));
        [terms.iter().sum(), terms.iter().map(|x| x.abs()).sum()]
    }
}

fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    [a, b]: [&HostMatrix; 2],
    added: &Added,
    case: &Case,
) -> Result<Vec<f32>, Failure> {
    let &Case { shape: [m, n, _], out, config, .. } = case;
    let view = case.bias.map(|(dtype, stride)| upload_vector(client, &added.bias, stride, dtype));
    let (a, b) = (a.upload(client), b.upload(client));
    poison(client, &[m * n * out.size(); 2])?;
    let out_handle = if case.accumulate {
        let handle = client.create_from_slice(&to_dtype(&added.old, out).0);
        let output = Output { handle, dtype: out, accumulate: true };
        scaled_gemm_into(client, &a, &b, view.as_ref(), &output, config)?;
        output.handle
    } else {
        scaled_gemm(client, &a, &b, view.as_ref(), out, config)?
    };
    let got = from_dtype(&read(client, out_handle)?, out);
    if got.len() != m * n {
        return Err(wrong!("{} elements, not {m} by {n}", got.len()));
    }
    Ok(got)
}

/// Rows on both sides of the edges of tiles, the ends, and some between them.
fn sample(rows: usize) -> Vec<usize> {
    let mut random = Random::new(rows as u64);
    let mut sample: Vec<_> = [0, 1, 63, 64, 127, 128, 191, 192, 255, 256, 257].into();
    sample.extend(
        [rows - 1, rows.saturating_sub(2), rows / 128 * 128, (rows - 1) / 256 * 256, rows / 2]
            .map(|row| row.min(rows - 1)),
    );
    sample.extend((0..8).map(|_| random.below(rows)));
    sample.retain(|&row| row < rows);
    sample.sort_unstable();
    sample.dedup();
    sample
}

/// Half a step of `dtype` at `x`: what rounding the f32 result to it may add.
fn rounding(x: f64, dtype: StorageType) -> f64 {
    if dtype == F16 {
        (x.abs() * 2f64.powi(-11)).max(2f64.powi(-25))
    } else if dtype == BF16 {
        x.abs() * 2f64.powi(-8)
    } else {
        0.0
    }
}

/// The largest error as a share of what it may be.
fn compare(got: &[f32], expected: &Expected, added: &Added, case: &Case, bound: f64) -> Result<f64, Failure> {
    let &Case { shape: [m, n, _], out, codes, .. } = case;
    let width = if expected.transposed { m } else { n };
    let mut worst = 0f64;
    let mut failures = 0usize;
    let mut first = None;
    for (i, element) in expected.elements.iter().enumerate() {
        let (row, col) = (expected.rows[i / width], i % width);
        let (row, col) = if expected.transposed { (col, row) } else { (row, col) };
        let [shift, magnitude] = added.at(row, col);
        let (want, size) = (element.want + shift, element.size + magnitude);
        let got = f64::from(got[row * n + col]);
        let error = if codes == Codes::Exact {
            let rounded = to_dtype(&[want as f32], out).1[0];
            if got == f64::from(rounded) { 0.0 } else { f64::INFINITY }
        } else if want.is_finite() {
            let allowed = bound * size + rounding(want, out);
            let error = (got - want).abs();
            if error <= allowed { if allowed > 0.0 { error / allowed } else { 0.0 } } else { f64::INFINITY }
        } else if (want.is_nan() && got.is_nan()) || got == want {
            0.0
        } else {
            f64::INFINITY
        };
        if error > 1.0 {
            failures += 1;
            first.get_or_insert_with(|| format!("[{row}, {col}] is {got:e}, not {want:e} (terms {size:e})"));
        }
        worst = worst.max(error);
    }
    match first {
        Some(first) => Err(wrong!("{failures} of {} wrong: {first}", expected.elements.len())),
        None => Ok(worst),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernels would have to get wrong: one product, one rounding, one element, one NaN.
    #[test]
    fn wrong_elements_are_noticed() {
        let shape @ [m, n, k] = [5, 7, 4000];
        for (codes, out) in [(Codes::Random, F32), (Codes::Random, BF16), (Codes::Exact, F32), (Codes::Exact, F16)] {
            let case = Case { codes, out, ..Case::new(shape) };
            let [a, b] = case.matrices();
            let rows: Vec<_> = (0..m).collect();
            let elements = product(&a, &b, &rows);
            let right: Vec<f32> = elements.iter().map(|element| to_dtype(&[element.want as f32], out).1[0]).collect();
            let bound = Bound::of(GemmPath::Emulated, EMULATE, k).get();
            let passes = |got: &[f32]| {
                let expected = Expected { rows: rows.clone(), elements: elements.clone(), transposed: false };
                compare(got, &expected, &Added::default(), &case, bound).is_ok()
            };
            assert!(passes(&right));
            for place in [0, 3 * n + 2, m * n - 1] {
                let step = match out {
                    F32 => elements[place].size as f32 * 4e-4,
                    _ => right[place].abs() * 0.02 + 0.01,
                };
                let step = if codes == Codes::Exact { 0.25 * step.signum() } else { step };
                for wrong in [right[place] + step, right[place] - step, f32::NAN, f32::INFINITY] {
                    let mut got = right.clone();
                    got[place] = wrong;
                    assert!(!passes(&got), "{codes} {out} {place}: {wrong} for {}", right[place]);
                }
            }
        }
    }

    /// A NaN or an infinity must not be repaired.
    #[test]
    fn repairs_are_noticed() {
        let case = Case { codes: Codes::NanCode, ..Case::new([2, 1, 3]) };
        let element = |want| Element { want, size: 1.0 };
        let expected = || Expected {
            rows: vec![0, 1],
            elements: vec![element(f64::NAN), element(f64::INFINITY)],
            transposed: false,
        };
        let passes = |got: [f32; 2]| compare(&got, &expected(), &Added::default(), &case, 1e-3).is_ok();
        assert!(passes([f32::NAN, f32::INFINITY]));
        for wrong in [[0.0, f32::INFINITY], [f32::NAN, 3e38], [f32::NAN, f32::NEG_INFINITY], [f32::NAN, f32::NAN]] {
            assert!(!passes(wrong), "{wrong:?}");
        }
    }

    /// Samples hold both ends and lie inside, whatever the size.
    #[test]
    fn samples_are_rows() {
        for rows in [1, 2, 64, 129, 4096] {
            let sample = sample(rows);
            assert!(sample.contains(&0) && sample.contains(&(rows - 1)), "{rows}");
            assert!(sample.is_sorted_by(|a, b| a < b) && sample.iter().all(|&row| row < rows), "{rows}");
        }
    }
}
