//! LoRA, with merged weights and with two small linears: one FP8 step per optimizer step, one cast
//! of x.
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, module::linear};
use burn_float8::lora::{Lora, LoraConfig};
use burn_float8::{Float8Config, Float8LinearConfig, Float8State, Recipe};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{
    B, F8, applied, assert_falls, bits, float8_calls, layer, own_report, tensor, train, trained,
};

const RANK: usize = 2;
const STEPS: u64 = 6;

/// Frozen weight and its low-rank update, merged in every forward pass.
#[derive(Module, Debug)]
struct Merged<B: Backend> {
    base: Linear<B>,
    lora_a: Param<Tensor<B, 2>>,
    lora_b: Param<Tensor<B, 2>>,
}

impl<B: Backend> Merged<B> {
    fn new() -> Self {
        let device = Default::default();
        Self {
            base: LinearConfig::new(D, D).with_bias(false).init(&device).no_grad(),
            lora_a: Param::from_tensor(Tensor::ones([D, RANK], &device)),
            lora_b: Param::from_tensor(Tensor::ones([RANK, D], &device)),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let update = self.lora_a.val().matmul(self.lora_b.val()) * 0.5;
        linear(x, self.base.weight.val() + update, None)
    }
}

#[derive(Module, Debug)]
struct Projections<B: Backend> {
    q: Merged<B>,
    k: Merged<B>,
    v: Merged<B>,
}

impl<B: Backend> Projections<B> {
    fn new() -> Self {
        Self { q: Merged::new(), k: Merged::new(), v: Merged::new() }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.q.forward(x.clone()) * self.k.forward(x.clone()).tanh() + self.v.forward(x)
    }
}

fn x(seed: u64) -> Tensor<B, 3> {
    tensor([2, 4, D], seed)
}

fn loss(model: &Projections<B>) -> Tensor<B, 1> {
    (model.forward(x(1)) - tensor::<B, 3>([2, 4, D], 2).tanh()).powf_scalar(2.0).mean()
}

#[test]
fn merged_weights_begin_one_step_for_each_of_the_optimizers() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let model: Projections<B> = applied(&Float8Config::new(recipe).with_strict(true), Projections::new());
        let frozen = bits(model.q.base.weight.val());
        let (model, losses) = train(model, 0..STEPS, |m, step| {
            let loss = loss(m);
            assert_eq!(Float8State::export(m).step, step + 1, "{recipe}");
            loss
        });
        assert_falls(&losses);
        let report = own_report(&model);
        for name in ["q.base", "k.base", "v.base"] {
            let l = layer(&report, name);
            assert_eq!([float8_calls(l)[0], float8_calls(l)[2]], [STEPS; 2], "{recipe} {name}");
            assert_eq!(l.totals().high_precision, 0, "{recipe} {name}");
            assert_eq!(l.casts[1], STEPS, "{recipe} {name}: a merged weight is cast once");
        }
        // x is cast once for all three.
        assert_eq!(["q", "k", "v"].map(|n| layer(&report, &format!("{n}.base")).casts[0]), [STEPS, 0, 0], "{recipe}");
        report.verify().unwrap();
        assert_eq!(bits(model.q.base.weight.val()), frozen, "the base stays frozen");
        if recipe == Recipe::Delayed {
            let state = Float8State::export(&model);
            let history = &state.layers["k.base"].weight.as_ref().expect("delayed").history;
            let entries = history.iter().filter(|amax| **amax > 0).count() as u64;
            assert_eq!(entries, STEPS - 1, "the last step is not over");
        }
    }
}

/// Two linears whose product is the update. Merging multiplies a weight by a weight, which is not a
/// linear.
#[derive(Module, Debug)]
struct TwoLinears<B: Backend> {
    base: Linear<B>,
    lora_a: Linear<B>,
    lora_b: Linear<B>,
}

#[test]
fn the_product_of_two_weights_is_no_error() {
    for matmul in [false, true] {
        let recipe = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(matmul);
        let config = Float8Config::from(recipe).with_strict(true);
        let small = |k, n| LinearConfig::new(k, n).with_bias(false).init(&Default::default());
        let model = TwoLinears { base: small(D, D).no_grad(), lora_a: small(D, RANK), lora_b: small(RANK, D) };
        let model: TwoLinears<B> = applied(&config, model);
        let (model, losses) = train(model, 0..STEPS, |m, _| {
            // The update as a regularizer reads it; the adapter runs both linears.
            let update = m.lora_a.weight.val().matmul(m.lora_b.weight.val());
            let y = m.base.forward(x(1)) + m.lora_b.forward(m.lora_a.forward(x(1)));
            let target = tensor::<B, 3>([2, 4, D], 2).tanh();
            (y - target).powf_scalar(2.0).mean() + update.powf_scalar(2.0).mean() * 1e-3
        });
        assert_falls(&losses);
        let report = own_report(&model);
        for name in ["lora_a", "lora_b"] {
            let l = layer(&report, name);
            assert!(float8_calls(l)[0] >= STEPS, "matmul {matmul} {name}: {:?}", float8_calls(l));
            assert_eq!(l.fprop.high_precision, 0, "matmul {matmul} {name}");
        }
    }
}

/// Adapters with a nonzero update.
fn adapters(model: &Mlp<B>) -> Lora<B> {
    let mut lora = LoraConfig { rank: RANK, ..Default::default() }.init(model, 1).unwrap();
    for (seed, adapter) in lora.adapters.iter_mut().enumerate() {
        adapter.b = Param::from_tensor(tensor(adapter.b.dims(), seed as u64));
    }
    lora
}

/// Merged weights are separate parameters: trained ones learn, frozen ones do not, and no gradient
/// reaches the adapters.
#[test]
fn a_merged_model_trains() {
    let mut base: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    base.second = base.second.no_grad();
    let lora = adapters(&base);
    let merged = Float8Config::tensorwise().apply(lora.merge(base.clone())).unwrap().0;
    assert_eq!(trained(&merged), [true, true, false, false]);
    let grads = merged.forward(tensor::<B, 2>([4, D], 1)).powf_scalar(2.0).mean().backward();
    assert!(lora.adapters[0].a.grad(&grads).is_none() && base.first.weight.grad(&grads).is_none());
    let before = bits(merged.first.weight.val());
    let grads = GradientsParams::from_grads(grads, &merged);
    let merged = SgdConfig::new().init().step(0.1, merged, grads);
    assert_ne!(bits(merged.first.weight.val()), before);
}

/// Adapters created, attached and merged without autodiff can train later, and so can the model.
#[test]
fn adapters_made_below_autodiff_train() {
    let model = Mlp::<F8>::new();
    let lora = LoraConfig::default().init(&model, 1).unwrap();
    assert_eq!(trained(&lora.attach(Mlp::<F8>::new(), None).train::<B>()), [true; 4]);
    assert_eq!(trained(&lora.merge(model).train::<B>()), [true; 4]);
    assert_eq!(trained(&lora.train::<B>()), [true; 4]);
}
