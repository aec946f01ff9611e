//! Sums of linears that share x or dy, and frozen inputs: each linear counts its own GEMMs.
use burn::nn::LinearConfig;
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Recipe};

use crate::support::models::{Attention, D};
use crate::support::{B, F8, applied, float8_calls, layer, own_report, tensor, train};

/// Both linears get one dy, and x needs no gradient: only the nodes distinguish the two weight
/// gradients.
#[test]
fn each_of_two_summed_linears_counts_its_own_wgrad() {
    for recipe in [Recipe::Tensorwise, Recipe::Delayed] {
        let model: Attention<B> = applied(&Float8Config::new(recipe), Attention::new());
        for step in 0..3 {
            let x = tensor::<B, 2>([5, D], step);
            (model.q.forward(x.clone()) + model.k.forward(x)).powf_scalar(2.0).mean().backward();
            let report = own_report(&model);
            for name in ["q", "k"] {
                assert_eq!(float8_calls(layer(&report, name)), [step + 1, 0, step + 1], "{recipe} {name}");
            }
        }
    }
}

/// Residual sums that include x, so that dy is the gradient of three summands.
#[test]
fn residual_sums_with_x_itself() {
    let model: Attention<B> = applied(&Float8Config::tensorwise(), Attention::new());
    let (model, _) = train(model, 0..3, |m, step| {
        let x = tensor::<B, 2>([5, D], step).require_grad();
        let h = m.q.forward(x.clone()) + x.clone() + m.k.forward(x.clone());
        let h = h.clone() + m.v.forward(h.clone()) + m.o.forward(h);
        h.powf_scalar(2.0).mean()
    });
    let report = own_report(&model);
    for name in ["q", "k", "v", "o"] {
        assert_eq!(float8_calls(layer(&report, name)), [3; 3], "{name}");
    }
}

/// A linear called on two inputs has two weight gradients.
#[test]
fn a_linear_may_be_called_twice() {
    let model: Attention<B> = applied(&Float8Config::tensorwise(), Attention::new());
    let [a, b] = [1, 2].map(|seed| tensor::<B, 2>([5, D], seed));
    (model.q.forward(a) + model.q.forward(b)).sum().backward();
    assert_eq!(float8_calls(layer(&own_report(&model), "q")), [2, 0, 2]);
}

/// `LinearConfig` on the backend without autodiff: no backward, no gradients, but still FP8.
#[test]
fn without_autodiff() {
    let linear = LinearConfig::new(D, D).init::<F8>(&Default::default());
    let linear = applied(&Float8Config::tensorwise(), linear);
    let y: Tensor<F8, 2> = linear.forward(tensor([3, D], 1));
    assert_eq!(y.dims(), [3, D]);
    assert_eq!(float8_calls(layer(&own_report(&linear), "linear")), [1, 0, 0]);
}
