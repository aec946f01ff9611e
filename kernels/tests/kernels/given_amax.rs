//! Casts with an amax from outside: the scale is that of the amax, what exceeds it saturates, and x's own amax is observed.

use cubecl::ir::StorageType;
use float8_kernels::{Cast, Orientation, quantize, quantize_with_amax, reference};
use rstest::rstest;

use crate::common::*;

#[rstest]
fn the_scale_is_that_of_the_given_amax(
    #[values(F32, F16, BF16)] dtype: StorageType,
    #[values(Orientation::Rows, Orientation::Cols, Orientation::Both)] orientation: Orientation,
) {
    let Some(client) = client() else { return };
    let shape = [70, 133];
    let x = Random::new(60).values(shape[0] * shape[1]);
    let rounded = to_dtype(&x, dtype).1;
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        let view = upload(&client, &x, shape, layout, dtype);
        for cast in FORMATS.into_iter().flat_map(|format| MODES.map(|mode| tensorwise(format, mode))) {
            // Below, at and above the amax of x, and what has no scale of its own.
            let amax = [0.1, 31.7, 1e4, 0.0, f32::INFINITY, f32::NAN][i];
            let scale = reference::amax_to_scale(amax, cast.format, cast.scale_mode);
            let mut want = vec![0; rounded.len()];
            reference::cast(&rounded, scale, cast.format, &mut want);

            let given = upload_f32(&client, &[amax]);
            for observe in [false, true] {
                let done = quantize_with_amax(&client, &view, &given, observe, cast, orientation).unwrap();
                assert_eq!((done.rows.is_some(), done.cols.is_some()), (orientation.rows(), orientation.cols()));
                for (operand, want) in [(done.rows, want.clone()), (done.cols, transpose(&want, shape))] {
                    let Some(operand) = operand else { continue };
                    let got = HostMatrix::read(&client, &operand);
                    assert_eq!(got.inv_scales.len(), 1);
                    assert!(same(got.inv_scales[0].get(), scale.inverse().get()), "{cast:?} {amax}");
                    assert_eq!(got.codes, want, "{cast:?} {layout:?} {amax}");
                }
                let want = if observe { reference::amax(&rounded) } else { amax };
                let got = read_f32(&client, done.amax);
                assert!(got.len() == 1 && same(got[0], want), "{observe} {layout:?}: {got:?}, not {want}");
            }
        }
    }
}

/// The amax observed in the cast is that of `quantize`, wherever in many tiles it lies; NaN wins.
#[test]
fn the_amax_is_observed_in_every_tile() {
    let Some(client) = client() else { return };
    let shape = [300, 500];
    let given = upload_f32(&client, &[1.0]);
    let cast = tensorwise(FORMATS[0], MODES[0]);
    let mut x = vec![0.25; shape[0] * shape[1]];
    for place in [0, 499, 150 * 500 + 250, 299 * 500, 299 * 500 + 499] {
        for value in [-2.5, f32::INFINITY, f32::NAN] {
            x[place] = value;
            let view = upload(&client, &x, shape, Layout::Pitched, F32);
            let done = quantize_with_amax(&client, &view, &given, true, cast, Orientation::Both).unwrap();
            let got = read_f32(&client, done.amax)[0];
            assert!(same(got, value.abs()), "{place}: {got}, not {value}");
        }
        x[place] = 0.25;
    }
}

/// Given its own amax, a matrix gets the copies of `quantize`; the amax may lie anywhere in a longer vector.
#[test]
fn its_own_amax_changes_nothing() {
    let Some(client) = client() else { return };
    let shape = [33, 70];
    let x = Random::new(61).values(shape[0] * shape[1]);
    let view = upload(&client, &x, shape, Layout::RowMajor, F32);
    for cast in FORMATS.into_iter().flat_map(|format| MODES.map(|mode| tensorwise(format, mode))) {
        let history = upload_f32(&client, &[f32::NAN, f32::NAN, f32::NAN, reference::amax(&x), f32::NAN]);
        let given = history.offset_start(12);
        let got = quantize_with_amax(&client, &view, &given, false, cast, Orientation::Both).unwrap();
        let want = quantize(&client, &view, cast, Orientation::Both).unwrap();
        for (got, want) in [(got.rows, want.rows), (got.cols, want.cols)] {
            let [got, want] = [got, want].map(|operand| HostMatrix::read(&client, &operand.unwrap()));
            assert_eq!((got.codes, got.inv_scales), (want.codes, want.inv_scales));
        }
    }
}

#[rstest]
fn only_the_tensor_takes_an_amax(#[values(F32, BF16)] dtype: StorageType) {
    use float8_kernels::{Granularity, KernelError};
    let Some(client) = client() else { return };
    let view = upload(&client, &[1.0; 6], [2, 3], Layout::RowMajor, dtype);
    let one = upload_f32(&client, &[1.0]);
    for granularity in &GRANULARITIES[1..] {
        let cast = Cast { granularity: *granularity, ..tensorwise(FORMATS[0], MODES[0]) };
        let error = quantize_with_amax(&client, &view, &one, true, cast, Orientation::Rows).unwrap_err();
        assert_eq!(error, KernelError::NotTensorwise { granularity: *granularity });
        assert!(error.to_string().contains(&Granularity::to_string(granularity)), "{error}");
    }
}
