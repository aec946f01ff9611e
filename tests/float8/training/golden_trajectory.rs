//! Twelve training steps from hf_llama's weights: torchao's losses, recipe by recipe.
use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Float8Stack, Recipe, backend::Float8Backend, report};
use models::{CausalLmExt, Decoder};
use test_data::Golden;

use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::runtime::{Flex, Fused, has_wgpu};

fn load<B: AutodiffBackend>() -> Decoder<B> {
    Decoder::load_hf(Golden::folder().join("hf_llama"), &Default::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// Loss before each update, and the trained model.
fn train<B: AutodiffBackend>(mut model: Decoder<B>, golden: &Golden, steps: usize) -> (Vec<f32>, Decoder<B>) {
    let shape = golden.shape("batches");
    let [rows, len] = [shape[1], shape[2]];
    let batches: Vec<_> = golden.ints("batches").chunks_exact(rows * len).map(<[i32]>::to_vec).collect();
    let config = AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1);
    let mut optimizer = config.init::<B, Decoder<B>>();
    let losses = (0..steps).map(|step| {
        let batch = TensorData::new(batches[step % 3].clone(), [rows, len]);
        let batch = Tensor::<B, 2, Int>::from_data(batch, &Default::default());
        let (inputs, targets) = (batch.clone().slice([0..rows, 0..len - 1]), batch.slice([0..rows, 1..len]));
        let loss = model.loss(inputs, targets);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let value = values(loss.inner())[0];
        model = optimizer.step(1e-3, model.clone(), grads);
        value
    });
    (losses.collect(), model)
}

fn worst(ours: &[f32], golden: &[f32]) -> f32 {
    ours.iter().zip(golden).map(|(a, b)| (a - b).abs()).fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
}

fn compare(what: &str, ours: &[f32], golden: &[f32], tolerance: impl Fn(usize) -> f32) {
    println!("{what}: at most {:.5} from torchao's losses: {ours:?}", worst(ours, golden));
    for (step, (ours, golden)) in ours.iter().zip(golden).enumerate() {
        assert!((ours - golden).abs() < tolerance(step), "{what}, step {step}: loss {ours}, torchao {golden}");
    }
}

#[test]
fn golden_trajectory_without_fp8() {
    let golden = Golden::open("trajectory.safetensors");
    let losses = golden.floats("loss_none");
    let (ours, _) = train(load::<Autodiff<Flex>>(), &golden, losses.len());
    compare("flex, none", &ours, &losses, |_| 1e-3);
}

/// Scales every weight of q_proj, v_proj and up_proj by 1 + 1e-7 · noise, about one f32 rounding.
fn nudged<B: AutodiffBackend>(mut model: Decoder<B>, seed: u64) -> Decoder<B> {
    for layer in &mut model.layers {
        let mlp = layer.mlp.as_mut().expect("a dense model");
        for linear in [&mut layer.self_attn.q_proj, &mut layer.self_attn.v_proj, &mut mlp.up_proj] {
            linear.weight = linear.weight.clone().map(|w| {
                let noise = normal(w.shape().num_elements(), seed);
                let factors = noise.into_iter().map(|n| 1.0 + 1e-7 * n).collect();
                (w.clone() * tensor(factors, w.dims())).detach().require_grad()
            });
        }
    }
    model
}

/// Compares several runs with torchao's losses: each run, and their mean.
///
/// A different rounding in the last f32 bit of a GEMM operand flips a few FP8 codes, which Adam's
/// normalized steps amplify. Runs that differ in nothing else therefore have different losses, and
/// torchao's run is one of them. With `tensorwise`, the standard deviation of 24 runs is at most
/// 0.005 in all steps but the last, where it is 0.007.
fn trajectory<B: Float8Backend>(runtime: &str, recipe: Recipe, runs: usize) {
    type A<B> = Float8<Autodiff<B>>;
    let golden = Golden::open("trajectory.safetensors");
    let losses = golden.floats(&format!("loss_{recipe}"));
    let last = losses.len() - 1;
    let tolerance = |step| if step < last { 0.02 } else { 0.04 };
    let mut all = vec![];
    for run in 0..runs {
        let model = if run == 0 { load::<A<B>>() } else { nudged(load(), run as u64) };
        // A tied output is no separate linear and stays in high precision.
        let filters = if model.lm_head.is_some() { vec!["lm_head"] } else { vec![] };
        let model = Float8Config::new(recipe).with_filter_fqns(filters).apply(model).unwrap().0;
        let (ours, model) = train(model, &golden, losses.len());
        proves_fp8::<A<B>>(&model, losses.len() as u64, recipe);
        compare(&format!("{runtime}, {recipe}, run {run}"), &ours, &losses, tolerance);
        all.push(ours);
    }
    let mean: Vec<_> = (0..losses.len()).map(|i| all.iter().map(|ours| ours[i]).sum::<f32>() / runs as f32).collect();
    let of_mean = |step| if runs > 1 { 0.75 * tolerance(step) } else { tolerance(step) };
    compare(&format!("{runtime}, {recipe}, mean of {runs} runs"), &mean, &losses, of_mean);
}

/// Every projection ran its GEMMs in FP8 in every step, except wgrad where the recipe disables it.
/// The output layer ran none in FP8.
fn proves_fp8<B: Float8Stack>(model: &Decoder<B>, steps: u64, recipe: Recipe) {
    let high = if recipe == Recipe::RowwiseWithGwHp { steps } else { 0 };
    for layer in report(model).layers {
        let totals = layer.totals();
        if layer.name == "lm_head" {
            assert_eq!((totals.emulated, totals.high_precision), (0, 3 * steps), "{}", layer.name);
        } else if layer.name != burn_float8::report::UNTAGGED_NAME {
            assert_eq!(totals.native + totals.emulated, 3 * steps - high, "{}", layer.name);
            assert_eq!(totals.high_precision, high, "{}", layer.name);
        }
    }
}

/// torchao's recipes in the file.
const RECIPES: [Recipe; 3] = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::RowwiseWithGwHp];

#[test]
fn golden_trajectories() {
    for recipe in RECIPES {
        trajectory::<Flex>("flex", recipe, 4);
    }
}

#[test]
fn golden_trajectories_on_wgpu() {
    if has_wgpu() {
        for recipe in RECIPES {
            trajectory::<Fused>("wgpu", recipe, 1);
        }
    }
}
