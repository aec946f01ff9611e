//! The scaled GEMM: every pair of formats and granularities, every bias and output, and ragged,
//! tiny and large shapes.
//!
//! [`compare`](crate::compare) defines the allowed error. Matrices of -1, 0 and 1 must be right bit
//! for bit. Their partial sums are exact on every path, so one missing or extra product shows at
//! any size.
//!
//! Above [`MAX_PRODUCTS`] the host computes the f64 product only for sampled rows and columns.
//! Every element is then compared with the emulated kernel, whose samples are checked in the same
//! way.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Format, GemmArgs, GemmConfig, GemmDevice, GemmPath, Granularity, gemm_path, scaled_gemm, supports,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::{Comparison, EMULATE, Expected, FAST, MAX_PRODUCTS, PRECISE};
use crate::data::{BF16, DTYPES, F16, F32, Random, from_dtype, to_dtype};
use crate::device::{poison, read, upload_vector};
use crate::matrix::{Codes, HostMatrix};
use crate::oracle::Element;

/// Sizes around tiles of 64, 128, 192 and 256, blocks of 128 and padding to 16.
const SHAPES: [[usize; 3]; 16] = [
    [1, 1, 1],
    [1, 1, 1000],
    [5, 1, 1000],
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

/// Many tiles, long contractions, small M, and sizes of Llama.
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

/// M, N and K on both sides of the edges of blocks.
const BLOCKS: [[usize; 3]; 5] = [[2, 1, 1], [5, 3, 128], [70, 130, 129], [129, 257, 300], [2, 3, 513]];

/// Number of random shapes.
const ANY: u64 = 48;

/// Byte in the memory around an output.
const AROUND: u8 = 0xa5;

/// More than eight rows of tiles.
const BANDS: [usize; 3] = [1100, 130, 40];

/// A GEMM with its operands, bias and output.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// M, N and K.
    pub shape: [usize; 3],
    /// Formats of A and B.
    pub formats: [Format; 2],
    /// Granularities of A and B.
    pub granularities: [Granularity; 2],
    /// Contents of the operands.
    pub codes: Codes,
    /// Dtype and stride of the bias.
    pub bias: Option<(StorageType, usize)>,
    /// Dtype of the output.
    pub out: StorageType,
    /// Memory of the output.
    pub memory: Memory,
    /// Options of the GEMM.
    pub config: GemmConfig,
}

/// Memory of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Allocated by the GEMM.
    Fresh,
    /// Part of an allocation. It holds NaN, and the rest of the allocation must stay unchanged.
    Given,
}

impl Gemm {
    /// Random e4m3 operands with one scale for each tensor, a new f32 output, and [`PRECISE`].
    pub fn new(shape: [usize; 3]) -> Self {
        Self {
            shape,
            formats: [Format::E4m3; 2],
            granularities: [Granularity::Tensor; 2],
            codes: Codes::Random,
            bias: None,
            out: F32,
            memory: Memory::Fresh,
            config: PRECISE,
        }
    }

    fn path<R: Runtime>(&self, client: &ComputeClient<R>) -> GemmPath {
        GemmDevice::of(client).path(Some(self.shape[0]), self.granularities, self.config)
    }

    pub(crate) fn name<R: Runtime>(&self, client: &ComputeClient<R>) -> String {
        let Self { shape: [m, n, k], formats, granularities, codes, bias, out, memory, config } = self;
        let bias = bias.map_or(String::new(), |(dtype, stride)| format!(" bias:{dtype}/{stride}"));
        let fast = if config.use_fast_accum { " fast" } else { "" };
        let memory = match memory {
            Memory::Fresh => "",
            Memory::Given => " into",
        };
        let ([a, b], [left, right]) = (formats, granularities);
        let path = self.path(client);
        format!("scaled_gemm {m}x{n}x{k} {a},{b} {left},{right} {codes}{bias} {out}{memory} {path}{fast}")
    }

    /// Operands of the case.
    pub fn matrices(&self) -> [HostMatrix; 2] {
        let ([m, n, k], [a, b], [left, right]) = (self.shape, self.formats, self.granularities);
        match self.codes {
            Codes::EachLeft => {
                [HostMatrix::every_code([m, k], n.min(k), a, left), HostMatrix::identity([n, k], b, right)]
            }
            Codes::EachRight => {
                [HostMatrix::identity([m, k], a, left), HostMatrix::every_code([n, k], m.min(k), b, right)]
            }
            codes => [HostMatrix::new(codes, [m, k], a, left, 31), HostMatrix::new(codes, [n, k], b, right, 32)],
        }
    }

