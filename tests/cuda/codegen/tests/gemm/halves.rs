//! Products of bf16 and f16 matrices by rows and by columns, on exact operands: bit for bit.

use codegen::device::{GenerateCuda, OfflineDevice, execute_shared, on_each};
use cubecl_core::Runtime;
use float8_kernels::{HalfGemm, HalfGemmProblem, KernelError, MatrixView, disable_half_gemm, has_half_gemm};
use kernel_tests::{BF16, F16, F32};

/// Hopper's tiles, with and without clusters, and split-K, which `hopper_plans` names; every order
/// of both matrices, dtype and output.
#[test]
fn orders_and_plans() {
    let Some(_running) = execute_shared() else { return };
    let [few, many] = [2, 132];
    let cases = [
        (few, [500, 504, 130], [true, true], BF16, F32),
        (few, [500, 504, 130], [true, false], F16, BF16),
        (few, [500, 504, 130], [false, true], BF16, BF16),
        (few, [500, 504, 130], [false, false], BF16, F16),
        (few, [260, 510, 260], [false, true], F16, F16),
        (few, [60, 500, 260], [false, true], BF16, F32),
        (few, [40, 250, 900], [false, false], BF16, BF16),
        // Two blocks share boxes of 64 columns along the contraction.
        (few, [2200, 8, 130], [false, true], BF16, BF16),
        (few, [2200, 8, 130], [true, true], BF16, F32),
        (many, [60, 72, 2700], [false, true], BF16, F32),
        (many, [200, 67, 4100], [true, true], F16, BF16),
        (many, [5, 1, 3], [true, false], BF16, F32),
    ];
    on_each(cases, |(sms, product, row_major, dtype, out)| {
        let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms });
        for bias in [None, Some(F32)] {
            let problem = HalfGemmProblem { product, row_major, dtype, bias, out };
            problem.check(client, None, 5).unwrap_or_else(|flaw| panic!("{problem:?}: {flaw}"));
        }
    });
}

/// Matrices that the kernel cannot read are an error before any launch.
#[test]
fn errors() {
    let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms: 3 });
    let handle = client.empty(1 << 16);
    let view = |shape, strides| MatrixView { handle: handle.clone(), shape, strides, dtype: BF16 };
    let a = view([64, 72], [72, 1]);
    let b = view([72, 64], [1, 72]);
    let error = |a: &MatrixView, b: &MatrixView| {
        HalfGemm { a, b, bias: None, out: F32 }.variant(client).map(|_| ()).expect_err("not for this kernel")
    };
    HalfGemm { a: &a, b: &b, bias: None, out: F32 }.variant(client).expect("for this kernel");
    for strides in [[71, 1], [76, 1], [144, 2], [0, 1], [1, 60]] {
        let a = view([64, 72], strides);
        assert_eq!(error(&a, &b), KernelError::NotContiguous { shape: a.shape, strides });
    }
    let odd = MatrixView { handle: handle.clone().offset_start(8), ..a.clone() };
    assert_eq!(error(&odd, &b), KernelError::Misaligned { offset: 8, size: 16 });
    let short = view([1024, 72], [72, 1]);
    assert!(matches!(error(&short, &b), KernelError::OutOfBounds { .. }));
    assert_eq!(error(&a, &view([80, 64], [64, 1])), KernelError::ContractionMismatch { a: 72, b: 80 });
    assert_eq!(error(&a, &MatrixView { dtype: F16, ..b.clone() }), KernelError::UnsupportedDtype { dtype: F16 });
    let single = MatrixView { dtype: F32, ..a.clone() };
    assert_eq!(error(&single, &single), KernelError::ContractionMismatch { a: 72, b: 64 });
    assert_eq!(error(&single, &b), KernelError::UnsupportedDtype { dtype: F32 });
    assert_eq!(error(&view([4, 72], [72, 1]), &b), KernelError::Disabled);
    assert!(has_half_gemm(client));
    disable_half_gemm(client);
    assert!(!has_half_gemm(client) && error(&a, &b) == KernelError::Disabled);
    assert!(!has_half_gemm(&GenerateCuda::client(&OfflineDevice::new(100))));
}
