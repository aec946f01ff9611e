//! Your own model in FP8: wrap the backend, apply a config, train as before.
use burn::backend::{Autodiff, Flex};
use burn::nn::loss::MseLoss;
use burn::nn::{Linear, LinearConfig, Relu, loss::Reduction};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_float8::{Float8, Float8Config, Float8Error, report};

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.head.forward(self.down.forward(Relu::new().forward(self.up.forward(x))))
    }
}

fn main() -> Result<(), Float8Error> {
    type B = Float8<Autodiff<Flex>>; // was: Autodiff<Flex>
    let device = Default::default();
    let linear = |k, n| LinearConfig::new(k, n).init(&device);
    let model = Mlp::<B> { up: linear(64, 256), down: linear(256, 64), head: linear(64, 1) };
    let mut model = Float8Config::tensorwise().with_filter_fqns(["head"]).apply(model)?.0;

    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<B, 2>::random([128, 64], burn::tensor::Distribution::Default, &device);
    let y = x.clone().mean_dim(1);
    for step in 0..20 {
        let loss = MseLoss::new().forward(model.forward(x.clone()), y.clone(), Reduction::Mean);
        println!("step {step:2}  loss {:.5}", loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    println!("{}", report(&model));
    Ok(())
}
