//! The scaled and the grouped GEMM: operands, launches and comparisons.
//!
//! [`compare`](crate::compare) defines the allowed error. Matrices of -1, 0 and 1 must be right bit
//! for bit. Their partial sums are exact on every path, so one missing or extra product shows at
//! any size. Each group is compared with sums of its own operands, so a leak between groups fails.
//!
//! Above [`MAX_PRODUCTS`] the host computes the f64 product only for sampled rows and columns.
//! Every element is then compared with the emulated kernel, whose samples are checked in the same
//! way.

mod cases;
mod few_rows;
mod grouped_cases;
mod groups;
mod repeated;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{Format, GemmArgs, GemmConfig, GemmDevice, GemmPath, Granularity};

pub use self::groups::{GroupSizes, GroupsCase};
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::{Comparison, EMULATE, FAST, MAX_PRODUCTS, PRECISE, elements};
use crate::data::{F32, Random, from_dtype, to_dtype};
use crate::device::{poison, read, upload_vector};
use crate::matrix::{Codes, HostMatrix};
use crate::oracle::{Element, Factor};

/// Byte in the memory around an output.
const AROUND: u8 = 0xa5;

/// A GEMM with its operands, bias and output.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// M, N and K.
    pub shape: [usize; 3],
    /// Groups of a grouped GEMM.
    pub groups: Option<GroupsCase>,
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
            groups: None,
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
        let rows = self.groups.is_none().then_some(self.shape[0]);
        GemmDevice::of(client).path(rows, self.granularities, self.config)
    }

    /// The GEMM with each configuration. If all select the same kernel, one of them is enough.
    fn configs<R: Runtime>(self, client: &ComputeClient<R>) -> impl Iterator<Item = Self> {
        let count = if self.path(client) == GemmPath::Emulated { 1 } else { 3 };
        [PRECISE, FAST, EMULATE].into_iter().take(count).map(move |config| Self { config, ..self })
    }

    fn name<R: Runtime>(&self, client: &ComputeClient<R>) -> String {
        let Self { shape: [m, n, k], groups, formats: [a, b], granularities: [left, right], out, config, .. } = self;
        let kernel = groups.map_or("scaled_gemm".into(), |groups| format!("grouped_gemm {}", groups.name(self.shape)));
        let bias = self.bias.map_or(String::new(), |(dtype, stride)| format!(" bias:{dtype}/{stride}"));
        let memory = if self.memory == Memory::Given { " into" } else { "" };
        let fast = if config.use_fast_accum { " fast" } else { "" };
        let (codes, path) = (self.codes, self.path(client));
        format!("{kernel} {m}x{n}x{k} {a},{b} {left},{right} {codes}{bias} {out}{memory} {path}{fast}")
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
            codes => {
                let rows_b = n * self.groups.map_or(1, |groups| groups.matrices_of_b());
                let a = HostMatrix::new(codes, [m, k], a, left, 31);
                let mut matrices = [a, HostMatrix::new(codes, [rows_b, k], b, right, 32)];
                if let Some(groups) = self.groups {
                    groups.change(self, &mut matrices);
                }
                matrices
            }
        }
    }

    /// Multiplies the operands and compares the product with sums in f64.
    ///
    /// Returns the largest error as a share of `bound · Σ |terms|` plus the rounding to the output.
    /// Without a `bound`, [`GemmPath::error_bound`] for the contraction of each group applies.
    ///
    /// # Errors
    /// An element exceeds its bound, or the library or the device fails.
    pub fn compare<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [a, b]: [&HostMatrix; 2],
        bound: Option<f64>,
    ) -> Result<f64, Failure> {
        let &Self { shape: [m, n, k], granularities, codes, out, config, .. } = self;
        let path = self.path(client);
        let bound_of = |k: usize| bound.unwrap_or_else(|| path.error_bound(config, granularities, k));
        let bias = self.bias();
        let got = self.multiply(client, [a, b], &bias)?;
        let mut comparison = Comparison::new(codes.is_exact(), out);
        let mut compare = |[row, col]: [usize; 2], Element { want, size }: Element, bound: f64| {
            let shift = bias.get(col).map_or(0.0, |&shift| f64::from(shift));
            let element = Element { want: want + shift, size: size + shift.abs() };
            comparison.add([row, col], got[row * n + col], element, bound);
        };
        let full = m * n * k <= MAX_PRODUCTS;
        let [left, right] = [a, b].map(Factor::of);
        for part in self.parts() {
            let (left, right) = (left.part(part.a, part.k.clone()), right.part(part.b, part.k.clone()));
            for ([row, col], element) in elements(&left, &right, full) {
                compare([part.row + row, col], element, bound_of(part.k.len()));
            }
        }
        if !full && path != GemmPath::Emulated {
            let emulate = Self { config: EMULATE, out: F32, bias: None, memory: Memory::Fresh, ..*self };
            let want = emulate.multiply(client, [a, b], &[])?;
            let size = emulate.multiply(client, [&a.magnitudes(), &b.magnitudes()], &[])?;
            let emulated = GemmPath::Emulated.error_bound(EMULATE, granularities, k);
            let slack = if codes.is_exact() { 0.0 } else { emulated };
            for (i, (want, size)) in want.into_iter().map(f64::from).zip(size.into_iter().map(f64::from)).enumerate() {
                compare([i / n, i % n], Element { want, size }, bound_of(k) + slack);
            }
        }
        comparison.finish()
    }

    /// Bias, rounded to its dtype; empty without one.
    fn bias(&self) -> Vec<f32> {
        let mut random = Random::new(35);
        let mut value = || match self.codes {
            Codes::Exact => (random.below(9) as f32 - 4.0) / 4.0,
            _ => random.value(),
        };
        let Some((dtype, _)) = self.bias else { return vec![] };
        to_dtype(&(0..self.shape[1]).map(|_| value()).collect::<Vec<_>>(), dtype).1
    }

    fn multiply<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [a, b]: [&HostMatrix; 2],
        bias: &[f32],
    ) -> Result<Vec<f32>, Failure> {
        let &Self { shape: [m, n, _], out, config, memory, .. } = self;
        let bias = self.bias.map(|(dtype, stride)| upload_vector(client, bias, stride, dtype));
        let groups = self.groups.map(|groups| groups.upload(client, self.shape));
        let (a, b) = (a.upload(client), b.upload(client));
        let args = GemmArgs { a: &a, b: &b, bias: bias.as_ref(), groups: groups.as_ref(), dtype: out, config };
        let elements = m * n * self.groups.map_or(1, |groups| groups.products());
        let len = elements * out.size();
        poison(client, &[len; 2])?;
        let bytes = if memory == Memory::Fresh {
            read(client, args.run(client, None)?)?
        } else {
            let margin = vec![AROUND; client.properties().memory.alignment as usize];
            let around = client.create_from_slice(&[&margin, &vec![0xff; len], &margin].map(Vec::as_slice).concat());
            args.run_into(client, None, &around.clone().offset_start(margin.len() as u64))?;
            let mut bytes = read(client, around)?;
            let after = bytes.split_off(margin.len() + len);
            let written = bytes.split_off(margin.len());
            if [bytes, after].concat().iter().any(|&byte| byte != AROUND) {
                return Err(wrong!("memory around the output was written"));
            }
            written
        };
        let got = from_dtype(&bytes, out);
        if got.len() != elements { Err(wrong!("{} elements, not {elements}", got.len())) } else { Ok(got) }
    }
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    let cases = [cases::all(all), grouped_cases::all(all)].concat();
    let cases = cases.into_iter().flat_map(|case| case.configs(all.client));
    let emulated = [cases::emulated(), grouped_cases::emulated(), few_rows::cases(all)].concat();
    for case in cases.chain(emulated).collect::<Vec<_>>() {
        all.add(case.name(all.client), |client| {
            let [a, b] = case.matrices();
            case.compare(client, [&a, &b], None)
        });
    }
    few_rows::add(all);
    repeated::add(all);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{BF16, F16};

    /// One wrong product or rounding in any element must fail, as must a NaN or an infinity.
    #[test]
    fn wrong_elements_are_noticed() {
        let shape @ [m, n, k] = [5, 7, 4000];
        for (codes, out) in [(Codes::Random, F32), (Codes::Random, BF16), (Codes::Exact, F32), (Codes::Exact, F16)] {
            let case = Gemm { codes, out, ..Gemm::new(shape) };
            let [a, b] = case.matrices().each_ref().map(Factor::of);
            let expected = elements(&a, &b, true);
            let right: Vec<f32> =
                expected.iter().map(|(_, element)| to_dtype(&[element.want as f32], out).1[0]).collect();
            let bound = GemmPath::Emulated.error_bound(EMULATE, case.granularities, k);
            let passes = |got: &[f32]| {
                let mut comparison = Comparison::new(codes.is_exact(), out);
                expected
                    .iter()
                    .zip(got)
                    .for_each(|((place, element), got)| comparison.add(*place, *got, *element, bound));
                comparison.finish().is_ok()
            };
            assert!(passes(&right));
            for place in [0, 3 * n + 2, m * n - 1] {
                let step = match out {
                    F32 => expected[place].1.size as f32 * 4e-4,
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