    /// Multiplies the operands and compares the product with sums in f64.
    ///
    /// Returns the largest error as a share of `bound · Σ |terms|` plus the rounding to the output.
    ///
    /// # Errors
    /// An element exceeds its bound, or the library or the device fails.
    pub fn compare<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [a, b]: [&HostMatrix; 2],
        bound: f64,
    ) -> Result<f64, Failure> {
        let &Self { shape: [m, n, k], codes, granularities, out, .. } = self;
        let path = self.path(client);
        let bias = bias(self);
        let got = multiply(client, [a, b], &bias, self)?;
        let mut comparison = Comparison::new(codes, out);
        let full = m * n * k <= MAX_PRODUCTS;
        for expected in Expected::of(a, b, full) {
            compare(&mut comparison, &got, &expected, &bias, bound);
        }
        if !full && path != GemmPath::Emulated {
            let emulate = Self { config: EMULATE, out: F32, bias: None, memory: Memory::Fresh, ..*self };
            let want = multiply(client, [a, b], &[], &emulate)?;
            let size = multiply(client, [&a.magnitudes(), &b.magnitudes()], &[], &emulate)?;
            let emulated = GemmPath::Emulated.error_bound(EMULATE, granularities, k);
            let slack = if codes.is_exact() { 0.0 } else { emulated };
            compare(&mut comparison, &got, &Expected::given(&want, &size, n), &bias, bound + slack);
        }
        comparison.finish()
    }
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases(all) {
        all.add(case.name(all.client), |client| check(client, &case));
    }
}

fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Gemm> {
    let client = all.client;
    // If all configs select the same kernel, one of them is enough.
    let native = gemm_path(client, [Granularity::Tensor; 2], PRECISE) != GemmPath::Emulated;
    let configs = if native { vec![PRECISE, FAST, EMULATE] } else { vec![PRECISE] };
    let outs = DTYPES.into_iter().filter(|dtype| supports(client, *dtype)).collect::<Vec<_>>();
    let half = if outs.contains(&BF16) { BF16 } else { *outs.last().unwrap_or(&F32) };
    let mut cases = vec![];
    for config in configs {
        let new = |shape| Gemm { config, ..Gemm::new(shape) };
        for shape in all.sizes(&SHAPES, &LARGE) {
            cases.push(new(shape));
            cases.push(Gemm { codes: Codes::Exact, out: half, bias: Some((F32, 1)), ..new(shape) });
        }
        for formats in Format::ALL.into_iter().flat_map(|a| Format::ALL.map(|b| [a, b])) {
            let codes = [Codes::Random, Codes::Exact, Codes::Zeros, Codes::NanCode, Codes::InfCode];
            for codes in codes.into_iter().chain([Codes::EachLeft, Codes::EachRight]) {
                cases.push(Gemm { formats, codes, ..new([70, 133, 200]) });
            }
        }
        for granularities in Granularity::ALL.into_iter().flat_map(|a| Granularity::ALL.map(|b| [a, b])) {
            for shape in all.sizes(&[[130, 137, 300]], &[[1025, 1100, 2060], [300, 260, 128], [2048, 2304, 2560]]) {
                for codes in [Codes::Random, Codes::Exact] {
                    cases.push(Gemm { granularities, codes, ..new(shape) });
                }
            }
        }
        for granularity in Granularity::ALL {
            for codes in [Codes::NanCode, Codes::NanScale, Codes::Zeros] {
                cases.push(Gemm { granularities: [granularity, Granularity::Row], codes, ..new([140, 6, 300]) });
                cases.push(Gemm { granularities: [Granularity::Row, granularity], codes, ..new([6, 140, 300]) });
            }
        }
        for &out in &outs {
            for (i, bias) in [None, Some(F32), Some(F16), Some(BF16)].into_iter().enumerate() {
                for shape in [[66, 70, 48], [129, 133, 272]] {
                    let case = Gemm { out, bias: bias.map(|dtype| (dtype, i)), ..new(shape) };
                    cases.extend([case, Gemm { codes: Codes::Exact, ..case }]);
                    cases.push(Gemm { memory: Memory::Given, ..case });
                }
            }
        }
    }
    cases.extend(emulated_cases());
    cases
}

