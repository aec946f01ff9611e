//! Bad arguments are typed errors that name the values, and never reach the device.

use cubecl::ir::{ElemType, IntKind, StorageType};
use float8_kernels::{
    Format, GemmConfig, Granularity, KernelError, MatrixView, Orientation, ScaleMode, VectorView, amax, health,
    quantize, quantize_with_amax, scaled_gemm, supports,
};
use rstest::rstest;

use crate::common::*;

/// The error of all kernels that take a matrix, which must agree.
fn error(client: &Client, view: &MatrixView) -> KernelError {
    let error = amax(client, view).unwrap_err();
    for granularity in GRANULARITIES {
        let cast = cast_with(Format::E4m3, granularity, ScaleMode::F32);
        assert_eq!(quantize(client, view, cast, Orientation::Both).unwrap_err(), error);
    }
    let one = upload_f32(client, &[1.0]);
    let cast = tensorwise(Format::E4m3, ScaleMode::F32);
    assert_eq!(quantize_with_amax(client, view, &one, true, cast, Orientation::Both).unwrap_err(), error);
    let operand = upload_codes(client, &[0; 12], [3, 4], Format::E4m3, 1.0);
    assert_eq!(health(client, view, &operand).unwrap_err(), error);
    error
}

fn view(client: &Client, shape: [usize; 2], strides: [usize; 2]) -> MatrixView {
    MatrixView { handle: upload_f32(client, &[0.0; 12]), shape, strides, dtype: F32 }
}

#[rstest]
#[case([0, 4])]
#[case([4, 0])]
#[case([0, 0])]
fn empty_matrices(#[case] shape: [usize; 2]) {
    let Some(client) = client() else { return };
    let [rows, cols] = shape;
    assert_eq!(error(&client, &view(&client, shape, [4, 1])), KernelError::EmptyMatrix { rows, cols });
}

#[test]
fn views_beyond_their_memory() {
    let Some(client) = client() else { return };
    let out_of_bounds = |needed, available| KernelError::OutOfBounds { needed, available };
    assert!(amax(&client, &view(&client, [3, 4], [4, 1])).is_ok());
    assert_eq!(error(&client, &view(&client, [3, 4], [5, 1])), out_of_bounds(56, 48));
    assert_eq!(error(&client, &view(&client, [13, 1], [1, 1])), out_of_bounds(52, 48));
    let mut sliced = view(&client, [2, 4], [4, 1]);
    sliced.handle = sliced.handle.offset_start(32);
    assert_eq!(error(&client, &sliced), out_of_bounds(32, 16));
}

#[test]
fn handles_in_the_middle_of_an_element() {
    let Some(client) = client() else { return };
    let mut sliced = view(&client, [1, 4], [4, 1]);
    sliced.handle = sliced.handle.offset_start(6);
    assert_eq!(error(&client, &sliced), KernelError::Misaligned { offset: 6, size: 4 });
}

#[rstest]
#[case([1 << 17, 1 << 17], [0, 1])]
#[case([2, 2], [usize::MAX, 1])]
#[case([usize::MAX, usize::MAX], [usize::MAX, usize::MAX])]
#[case([2, 1], [1 << 33, 1])]
fn more_than_32_bits_of_index(#[case] shape: [usize; 2], #[case] strides: [usize; 2]) {
    let Some(client) = client() else { return };
    let error = error(&client, &view(&client, shape, strides));
    let [rows, cols] = shape;
    assert!(
        matches!(error, KernelError::TooLarge { rows: r, cols: c, strides: s, .. } if (r, c, s) == (rows, cols, strides))
    );
}

#[test]
fn other_dtypes() {
    let Some(client) = client() else { return };
    let dtype = StorageType::Scalar(ElemType::Int(IntKind::I32));
    let mut ints = view(&client, [3, 4], [4, 1]);
    ints.dtype = dtype;
    assert_eq!(error(&client, &ints), KernelError::UnsupportedDtype { dtype });
    assert!(!supports(&client, dtype) && supports(&client, F32));
    let a = upload_codes(&client, &[0; 4], [1, 4], Format::E4m3, 1.0);
    assert_eq!(
        scaled_gemm(&client, &a, &a, None, dtype, GemmConfig::default()).unwrap_err(),
        KernelError::UnsupportedDtype { dtype }
    );
    for dtype in [F16, BF16] {
        assert_eq!(
            scaled_gemm(&client, &a, &a, None, dtype, GemmConfig::default()).is_ok(),
            supports(&client, dtype),
            "{dtype}"
        );
    }
}

