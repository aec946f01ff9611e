//! GEMMs into memory that exists: overwritten, added to, or refused.

use cubecl::ir::{ElemType, IntKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::{Format, GemmConfig, Granularity, KernelError, Output, scaled_gemm, scaled_gemm_into, supports};
use half::{bf16, f16};
use rstest::rstest;

use crate::common::*;

const CONFIG: GemmConfig = GemmConfig { use_fast_accum: false, emulate: true };

/// Elements of `handle` as f32.
fn read(client: &Client, handle: Handle, dtype: StorageType) -> Vec<f32> {
    sync(client);
    let bytes = client.read_one(handle).unwrap();
    if dtype == F16 {
        f16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect()
    } else if dtype == BF16 {
        bf16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect()
    } else {
        f32::from_bytes(&bytes).to_vec()
    }
}

/// `out ← out + (A · Bᵀ · scales + bias)`, rounded once: the f32 result is known from a GEMM of its own, so every bit is.
#[rstest]
fn results_are_added_and_rounded_once(
    #[values(F32, F16, BF16)] dtype: StorageType,
    #[values([Granularity::Tensor, Granularity::Row], [Granularity::Block1x128, Granularity::Block128x128])]
    granularities: [Granularity; 2],
    #[values([1, 1, 1], [33, 70, 150], [65, 3, 257])] shape: [usize; 3],
) {
    let Some(client) = client() else { return };
    if !supports(&client, dtype) {
        skip(&format!("the device has no {dtype}"));
        return;
    }
    let [m, n, k] = shape;
    let a = HostMatrix::random([m, k], Format::E4m3, granularities[0], 61).upload(&client);
    let b = HostMatrix::random([n, k], Format::E5m2, granularities[1], 62).upload(&client);
    let mut random = Random::new(63);
    let bias = upload_vector(&client, &random.values(n), 1, BF16);
    let result = read_f32(&client, scaled_gemm(&client, &a, &b, Some(&bias), F32, CONFIG).unwrap());
    let (bytes, old) = to_dtype(&random.values(m * n), dtype);
    for accumulate in [true, false] {
        let out = Output { handle: client.create_from_slice(&bytes), dtype, accumulate };
        scaled_gemm_into(&client, &a, &b, Some(&bias), &out, CONFIG).unwrap();
        let sums: Vec<f32> =
            old.iter().zip(&result).map(|(old, new)| if accumulate { old + new } else { *new }).collect();
        assert_eq!(read(&client, out.handle, dtype), to_dtype(&sums, dtype).1, "accumulate: {accumulate}");
    }
}

/// Micro-batches summed into one gradient: a NaN that is there stays, and only there.
#[test]
fn sums_over_calls() {
    let Some(client) = client() else { return };
    let (m, n, k) = (5, 6, 40);
    let a = HostMatrix::random([m, k], Format::E4m3, Granularity::Tensor, 64).upload(&client);
    let b = HostMatrix::random([n, k], Format::E4m3, Granularity::Tensor, 65).upload(&client);
    let once = read_f32(&client, scaled_gemm(&client, &a, &b, None, F32, CONFIG).unwrap());
    let mut start = vec![0.0; m * n];
    start[7] = f32::NAN;
    let out = Output { handle: upload_f32(&client, &start), dtype: F32, accumulate: true };
    for _ in 0..3 {
        scaled_gemm_into(&client, &a, &b, None, &out, CONFIG).unwrap();
    }
    for (i, (got, once)) in read_f32(&client, out.handle).into_iter().zip(once).enumerate() {
        assert!(if i == 7 { got.is_nan() } else { got == once + once + once }, "element {i}: {got}");
    }
}

/// A part of an allocation is written, and nothing else of it.
#[test]
fn memory_around_the_output_is_left_alone() {
    let Some(client) = client() else { return };
    let (m, n, k) = (3, 5, 20);
    let a = HostMatrix::random([m, k], Format::E4m3, Granularity::Row, 66).upload(&client);
    let b = HostMatrix::random([n, k], Format::E4m3, Granularity::Row, 67).upload(&client);
    let want = read_f32(&client, scaled_gemm(&client, &a, &b, None, F32, CONFIG).unwrap());
    let alignment = client.properties().memory.alignment as usize;
    let memory = upload_f32(&client, &vec![7.0; 2 * alignment]);
    let handle = memory.clone().offset_start(alignment as u64);
    scaled_gemm_into(&client, &a, &b, None, &Output { handle, dtype: F32, accumulate: false }, CONFIG).unwrap();
    let got = read_f32(&client, memory);
    let (before, rest) = got.split_at(alignment / 4);
    let (written, after) = rest.split_at(m * n);
    assert_eq!(written, want);
    assert!(before.iter().chain(after).all(|&x| x == 7.0));
}

#[test]
fn outputs_that_do_not_fit() {
    let Some(client) = client() else { return };
    let a = upload_codes(&client, &[0; 40], [2, 20], Format::E4m3, 1.0);
    let b = upload_codes(&client, &[0; 60], [3, 20], Format::E4m3, 1.0);
    let gemm = |handle: Handle, dtype: StorageType| {
        scaled_gemm_into(&client, &a, &b, None, &Output { handle, dtype, accumulate: true }, CONFIG)
    };
    assert_eq!(gemm(upload_f32(&client, &[0.0; 6]), F32), Ok(()));
    let small = upload_f32(&client, &[0.0; 5]);
    assert_eq!(gemm(small, F32), Err(KernelError::OutOfBounds { needed: 24, available: 20 }));
    let memory = upload_f32(&client, &[0.0; 64]);
    let size = client.properties().memory.alignment as usize;
    for offset in [2, 4] {
        let error = gemm(memory.clone().offset_start(offset), F32).unwrap_err();
        assert_eq!(error, KernelError::Misaligned { offset, size });
    }
    let dtype = StorageType::Scalar(ElemType::Int(IntKind::I32));
    assert_eq!(gemm(memory.clone(), dtype), Err(KernelError::UnsupportedDtype { dtype }));
    for dtype in [F16, BF16] {
        let unsupported = Err(KernelError::UnsupportedDtype { dtype });
        assert_eq!(gemm(memory.clone(), dtype), if supports(&client, dtype) { Ok(()) } else { unsupported });
    }
}
