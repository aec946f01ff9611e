//! Whole-matrix casts: every granularity in both orientations, every layout and dtype, padding, non-finite values.

use cubecl::ir::StorageType;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Operand, Orientation, Quantized, ScaleMode, quantize, reference,
};
use rstest::rstest;

use crate::common::*;

const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];

/// Checks one copy of row-major `x [rows, cols]` against the reference.
pub(crate) fn check_copy(
    client: &Client,
    operand: &Operand,
    x: &[f32],
    shape: [usize; 2],
    cast: Cast,
    transposed: bool,
) {
    let want = reference::quantize(x, shape[0], shape[1], cast, transposed);
    let ([rows, k], codes) =
        if transposed { ([shape[1], shape[0]], transpose(&want.codes, shape)) } else { (shape, want.codes) };
    assert_eq!((operand.rows, operand.k), (rows, k));
    assert_eq!((operand.format, operand.granularity), (cast.format, cast.granularity));
    let got = HostMatrix::read(client, operand);
    assert_eq!(got.inv_scales.len(), want.scales.len());
    for (i, (got, want)) in got.inv_scales.iter().zip(&want.scales).enumerate() {
        let want = want.inverse();
        assert!(same(got.get(), want.get()), "{cast:?} {transposed} {shape:?}: scale {i} is {got:?}, not {want:?}");
    }
    if let Some(i) = got.codes.iter().zip(&codes).position(|(got, want)| got != want) {
        let (row, col, got, want) = (i / k, i % k, got.codes[i], codes[i]);
        panic!("{cast:?} {transposed} {shape:?}: [{row}, {col}] is {got:#x}, not {want:#x}");
    }
}

/// Checks copies, amax and scales of `view`, whose values are row-major `x`, against the reference.
pub(crate) fn check(client: &Client, view: &MatrixView, x: &[f32], cast: Cast, orientation: Orientation) {
    let shape = view.shape;
    let Quantized { rows, cols, amax } = quantize(client, view, cast, orientation).unwrap();
    assert_eq!(rows.is_some(), orientation.rows());
    assert_eq!(cols.is_some(), orientation.cols());
    for (operand, transposed) in [(rows, false), (cols, true)] {
        if let Some(operand) = operand {
            check_copy(client, &operand, x, shape, cast, transposed);
        }
    }
    let amax = read_f32(client, amax);
    assert_eq!(amax.len(), cast.granularity.amax_len(shape[0], shape[1], orientation));
    assert!(same(reference::amax(&amax), reference::amax(x)), "{cast:?} {orientation:?} {shape:?}");
    if cast.granularity == Granularity::Row {
        let (x, k) = if orientation.rows() { (x.to_vec(), shape[1]) } else { (transpose(x, shape), shape[0]) };
        for (i, (got, row)) in amax.iter().zip(x.chunks(k)).enumerate() {
            assert!(same(*got, reference::amax(row)), "{orientation:?} {shape:?}: amax {i} is {got}");
        }
    }
}

/// Shapes around the tiles of 64 and 128, the words of 4 and the padding to 16.
#[rstest]
fn every_layout_and_dtype_equals_the_reference(
    #[values([1, 1], [3, 5], [17, 33], [64, 64], [1, 1000], [1000, 1], [257, 129], [66, 128])] shape: [usize; 2],
    #[values(F32, F16, BF16)] dtype: StorageType,
    #[values(Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128)]
    granularity: Granularity,
) {
    let Some(client) = client() else { return };
    let x = Random::new(21).values(shape[0] * shape[1]);
    let rounded = to_dtype(&x, dtype).1;
    for layout in LAYOUTS {
        let view = upload(&client, &x, shape, layout, dtype);
        let cast = Cast { format: Format::E4m3, granularity, scale_mode: ScaleMode::F32 };
        for orientation in ORIENTATIONS {
            check(&client, &view, &rounded, cast, orientation);
        }
    }
}

#[rstest]
fn every_cast_equals_the_reference(
    #[values(Orientation::Rows, Orientation::Cols, Orientation::Both)] orientation: Orientation,
) {
    let Some(client) = client() else { return };
    let shape = [70, 300];
    let x = Random::new(22).values(shape[0] * shape[1]);
    for layout in [Layout::RowMajor, Layout::ColumnMajor] {
        let view = upload(&client, &x, shape, layout, F32);
        for cast in casts() {
            check(&client, &view, &x, cast, orientation);
        }
    }
}

/// Row lengths on both sides of every change of plan, the last ones too long for registers.
#[rstest]
#[case([70, 16])]
#[case([70, 17])]
#[case([67, 128])]
#[case([67, 129])]
#[case([19, 512])]
#[case([19, 513])]
#[case([3, 4096])]
#[case([3, 4097])]
#[case([2, 8192])]
#[case([2, 8193])]
#[case([2, 16384])]
#[case([2, 16385])]
#[case([3, 40003])]
fn rows_of_every_length(#[case] shape: [usize; 2]) {
    let Some(client) = client() else { return };
    let mut x = Random::new(24).values(shape[0] * shape[1]);
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Row, scale_mode: ScaleMode::F32 };
    // The largest element of a row is its first, its last or one in between.
    for (r, row) in x.chunks_mut(shape[1]).enumerate() {
        let place = [0, shape[1] - 1, shape[1] / 2][r % 3];
        row[place] = -100.0 - r as f32;
    }
    for layout in [Layout::RowMajor, Layout::Pitched, Layout::ColumnMajor] {
        for orientation in [Orientation::Rows, Orientation::Both] {
            check(&client, &upload(&client, &x, shape, layout, F32), &x, cast, orientation);
        }
    }
}

