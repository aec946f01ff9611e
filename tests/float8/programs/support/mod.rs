//! Shared parts of the programs: deterministic parameters and data, a training loop, and checks of
//! reports.
pub mod learner;
pub mod models;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{
    Float8, Float8Config, Float8Error, Float8Stack, Recipe, Report, report,
    report::{LayerReport, UNTAGGED_NAME},
};
pub use test_data::{panic_of, relative_error};

pub use crate::support::operand::values;
pub use crate::support::{mean_square, train};
use crate::support::{normal, operand};

/// FP8 backend.
pub type B = Float8<Autodiff<Flex>>;
/// FP8 backend without autodiff.
pub type F8 = Float8<Flex>;
/// Autodiff without FP8.
pub type Plain = Autodiff<Flex>;

/// Normal tensor on the default device, the same for every backend.
pub fn tensor<B: Backend, const D: usize>(shape: [usize; D], seed: u64) -> Tensor<B, D> {
    operand::tensor(normal(shape.iter().product(), seed + 1), shape)
}

/// Input `[6, D]` of an [`Mlp`](models::Mlp).
pub fn x<B: Backend>(seed: u64) -> Tensor<B, 2> {
    tensor([6, models::D], seed)
}

/// Mean squared distance of y to a fixed target.
pub fn to_target<B: Backend, const R: usize>(y: Tensor<B, R>) -> Tensor<B, 1> {
    mean_square(y.clone() - tensor(y.dims(), 2).tanh())
}

/// Values of a tensor as a new constant, on any backend.
pub fn constant<A: Backend, B: Backend, const D: usize>(tensor: Tensor<A, D>) -> Tensor<B, D> {
    Tensor::from_data(tensor.into_data(), &Default::default())
}

/// Bits of a tensor's values, for exact comparisons.
pub fn bits<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// Sets parameters that depend only on their position and the seed. Burn's `seed` is shared by all
/// tests of the process.
pub fn with_parameters<B: Backend, M: Module<B>>(model: M, seed: u64) -> M {
    struct Set(u64);
    impl<B: Backend> ModuleMapper<B> for Set {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            self.0 += 1;
            let seed = self.0;
            param.map(|t| {
                let dims = t.dims();
                let scale = if D == 1 { 0.05 } else { (dims[0] as f32).powf(-0.5) };
                let new = tensor::<B, D>(dims, seed) * scale;
                new.set_require_grad(t.is_require_grad())
            })
        }
    }
    model.map(&mut Set(1000 * seed))
}

/// Model with fixed parameters and the configuration applied.
pub fn applied<B: Float8Stack, M: Module<B>>(config: &Float8Config, model: M) -> M {
    config.apply(with_parameters(model, 1)).unwrap_or_else(|error| panic!("{}", Float8Error::from(error))).0
}

/// Panics unless the last loss is well below the first.
pub fn assert_falls(losses: &[f32]) {
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last < 0.8 * first && last.is_finite(), "losses do not fall: {losses:?}");
}

/// Report without the row of untagged linears, which other tests of the process also run.
pub fn own_report<B: Float8Stack, M: Module<B>>(model: &M) -> Report {
    let mut report = report(model);
    report.layers.retain(|layer| layer.name != UNTAGGED_NAME);
    report
}

/// Layer of a report.
pub fn layer<'a>(report: &'a Report, name: &str) -> &'a LayerReport {
    report.layers.iter().find(|l| l.name == name).unwrap_or_else(|| panic!("no layer {name} in\n{report}"))
}

/// Layer of a model's report.
pub fn layer_of<B: Float8Stack, M: Module<B>>(model: &M, name: &str) -> LayerReport {
    layer(&own_report(model), name).clone()
}

/// FP8 and high-precision calls of fprop, dgrad and wgrad.
pub fn calls(layer: &LayerReport) -> [[u64; 3]; 2] {
    let gemms = [&layer.fprop, &layer.dgrad, &layer.wgrad];
    [gemms.map(|gemm| gemm.native + gemm.emulated), gemms.map(|gemm| gemm.high_precision)]
}

/// FP8 calls of fprop, dgrad and wgrad.
pub fn float8_calls(layer: &LayerReport) -> [u64; 3] {
    calls(layer)[0]
}

/// Gradient of a linear's weight.
pub fn dw<A: AutodiffBackend>(l: &Linear<A>, grads: &A::Gradients) -> Tensor<A::InnerBackend, 2> {
    l.weight.grad(grads).expect("tracked")
}

/// Whether a recipe computes the weight gradient in FP8.
pub fn has_float8_wgrad(recipe: Recipe) -> bool {
    !matches!(recipe, Recipe::RowwiseWithGwHp | Recipe::Mxfp8WgradWithHp)
}

/// Backward of a separate graph. Autodiff then drops saved tensors of unreferenced graphs.
pub fn unrelated_backward() {
    tensor::<B, 2>([2, 2], 1).require_grad().sum().backward();
}
