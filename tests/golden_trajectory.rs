//! Twelve steps of training from hf_llama's weights: the losses of torchao, recipe by recipe.
use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Backend, Float8Config, Float8Ops, report};
use llama3::Llama;

use crate::support::goldens::{Golden, folder};
use crate::support::operand::values;
use crate::support::runtime::{Flex, Fused, has_wgpu};

fn load<B: AutodiffBackend>() -> Llama<B> {
    Llama::load_hf(folder().join("hf_llama"), &Default::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// The loss before each update.
fn train<B: AutodiffBackend>(mut model: Llama<B>, golden: &Golden, steps: usize) -> (Vec<f32>, Llama<B>) {
    let shape = golden.shape("batches");
    let [rows, len] = [shape[1], shape[2]];
    let batches: Vec<_> = golden.ints("batches").chunks_exact(rows * len).map(<[i32]>::to_vec).collect();
    let config = AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1);
    let mut optimizer = config.init::<B, Llama<B>>();
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

fn compare(what: &str, ours: &[f32], golden: &[f32], tolerance: f32) {
    let worst = ours.iter().zip(golden).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{what}: at most {worst:.5} from torchao's losses: {ours:?}");
    for (step, (ours, golden)) in ours.iter().zip(golden).enumerate() {
        assert!((ours - golden).abs() < tolerance, "{what}, step {step}: loss {ours}, torchao {golden}");
    }
}

#[test]
fn golden_trajectory_without_fp8() {
    let golden = Golden::open("trajectory.safetensors");
    let losses = golden.floats("loss_none");
    let (ours, _) = train(load::<Autodiff<Flex>>(), &golden, losses.len());
    compare("flex, none", &ours, &losses, 1e-3);
}

fn tensorwise<B: Float8Backend>(what: &str) {
    type A<B> = Autodiff<Float8<B>>;
    let golden = Golden::open("trajectory.safetensors");
    let losses = golden.floats("loss_tensorwise");
    let mut model = load::<A<B>>();
    if let Ok(p) = std::env::var("PERTURB") {
        let mut rng = p.parse::<u64>().unwrap();
        for l in &mut model.layers {
            for w in [&mut l.mlp.gate_proj, &mut l.mlp.up_proj, &mut l.self_attn.q_proj, &mut l.self_attn.v_proj] {
                rng += 1;
                let v = values(w.weight.val());
                let n = crate::support::normal(v.len(), rng);
                let d = w.weight.dims();
                let t = crate::support::operand::tensor::<A<B>, 2>(v.iter().zip(n).map(|(v, n)| v * (1.0 + 1e-7 * n)).collect(), d);
                w.weight = w.weight.clone().map(|_| t.require_grad());
            }
        }
    }
    // A tied output is no linear of its own and stays in high precision anyway.
    let filters = if model.lm_head.is_some() { vec!["lm_head"] } else { vec![] };
    let model = Float8Config::tensorwise().with_filter_fqns(filters).apply(model).unwrap();
    let (ours, model) = train(model, &golden, losses.len());
    compare(what, &ours, &losses, 0.02);
    proves_fp8::<A<B>>(&model, losses.len() as u64);
}

/// Every projection ran its three GEMMs in FP8 at every step, and the output layer none.
fn proves_fp8<B: Float8Ops>(model: &Llama<B>, steps: u64) {
    for layer in report(model).layers {
        let totals = layer.totals();
        if layer.name == "lm_head" {
            assert_eq!((totals.emulated, totals.high_precision), (0, 3 * steps), "{}", layer.name);
        } else if layer.name != burn_float8::UNTAGGED_NAME {
            assert_eq!((totals.native + totals.emulated, totals.high_precision), (3 * steps, 0), "{}", layer.name);
        }
    }
}

#[test]
fn golden_trajectory_tensorwise() {
    tensorwise::<Flex>("flex, tensorwise");
    if has_wgpu("golden_trajectory_tensorwise") {
        tensorwise::<Fused>("wgpu, tensorwise");
    }
}
