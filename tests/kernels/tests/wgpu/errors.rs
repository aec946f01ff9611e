//! Bad arguments give typed errors with their values and never reach the device.

use core::fmt::Debug;

use cubecl::ir::{ElemType, IntKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::fused::{rms_norm, rotary, swiglu};
use float8_kernels::{
    Cast, Format, GemmArgs, GemmConfig, Granularity, Grouping, Groups, KernelError, MAX_INDEX, MatrixView, Operand,
    Orientation, ScaleCalculationMode, ScaleMode, VectorView, amax, dequantize_to_f32, grouped_scaled_gemm, health,
    quantize, quantize_with_amax, scaled_gemm, supports, transpose,
};
use kernel_tests::{BF16, F16, F32, HostMatrix};

use super::{Client, client};

const INT: StorageType = StorageType::Scalar(ElemType::Int(IntKind::I32));
const E8M0: ScaleMode = ScaleMode::E8m0(ScaleCalculationMode::Rceil);
const TENSORWISE: Cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };

fn floats(client: &Client, len: usize) -> Handle {
    client.create_from_slice(f32::as_bytes(&vec![0.0; len]))
}

fn operand(client: &Client, shape: [usize; 2], format: Format, granularity: Granularity) -> Operand {
    HostMatrix::identity(shape, format, granularity).upload(client)
}

/// e4m3 with one scale.
fn codes(client: &Client, shape: [usize; 2]) -> Operand {
    operand(client, shape, Format::E4m3, Granularity::Tensor)
}

fn view(client: &Client, shape: [usize; 2], strides: [usize; 2]) -> MatrixView {
    MatrixView { handle: floats(client, 12), shape, strides, dtype: F32 }
}

fn beyond(what: &str, needed: u64, available: u64) -> KernelError {
    KernelError::OutOfBounds { what: what.into(), needed, available }
}

/// Checks the error of a call, whose text names all of its numbers.
fn refused<T: Debug>(result: Result<T, KernelError>, want: &KernelError) {
    let error = result.expect_err("bad arguments");
    assert_eq!(error, *want);
    let (fields, text) = (format!("{error:?}"), error.to_string());
    assert!(fields.split(|c: char| !c.is_ascii_digit()).all(|number| text.contains(number)), "{text}, of {fields}");
}

/// Checks the error of all kernels that take a matrix.
fn is_refused(client: &Client, view: &MatrixView, want: &KernelError) {
    refused(amax(client, view), want);
    for granularity in Granularity::ALL {
        let scale_mode = if granularity == Granularity::Block1x32 { E8M0 } else { ScaleMode::F32 };
        refused(quantize(client, view, Cast { granularity, scale_mode, ..TENSORWISE }, Orientation::Both), want);
    }
    let one = floats(client, 1);
    refused(quantize_with_amax(client, view, &one, true, TENSORWISE, Orientation::Both), want);
    refused(health(client, view, &codes(client, [3, 4])), want);
}

#[test]
fn views_that_do_not_fit() {
    let Some(client) = client() else { return };
    assert!(amax(&client, &view(&client, [3, 4], [4, 1])).is_ok());
    let empty = |rows, cols| KernelError::EmptyMatrix { rows, cols };
    for (shape, strides, offset, want) in [
        ([0, 4], [4, 1], 0, empty(0, 4)),
        ([4, 0], [4, 1], 0, empty(4, 0)),
        ([0, 0], [4, 1], 0, empty(0, 0)),
        ([3, 4], [5, 1], 0, beyond("elements of a view [3, 4]", 56, 48)),
        ([13, 1], [1, 1], 0, beyond("elements of a view [13, 1]", 52, 48)),
        ([2, 4], [4, 1], 32, beyond("elements of a view [2, 4]", 32, 16)),
        // In the middle of an element.
        ([1, 4], [4, 1], 6, KernelError::Misaligned { offset: 6, size: 4 }),
    ] {
        let mut view = view(&client, shape, strides);
        if offset > 0 {
            view.handle = view.handle.offset_start(offset);
        }
        is_refused(&client, &view, &want);
    }
    // More than 32 bits of index.
    for (shape @ [rows, cols], strides) in [
        ([1 << 17, 1 << 17], [0, 1]),
        ([2, 2], [usize::MAX, 1]),
        ([usize::MAX, usize::MAX], [usize::MAX, usize::MAX]),
        ([2, 1], [1 << 33, 1]),
    ] {
        let want = KernelError::TooLarge { rows, cols, strides, limit: MAX_INDEX };
        is_refused(&client, &view(&client, shape, strides), &want);
    }
    let ints = MatrixView { dtype: INT, ..view(&client, [3, 4], [4, 1]) };
    is_refused(&client, &ints, &KernelError::UnsupportedDtype { dtype: INT });
    assert!(!supports(&client, INT) && supports(&client, F32));
}

