//! State that an `nn::Linear` saves for backward: the FP8 operand of x if a gradient needs it, and
//! the precision of forward.
use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::Linear;
use burn::tensor::module::linear;
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, PrecisionSchedule, Recipe, backend::Float8Backend, report,
    set_float8_enabled,
};

use crate::on_every_runtime;
use crate::support::linear::{forward_backward, layer};
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;

type A<B> = Float8<Autodiff<B>>;

fn between_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [24, 37, 21];
    for recipe in Recipe::ALL {
        for with_bias in [false, true] {
            let new = || {
                let bias = with_bias.then(|| tensor(normal(n, 3), [n]));
                layer::<B>(&Float8Config::new(recipe), tensor(normal(k * n, 2), [k, n]), bias)
            };
            let x = |seed| tensor::<A<B>, 3>(normal(m * k, seed), [2, 12, k]);
            let dy = || tensor::<A<B>, 3>(normal(m * n, 4), [2, 12, n]);
            let (at_once, later, other) = (new(), new(), new());
            let want = forward_backward(&at_once, x(1), dy());

            let tracked = x(1).require_grad();
            let y = later.forward(tracked.clone());
            (5..8).for_each(|seed| drop(other.forward(x(seed))));
            set_float8_enabled(&later, false);
            let grads = (y.clone() * dy()).sum().backward();
            let dw = later.weight.grad(&grads).expect("tracked");
            let db = later.bias.as_ref().map(|bias| values(bias.grad(&grads).expect("tracked")));
            let dx = tracked.grad(&grads).expect("tracked");
            let got: Vec<_> = [values(y), values(dx), values(dw)].into_iter().chain(db).collect();
            assert_eq!(got, want, "{runtime} {recipe} bias {with_bias}");
            let calls = |l| report(l).layers[0].gemms().map(|(_, g)| [g.emulated, g.high_precision]);
            assert_eq!(calls(&later), calls(&at_once), "{runtime} {recipe}");
        }
    }
}

/// Backward does not depend on other linears or on switches after forward.
#[test]
fn backward_runs_on_what_forward_has_saved() {
    on_every_runtime!(between_on);
}

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

/// In high precision x is saved unchanged, and Burn computes everything.
#[test]
fn high_precision_is_the_plain_linear() {
    let (x, w, dy) = (normal(160, 1), normal(200, 2), normal(80, 3));
    let float8 = layer::<Flex>(&Float8Config::tensorwise(), tensor(w.clone(), [20, 10]), None);
    set_float8_enabled(&float8, PrecisionSchedule::default().is_float8(1, 1));
    let ours = forward_backward::<Flex, 2>(&float8, tensor(x.clone(), [8, 20]), tensor(dy.clone(), [8, 10]));

    let plain = |values: Vec<f32>, shape| tensor::<Autodiff<Flex>, 2>(values, shape);
    let (x, w) = (plain(x, [8, 20]).require_grad(), plain(w, [20, 10]).require_grad());
    let y = linear(x.clone(), w.clone(), None);
    let grads = (y.clone() * plain(dy, [8, 10])).sum().backward();
    let theirs = [values(y), values(x.grad(&grads).expect("tracked")), values(w.grad(&grads).expect("tracked"))];
    assert_eq!(ours, theirs);
    let report = report(&float8);
    assert_eq!(report.layers[0].gemms().map(|(_, g)| [g.emulated, g.high_precision]), [[0, 1]; 3]);
    assert_eq!(report.layers[0].fprop.reason.as_deref(), Some("precision schedule"));
}
