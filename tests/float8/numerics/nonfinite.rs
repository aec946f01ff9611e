//! A NaN must reach the output; an infinity saturates.
use burn_float8::{Float8Config, Recipe, backend::Float8Backend};

use crate::on_cpu_and_wgpu;
use crate::support::linear::from_values;
use crate::support::normal;

const M: usize = 6;
const K: usize = 20;
const N: usize = 9;

/// y, dx and dw for x, w and dy.
fn run<B: Float8Backend>(recipe: Recipe, [x, w, dy]: &[Vec<f32>; 3]) -> Vec<Vec<f32>> {
    from_values::<B>(&Float8Config::new(recipe), [x, w, dy], [M, K, N], None)
}

fn inputs() -> [Vec<f32>; 3] {
    [normal(M * K, 1), normal(K * N, 2), normal(M * N, 3)]
}

/// A NaN in x, w or dy, for every recipe: each result that depends on it has a NaN, and all of the
/// row of y that reads it.
fn nan_on<B: Float8Backend>(runtime: &str) {
    for recipe in Recipe::ALL {
        for (at, reached) in [(0, [true, false, true]), (1, [true, true, false]), (2, [false, true, true])] {
            let mut inputs = inputs();
            inputs[at][7] = f32::NAN;
            let ours = run::<B>(recipe, &inputs);
            let has_nan: Vec<_> = ours.iter().map(|result| result.iter().any(|v| v.is_nan())).collect();
            assert_eq!(has_nan, reached, "{runtime} {recipe}, NaN in input {at}");
            assert!(at != 0 || ours[0][..N].iter().all(|v| v.is_nan()), "{runtime} {recipe}: {:?}", ours[0]);
        }
    }
}

#[test]
fn a_nan_reaches_every_result_of_every_recipe() {
    on_cpu_and_wgpu!(nan_on);
}

/// Large and small operands whose product fits in f32.
fn extremes_on<B: Float8Backend>(runtime: &str) {
    for recipe in Recipe::ALL {
        let ours = run::<B>(recipe, &[vec![1e38; M * K], vec![1e-3; K * N], vec![1e-10; M * N]]);
        let near = |v: f32, exact: f32| (v / exact - 1.0).abs() < 0.1;
        assert!(ours[0].iter().all(|y| near(*y, K as f32 * 1e35)), "{runtime} {recipe}: {}", ours[0][0]);
        assert!(ours[2].iter().all(|dw| near(*dw, M as f32 * 1e28)), "{runtime} {recipe}: {}", ours[2][0]);
    }
}

#[test]
fn extremes_that_cancel_do_not_overflow() {
    on_cpu_and_wgpu!(extremes_on);
}

/// An infinity saturates. An E8M0 scale cannot mark a largest value: the block of an infinity is
/// NaN (OCP MX), and so are its products.
fn infinity_on<B: Float8Backend>(runtime: &str) {
    for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
        let mut inputs = inputs();
        inputs[0][3 * K + 7] = infinity;
        let y = &run::<B>(Recipe::Tensorwise, &inputs)[0];
        assert!(y.iter().all(|v| !v.is_nan()), "{runtime}: {y:?}");
        assert!(y[3 * N..4 * N].iter().any(|v| v.abs() > 1e30), "{runtime}: the infinity left no trace: {y:?}");
        let y = &run::<B>(Recipe::Mxfp8, &inputs)[0];
        let rows: Vec<_> = y.chunks(N).map(|row| row.iter().all(|v| v.is_nan())).collect();
        assert_eq!(rows, [false, false, false, true, false, false], "{runtime}: {y:?}");
    }
}

#[test]
fn an_infinity_saturates_or_is_nan_in_mx() {
    on_cpu_and_wgpu!(infinity_on);
}
