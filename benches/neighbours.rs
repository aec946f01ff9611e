//! Bytes and launches of a Llama layer on CUDA, forward and backward, without a GPU. Compares RMSNorm,
//! rotary positions and SwiGLU of [`burn_float8::nn`] with Burn's operations, which fuse.
//!
//! ```text
//! bytes of a launch = sizes of all its tensors, each read or written once
//! ```
//! `FLOAT8_ATTENTION` requests the attention of both. Nothing is launched.

use benches::ops;
use benches::table::Table;
use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::silu;
use burn::tensor::backend::Backend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Distribution, Tensor};
use burn_cubecl::CubeBackend;
use burn_float8::config::SelfCheck;
use burn_float8::{Float8, Float8Config, Recipe, nn, without_float8};
use burn_fusion::Fusion;
use codegen::device::{GenerateCuda, OfflineDevice, idle};
use serde_json::json;

/// `burn::backend::Cuda` on a runtime that needs no GPU.
type B = Float8<Autodiff<Fusion<CubeBackend<GenerateCuda, f32, i32, u8>>>>;

/// Sizes of Llama 3 8B.
const HIDDEN: usize = 4096;
const FFN: usize = 14_336;
const HEADS: [usize; 2] = [32, 8];
const HEAD: usize = 128;

const TOKENS: usize = 8192;

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    o: Linear<B>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

/// Implementations of the surrounding operations.
struct Neighbours {
    rms_norm: fn(Tensor<B, 3>, Tensor<B, 1>) -> Tensor<B, 3>,
    rotary: fn(Tensor<B, 4>, Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 4>,
    swiglu: fn(Tensor<B, 3>, Tensor<B, 3>) -> Tensor<B, 3>,
}

const NODES: Neighbours = Neighbours {
    rms_norm: |x, gamma| nn::rms_norm(x, gamma, ops::EPSILON),
    rotary: |x, cos, sin| nn::rotary(x, cos, sin),
    swiglu: |gate, up| nn::swiglu(gate, up),
};

const BURN: Neighbours =
    Neighbours { rms_norm: ops::rms_norm, rotary: ops::rotary, swiglu: |gate, up| silu(gate) * up };

fn random<const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Default, &OfflineDevice::default())
}

fn sync() {
    B::sync(&OfflineDevice::default()).expect("nothing runs");
}

/// Bytes and launches of forward and backward.
fn measure(layer: &Layer<B>, neighbours: &Neighbours) -> (u64, usize) {
    let hidden = || random([1, TOKENS, HIDDEN]).cast(DType::BF16).detach();
    let (x, grad) = (hidden().require_grad(), hidden());
    let gammas = [random([HIDDEN]).require_grad(), random([HIDDEN]).require_grad()];
    let [cos, sin] = [random([TOKENS, HEAD / 2]), random([TOKENS, HEAD / 2])];
    sync();
    let counting = idle();
    counting.take_launches();
    counting.take_bytes();
    let normed = (neighbours.rms_norm)(x.clone(), gammas[0].clone());
    let heads = |x: Tensor<B, 3>, heads: usize| x.reshape([1, TOKENS, heads, HEAD]);
    let [q, k] = [(&layer.q, HEADS[0]), (&layer.k, HEADS[1])].map(|(linear, count)| {
        (neighbours.rotary)(heads(linear.forward(normed.clone()), count), cos.clone(), sin.clone())
    });
    let v = heads(layer.v.forward(normed), HEADS[1]).swap_dims(1, 2);
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let y = nn::attention(q, k, v, None, options).swap_dims(1, 2).reshape([1, TOKENS, HIDDEN]);
    let h = x + layer.o.forward(y);
    let normed = (neighbours.rms_norm)(h.clone(), gammas[1].clone());
    let up = layer.up.forward(normed.clone());
    let y = h + layer.down.forward((neighbours.swiglu)(layer.gate.forward(normed), up));
    let grads = (y * grad).sum().backward();
    sync();
    drop(grads);
    (counting.take_bytes(), counting.take_launches())
}

fn layer() -> Layer<B> {
    let device = OfflineDevice::default();
    let linear = |k, n| LinearConfig::new(k, n).with_bias(false).init::<B>(&device);
    let [q, kv] = HEADS.map(|heads| heads * HEAD);
    Layer {
        q: linear(HIDDEN, q),
        k: linear(HIDDEN, kv),
        v: linear(HIDDEN, kv),
        o: linear(q, HIDDEN),
        gate: linear(HIDDEN, FFN),
        up: linear(HIDDEN, FFN),
        down: linear(FFN, HIDDEN),
    }
}

/// Table of bf16 and of every recipe that needs no history.
pub fn table() -> Table {
    let title = format!("bytes that a Llama 3 8B layer moves on CUDA, {TOKENS} tokens, forward and backward");
    let mut table = Table::new(title);
    let mut row = |precision: String, layer: &Layer<B>| {
        let [(before, launches_before), (after, launches_after)] = [BURN, NODES].map(|neighbours| {
            // The first step casts the weights and searches for fusions.
            measure(layer, &neighbours);
            measure(layer, &neighbours)
        });
        let [before, after] = [before, after].map(|bytes| bytes as f64 / 1e6);
        table.rows.push(json!({
            "precision": precision, "Burn, MB": before, "nodes, MB": after, "ratio": after / before,
            "launches": format!("{launches_before} -> {launches_after}"),
        }));
    };
    let applied = |recipe| {
        let config = Float8Config::new(recipe).with_self_check(SelfCheck::Off);
        config.apply(layer()).expect("seven linears").0
    };
    row("bf16".into(), &without_float8(applied(Recipe::Tensorwise)));
    for recipe in Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::Delayed) {
        row(recipe.to_string(), &applied(recipe));
    }
    table
}
