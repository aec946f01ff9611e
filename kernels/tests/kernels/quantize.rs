//! Whole-matrix casts: both orientations, every layout and dtype, padding, non-finite values.

use cubecl::ir::StorageType;
use float8_kernels::{Cast, Format, MatrixView, Orientation, Quantized, ScaleMode, quantize, reference};
use proptest::prelude::*;
use rstest::rstest;

use crate::common::*;

/// Checks copies, amax and scale of `view`, whose values are row-major `x`, against the reference.
fn check(client: &Client, view: &MatrixView, x: &[f32], cast: Cast, orientation: Orientation) {
    let shape = view.shape;
    let (codes, amax, scale) = reference::quantize(x, shape[0], shape[1], cast);
    let Quantized { rows, cols, amax: got_amax, scale: got_scale } = quantize(client, view, cast, orientation).unwrap();
    assert_eq!(rows.is_some(), orientation.rows());
    assert_eq!(cols.is_some(), orientation.cols());
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert!(same(read_f32(client, got_amax)[0], amax));
    assert!(same(read_f32(client, got_scale)[0], scale.get()));
    let sides = [(rows, shape, codes.clone()), (cols, [shape[1], shape[0]], transpose(&codes, shape))];
    for (operand, [rows, k], want) in sides {
        let Some(operand) = operand else { continue };
        assert_eq!((operand.rows, operand.k, operand.format), (rows, k, cast.format));
        assert!(same(read_f32(client, operand.inv_scale.clone())[0], scale.inverse().get()));
        let got = read_codes(client, &operand);
        let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
        if let Some(i) = wrong {
            panic!("{orientation:?} {view:?}: [{}, {}] is {:#x}, not {:#x}", i / k, i % k, got[i], want[i]);
        }
    }
}

#[rstest]
fn both_copies_equal_the_reference(
    #[values([1, 1], [3, 5], [17, 33], [64, 64], [100, 70], [1, 1000], [1000, 1], [257, 129], [66, 128])] shape: [usize;
        2],
    #[values(F32, F16, BF16)] dtype: StorageType,
) {
    let Some(client) = client() else { return };
    let x = Random::new(21).values(shape[0] * shape[1]);
    let rounded = to_dtype(&x, dtype).1;
    for layout in LAYOUTS {
        let view = upload(&client, &x, shape, layout, dtype);
        for format in FORMATS {
            check(&client, &view, &rounded, tensorwise(format, ScaleMode::F32), Orientation::Both);
        }
    }
}

#[rstest]
fn one_copy_equals_one_of_both(#[values(Orientation::Rows, Orientation::Cols)] orientation: Orientation) {
    let Some(client) = client() else { return };
    let shape = [70, 100];
    let x = Random::new(22).values(shape[0] * shape[1]);
    for layout in LAYOUTS {
        let view = upload(&client, &x, shape, layout, F32);
        for mode in MODES {
            check(&client, &view, &x, tensorwise(Format::E4m3, mode), orientation);
        }
    }
}

/// A NaN poisons amax and scale, so every code is NaN, but not the padding; an infinity saturates and leaves zeros.
#[rstest]
fn non_finite_values(#[values(Format::E4m3, Format::E5m2)] format: Format, #[values(F32, BF16)] dtype: StorageType) {
    let Some(client) = client() else { return };
    let shape = [19, 37];
    let cast = tensorwise(format, ScaleMode::F32);
    let mut x = to_dtype(&Random::new(23).values(shape[0] * shape[1]), dtype).1;
    x[5] = f32::NEG_INFINITY;
    x[6] = f32::INFINITY;
    check(&client, &upload(&client, &x, shape, Layout::RowMajor, dtype), &x, cast, Orientation::Both);
    let codes = reference::quantize(&x, shape[0], shape[1], cast).0;
    assert_eq!(codes[5..7], [0x80 | format.max_code(), format.max_code()]);

    x[700] = f32::NAN;
    check(&client, &upload(&client, &x, shape, Layout::RowMajor, dtype), &x, cast, Orientation::Both);
    let codes = reference::quantize(&x, shape[0], shape[1], cast).0;
    assert!(codes.iter().all(|code| code & 0x7f == 0x7f));
}

#[test]
fn signed_zeros_keep_their_sign() {
    let Some(client) = client() else { return };
    let x = [0.0, -0.0, 1e-30, -1e-30, f32::from_bits(1), -f32::from_bits(1), -0.0, 0.0];
    for x in [x.to_vec(), [x.as_slice(), &[1.0]].concat()] {
        let shape = [1, x.len()];
        let cast = tensorwise(Format::E4m3, ScaleMode::F32);
        check(&client, &upload(&client, &x, shape, Layout::RowMajor, F32), &x, cast, Orientation::Both);
    }
}

/// More tiles than wgpu takes along one dimension of the grid.
#[test]
fn grids_fold() {
    let Some(client) = client() else { return };
    let shape = [1, 65535 * 64 + 65];
    let x: Vec<f32> = (0..shape[1]).map(|i| (i % 511) as f32 - 255.0).collect();
    let view = upload(&client, &x, shape, Layout::RowMajor, F32);
    check(&client, &view, &x, tensorwise(Format::E4m3, ScaleMode::F32), Orientation::Rows);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_shape_and_stride(
        rows in 1usize..150,
        cols in 1usize..150,
        col_stride in 1usize..4,
        gap in 0usize..9,
        transposed: bool,
        seed: u64,
    ) {
        let Some(client) = client() else { return Ok(()) };
        let mut strides = [(cols - 1) * col_stride + 1 + gap, col_stride];
        let mut shape = [rows, cols];
        let memory = Random::new(seed).values((rows - 1) * strides[0] + (cols - 1) * strides[1] + 1);
        if transposed {
            strides.swap(0, 1);
            shape.swap(0, 1);
        }
        let x: Vec<f32> = (0..shape[0])
            .flat_map(|r| (0..shape[1]).map(move |c| r * strides[0] + c * strides[1]))
            .map(|i| memory[i])
            .collect();
        let view = MatrixView { handle: upload_f32(&client, &memory), shape, strides, dtype: F32 };
        check(&client, &view, &x, tensorwise(Format::E5m2, ScaleMode::PowerOfTwo), Orientation::Both);
    }
}
