//! A custom operation in a model with FP8 linears. FP8 needs one impl more than Burn.
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::nn::Linear;
use burn::prelude::*;
use burn::tensor::TensorPrimitive;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};

use burn_float8::{Float8, Float8Config, Float8Error, Float8Tensor, Wrapped, report};

const HEIGHT: f32 = 1.7159;
const SLOPE: f32 = 2.0 / 3.0;

/// LeCun's `1.7159 · tanh(2x / 3)`.
trait ScaledTanh: Backend {
    fn scaled_tanh(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Forward on the compute backend. It may call your own kernel.
impl ScaledTanh for Flex {
    fn scaled_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = Self::float_mul_scalar(x, SLOPE.into());
        Self::float_mul_scalar(Self::float_tanh(x), HEIGHT.into())
    }
}

/// Autodiff node that keeps y for backward.
impl<B: ScaledTanh, C: CheckpointStrategy> ScaledTanh for Autodiff<B, C> {
    fn scaled_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Node;

        impl<B: Backend> Backward<B, 1> for Node {
            type State = FloatTensor<B>;

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let y = ops.state;
                unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                    let y2 = B::float_mul(y.clone(), y);
                    let slope = B::float_mul_scalar(y2, (-SLOPE / HEIGHT).into());
                    B::float_mul(dy, B::float_add_scalar(slope, (SLOPE * HEIGHT).into()))
                });
            }
        }

        let y = B::scaled_tanh(x.primitive);
        match Backward::<B, 1>::prepare::<C>(Node, [x.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(y.clone(), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Implementation for FP8.
impl<W: Wrapped + ScaledTanh> ScaledTanh for Float8<W> {
    fn scaled_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Float8Tensor::new(W::scaled_tanh(x.into_full()))
    }
}

fn scaled_tanh<B: ScaledTanh, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::scaled_tanh(x.into_primitive().tensor())))
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: ScaledTanh> Mlp<B> {
    fn new() -> Self {
        let linear = |k, n| {
            let weight = Tensor::<B, 2>::from_data(data([k, n], 0.1), &B::Device::default());
            Linear { weight: Param::from_tensor(weight), bias: None }
        };
        Self { up: linear(64, 256), down: linear(256, 16) }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.down.forward(scaled_tanh(self.up.forward(x)))
    }
}

/// Values between -`scale` and `scale`.
fn data(shape: [usize; 2], scale: f32) -> TensorData {
    let values = (0..shape[0] * shape[1]).map(|i| ((i * i * 37 % 101) as f32 / 50.0 - 1.0) * scale);
    TensorData::new(values.collect::<Vec<_>>(), shape)
}

fn x<B: Backend>() -> Tensor<B, 2> {
    Tensor::from_data(data([32, 64], 2.0), &B::Device::default())
}

/// Gradient of the operation itself.
fn dx<B: AutodiffBackend + ScaledTanh>() -> Vec<f32> {
    let x = x::<B>().require_grad();
    let grads = scaled_tanh(x.clone()).sum().backward();
    x.grad(&grads).expect("tracked").into_data().to_vec().expect("f32")
}

/// Gradient of the first linear's weight, through the operation.
fn dw<B: AutodiffBackend + ScaledTanh>(model: &Mlp<B>) -> Vec<f32> {
    let grads = model.forward(x()).powf_scalar(2.0).mean().backward();
    model.up.weight.grad(&grads).expect("tracked").into_data().to_vec().expect("f32")
}

fn main() -> Result<(), Float8Error> {
    type Plain = Autodiff<Flex>;
    type B = Float8<Plain>;
    assert_eq!(dx::<B>(), dx::<Plain>());
    println!("The operation's gradient is that of Autodiff<Flex>, bit for bit.");

    let model = Float8Config::tensorwise().apply(Mlp::<B>::new())?.0;
    let (ours, exact) = (dw(&model), dw(&Mlp::<Plain>::new()));
    let norm = |values: Vec<f32>| values.iter().map(|v| v * v).sum::<f32>().sqrt();
    let off = ours.iter().zip(&exact).map(|(ours, exact)| ours - exact).collect();
    let error = norm(off) / norm(exact);
    println!("The gradient that comes through it to an FP8 linear is {:.1} % off.", 100.0 * error);
    assert!(error > 0.0 && error < 0.2);
    println!("{}", report(&model));
    Ok(())
}
