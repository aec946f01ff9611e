//! `burn_float8::linear` against `nn::Linear`: the same bits, less memory.
use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_float8::{
    Float8, Float8Backend, Float8Config, Float8LinearConfig, PrecisionSchedule, Recipe, report, set_float8_enabled,
};

use crate::on_every_runtime;
use crate::support::linear::{forward_backward, layer};
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;

type A<B> = Autodiff<Float8<B>>;

fn saved<B: Float8Backend, const D: usize>(
    layer: &Linear<A<B>>,
    x: Tensor<A<B>, D>,
    dy: Tensor<A<B>, D>,
) -> Vec<Vec<f32>> {
    let x = x.detach().require_grad();
    let bias = layer.bias.as_ref().map(|bias| bias.val());
    let y = burn_float8::linear(x.clone(), layer.weight.val(), bias);
    let grads = (y.clone() * dy).sum().backward();
    let dw = layer.weight.grad(&grads).expect("tracked");
    let db = layer.bias.as_ref().map(|bias| values(bias.grad(&grads).expect("tracked")));
    [values(y), values(x.grad(&grads).expect("tracked")), values(dw)].into_iter().chain(db).collect()
}

fn equal_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [24, 37, 21];
    for recipe in Recipe::ALL {
        for with_bias in [false, true] {
            let new = || {
                let bias = with_bias.then(|| tensor(normal(n, 3), [n]));
                layer::<B>(&Float8Config::new(recipe), tensor(normal(k * n, 2), [k, n]), bias)
            };
            let (x, dy) = (normal(m * k, 1), normal(m * n, 4));
            let (implicit, explicit) = (new(), new());
            let x3 = || tensor::<A<B>, 3>(x.clone(), [2, 12, k]);
            let dy3 = || tensor::<A<B>, 3>(dy.clone(), [2, 12, n]);
            let want = forward_backward(&implicit, x3(), dy3());
            assert_eq!(saved(&explicit, x3(), dy3()), want, "{runtime} {recipe} bias {with_bias}");
            let calls = |l| report(l).layers[0].gemms().map(|(_, g)| [g.emulated, g.high_precision]);
            assert_eq!(calls(&explicit), calls(&implicit), "{runtime} {recipe}");
        }
    }
}

#[test]
fn saved_operands_give_the_same_bits() {
    on_every_runtime!(equal_on);
}

#[test]
fn every_rank() {
    let layer = layer::<Flex>(&Float8Config::new(Recipe::Rowwise), tensor(normal(60, 2), [10, 6]), None);
    let r1 = |seed, c| tensor::<A<Flex>, 1>(normal(c, seed), [c]);
    assert_eq!(saved(&layer, r1(1, 10), r1(3, 6)), forward_backward(&layer, r1(1, 10), r1(3, 6)));
    let r5 = |seed, c| tensor::<A<Flex>, 5>(normal(4 * c, seed), [1, 2, 1, 2, c]);
    assert_eq!(saved(&layer, r5(1, 10), r5(3, 6)), forward_backward(&layer, r5(1, 10), r5(3, 6)));
    let empty = Tensor::<A<Flex>, 2>::zeros([0, 10], &Default::default());
    assert_eq!(burn_float8::linear(empty, layer.weight.val(), None).dims(), [0, 6]);
}

/// Parameters that want no gradient, and inputs that want none.
#[test]
fn only_what_is_tracked_is_saved() {
    // Nothing of the weight is kept either, so that what lives is x's.
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
    let y = burn_float8::linear(x(), layer.weight.val(), None);
    assert_eq!(live(), 1);
    let grads = y.sum().backward();
    assert!(layer.weight.grad(&grads).is_some());
    assert_eq!(live(), 0);
    // The weight frozen: nothing of x is kept.
    let frozen = Linear { weight: layer.weight.clone().map(|w| w.set_require_grad(false)), bias: None };
    let tracked = x().require_grad();
    let y = burn_float8::linear(tracked.clone(), frozen.weight.val(), None);
    assert_eq!(live(), 0);
    assert!(tracked.grad(&y.sum().backward()).is_some());
    // Nothing tracked: a plain linear.
    let y = burn_float8::linear(x(), frozen.weight.val(), None);
    assert_eq!(live(), 0);
    assert_eq!(values(y), values(frozen.forward(x())));
}

/// In high precision x is saved as it is.
#[test]
fn high_precision_is_the_plain_linear() {
    let new = || layer::<Flex>(&Float8Config::tensorwise(), tensor(normal(200, 2), [20, 10]), None);
    let (x, dy) = (tensor::<A<Flex>, 2>(normal(160, 1), [8, 20]), tensor::<A<Flex>, 2>(normal(80, 3), [8, 10]));
    let (implicit, explicit) = (new(), new());
    for layer in [&implicit, &explicit] {
        set_float8_enabled(layer, PrecisionSchedule::default().is_float8(1, 1));
    }
    assert_eq!(saved(&explicit, x.clone(), dy.clone()), forward_backward(&implicit, x, dy));
    let calls = |l| report(l).layers[0].gemms().map(|(_, g)| [g.emulated, g.high_precision]);
    assert_eq!(calls(&explicit), [[0, 1]; 3]);
    assert_eq!(report(&explicit).layers[0].fprop.reason.as_deref(), Some("precision schedule"));
}
