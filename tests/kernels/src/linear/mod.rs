//! `nn::Linear` on `Float8<Autodiff<B>>`, forward and backward, in every recipe.
//!
//! Results are compared with the CPU's in f32, and with torchao's. Codes and scales have the same
//! bits there, so results differ only by summation error.

mod golden;

use burn::backend::{Autodiff, Flex};
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Recipe, Report, backend::Float8Backend, config::SelfCheck, report,
    report::Gemm,
};
use half::bf16;
use test_data::{Random, relative_error};

pub use self::golden::visit_golden_linears;
use crate::case::{Case, Failure, Size, wrong};

type A<B> = Float8<Autodiff<B>>;

/// M, K and N: tiny, ragged, one past tiles, and sizes of models.
const SHAPES: [[usize; 3]; 6] = [[1, 64, 32], [8, 16, 16], [37, 70, 45], [129, 257, 65], [256, 512, 384], [5, 1, 3]];
const LARGE: [[usize; 3]; 3] = [[1000, 1030, 500], [2048, 1024, 1536], [300, 4100, 260]];

/// Tolerance for f32 sums: norm of the difference relative to the norm of the result.
const F32_SUMS: f64 = 1e-5;

/// A linear.
#[derive(Clone, Copy)]
struct LinearCase {
    recipe: Recipe,
    /// M, K and N.
    shape: [usize; 3],
    dtype: DType,
    /// Whether x, w, b and dy are -1, 0 and 1. Codes then have one magnitude, so sums are exact in 13
    /// bits; 16-bit results hold these integers. Otherwise they are roughly normal multiples of 2^-8
    /// with at most eight bits, which bf16 and f16 represent exactly.
    exact: bool,
}

/// Tolerance for normal operands relative to f32 sums, for a contraction of length `k`.
///
/// Some tensor cores keep 13 bits below the largest of each 128 products and round down. They lose
/// about the same amount each time, while results grow as √k: 2.7e-5 · √k on the PTX interpreter.
/// Rounding toward zero loses less. Tensor cores for f16 and bf16 may truncate an f32 sum after
/// every 16 products. 16-bit results are rounded by at most 2^-9, 1.1e-3 on average.
fn tolerance(report: &Report, dtype: DType, k: usize) -> f64 {
    let k = k as f64;
    let native = report.totals().native > 0;
    let sums = F32_SUMS + if native { 1e-4 * k.sqrt() } else { k / 16.0 * 2f64.powi(-23) };
    if dtype == DType::F32 { sums } else { sums + 2.5e-3 }
}

/// Results and report of a linear.
struct Done {
    /// y, dx, dw and db of the last step.
    results: Vec<Vec<f32>>,
    report: Report,
}