#[test]
fn operands_that_do_not_fit() {
    let Some(client) = client() else { return };
    let a = upload_codes(&client, &[0; 40], [2, 20], Format::E4m3, 1.0);
    let b = upload_codes(&client, &[0; 42], [2, 21], Format::E5m2, 1.0);
    let gemm = |a, b| scaled_gemm(&client, a, b, None, F32, GemmConfig::default()).unwrap_err();
    assert_eq!(gemm(&a, &b), KernelError::ContractionMismatch { a: 20, b: 21 });

    let mut empty = a.clone();
    empty.rows = 0;
    assert_eq!(gemm(&empty, &b), KernelError::EmptyMatrix { rows: 0, cols: 20 });
    let mut empty = b.clone();
    empty.k = 0;
    assert_eq!(gemm(&a, &empty), KernelError::EmptyMatrix { rows: 2, cols: 0 });

    let mut long = a.clone();
    long.rows = 3;
    let (format, rows, k) = (Format::E4m3, 3, 20);
    assert_eq!(gemm(&long, &a), KernelError::BadOperand { format, rows, k, needed: 96, available: 64 });
    let mut huge = a.clone();
    huge.rows = usize::MAX;
    assert!(matches!(gemm(&a, &huge), KernelError::TooLarge { rows: usize::MAX, .. }));
}

#[test]
fn biases_that_do_not_fit() {
    let Some(client) = client() else { return };
    let a = upload_codes(&client, &[0; 40], [2, 20], Format::E4m3, 1.0);
    let bias = upload_vector(&client, &[0.0; 3], 1, F32);
    let gemm = |bias: &VectorView| scaled_gemm(&client, &a, &a, Some(bias), F32, GemmConfig::default()).unwrap_err();
    assert_eq!(gemm(&bias), KernelError::BiasMismatch { bias: 3, n: 2 });
    let bias = VectorView { len: 2, stride: 3, ..bias };
    assert_eq!(gemm(&bias), KernelError::OutOfBounds { needed: 16, available: 12 });
}

#[test]
fn scales_that_do_not_fit() {
    let Some(client) = client() else { return };
    let (rows, k) = (130, 129);
    let b = upload_codes(&client, &vec![0; k], [1, k], Format::E4m3, 1.0);
    let view = upload(&client, &vec![0.0; rows * k], [rows, k], Layout::RowMajor, F32);
    let scales = [(Granularity::Tensor, 1), (Granularity::Row, 130), (Granularity::Block1x128, 260)];
    for (granularity, count) in scales.into_iter().chain([(Granularity::Block128x128, 4)]) {
        let matrix = HostMatrix::random([rows, k], Format::E4m3, granularity, 1);
        assert_eq!(matrix.inv_scales.len(), count);
        let mut a = matrix.upload(&client);
        assert!(scaled_gemm(&client, &a, &b, None, F32, GemmConfig::default()).is_ok());
        assert!(health(&client, &view, &a).is_ok());
        a.inv_scale = a.inv_scale.offset_start(4);
        let (needed, available) = (4 * count as u64, 4 * count as u64 - 4);
        let want = KernelError::BadScales { granularity, rows, k, needed, available };
        for (a, b) in [(&a, &b), (&b, &a)] {
            assert_eq!(scaled_gemm(&client, a, b, None, F32, GemmConfig::default()).unwrap_err(), want);
        }
        assert_eq!(health(&client, &view, &a).unwrap_err(), want);
    }
}

#[test]
fn an_amax_must_be_there() {
    let Some(client) = client() else { return };
    let x = view(&client, [3, 4], [4, 1]);
    let one = upload_f32(&client, &[1.0]);
    let cast = tensorwise(Format::E4m3, ScaleMode::F32);
    let error = |amax| quantize_with_amax(&client, &x, &amax, false, cast, Orientation::Rows).unwrap_err();
    assert_eq!(error(one.clone().offset_start(4)), KernelError::OutOfBounds { needed: 4, available: 0 });
    assert_eq!(error(one.offset_start(2)), KernelError::Misaligned { offset: 2, size: 4 });
}

#[test]
fn messages_name_the_values() {
    let message = KernelError::ContractionMismatch { a: 20, b: 21 }.to_string();
    assert!(message.contains("20") && message.contains("21"), "{message}");
    let (granularity, rows, k) = (Granularity::Block1x128, 2, 300);
    let message = KernelError::BadScales { granularity, rows, k, needed: 24, available: 20 }.to_string();
    for part in ["1x128", "[2, 300]", "24", "20"] {
        assert!(message.contains(part), "{message}");
    }
}
