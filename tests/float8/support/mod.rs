//! Shared by all cases: error measures, a layer, a model, and the runtimes of this machine.
pub mod linear;
pub mod model;
pub mod operand;
pub mod oracle;
pub mod process;
pub mod runtime;

use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
pub use test_data::{normal, relative_error};

/// Signal-to-quantization-noise ratio in dB: 20 log10(‖exact‖ / ‖exact − approx‖).
pub fn sqnr(approx: &[f32], exact: &[f32]) -> f64 {
    -20.0 * relative_error(approx, exact).log10()
}

/// max |a − b|
pub fn max_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs())
        .fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
}

/// Checks that no element of `got` is further from `want` than `tolerance` times the largest of
/// `want`, which counts as 1e-3 at least.
pub fn assert_near(what: &str, got: &[f32], want: &[f32], tolerance: f64) {
    let largest = want.iter().fold(1e-3, |largest: f64, x| largest.max(f64::from(x.abs())));
    let error = max_error(got, want);
    assert!(error <= tolerance * largest, "{what}: differs by {error:e} of {largest:e}");
}

/// Mean of the squares.
pub fn mean_square<B: Backend, const D: usize>(y: Tensor<B, D>) -> Tensor<B, 1> {
    y.powf_scalar(2.0).mean()
}

/// Trains with AdamW; returns the model and each step's loss.
pub fn train<B: AutodiffBackend, M: AutodiffModule<B>>(
    mut model: M,
    steps: std::ops::Range<u64>,
    loss: impl Fn(&M, u64) -> Tensor<B, 1>,
) -> (M, Vec<f32>) {
    let mut optimizer = AdamWConfig::new().init::<B, M>();
    let mut losses = vec![];
    for step in steps {
        let loss = loss(&model, step);
        losses.push(operand::values(loss.clone())[0]);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    (model, losses)
}

/// Replaces each weight with a new tensor, as an optimizer does.
pub fn updated<B: AutodiffBackend, M: Module<B>>(model: M) -> M {
    struct Update;
    impl<B: Backend> ModuleMapper<B> for Update {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|w| (w.clone() - w * 0.1).detach().require_grad())
        }
    }
    model.map(&mut Update)
}

/// Values over many binades, by row and by column, so that scales differ in every granularity.
pub fn spread(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let binade = |i: usize| 2f32.powi((i * 7 % 5) as i32 - 2);
    let values = normal(rows * cols, seed).into_iter().enumerate();
    values.map(|(i, x)| x * binade(i / cols) * binade(i % cols)).collect()
}

/// Checks that all GEMMs of the model's own layers ran as configured. Untagged linears are ignored:
/// other tests run them on the same device.
pub fn verify(mut report: burn_float8::Report) -> Result<(), burn_float8::Float8Error> {
    report.layers.retain(|layer| layer.name != burn_float8::report::UNTAGGED_NAME);
    report.verify()
}