#[test]
fn arguments_that_do_not_fit() {
    let Some(client) = client() else { return };
    let config = GemmConfig::default();
    let (a, b) = (codes(&client, [2, 20]), codes(&client, [3, 20]));
    let c = operand(&client, [2, 21], Format::E5m2, Granularity::Tensor);
    let x = view(&client, [3, 4], [4, 1]);
    let floats = |len| floats(&client, len);
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
    let given = |offset, cast| {
        let amax = floats(1).offset_start(offset);
        quantize_with_amax(&client, &x, &amax, false, cast, Orientation::Rows).map(drop)
    };
    let scaled = |granularity, scale_mode| {
        let cast = Cast { granularity, scale_mode, ..TENSORWISE };
        quantize(&client, &x, cast, Orientation::Rows).map(drop)
    };
    let mismatch = |granularity, scale_mode| KernelError::ScaleModeMismatch { granularity, scale_mode };
    let measured = health(&client, &view(&client, [4, 3], [3, 1]), &codes(&client, [3, 4])).map(drop);
    let [flat, narrow] = [Operand { rows: 0, ..a.clone() }, Operand { k: 0, ..c.clone() }];
    let [of_flat, of_narrow] = [[0, 20], [2, 0]].map(|[rows, cols]| KernelError::EmptyMatrix { rows, cols });
    let size = client.properties().memory.alignment as usize;
    for (result, want) in [
        (gemm(&a, &c), KernelError::ContractionMismatch { a: 20, b: 21 }),
        (gemm(&flat, &c), of_flat.clone()),
        (gemm(&a, &narrow), of_narrow.clone()),
        (transpose(&client, &flat).map(drop), of_flat.clone()),
        (transpose(&client, &narrow).map(drop), of_narrow.clone()),
        (dequantize_to_f32(&client, &flat).map(drop), of_flat),
        (dequantize_to_f32(&client, &narrow).map(drop), of_narrow),
        (gemm(&Operand { rows: 3, ..a.clone() }, &a), beyond("e4m3 codes [3, 20]", 96, 64)),
        (biased(3, 1), KernelError::BiasMismatch { bias: 3, n: 2 }),
        (biased(2, 3), beyond("elements of a view [1, 2]", 16, 12)),
        (given(4, TENSORWISE), beyond("elements of a view [1, 1]", 4, 0)),
        (given(2, TENSORWISE), KernelError::Misaligned { offset: 2, size: 4 }),
        (given(0, Cast { scale_mode: E8M0, ..TENSORWISE }), mismatch(Granularity::Tensor, E8M0)),
        (scaled(Granularity::Block1x32, ScaleMode::F32), mismatch(Granularity::Block1x32, ScaleMode::F32)),
        (scaled(Granularity::Tensor, E8M0), mismatch(Granularity::Tensor, E8M0)),
        (scaled(Granularity::Block1x128, E8M0), mismatch(Granularity::Block1x128, E8M0)),
        (into(floats(5), F32), beyond("6 elements of the output", 24, 20)),
        (into(floats(64).offset_start(2), F32), KernelError::Misaligned { offset: 2, size }),
        (into(floats(64).offset_start(4), F32), KernelError::Misaligned { offset: 4, size }),
        (into(floats(64), INT), KernelError::UnsupportedDtype { dtype: INT }),
        (scaled_gemm(&client, &a, &a, None, INT, config).map(drop), KernelError::UnsupportedDtype { dtype: INT }),
        (grouped([7, 32], 2), KernelError::UnevenGroups { rows: 7, groups: 2 }),
        (grouped([7, 32], 0), KernelError::UnevenGroups { rows: 7, groups: 0 }),
        (grouped([7, 32], 7), beyond("ends of 7 groups", 28, 8)),
        (grouped([4, 33], 2), KernelError::ContractionMismatch { a: 32, b: 33 }),
        (measured, KernelError::ShapeMismatch { x: [4, 3], operand: [3, 4] }),
    ] {
        refused(result, &want);
    }
    let huge = gemm(&a, &Operand { rows: usize::MAX, ..a.clone() });
    assert!(matches!(huge, Err(KernelError::TooLarge { rows: usize::MAX, .. })), "{huge:?}");
    for dtype in [F32, F16, BF16] {
        let want = if supports(&client, dtype) { Ok(()) } else { Err(KernelError::UnsupportedDtype { dtype }) };
        assert_eq!(into(floats(6), dtype), want);
        assert_eq!(scaled_gemm(&client, &a, &a, None, dtype, config).map(drop), want);
    }
}

