//! What an `nn::Linear` keeps from forward for its backward: the FP8 operand of x, and whether it ran in FP8.
use burn::nn::{Linear, LinearConfig};
use burn_float8::{Float8Config, float8_autocast};

use crate::support::models::D;
use crate::support::{B, applied, bits, float8_calls, high_precision_calls, layer_of, tensor};

fn linear() -> Linear<B> {
    applied(&Float8Config::tensorwise(), LinearConfig::new(D, 12).init(&Default::default()))
}

/// Between forward and backward it is x's FP8 operand that lives, however many linears follow.
#[test]
fn a_linear_saves_the_float8_operand_of_x() {
    let dw = |others: u64| {
        let (linear, other) = (linear(), linear());
        let y = linear.forward(tensor::<B, 2>([6, D], 1));
        // The last activations are kept until the thread's next linears.
        (0..others).for_each(|seed| drop(other.forward(tensor::<B, 2>([6, D], 2 + seed))));
        let before = layer_of(&linear, "linear");
        let grads = y.sum().backward();
        let casts = layer_of(&linear, "linear").casts[0] - before.casts[0];
        (before.live_copies, casts, bits(linear.weight.grad(&grads).expect("tracked")))
    };
    let (copies, casts, saved) = dw(3);
    assert_eq!(copies, 2, "the operand of x, and the weight's");
    assert_eq!(casts, 0, "casts of x in backward");
    assert_eq!(saved, dw(0).2);
}

/// Backward runs as its forward did.
#[test]
fn a_forward_in_high_precision_has_such_a_backward() {
    let linear = linear();
    let x = || tensor::<B, 2>([6, D], 1);
    float8_autocast(false, || linear.forward(x().require_grad())).sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&linear, "linear")), [1; 3]);
    let y = linear.forward(x().require_grad());
    float8_autocast(false, || y.sum().backward());
    assert_eq!(float8_calls(&layer_of(&linear, "linear")), [1; 3]);
    // An x that wants no gradient, evaluated in FP8 between.
    let x = x();
    let y = float8_autocast(false, || linear.forward(x.clone()));
    linear.forward(x);
    y.sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&linear, "linear")), [2, 1, 2]);
    assert_eq!(float8_calls(&layer_of(&linear, "linear")), [2, 1, 1]);
}
