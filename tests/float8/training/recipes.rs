//! Guarantees of recipes: SQNR of a Llama FFN, and settings that change memory or speed but no
//! result.
use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Tensor, TensorData};
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Recipe, Report,
    backend::Float8Backend,
    report,
    report::{Gemm, Role},
};
use device_select::wgpu_adapters;

use crate::on_every_runtime;
use crate::support::linear::from_values;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, sqnr, verify};

type A<B> = Float8<Autodiff<B>>;

#[derive(Module, Debug)]
struct Ffn<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: Linear<B>,
}

const TOKENS: usize = 64;
/// An eighth of Llama 3 8B's 4096 and 14336.
const HIDDEN: usize = 512;
const INTERMEDIATE: usize = 1792;

/// Factor of the FFN's size: full size if there is a GPU.
fn size(runtime: &str) -> usize {
    let gpu = || wgpu_adapters().is_ok_and(|adapters| adapters.iter().any(|a| a.hardware));
    if runtime.starts_with("wgpu") && gpu() { 8 } else { 1 }
}

impl<B: Backend> Ffn<B> {
    /// Creates weights initialised like Llama's, `N(0, 0.02²)`.
    fn new(size: usize) -> Self {
        let (hidden, intermediate) = (size * HIDDEN, size * INTERMEDIATE);
        let linear = |k: usize, n: usize, seed: u64| -> Linear<B> {
            let linear = LinearConfig::new(k, n).with_bias(false).init(&Default::default());
            let weight: Vec<_> = normal(k * n, seed).iter().map(|x| 0.02 * x).collect();
            let data = TensorData::new(weight, [k, n]);
            Linear { weight: linear.weight.map(|w| Tensor::from_data(data, &w.device()).require_grad()), bias: None }
        };
        Self {
            gate_proj: linear(hidden, intermediate, 1),
            up_proj: linear(hidden, intermediate, 2),
            down_proj: linear(intermediate, hidden, 3),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.down_proj.forward(silu(self.gate_proj.forward(x.clone())) * self.up_proj.forward(x))
    }
}

/// y, dx and the three weight gradients.
fn ffn<B: AutodiffBackend>(ffn: &Ffn<B>) -> Vec<(&'static str, Vec<f32>)> {
    let hidden = ffn.gate_proj.weight.dims()[0];
    let x = tensor::<B, 2>(normal(TOKENS * hidden, 4), [TOKENS, hidden]).require_grad();
    let y = ffn.forward(x.clone());
    let grads = (y.clone() * tensor(normal(TOKENS * hidden, 5), [TOKENS, hidden])).sum().backward();
    let dw = |l: &Linear<B>| values(l.weight.grad(&grads).unwrap());
    vec![
        ("y", values(y)),
        ("dx", values(x.grad(&grads).unwrap())),
        ("dw gate", dw(&ffn.gate_proj)),
        ("dw up", dw(&ffn.up_proj)),
        ("dw down", dw(&ffn.down_proj)),
    ]
}

fn ffn_on<B: Float8Backend>(runtime: &str) {
    let size = size(runtime);
    let exact = ffn(&Ffn::<Autodiff<B>>::new(size));
    for recipe in Recipe::ALL {
        let model = Float8Config::new(recipe).apply(Ffn::<A<B>>::new(size)).unwrap().0;
        for ((name, ours), (_, exact)) in ffn(&model).iter().zip(&exact) {
            let sqnr = sqnr(ours, exact);
            println!("{runtime} {recipe} {name}: {sqnr:.1} dB");
            assert!(sqnr > 20.0, "{runtime} {recipe} {name}: {sqnr} dB");
        }
        verify(report(&model)).unwrap();
    }
}

#[test]
fn a_llama_ffn_stays_above_20_db() {
    on_every_runtime!(ffn_on);
}

fn live(report: &Report) -> (u64, u64) {
    (report.layers.iter().map(|l| l.live_copies).sum(), report.layers.iter().map(|l| l.live_bytes).sum())
}

/// Weight copies are dropped after fprop and recreated in backward. No result changes.
#[test]
fn weights_can_be_cast_again_in_backward() {
    let run = |recompute: bool, recipe| {
        let config = Float8LinearConfig::new(recipe).with_force_recompute_fp8_weight_in_bwd(recompute);
        let model = Float8Config::from(config).apply(Ffn::<A<Flex>>::new(1)).unwrap().0;
        let y = model.forward(tensor(normal(TOKENS * HIDDEN, 4), [TOKENS, HIDDEN]));
        // Two activations in both orientations, since gate and up share theirs. Three weights, one
        // of them for dgrad too: gate and up need no dx, since the batch needs no gradient.
        let (copies, bytes) = live(&report(&model));
        assert_eq!(copies, if recompute { 4 } else { 8 }, "{recipe}");
        assert!(bytes >= if recompute { 0 } else { 3 * (HIDDEN * INTERMEDIATE) as u64 });
        drop(y);
        let results = ffn(&model);
        let casts: Vec<_> = report(&model).layers.iter().take(3).map(|l| l.casts[Role::Weight as usize]).collect();
        (results, casts)
    };
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Delayed, Recipe::Mxfp8] {
        let (kept, once) = run(false, recipe);
        let (recomputed, again) = run(true, recipe);
        assert_eq!(kept, recomputed, "{recipe}");
        // Kept: once each for fprop and dgrad, or once for both. Recomputed: twice in forward, once
        // in backward.
        assert_eq!((once, again), (vec![2, 2, 1], vec![3; 3]), "{recipe}");
    }
}

