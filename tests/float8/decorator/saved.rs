//! State that an `nn::Linear` saves for backward: the FP8 operand of x, if a gradient needs it.
use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::Linear;
use burn_float8::{Float8, Float8Config, Float8LinearConfig, Recipe, report};

use crate::support::linear::layer;
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;

type A<B> = Float8<Autodiff<B>>;

/// Frozen parameters, and inputs without gradients.
#[test]
fn only_what_is_tracked_is_saved() {
    // No copy of the weight is kept either, so the live copies are x's.
    let config = Float8LinearConfig::new(Recipe::Tensorwise).with_force_recompute_fp8_weight_in_bwd(true);
    let layer = layer::<Flex>(&config.into(), tensor(normal(200, 2), [20, 10]), None);
    let other = self::layer::<Flex>(&Float8Config::tensorwise(), tensor(normal(200, 2), [20, 10]), None);
    let x = || tensor::<A<Flex>, 2>(normal(160, 1), [8, 20]);
    // Pushes out the last two activations, which the thread keeps.
    let live = || {
        (0..2).for_each(|_| drop(other.valid().forward(x().inner())));
        report(&layer).layers[0].live_copies
    };

    // x untracked: its copy for dw is saved until backward.
    let y = layer.forward(x());
    let want = values(y.clone());
    assert_eq!(live(), 1);
    let casts = || report(&layer).layers[0].casts[0];
    let in_forward = casts();
    let grads = y.sum().backward();
    assert!(layer.weight.grad(&grads).is_some());
    assert_eq!((live(), casts()), (0, in_forward), "backward casts no x");
    // Weight frozen: no copy of x is kept.
    let frozen = Linear { weight: layer.weight.clone().map(|w| w.set_require_grad(false)), bias: None };
    let tracked = x().require_grad();
    let of_tracked = frozen.forward(tracked.clone());
    assert_eq!(live(), 0);
    assert!(tracked.grad(&of_tracked.sum().backward()).is_some());
    // Nothing tracked: a plain linear.
    let untracked = frozen.forward(x());
    assert_eq!(live(), 0);
    assert_eq!(values(untracked), want);
}
