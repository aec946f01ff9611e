//! Bad arguments give typed errors with their values and never reach the device.

use cubecl::ir::{ElemType, IntKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};
use float8_kernels::{
    Cast, Format, GemmArgs, GemmConfig, Granularity, Grouping, Groups, KernelError, MatrixView, Operand, Orientation,
    ScaleCalculationMode, ScaleMode, VectorView, amax, grouped_scaled_gemm, health, quantize, quantize_with_amax,
    scaled_gemm, supports,
};
use kernel_tests::{BF16, F16, F32, HostMatrix};
use rstest::rstest;

type Client = ComputeClient<WgpuRuntime>;

/// Default wgpu device. Without one, prints that the test is skipped; fails in CI.
fn client() -> Option<Client> {
    // Type 4 is every adapter. Creating a client without one panics.
    if WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty() {
        test_data::skip(test_data::VULKAN);
        return None;
    }
    Some(WgpuRuntime::client(&WgpuDevice::default()))
}

fn tensorwise(format: Format, scale_mode: ScaleMode) -> Cast {
    Cast { format, granularity: Granularity::Tensor, scale_mode }
}

fn upload_f32(client: &Client, x: &[f32]) -> Handle {
    client.create_from_slice(f32::as_bytes(x))
}

fn operand(client: &Client, shape: [usize; 2], format: Format, granularity: Granularity) -> Operand {
    HostMatrix::identity(shape, format, granularity).upload(client)
}

/// e4m3 with one scale.
fn codes(client: &Client, shape: [usize; 2]) -> Operand {
    operand(client, shape, Format::E4m3, Granularity::Tensor)
}

/// Error of all kernels that take a matrix. They must agree.
fn error(client: &Client, view: &MatrixView) -> KernelError {
    let error = amax(client, view).unwrap_err();
    for granularity in Granularity::ALL {
        let is_mx = granularity == Granularity::Block1x32;
        let scale_mode = if is_mx { ScaleMode::E8m0(ScaleCalculationMode::Rceil) } else { ScaleMode::F32 };
        let cast = Cast { format: Format::E4m3, granularity, scale_mode };
        assert_eq!(quantize(client, view, cast, Orientation::Both).unwrap_err(), error);
    }
    let one = upload_f32(client, &[1.0]);
    let cast = tensorwise(Format::E4m3, ScaleMode::F32);
    assert_eq!(quantize_with_amax(client, view, &one, true, cast, Orientation::Both).unwrap_err(), error);
    assert_eq!(health(client, view, &codes(client, [3, 4])).unwrap_err(), error);
    error
}

fn view(client: &Client, shape: [usize; 2], strides: [usize; 2]) -> MatrixView {
    MatrixView { handle: upload_f32(client, &[0.0; 12]), shape, strides, dtype: F32 }
}

#[test]
fn views_that_do_not_fit() {
    let Some(client) = client() else { return };
    assert!(amax(&client, &view(&client, [3, 4], [4, 1])).is_ok());
    let empty = |rows, cols| KernelError::EmptyMatrix { rows, cols };
    let beyond = |shape: [usize; 2], needed, available| {
        let what = format!("elements of a view {shape:?}");
        KernelError::OutOfBounds { what, needed, available }
    };
    for (shape, strides, offset, want) in [
        ([0, 4], [4, 1], 0, empty(0, 4)),
        ([4, 0], [4, 1], 0, empty(4, 0)),
        ([0, 0], [4, 1], 0, empty(0, 0)),
        ([3, 4], [5, 1], 0, beyond([3, 4], 56, 48)),
        ([13, 1], [1, 1], 0, beyond([13, 1], 52, 48)),
        ([2, 4], [4, 1], 32, beyond([2, 4], 32, 16)),
        // In the middle of an element.
        ([1, 4], [4, 1], 6, KernelError::Misaligned { offset: 6, size: 4 }),
    ] {
        let mut view = view(&client, shape, strides);
        if offset > 0 {
            view.handle = view.handle.offset_start(offset);
        }
        assert_eq!(error(&client, &view), want);
    }
    // More than 32 bits of index.
    for (shape @ [rows, cols], strides) in [
        ([1 << 17, 1 << 17], [0, 1]),
        ([2, 2], [usize::MAX, 1]),
        ([usize::MAX, usize::MAX], [usize::MAX, usize::MAX]),
        ([2, 1], [1 << 33, 1]),
    ] {
        let error = error(&client, &view(&client, shape, strides));
        let KernelError::TooLarge { rows: r, cols: c, strides: s, .. } = error else { panic!("{error}") };
        assert_eq!((r, c, s), (rows, cols, strides));
    }
}

