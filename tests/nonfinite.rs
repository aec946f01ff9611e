//! A NaN must reach the output; an infinity saturates.
use burn::tensor::module::linear;
use burn_float8::{Cast, Float8, Float8Backend, Format, Granularity, ScaleMode};
use float8_kernels::reference;

use crate::on_every_runtime;
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

fn zeros_on<B: Float8Backend>(runtime: &str) {
    assert_eq!(forward::<B>(vec![0.0; M * K]), vec![0.0; M * N], "{runtime}");
}

#[test]
fn zeros_give_zeros() {
    on_every_runtime!(zeros_on);
}
