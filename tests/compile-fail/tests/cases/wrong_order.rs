//! Float8 below autodiff: no backward would know which linear it is of.
use burn::backend::{Autodiff, Flex};
use burn::nn::{Linear, LinearConfig};
use burn_float8::{Float8, Float8Config};

type B = Autodiff<Float8<Flex>>;

fn main() {
    let model: Linear<B> = LinearConfig::new(8, 8).init(&Default::default());
    let _ = Float8Config::tensorwise().apply(model);
}
