//! One linear layer, forward and backward, as in user code.
use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_float8::{Float8, Float8Config, backend::Float8Backend};

use super::operand::{tensor, values};

/// The backend of a training program.
pub type A<B> = Float8<Autodiff<B>>;

/// A converted layer with these parameters, both tracked.
pub fn layer<B: Float8Backend>(
    config: &Float8Config,
    weight: Tensor<A<B>, 2>,
    bias: Option<Tensor<A<B>, 1>>,
) -> Linear<A<B>> {
    let weight = Param::initialized(ParamId::new(), weight.detach().require_grad());
    let bias = bias.map(|bias| Param::initialized(ParamId::new(), bias.detach().require_grad()));
    config.apply(Linear { weight, bias }).unwrap().0
}

/// y, dx, dw and, with a bias, db, for x `[.., K]` and dy `[.., N]`. y and dx must have x's dtype,
/// and dw and db their parameter's.
pub fn forward_backward<B: Float8Backend, const D: usize>(
    layer: &Linear<A<B>>,
    x: Tensor<A<B>, D>,
    dy: Tensor<A<B>, D>,
) -> Vec<Vec<f32>> {
    let x = x.detach().require_grad();
    let y = layer.forward(x.clone());
    let grads = (y.clone() * dy).sum().backward();
    let (dx, dw) = (x.grad(&grads).expect("tracked"), layer.weight.grad(&grads).expect("tracked"));
    assert_eq!([y.dtype(), dx.dtype(), dw.dtype()], [x.dtype(), x.dtype(), layer.weight.dtype()]);
    let db = layer.bias.as_ref().map(|bias| {
        let db = bias.grad(&grads).expect("tracked");
        assert_eq!(db.dtype(), bias.dtype());
        values(db)
    });
    [values(y), values(dx), values(dw)].into_iter().chain(db).collect()
}

/// Results of a linear from values: x `[M, K]`, w `[K, N]`, dy `[M, N]`.
pub fn from_values<B: Float8Backend>(
    config: &Float8Config,
    [x, w, dy]: [&[f32]; 3],
    [m, k, n]: [usize; 3],
    bias: Option<&[f32]>,
) -> Vec<Vec<f32>> {
    let bias = bias.map(|bias| tensor(bias.to_vec(), [n]));
    let layer = layer::<B>(config, tensor(w.to_vec(), [k, n]), bias);
    forward_backward::<B, 2>(&layer, tensor(x.to_vec(), [m, k]), tensor(dy.to_vec(), [m, n]))
}