/// Passes every comparison with the CPU's linears to `visit`, which decides what to run. Names end
/// with the expected path of the forward pass.
pub fn visit_linears<B: Float8Backend>(size: Size, visit: &mut dyn FnMut(Case<'_>)) {
    let shapes = if size == Size::Full { [&SHAPES[..], &LARGE].concat() } else { SHAPES.to_vec() };
    let facts = B::fp8_facts(&Default::default());
    for dtype in [DType::F32, DType::BF16, DType::F16].into_iter().filter(|dtype| facts.supports(*dtype)) {
        for (recipe, &shape) in Recipe::ALL.iter().flat_map(|recipe| shapes.iter().map(move |shape| (recipe, shape))) {
            let config = Float8LinearConfig::new(*recipe);
            let (granularities, gemm) = (config.casts().granularities(Gemm::Fprop), config.gemm_config(Gemm::Fprop));
            let [m, k, n] = shape;
            let path = facts.gemm_path(Some(m), granularities, gemm).to_string();
            for (values, exact) in [("exact", true), ("normal", false)] {
                let name = format!("linear {recipe} {m}x{k}x{n} {dtype:?} {values} {path}");
                visit(Case::new(name, || LinearCase { recipe: *recipe, shape, dtype, exact }.compare::<B>(&path)));
            }
        }
    }
}

impl LinearCase {
    fn compare<B: Float8Backend>(self, path: &str) -> Result<f64, Failure> {
        let got = self.run::<B>()?;
        let want = Self { dtype: DType::F32, ..self }.run::<Flex>()?;
        // Only this model's layer: other tests may have run untagged linears.
        let mut ran = got.report;
        ran.layers.truncate(1);
        ran.verify().map_err(|error| wrong!("{error}"))?;
        let taken = ran.layers[0].fprop.path.as_deref();
        if taken != Some(path) {
            return Err(wrong!("the forward pass took {}, not {path}", taken.unwrap_or("no FP8 path")));
        }
        let [m, k, n] = self.shape;
        let allowed = |contraction| if self.exact { F32_SUMS } else { tolerance(&ran, self.dtype, contraction) };
        // Burn sums the bias gradient itself, in its own precision.
        let burns = if self.dtype == DType::F32 { 1e-4 } else { 2e-2 };
        let allowed = [("y", allowed(k)), ("dx", allowed(n)), ("dw", allowed(m)), ("db", burns)];
        let mut worst = 0f64;
        for ((what, allowed), (got, want)) in allowed.into_iter().zip(got.results.iter().zip(&want.results)) {
            worst = worst.max(share(what, relative_error(got, want), allowed)?);
        }
        Ok(worst)
    }

    fn fill(self, len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let rounded = |x: f32| bf16::from_f32((x * 256.0).round() / 256.0).to_f32();
        match self.exact {
            true => (0..len).map(|_| random.below(3) as f32 - 1.0).collect(),
            false => test_data::normal(len, seed).into_iter().map(rounded).collect(),
        }
    }

    /// Runs two steps, so that delayed scales come from a history.
    fn run<B: Float8Backend>(self) -> Result<Done, Failure> {
        let [m, k, n] = self.shape;
        let load = |seed, shape: [usize; 2]| {
            let data = TensorData::new(self.fill(shape[0] * shape[1], seed), shape);
            Tensor::<A<B>, 2>::from_data(data, &Default::default()).cast(self.dtype)
        };
        let bias = Some(load(2, [1, n]).reshape([n]));
        let linear = converted::<B>(self.recipe, load(1, [k, n]), bias)?;
        let mut results = vec![];
        for seed in 0..2 {
            results = step::<B>(&linear, load(3 + seed, [m, k]), load(5 + seed, [m, n]))?;
        }
        Ok(Done { results, report: report(&linear) })
    }
}

/// Error as a share of the allowed error.
fn share(what: &str, error: f64, allowed: f64) -> Result<f64, Failure> {
    // NaN fails.
    if error <= allowed { Ok(error / allowed) } else { Err(wrong!("{what}: {error:.2e}, allowed {allowed:.0e}")) }
}

/// Linear with a configuration whose self-check is off: it would work around a wrong kernel.
fn converted<B: Float8Backend>(
    recipe: Recipe,
    weight: Tensor<A<B>, 2>,
    bias: Option<Tensor<A<B>, 1>>,
) -> Result<Linear<A<B>>, Failure> {
    let weight = Param::initialized(ParamId::new(), weight.detach().require_grad());
    let bias = bias.map(|bias| Param::initialized(ParamId::new(), bias.detach().require_grad()));
    let config = Float8Config::new(recipe).with_self_check(SelfCheck::Off);
    let (linear, _) = config.apply(Linear { weight, bias }).map_err(|error| wrong!("{}", error.error))?;
    Ok(linear)
}

/// y, dx, dw and, with a bias, db.
fn step<B: Float8Backend>(
    linear: &Linear<A<B>>,
    x: Tensor<A<B>, 2>,
    dy: Tensor<A<B>, 2>,
) -> Result<Vec<Vec<f32>>, Failure> {
    let x = x.detach().require_grad();
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy).sum().backward();
    let missing = || wrong!("a gradient is missing");
    let dx = x.grad(&grads).ok_or_else(missing)?;
    let dw = linear.weight.grad(&grads).ok_or_else(missing)?;
    let db = linear.bias.as_ref().map(|bias| bias.grad(&grads).ok_or_else(missing)).transpose()?;
    let values = |data: TensorData| data.convert::<f32>().to_vec().map_err(|error| wrong!("{error:?}"));
    let data = [y.into_data(), dx.into_data(), dw.into_data()].into_iter().chain(db.map(|db| db.into_data()));
    data.map(values).collect()
}
