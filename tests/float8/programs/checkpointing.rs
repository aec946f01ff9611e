//! Gradient checkpointing: activations are recomputed in backward, and no number changes.
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use burn::tensor::activation::{relu, silu};
use burn_float8::{Float8, Float8Config, Float8State, Recipe, StatisticsConfig};

use crate::support::models::{Attention, D};
use crate::support::{applied, counters, float8_calls, layer, own_report, tensor, train};

/// FP8 backend with a checkpointing strategy.
type B<C> = Float8<Autodiff<Flex, C>>;

const STEPS: u64 = 6;

/// q, k and v share the output of an activation, which balanced checkpointing does not keep.
fn loss<C: CheckpointStrategy>(model: &Attention<B<C>>, step: u64) -> Tensor<B<C>, 1> {
    // Growing amaxes reveal a scale from another history.
    let x = tensor::<B<C>, 3>([2, 4, D], step) * (1.0 + step as f32);
    let x = relu(model.embed.forward(x)) + 0.1;
    let (q, k, v) = (model.q.forward(x.clone()), model.k.forward(x.clone()), model.v.forward(x));
    let h = silu(q.clone() * 0.5) * k.tanh() + relu(v);
    model.o.forward(h + q).powf_scalar(2.0).mean()
}

fn run<C: CheckpointStrategy>(recipe: Recipe) -> (Vec<u32>, Float8State, Attention<B<C>>) {
    let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(2)).with_strict(true);
    let model: Attention<B<C>> = applied(&config, Attention::new());
    let (model, losses) = train(model, 0..STEPS, loss);
    let state = Float8State::export(&model);
    (losses.into_iter().map(f32::to_bits).collect(), state, model)
}

#[test]
fn losses_and_histories_are_those_without_it() {
    for recipe in [Recipe::Delayed, Recipe::Tensorwise, Recipe::Rowwise, Recipe::Mxfp8] {
        let (losses, state, model) = run::<BalancedCheckpointing>(recipe);
        let (expected, expected_state, plain) = run::<NoCheckpointing>(recipe);
        assert_eq!(losses, expected, "{recipe}");
        assert_eq!(state, expected_state, "{recipe}");
        let calls = |c: Vec<(String, [[u64; 3]; 3], u64)>| -> Vec<_> {
            c.into_iter().map(|(name, [float8, high, _], _)| (name, float8, high)).collect()
        };
        assert_eq!(calls(counters(&model)), calls(counters(&plain)), "{recipe}");
    }
}

/// The same for burn-nn's attention module.
#[test]
fn attention() {
    let losses = |balanced: bool| {
        fn run<C: CheckpointStrategy>() -> Vec<f32> {
            let config = burn::nn::attention::MultiHeadAttentionConfig::new(D, 2).with_dropout(0.0);
            let model = config.init::<B<C>>(&Default::default());
            let model = applied(&Float8Config::new(Recipe::Delayed), model);
            train(model, 0..STEPS, |m, step| {
                let x = relu(tensor::<B<C>, 3>([2, 4, D], step).require_grad()) * (1.0 + step as f32);
                let input = burn::nn::attention::MhaInput::self_attn(x);
                m.forward(input).context.powf_scalar(2.0).mean()
            })
            .1
        }
        if balanced { run::<BalancedCheckpointing>() } else { run::<NoCheckpointing>() }
    };
    assert_eq!(losses(true), losses(false));
}

/// Each weight gradient is attributed to its layer, although backward sees only recomputed tensors.
#[test]
fn every_wgrad_finds_its_layer() {
    let model: Attention<B<BalancedCheckpointing>> = applied(&Float8Config::tensorwise(), Attention::new());
    loss(&model, 1).backward();
    let report = own_report(&model);
    for name in ["q", "k", "v", "o"] {
        assert_eq!(float8_calls(layer(&report, name)), [1; 3], "{name}");
    }
    assert_eq!(float8_calls(layer(&report, "embed")), [1, 0, 1]);
    report.verify().unwrap();
}
