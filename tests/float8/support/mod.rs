//! Shared by all cases: error measures, a layer, a model, and the runtimes of this machine.
pub mod linear;
pub mod model;
pub mod operand;
pub mod oracle;
pub mod process;
pub mod runtime;

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
