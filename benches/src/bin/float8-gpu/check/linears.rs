//! `nn::Linear` on `Autodiff<Float8<B>>`, forward and backward, every recipe, against the same on the CPU in f32.
//!
//! Codes and scales are the same bits there, so results differ by the sums' rounding only.

use burn::backend::{Autodiff, Flex};
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8, Float8Backend, Float8Config, Float8Error, Float8LinearConfig, Gemm, Recipe, Report, report};
use checks::{Case, Failure};
use half::bf16;
use test_data::relative_error;

use crate::target::Target;

/// M, K and N: tiny, ragged, one past tiles, and sizes that models have.
const SHAPES: [[usize; 3]; 6] = [[1, 64, 32], [8, 16, 16], [37, 70, 45], [129, 257, 65], [256, 512, 384], [5, 1, 3]];
const LARGE: [[usize; 3]; 3] = [[1000, 1030, 500], [2048, 1024, 1536], [300, 4100, 260]];

/// How far the results of a linear, as norms, may be from those with f32 sums.
///
/// f32 sums in another order: 1e-5. Tensor cores that keep about 14 bits: 2e-3. Results in bf16 are rounded by 2^-9 at most,
/// 1.1e-3 in the mean.
pub fn tolerance(report: &Report, dtype: DType) -> f64 {
    let sums = if report.totals().native > 0 { 2e-3 } else { 1e-5 };
    if dtype == DType::F32 { sums } else { sums + 2.5e-3 }
}

fn wrong(message: impl Into<String>) -> Failure {
    Failure::Wrong(message.into())
}

/// Roughly normal values, each one that bf16 and f16 have: multiples of 2^-8 of at most eight bits.
fn normal(len: usize, seed: u64) -> Vec<f32> {
    let rounded = |x: f32| bf16::from_f32((x * 256.0).round() / 256.0).to_f32();
    test_data::normal(len, seed).into_iter().map(rounded).collect()
}

/// What a linear gives, and what it did.
struct Done {
    /// y, dx, dw and db of the last step.
    results: [Vec<f32>; 4],
    report: Report,
}

/// Names end with the path that the forward pass should take.
pub fn visit<T: Target>(quick: bool, visit: &mut dyn FnMut(Case<'_>)) {
    let large: &[_] = if quick { &[] } else { &LARGE };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        if !T::Backend::fp8_supports(&Default::default(), dtype) {
            continue;
        }
        for recipe in Recipe::ALL {
            let config = Float8LinearConfig::new(recipe);
            let (granularities, gemm) = (config.casts().granularities(Gemm::Fprop), config.gemm_config(Gemm::Fprop));
            let path = T::Backend::fp8_gemm_path(&Default::default(), granularities, gemm).to_string();
            for &shape in SHAPES.iter().chain(large) {
                let ([m, k, n], path) = (shape, &path);
                visit(Case::new(format!("linear {recipe} {m}x{k}x{n} {dtype:?} {path}"), move || {
                    compare::<T::Backend>(recipe, shape, dtype, path)
                }));
            }
        }
    }
}

fn compare<B: Float8Backend>(recipe: Recipe, shape: [usize; 3], dtype: DType, path: &str) -> Result<f64, Failure> {
    let got = linear::<B>(recipe, shape, dtype)?;
    let want = linear::<Flex>(recipe, shape, DType::F32)?;
    // Only this model's: other tests may have run untagged linears.
    let mut ran = got.report.clone();
    ran.layers.truncate(1);
    ran.verify().map_err(|error| wrong(error.to_string()))?;
    let taken = ran.layers[0].fprop.path.as_deref();
    if taken != Some(path) {
        return Err(wrong(format!("the forward pass took {}, not {path}", taken.unwrap_or("no FP8 path"))));
    }
    let allowed = tolerance(&ran, dtype);
    let mut worst = 0f64;
    for (what, (got, want)) in ["y", "dx", "dw", "db"].into_iter().zip(got.results.iter().zip(&want.results)) {
        // The bias' gradient is Burn's own sum, whose precision is not ours.
        let allowed = if what == "db" { allowed.max(if dtype == DType::F32 { 1e-4 } else { 2e-2 }) } else { allowed };
        let error = relative_error(got, want);
        if error.is_nan() || error > allowed {
            return Err(wrong(format!("{what} by {path}: {error:.2e} from the CPU's, allowed {allowed:.0e}")));
        }
        worst = worst.max(error / allowed);
    }
    Ok(worst)
}

/// Two steps, so that delayed scales come from a history.
fn linear<B: Float8Backend>(recipe: Recipe, [m, k, n]: [usize; 3], dtype: DType) -> Result<Done, Failure> {
    type A<B> = Autodiff<Float8<B>>;
    let device = Default::default();
    let load = |seed, shape: [usize; 2]| {
        let data = TensorData::new(normal(shape[0] * shape[1], seed), shape);
        Tensor::<A<B>, 2>::from_data(data, &device).cast(dtype)
    };
    let weight = Param::initialized(ParamId::new(), load(1, [k, n]).detach().require_grad());
    let bias = load(2, [1, n]).reshape([n]).detach().require_grad();
    let linear = Linear { weight, bias: Some(Param::initialized(ParamId::new(), bias)) };
    let failed = |error: Float8Error| wrong(error.to_string());
    let linear = Float8Config::new(recipe).convert(linear).map_err(|error| failed(error.into()))?.0;
    let mut results = [vec![], vec![], vec![], vec![]];
    for step in 0..2 {
        let x = load(3 + step, [m, k]).detach().require_grad();
        let y = linear.forward(x.clone());
        let grads = (y.clone() * load(5 + step, [m, n])).sum().backward();
        let missing = || wrong("a gradient is missing");
        let dw = linear.weight.grad(&grads).ok_or_else(missing)?;
        let db = linear.bias.as_ref().and_then(|bias| bias.grad(&grads)).ok_or_else(missing)?;
        let dx = x.grad(&grads).ok_or_else(missing)?;
        results = [y.into_data(), dx.into_data(), dw.into_data(), db.into_data()]
            .map(|data| data.convert::<f32>().to_vec().unwrap_or_default());
    }
    Ok(Done { results, report: report(&linear) })
}