/// A NaN poisons amax and scale, so every code of its group is NaN, but neither the padding nor another group; an infinity
/// saturates and leaves zeros.
#[rstest]
fn non_finite_values_stay_in_their_group(
    #[values(Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128)]
    granularity: Granularity,
    #[values(F32, BF16)] dtype: StorageType,
) {
    let Some(client) = client() else { return };
    let shape = [139, 261];
    let at = |r: usize, c: usize| r * shape[1] + c;
    for format in FORMATS {
        let cast = Cast { format, granularity, scale_mode: ScaleMode::F32 };
        let mut x = to_dtype(&Random::new(23).values(shape[0] * shape[1]), dtype).1;
        x[at(0, 5)] = f32::NEG_INFINITY;
        x[at(0, 6)] = f32::INFINITY;
        check(&client, &upload(&client, &x, shape, Layout::RowMajor, dtype), &x, cast, Orientation::Both);
        let codes = reference::quantize(&x, shape[0], shape[1], cast, false).codes;
        assert_eq!(codes[5..7], [0x80 | format.max_code(), format.max_code()]);

        x[at(137, 259)] = -f32::NAN;
        check(&client, &upload(&client, &x, shape, Layout::RowMajor, dtype), &x, cast, Orientation::Both);
        for transposed in [false, true] {
            let codes = reference::quantize(&x, shape[0], shape[1], cast, transposed).codes;
            for (i, code) in codes.iter().enumerate() {
                let (r, c) = (i / shape[1], i % shape[1]);
                let group = match (granularity, transposed) {
                    (Granularity::Tensor, _) => true,
                    (Granularity::Row, false) => r == 137,
                    (Granularity::Row, true) => c == 259,
                    (Granularity::Block1x128, false) => r == 137 && c >= 256,
                    (Granularity::Block1x128, true) => r >= 128 && c == 259,
                    (Granularity::Block128x128, _) => r >= 128 && c >= 256,
                    (Granularity::Block1x32, _) => unreachable!("its infinities are NaN"),
                };
                assert_eq!(code & 0x7f == 0x7f, group, "{format} {transposed} [{r}, {c}] is {code:#x}");
            }
        }
    }
}

/// Groups of zeros, of negative zeros and of subnormals beside a group of ones: each has its own scale, signs stay.
#[test]
fn zeros_and_subnormals_per_group() {
    let Some(client) = client() else { return };
    let shape = [6, 300];
    let rows = [0.0, -0.0, f32::from_bits(1), -1e-40, 1e-30, -1.0];
    let x: Vec<f32> = rows.iter().flat_map(|&x| vec![x; shape[1]]).collect();
    for layout in [Layout::RowMajor, Layout::ColumnMajor] {
        for cast in casts() {
            check(&client, &upload(&client, &x, shape, layout, F32), &x, cast, Orientation::Both);
        }
    }
}

/// Stride 0, what a broadcast leaves behind.
#[test]
fn repeated_rows_and_columns() {
    let Some(client) = client() else { return };
    let values = Random::new(25).values(150);
    let handle = upload_f32(&client, &values);
    for (strides, shape) in [([0, 1], [140, 150]), ([1, 0], [150, 140]), ([0, 0], [5, 7])] {
        let view = MatrixView { handle: handle.clone(), shape, strides, dtype: F32 };
        let x: Vec<f32> = (0..shape[0])
            .flat_map(|r| (0..shape[1]).map(move |c| r * strides[0] + c * strides[1]))
            .map(|i| values[i])
            .collect();
        for granularity in GRANULARITIES {
            let cast = cast_with(Format::E5m2, granularity, ScaleMode::PowerOfTwo);
            check(&client, &view, &x, cast, Orientation::Both);
        }
    }
}

/// More tiles, and more rows, than wgpu takes along one dimension of the grid.
#[test]
fn grids_fold() {
    let Some(client) = client() else { return };
    let values = |len: usize| -> Vec<f32> { (0..len).map(|i| (i % 511) as f32 - 255.0).collect() };
    let line = |size: usize| [1, 65535 * size + size + 1];
    // Tiles of 64, tiles of 128, and 32 rows to a cube.
    let cases = [
        (line(64), Granularity::Tensor),
        (line(128), Granularity::Block128x128),
        ([65535 * 32 + 33, 3], Granularity::Row),
    ];
    for (shape, granularity) in cases {
        let x = values(shape[0] * shape[1]);
        let view = upload(&client, &x, shape, Layout::RowMajor, F32);
        let cast = Cast { format: Format::E4m3, granularity, scale_mode: ScaleMode::F32 };
        check(&client, &view, &x, cast, Orientation::Rows);
    }
}