/// Without FP8 tensor cores, the accumulation and emulation settings have no effect.
fn gemm_settings_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [20, 300, 24];
    let (x, w, dy) = (normal(m * k, 1), normal(k * n, 2), normal(m * n, 3));
    let mut config = Float8LinearConfig::new(Recipe::Tensorwise);
    let plain = from_values::<B>(&config.clone().into(), [&x, &w, &dy], [m, k, n], None);
    for gemm in Gemm::ALL {
        config = config.with_use_fast_accum(gemm, true);
        assert!(config.gemm_config(gemm).use_fast_accum);
    }
    let fast = from_values::<B>(&config.clone().into(), [&x, &w, &dy], [m, k, n], None);
    let emulated = from_values::<B>(&config.with_emulate(true).into(), [&x, &w, &dy], [m, k, n], None);
    assert_eq!(fast, plain, "{runtime}");
    assert_eq!(emulated, plain, "{runtime}");
}

#[test]
fn gemm_settings_change_nothing_without_tensor_cores() {
    on_every_runtime!(gemm_settings_on);
}

/// Each linear runs with its own recipe.
#[test]
fn recipes_can_differ_by_layer() {
    let config = Float8Config::tensorwise()
        .with_override(["*_proj"], Float8LinearConfig::new(Recipe::Blockwise))
        .with_override(["down"], Float8LinearConfig::new(Recipe::RowwiseWithGwHp));
    let (model, summary) = config.apply(Ffn::<A<Flex>>::new(1)).unwrap();
    assert_eq!(
        summary.to_string(),
        "Applied Float8: recipe=tensorwise, 3 of 3 linears; overridden: gate_proj (blockwise), up_proj (blockwise), \
         down_proj (rowwise_with_gw_hp)"
    );
    ffn(&model);
    let layers = report(&model).layers;
    assert_eq!(layers[0].wgrad.emulated, 1);
    assert_eq!((layers[2].wgrad.emulated, layers[2].wgrad.high_precision), (0, 1));
    assert_eq!(layers[2].wgrad.reason.as_deref(), Some("disabled by the recipe"));
    verify(report(&model)).unwrap();
}

/// Operations other than linears run on the inner backend, bit for bit, and enter no counter.
fn untouched_on<B: Float8Backend>(runtime: &str) {
    fn run<B: AutodiffBackend>() -> Vec<Vec<f32>> {
        let q = tensor::<B, 3>(normal(2 * 6 * 8, 1), [2, 6, 8]).require_grad();
        let k = tensor::<B, 3>(normal(2 * 6 * 8, 2), [2, 6, 8]);
        let scores = softmax(q.clone().matmul(k.clone().swap_dims(1, 2)) / 8f32.sqrt(), 2);
        let attention = scores.matmul(k.clone());
        let image = tensor::<B, 4>(normal(2 * 3 * 5 * 5, 3), [2, 3, 5, 5]);
        let kernel = tensor::<B, 4>(normal(4 * 3 * 3 * 3, 4), [4, 3, 3, 3]);
        let conv = conv2d(image, kernel, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        let norm = LayerNormConfig::new(8).init::<B>(&Default::default()).forward(attention.clone());
        let grads = norm.clone().powf_scalar(2.0).sum().backward();
        vec![values(attention), values(conv), values(norm), values(q.grad(&grads).unwrap())]
    }
    assert_eq!(run::<A<B>>(), run::<Autodiff<B>>(), "{runtime}");
}

#[test]
fn what_is_no_linear_is_untouched() {
    on_every_runtime!(untouched_on);
}
