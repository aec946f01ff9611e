//! amax of every layout and dtype, with NaN and infinities.

use cubecl::ir::StorageType;
use float8_kernels::{MatrixView, amax, reference};
use rstest::rstest;

use crate::common::*;

fn device_amax(client: &Client, view: &MatrixView) -> f32 {
    read_f32(client, amax(client, view).unwrap())[0]
}

#[rstest]
fn device_amax_is_exact(
    #[values([1, 1], [3, 5], [17, 33], [64, 64], [100, 70], [1, 1000], [1000, 1], [257, 129])] shape: [usize; 2],
    #[values(F32, F16, BF16)] dtype: StorageType,
) {
    let Some(client) = client() else { return };
    let mut x = Random::new(11).values(shape[0] * shape[1]);
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        // The largest is negative and not where it was for the last layout, the last element among others.
        let place = x.len() - 1 - i * x.len() / LAYOUTS.len();
        x[place] = -100.0 - i as f32;
        let want = reference::amax(&to_dtype(&x, dtype).1);
        let view = upload(&client, &x, shape, layout, dtype);
        assert_eq!(device_amax(&client, &view), want, "{shape:?} {layout:?} {dtype}");
    }
}

#[rstest]
fn nan_wins_and_infinity_comes_second(#[values(F32, F16, BF16)] dtype: StorageType) {
    let Some(client) = client() else { return };
    for layout in LAYOUTS {
        let shape = [33, 70];
        let mut x = Random::new(12).values(shape[0] * shape[1]);
        x[1000] = f32::NEG_INFINITY;
        let view = upload(&client, &x, shape, layout, dtype);
        assert_eq!(device_amax(&client, &view), f32::INFINITY, "{layout:?} {dtype}");
        x[2309] = -f32::NAN;
        let view = upload(&client, &x, shape, layout, dtype);
        assert!(device_amax(&client, &view).is_nan(), "{layout:?} {dtype}");
        assert!(reference::amax(&x).is_nan());
    }
}

/// A maximum that is subnormal in its dtype is not flushed.
#[test]
fn subnormals_count() {
    let Some(client) = client() else { return };
    for (dtype, smallest) in [(F32, 2f32.powi(-149)), (F16, 2f32.powi(-24)), (BF16, 2f32.powi(-133))] {
        let view = upload(&client, &[0.0, -smallest, 0.0], [1, 3], Layout::RowMajor, dtype);
        assert_eq!(device_amax(&client, &view), smallest, "{dtype}");
    }
}

#[test]
fn zeros_have_amax_zero() {
    let Some(client) = client() else { return };
    let view = upload(&client, &[-0.0; 12], [3, 4], Layout::RowMajor, F32);
    assert_eq!(device_amax(&client, &view).to_bits(), 0);
    assert_eq!(reference::amax(&[]), 0.0);
}

/// More quads than the units of the largest grid take in one step, the largest element in each part in turn.
#[test]
fn large_matrices_take_many_steps() {
    let Some(client) = client() else { return };
    let shape = [1031, 2051];
    let mut x = vec![0.5f32; shape[0] * shape[1]];
    for place in [0, x.len() / 2, x.len() - 1] {
        x[place] = 2.0;
        for layout in [Layout::RowMajor, Layout::Pitched] {
            assert_eq!(device_amax(&client, &upload(&client, &x, shape, layout, F32)), 2.0, "{place} {layout:?}");
        }
        x[place] = 0.5;
    }
}

/// Stride 0, what a broadcast leaves behind.
#[test]
fn repeated_rows_and_columns() {
    let Some(client) = client() else { return };
    let handle = upload_f32(&client, &[1.0, -3.0, 2.0]);
    for (strides, shape) in [([0, 1], [50, 3]), ([1, 0], [3, 50])] {
        let view = MatrixView { handle: handle.clone(), shape, strides, dtype: F32 };
        assert_eq!(device_amax(&client, &view), 3.0, "{strides:?}");
    }
}