#[test]
fn granularities_that_do_not_fit() {
    let Some(client) = client() else { return };
    let (x, amax) = (view(&client, [2, 3], [3, 1]), floats(&client, 1));
    let given = |granularity| {
        let cast = Cast { granularity, ..TENSORWISE };
        quantize_with_amax(&client, &x, &amax, true, cast, Orientation::Rows).map(drop)
    };
    let transposed = |granularity| transpose(&client, &operand(&client, [40, 50], Format::E4m3, granularity)).map(drop);
    let all = Granularity::ALL[1..].iter().map(|one| (*one, given(*one)));
    for (of, result) in all.chain([Granularity::Row, Granularity::Block1x128].map(|one| (one, transposed(one)))) {
        let error = result.expect_err("only the tensor takes an amax, and only squares are transposed");
        assert!(matches!(error, KernelError::UnfitGranularity { granularity, .. } if granularity == of), "{error}");
        assert!(error.to_string().contains(&of.to_string()), "{error}");
    }
}

#[test]
fn scales_that_do_not_fit() {
    let Some(client) = client() else { return };
    let shape @ [rows, k] = [130, 129];
    let b = codes(&client, [1, k]);
    let view = MatrixView { handle: floats(&client, rows * k), shape, strides: [k, 1], dtype: F32 };
    let gemm = |a: &Operand, b: &Operand| scaled_gemm(&client, a, b, None, F32, GemmConfig::default());
    let scales = [(Granularity::Tensor, 1), (Granularity::Row, 130), (Granularity::Block1x128, 260)];
    for (granularity, count) in scales.into_iter().chain([(Granularity::Block128x128, 4)]) {
        assert_eq!(granularity.scale_words(rows, k), count);
        let mut a = operand(&client, shape, Format::E4m3, granularity);
        assert!(gemm(&a, &b).is_ok() && health(&client, &view, &a).is_ok());
        a.inv_scale = a.inv_scale.offset_start(4);
        let bytes = 4 * count as u64;
        let want = beyond(&format!("{granularity} scales of codes [{rows}, {k}]"), bytes, bytes - 4);
        refused(gemm(&a, &b), &want);
        refused(gemm(&b, &a), &want);
        refused(health(&client, &view, &a), &want);
    }
}

#[test]
fn arguments_of_fused_operations_that_do_not_fit() {
    let Some(client) = client() else { return };
    let of = |shape, strides| MatrixView { handle: floats(&client, 72), shape, strides, dtype: F32 };
    let (x, other) = (of([4, 6], [6, 1]), of([6, 4], [4, 1]));
    let (gamma, table) = (of([1, 6], [6, 1]), of([2, 3], [3, 1]));
    // Column-major, pitched, and with gaps.
    for strides in [[1, 4], [9, 1], [18, 3]] {
        refused(swiglu(&client, &of([4, 6], strides), &x), &KernelError::NotContiguous { shape: [4, 6], strides });
    }
    let ints = MatrixView { dtype: INT, ..x.clone() };
    for result in [
        swiglu(&client, &ints, &ints),
        rms_norm(&client, &ints, &gamma, 1e-5),
        rotary(&client, &ints, [&table, &table], [1, 2, 2], false),
    ] {
        refused(result, &KernelError::UnsupportedDtype { dtype: INT });
    }
    for result in [
        swiglu(&client, &x, &other),
        rms_norm(&client, &x, &other, 1e-5),
        rotary(&client, &x, [&other, &other], [1, 2, 2], false),
        rotary(&client, &x, [&other, &other], [1, 2, 3], false),
    ] {
        assert!(matches!(result, Err(KernelError::ShapeMismatch { .. })), "{result:?}");
    }
}
