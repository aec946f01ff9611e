//! A NaN must reach the output; an infinity saturates.
use burn::tensor::module::linear;
use burn_float8::{
    Float8, Float8Config, Recipe,
    backend::{Cast, Float8Backend},
    config::{Format, Granularity, ScaleCalculationMode, ScaleMode},
};
use float8_kernels::reference;

use crate::on_every_runtime;
use crate::support::linear::from_values;
use crate::support::normal;
use crate::support::operand::{quantize, tensor, values};

const M: usize = 6;
const K: usize = 20;
const N: usize = 9;

fn forward<B: Float8Backend>(x: Vec<f32>) -> Vec<f32> {
    let w = tensor::<Float8<B>, 2>(normal(K * N, 2), [K, N]);
    values(linear(tensor(x, [M, K]), w, None))
}

fn nan_on<B: Float8Backend>(runtime: &str) {
    let mut x = normal(M * K, 1);
    x[3 * K + 7] = f32::NAN;
    let y = forward::<B>(x);
    assert!(y[3 * N..4 * N].iter().all(|v| v.is_nan()), "{runtime}: {y:?}");
}

#[test]
fn a_nan_reaches_the_output() {
    on_every_runtime!(nan_on);
}

/// A NaN in x, w or dy, for every recipe: each result that depends on it has a NaN.
fn nan_in_training_on<B: Float8Backend>(runtime: &str) {
    for recipe in Recipe::ALL {
        for (at, reached) in [(0, [true, false, true]), (1, [true, true, false]), (2, [false, true, true])] {
            let mut inputs = [normal(M * K, 1), normal(K * N, 2), normal(M * N, 3)];
            inputs[at][7] = f32::NAN;
            let [x, w, dy] = &inputs;
            let ours = from_values::<B>(&Float8Config::new(recipe), [x, w, dy], [M, K, N], None);
            let has_nan = [0, 1, 2].map(|i| ours[i].iter().any(|v: &f32| v.is_nan()));
            assert_eq!(has_nan, reached, "{runtime} {recipe}, NaN in input {at}");
        }
    }
}

#[test]
fn a_nan_reaches_every_result_of_every_recipe() {
    on_every_runtime!(nan_in_training_on);
}

/// Large and small operands whose product fits in f32.
fn extremes_on<B: Float8Backend>(runtime: &str) {
    for recipe in Recipe::ALL {
        let (x, w, dy) = (vec![1e38f32; M * K], vec![1e-3f32; K * N], vec![1e-10f32; M * N]);
        let ours = from_values::<B>(&Float8Config::new(recipe), [&x, &w, &dy], [M, K, N], None);
        let near = |v: f32, exact: f32| (v / exact - 1.0).abs() < 0.1;
        assert!(ours[0].iter().all(|y| near(*y, K as f32 * 1e35)), "{runtime} {recipe}: {}", ours[0][0]);
        assert!(ours[2].iter().all(|dw| near(*dw, M as f32 * 1e28)), "{runtime} {recipe}: {}", ours[2][0]);
    }
}

#[test]
fn extremes_that_cancel_do_not_overflow() {
    on_every_runtime!(extremes_on);
}

fn infinity_on<B: Float8Backend>(runtime: &str) {
    for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = normal(M * K, 1);
        x[3 * K + 7] = infinity;
        for format in [Format::E4m3, Format::E5m2] {
            let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
            let [rows, _] = quantize::<B>(tensor(x.clone(), [M, K]), cast);
            let value = reference::decode(rows.codes[3 * K + 7], format);
            assert_eq!(value, format.max().copysign(infinity), "{runtime} {format:?}");
            let scale = rows.inv_scales[0].get();
            assert!(scale.is_finite() && scale > 0.0, "{runtime} {format:?}: inverse scale {scale}");
        }
        let y = forward::<B>(x);
        assert!(y.iter().all(|v| !v.is_nan()), "{runtime}: {y:?}");
        assert!(y[3 * N..4 * N].iter().any(|v| v.abs() > 1e30), "{runtime}: the infinity left no trace: {y:?}");
    }
}

#[test]
fn an_infinity_saturates() {
    on_every_runtime!(infinity_on);
}

/// An E8M0 scale cannot mark a largest value: the block of an infinity is NaN (OCP MX), and so are
/// its products.
fn infinity_in_mx_on<B: Float8Backend>(runtime: &str) {
    let mut x = normal(M * K, 1);
    x[3 * K + 7] = f32::INFINITY;
    let scale_mode = ScaleMode::E8m0(ScaleCalculationMode::Rceil);
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Block1x32, scale_mode };
    let [rows, cols] = quantize::<B>(tensor(x.clone(), [M, K]), cast);
    for (copy, hit) in [(&rows, 3), (&cols, 7)] {
        let nan: Vec<_> = copy.inv_scales.iter().map(|scale| scale.get().is_nan()).collect();
        assert!(nan.iter().enumerate().all(|(block, is_nan)| *is_nan == (block == hit)), "{runtime}: {nan:?}");
    }
    let y = from_values::<B>(
        &Float8Config::new(Recipe::Mxfp8),
        [&x, &normal(K * N, 2), &normal(M * N, 3)],
        [M, K, N],
        None,
    );
    let rows: Vec<_> = y[0].chunks(N).map(|row| row.iter().all(|v| v.is_nan())).collect();
    assert_eq!(rows, [false, false, false, true, false, false], "{runtime}: {:?}", y[0]);
}

#[test]
fn an_infinity_in_mx_is_nan() {
    on_every_runtime!(infinity_in_mx_on);
}

fn zeros_on<B: Float8Backend>(runtime: &str) {
    assert_eq!(forward::<B>(vec![0.0; M * K]), vec![0.0; M * N], "{runtime}");
}

#[test]
fn zeros_give_zeros() {
    on_every_runtime!(zeros_on);
}