#[test]
fn other_dtypes() {
    let Some(client) = client() else { return };
    let dtype = StorageType::Scalar(ElemType::Int(IntKind::I32));
    let mut ints = view(&client, [3, 4], [4, 1]);
    ints.dtype = dtype;
    assert_eq!(error(&client, &ints), KernelError::UnsupportedDtype { dtype });
    assert!(!supports(&client, dtype) && supports(&client, F32));
    let a = codes(&client, [1, 4]);
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
fn arguments_that_do_not_fit() {
    let Some(client) = client() else { return };
    let config = GemmConfig::default();
    let (a, b) = (codes(&client, [2, 20]), codes(&client, [3, 20]));
    let c = operand(&client, [2, 21], Format::E5m2, Granularity::Tensor);
    let floats = |len| upload_f32(&client, &vec![0.0; len]);
    let gemm = |a: &Operand, b: &Operand| scaled_gemm(&client, a, b, None, F32, config).map(drop);
    let biased = |len, stride| {
        let bias = VectorView { handle: floats(3), len, stride, dtype: F32 };
        scaled_gemm(&client, &a, &a, Some(&bias), F32, config).map(drop)
    };
    let into = |handle: Handle, dtype| {
        GemmArgs { a: &a, b: &b, bias: None, groups: None, dtype, config }.run_into(&client, None, &handle)
    };
    let grouped = |shape, count| {
        let (x, w) = (codes(&client, [4, 32]), codes(&client, shape));
        let groups = Groups { ends: client.create_from_slice(u32::as_bytes(&[2, 4])), count, grouping: Grouping::Rows };
        grouped_scaled_gemm(&client, &x, &w, &groups, F32, config).map(drop)
    };
    let given = |offset| {
        let cast = tensorwise(Format::E4m3, ScaleMode::F32);
        let (x, amax) = (view(&client, [3, 4], [4, 1]), floats(1).offset_start(offset));
        quantize_with_amax(&client, &x, &amax, false, cast, Orientation::Rows).map(drop)
    };
    let measured = health(&client, &view(&client, [4, 3], [3, 1]), &codes(&client, [3, 4])).map(drop);
    let beyond = |what: &str, needed, available| KernelError::OutOfBounds { what: what.into(), needed, available };
    let int = StorageType::Scalar(ElemType::Int(IntKind::I32));
    let size = client.properties().memory.alignment as usize;
    for (result, want) in [
        (gemm(&a, &c), KernelError::ContractionMismatch { a: 20, b: 21 }),
        (gemm(&Operand { rows: 0, ..a.clone() }, &c), KernelError::EmptyMatrix { rows: 0, cols: 20 }),
        (gemm(&a, &Operand { k: 0, ..c.clone() }), KernelError::EmptyMatrix { rows: 2, cols: 0 }),
        (gemm(&Operand { rows: 3, ..a.clone() }, &a), beyond("e4m3 codes [3, 20]", 96, 64)),
        (biased(3, 1), KernelError::BiasMismatch { bias: 3, n: 2 }),
        (biased(2, 3), beyond("elements of a view [1, 2]", 16, 12)),
        (given(4), beyond("elements of a view [1, 1]", 4, 0)),
        (given(2), KernelError::Misaligned { offset: 2, size: 4 }),
        (into(floats(5), F32), beyond("6 elements of the output", 24, 20)),
        (into(floats(64).offset_start(2), F32), KernelError::Misaligned { offset: 2, size }),
        (into(floats(64).offset_start(4), F32), KernelError::Misaligned { offset: 4, size }),
        (into(floats(64), int), KernelError::UnsupportedDtype { dtype: int }),
        (grouped([7, 32], 2), KernelError::UnevenGroups { rows: 7, groups: 2 }),
        (grouped([7, 32], 0), KernelError::UnevenGroups { rows: 7, groups: 0 }),
        (grouped([7, 32], 7), beyond("ends of 7 groups", 28, 8)),
        (grouped([4, 33], 2), KernelError::ContractionMismatch { a: 32, b: 33 }),
        (measured, KernelError::ShapeMismatch { x: [4, 3], operand: [3, 4] }),
    ] {
        assert_eq!(result, Err(want));
    }
    assert_eq!(into(floats(6), F32), Ok(()));
    let huge = gemm(&a, &Operand { rows: usize::MAX, ..a.clone() });
    assert!(matches!(huge, Err(KernelError::TooLarge { rows: usize::MAX, .. })), "{huge:?}");
    for dtype in [F16, BF16] {
        let unsupported = Err(KernelError::UnsupportedDtype { dtype });
        assert_eq!(into(floats(64), dtype), if supports(&client, dtype) { Ok(()) } else { unsupported });
    }
}

#[test]
fn scales_that_do_not_fit() {
    let Some(client) = client() else { return };
    let (rows, k) = (130, 129);
    let b = codes(&client, [1, k]);
    let handle = upload_f32(&client, &vec![0.0; rows * k]);
    let view = MatrixView { handle, shape: [rows, k], strides: [k, 1], dtype: F32 };
    let scales = [(Granularity::Tensor, 1), (Granularity::Row, 130), (Granularity::Block1x128, 260)];
    for (granularity, count) in scales.into_iter().chain([(Granularity::Block128x128, 4)]) {
        assert_eq!(granularity.scale_words(rows, k), count);
        let mut a = operand(&client, [rows, k], Format::E4m3, granularity);
        assert!(scaled_gemm(&client, &a, &b, None, F32, GemmConfig::default()).is_ok());
        assert!(health(&client, &view, &a).is_ok());
        a.inv_scale = a.inv_scale.offset_start(4);
        let (needed, available) = (4 * count as u64, 4 * count as u64 - 4);
        let what = format!("{granularity} scales of codes [{rows}, {k}]");
        let want = KernelError::OutOfBounds { what, needed, available };
        for (a, b) in [(&a, &b), (&b, &a)] {
            assert_eq!(scaled_gemm(&client, a, b, None, F32, GemmConfig::default()).unwrap_err(), want);
        }
        assert_eq!(health(&client, &view, &a).unwrap_err(), want);
    }
}

#[test]
fn modes_that_do_not_fit() {
    let Some(client) = client() else { return };
    let view = view(&client, [2, 3], [3, 1]);
    let e8m0 = ScaleMode::E8m0(ScaleCalculationMode::Rceil);
    for (granularity, scale_mode) in
        [(Granularity::Block1x32, ScaleMode::F32), (Granularity::Tensor, e8m0), (Granularity::Block1x128, e8m0)]
    {
        let cast = Cast { format: Format::E4m3, granularity, scale_mode };
        let error = quantize(&client, &view, cast, Orientation::Rows).unwrap_err();
        assert_eq!(error, KernelError::ScaleModeMismatch { granularity, scale_mode });
        for word in [granularity.to_string(), scale_mode.to_string()] {
            assert!(error.to_string().contains(&word), "{error}");
        }
    }
    let one = upload_f32(&client, &[1.0]);
    let error = quantize_with_amax(&client, &view, &one, false, tensorwise(Format::E4m3, e8m0), Orientation::Rows);
    let want = KernelError::ScaleModeMismatch { granularity: Granularity::Tensor, scale_mode: e8m0 };
    assert_eq!(error.unwrap_err(), want);
}

#[rstest]
fn only_the_tensor_takes_an_amax(#[values(F32, BF16)] dtype: StorageType) {
    let Some(client) = client() else { return };
    let view = MatrixView { dtype, ..view(&client, [2, 3], [3, 1]) };
    let one = upload_f32(&client, &[1.0]);
    for granularity in &Granularity::ALL[1..] {
        let cast = Cast { granularity: *granularity, ..tensorwise(Format::E4m3, ScaleMode::F32) };
        let error = quantize_with_amax(&client, &view, &one, true, cast, Orientation::Rows).unwrap_err();
        assert!(matches!(&error, KernelError::UnfitGranularity { granularity: g, .. } if g == granularity), "{error}");
        assert!(error.to_string().contains(&Granularity::to_string(granularity)), "{error}");
    }
}

#[test]
fn messages_name_the_values() {
    let message = KernelError::ContractionMismatch { a: 20, b: 21 }.to_string();
    assert!(message.contains("20") && message.contains("21"), "{message}");
    let what = "1x128 scales of codes [2, 300]".into();
    let message = KernelError::OutOfBounds { what, needed: 24, available: 20 }.to_string();
    for part in ["1x128", "[2, 300]", "24", "20"] {
        assert!(message.contains(part), "{message}");
    }
}
