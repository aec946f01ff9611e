//! Forward and backward of one linear, the casts of x, w and dy included.
//!
//! Backward starts from a given dy, like torch's.

use burn::backend::Autodiff;
use burn::backend::autodiff::grads::Gradients;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::linear;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Float8Tensor, Recipe, backend::Float8Backend, report::Gemm,
    set_default_config,
};
use serde::{Deserialize, Serialize};

use super::data::sets;
use super::timing::or_dash;
use super::{Bench, Size, given, headed, torch};
use crate::target::Target;

/// M, K and N.
pub fn shapes(size: Size) -> Vec<[usize; 3]> {
    size.of(&[[64, 128, 96]], 2, &[[8192, 4096, 4096], [8192, 8192, 8192], [8192, 4096, 14_336]])
}

/// One precision of one shape.
#[derive(Serialize, Deserialize)]
pub struct Row {
    pub m: usize,
    pub k: usize,
    pub n: usize,
    /// Recipe with its changes, or the compute dtype.
    pub precision: String,
    pub milliseconds: f64,
    /// Time of Burn in high precision / time of this, if measured.
    pub speedup: Option<f64>,
    /// Path of the FP8 GEMMs.
    pub path: Option<String>,
}

/// Recipes without a history, which would need a layer.
fn configs(size: Size) -> Vec<(String, Float8LinearConfig)> {
    let tensorwise = Float8LinearConfig::new(Recipe::Tensorwise);
    let fast = Gemm::ALL.into_iter().fold(tensorwise, |config, gemm| config.with_use_fast_accum(gemm, true));
    let recipes = Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::Delayed);
    let mut configs: Vec<_> = recipes.map(|recipe| (recipe.to_string(), Float8LinearConfig::new(recipe))).collect();
    configs.insert(1, ("tensorwise, fast accumulation".into(), fast));
    let blockwise = configs.iter().position(|(_, config)| config.recipe() == Recipe::Blockwise).expect("a recipe");
    // Scales that Blackwell's tensor cores apply.
    let rounded = Float8LinearConfig::new(Recipe::Blockwise).with_round_scales_to_power_of_2(true);
    configs.insert(blockwise + 1, ("blockwise, powers of two".into(), rounded));
    match size {
        Size::First => configs.truncate(1),
        Size::Headline => configs.truncate(3),
        Size::Tiny | Size::Full => {}
    }
    configs
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    for shape @ [m, k, n] in shapes(bench.size) {
        let precision = format!("{:?}", T::compute_dtype()).to_lowercase();
        let row = |precision, seconds: f64, path| {
            super::Row::Linear(Row { m, k, n, precision, milliseconds: seconds * 1e3, speedup: None, path })
        };
        bench.case(&format!("linear {m}x{k}x{n} {precision}"), |clock| {
            let inputs = inputs::<T>(shape);
            let seconds = clock.seconds::<T>(|turn| {
                plain_step::<T>(inputs[turn % inputs.len()].clone());
            });
            Ok(row(precision, seconds, None))
        });
        for (precision, config) in configs(bench.size) {
            let (granularities, gemm) = (config.casts().granularities(Gemm::Fprop), config.gemm_config(Gemm::Fprop));
            bench.case(&format!("linear {m}x{k}x{n} {precision}"), |clock| {
                let device = T::Backend::fp8_facts(&Default::default());
                let path = device.gemm_path(Some(m), granularities, gemm).to_string();
                with_default::<T>(&config.into());
                let inputs = inputs::<T>(shape);
                let seconds = clock.seconds::<T>(|turn| {
                    float8_step::<T>(inputs[turn % inputs.len()].clone());
                });
                with_default::<T>(&Float8Config::default());
                Ok(row(precision, seconds, Some(path)))
            });
        }
    }
}

/// Sets the device's default configuration, for linears outside of a model.
pub fn with_default<T: Target>(config: &Float8Config) {
    set_default_config::<Float8<Autodiff<T::Backend>>>(&Default::default(), Some(config))
        .expect("a recipe without a history");
}

/// Computes speedups over high precision, if measured.
pub fn compare(rows: &mut [Row]) {
    let key = |row: &Row| [row.m, row.k, row.n];
    let plain: Vec<_> = rows.iter().filter(|row| row.path.is_none()).map(|row| (key(row), row.milliseconds)).collect();
    for row in rows {
        let plain = plain.iter().find(|(shape, _)| *shape == key(row));
        row.speedup = plain.map(|(_, milliseconds)| milliseconds / row.milliseconds);
    }
}

/// Sets of x `[M, K]`, w `[K, N]`, dy `[M, N]` and the one-element root of backward.
pub fn inputs<T: Target>([m, k, n]: [usize; 3]) -> Vec<[FloatTensor<T::Backend>; 4]> {
    let (device, dtype) = (Default::default(), T::compute_dtype());
    let tensor = |shape: [usize; 2], deviation| {
        let tensor = Tensor::<T::Backend, 2>::random(shape, Distribution::Normal(0.0, deviation), &device);
        tensor.cast(dtype).into_primitive().tensor()
    };
    let set = |_| [tensor([m, k], 1.0), tensor([k, n], 0.02), tensor([m, n], 1.0), tensor([1, 1], 1.0)];
    (0..sets(2 * (m * k + k * n + m * n)).max(2)).map(set).collect()
}

/// Forward and backward in high precision.
pub fn plain_step<T: Target>([x, w, dy, root]: [FloatTensor<T::Backend>; 4]) {
    let new = |input| Tensor::from_primitive(TensorPrimitive::Float(input));
    step::<Autodiff<T::Backend>>([x, w].map(new), |y| given::backward(y, dy, root));
}

/// Forward and backward with the device's default configuration. The tensors are new to the
/// decorator, so nothing is cast yet.
pub fn float8_step<T: Target>([x, w, dy, root]: [FloatTensor<T::Backend>; 4]) {
    let new = |input| Tensor::from_primitive(TensorPrimitive::Float(Float8Tensor::new(input)));
    step::<Float8<Autodiff<T::Backend>>>([x, w].map(new), |y| given::backward(y.into_full(), dy, root));
}

/// Forward of x and w, and their gradients by `backward`.
fn step<B: AutodiffBackend<Gradients = Gradients>>(
    inputs: [Tensor<B::InnerBackend, 2>; 2],
    backward: impl FnOnce(FloatTensor<B>) -> Gradients,
) {
    let [x, w] = inputs.map(|input| Tensor::<B, 2>::from_inner(input).require_grad());
    let grads = backward(linear(x.clone(), w.clone(), None).into_primitive().tensor());
    drop((x.grad(&grads).expect("x is tracked"), w.grad(&grads).expect("w is tracked")));
}

pub fn print(rows: &[Row], torch: &torch::Results) {
    if rows.is_empty() {
        return;
    }
    headed("forward + backward of one linear, casts included");
    println!(
        "{:>6} {:>6} {:>6}  {:<30}  {:>8}  {:>9}  {:>13}  path",
        "M", "K", "N", "precision", "ms", "to Burn's", "to torch bf16"
    );
    for row in rows {
        let Row { m, k, n, precision, milliseconds, speedup, path } = row;
        let torch = torch.linear_ms([*m, *k, *n]).map(|torch| torch / milliseconds);
        println!(
            "{m:>6} {k:>6} {n:>6}  {precision:<30}  {milliseconds:>8.3}  {:>9}  {:>13}  {}",
            or_dash(*speedup, 2),
            or_dash(torch, 2),
            path.as_deref().unwrap_or("-"),
        );
    }
}
