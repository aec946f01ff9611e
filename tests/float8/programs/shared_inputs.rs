//! Several linears, models or graphs read the same x: each keeps its recipe, histories and
//! gradients.
use burn::tensor::Tensor;
use burn_float8::{Float8Config, Recipe, without_float8};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{B, applied, bits, tensor};

fn x(seed: u64) -> Tensor<B, 2> {
    tensor([6, D], seed)
}

fn loss(y: Tensor<B, 2>) -> Tensor<B, 1> {
    y.powf_scalar(2.0).mean()
}

fn dw(model: &Mlp<B>, grads: &<B as burn::tensor::backend::AutodiffBackend>::Gradients) -> Vec<u32> {
    bits(model.first.weight.grad(grads).expect("tracked"))
}

/// Gradient of a model without other readers of its batch.
fn alone(model: &Mlp<B>) -> Vec<u32> {
    dw(model, &loss(model.forward(x(1))).backward())
}

/// A baseline and the FP8 model on one batch with separate losses; either backward may come first.
#[test]
fn two_models_on_one_batch() {
    let float8: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let others: [Mlp<B>; 2] = [
        applied(&Float8Config::new(Recipe::RowwiseWithGwHp), Mlp::new()),
        without_float8(applied(&Float8Config::tensorwise(), Mlp::new())),
    ];
    for other in others {
        let want = [alone(&float8), alone(&other)];
        assert_ne!(want[0], want[1], "by other recipes");
        for float8_comes_first in [true, false] {
            let x = x(1);
            let (a, b) = (loss(float8.forward(x.clone())), loss(other.forward(x)));
            let got = if float8_comes_first {
                let a = dw(&float8, &a.backward());
                [a, dw(&other, &b.backward())]
            } else {
                let b = dw(&other, &b.backward());
                [dw(&float8, &a.backward()), b]
            };
            assert_eq!(got, want, "{float8_comes_first}");
        }
        // One loss of both.
        let x = x(1);
        let grads = (loss(float8.forward(x.clone())) + loss(other.forward(x))).backward();
        assert_eq!([dw(&float8, &grads), dw(&other, &grads)], want);
    }
}