/// Cases for the emulated kernel only, since tensor-core kernels take long to compile.
///
/// All pairs of granularities with mixed formats, with and without bias, for shapes around blocks
/// and random shapes. One shape has more rows of tiles than the kernel traverses together.
fn emulated_cases() -> Vec<Gemm> {
    let pair = |shape, [i, j]: [usize; 2]| Gemm {
        formats: [Format::ALL[i % 2], Format::ALL[j % 2]],
        granularities: [Granularity::ALL[i], Granularity::ALL[j]],
        bias: ((i + j) % 2 == 1).then_some((F32, 1)),
        config: EMULATE,
        ..Gemm::new(shape)
    };
    let pairs = || (0..5).flat_map(|i| (0..5).map(move |j| [i, j]));
    let mut cases: Vec<_> = BLOCKS.into_iter().flat_map(|shape| pairs().map(move |ij| pair(shape, ij))).collect();
    cases.extend((0..ANY).map(|seed| {
        let random = &mut Random::new(3000 + seed);
        let shape = [150, 150, 420].map(|most| 1 + random.below(most));
        pair(shape, [random.below(5), random.below(5)])
    }));
    cases.push(Gemm { config: EMULATE, ..Gemm::new(BANDS) });
    cases
}

pub(crate) fn check<R: Runtime>(client: &ComputeClient<R>, case: &Gemm) -> Result<f64, Failure> {
    let [a, b] = case.matrices();
    let bound = case.path(client).error_bound(case.config, case.granularities, case.shape[2]);
    case.compare(client, [&a, &b], bound)
}

/// Compares an output with products plus the bias.
fn compare(comparison: &mut Comparison, got: &[f32], expected: &Expected, bias: &[f32], bound: f64) {
    let n = if expected.transposed { got.len() / expected.width } else { expected.width };
    for ([row, col], Element { want, size }) in expected.iter() {
        let shift = bias.get(col).map_or(0.0, |&shift| f64::from(shift));
        let element = Element { want: want + shift, size: size + shift.abs() };
        comparison.add([row, col], got[row * n + col], element, bound);
    }
}

/// Bias, rounded to its dtype; empty without one.
fn bias(case: &Gemm) -> Vec<f32> {
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

pub(crate) fn multiply<R: Runtime>(
    client: &ComputeClient<R>,
    [a, b]: [&HostMatrix; 2],
    bias: &[f32],
    case: &Gemm,
) -> Result<Vec<f32>, Failure> {
    let &Gemm { shape: [m, n, _], out, config, memory, .. } = case;
    let view = case.bias.map(|(dtype, stride)| upload_vector(client, bias, stride, dtype));
    let (a, b) = (a.upload(client), b.upload(client));
    let len = m * n * out.size();
    poison(client, &[len; 2])?;
    let bytes = if memory == Memory::Fresh {
        read(client, scaled_gemm(client, &a, &b, view.as_ref(), out, config)?)?
    } else {
        let margin = client.properties().memory.alignment as usize;
        let around = client.create_from_slice(&[vec![AROUND; margin], vec![0xff; len], vec![AROUND; margin]].concat());
        let handle = around.clone().offset_start(margin as u64);
        let args = GemmArgs { a: &a, b: &b, bias: view.as_ref(), groups: None, dtype: out, config };
        args.run_into(client, None, &handle)?;
        let mut bytes = read(client, around)?;
        let after = bytes.split_off(margin + len);
        let written = bytes.split_off(margin);
        if bytes.iter().chain(&after).any(|&byte| byte != AROUND) {
            return Err(wrong!("memory around the output was written"));
        }
        written
    };
    let got = from_dtype(&bytes, out);
    if got.len() != m * n {
        return Err(wrong!("{} elements, not {m} by {n}", got.len()));
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One wrong product or rounding in any element must fail, as must a NaN or an infinity.
    #[test]
    fn wrong_elements_are_noticed() {
        let shape @ [m, n, k] = [5, 7, 4000];
        for (codes, out) in [(Codes::Random, F32), (Codes::Random, BF16), (Codes::Exact, F32), (Codes::Exact, F16)] {
            let case = Gemm { codes, out, ..Gemm::new(shape) };
            let [a, b] = case.matrices();
            let expected = Expected::all(&a, &b);
            let elements = &expected.elements;
            let right: Vec<f32> = elements.iter().map(|element| to_dtype(&[element.want as f32], out).1[0]).collect();
            let bound = GemmPath::Emulated.error_bound(EMULATE, case.granularities, k);
            let passes = |got: &[f32]| {
                let mut comparison = Comparison::new(codes, out);
                compare(&mut comparison, got, &expected, &[], bound);
                comparison.finish().is_ok()
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
}
