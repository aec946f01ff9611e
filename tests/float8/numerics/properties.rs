//! Random shapes, views, dtypes, values and casts: the same codes on every runtime.
use burn::tensor::{DType, s};
use burn_float8::backend::{Cast, Float8Backend, HostCodes};
use kernel_tests::{HostMatrix, casts};
use proptest::prelude::*;
use proptest::sample::select;
use test_data::{Random, transpose};

use crate::support::operand::{quantize, tensor};
use crate::support::runtime::{Eager, Flex, Fused, has_wgpu};

/// Layout of a matrix in a larger tensor.
#[derive(Clone, Copy, Debug)]
enum View {
    Contiguous,
    Transposed,
    /// `[2.., 1..]` of a larger tensor.
    Sliced,
}

fn check<B: Float8Backend>(
    runtime: &str,
    x: &[f32],
    shape @ [rows, cols]: [usize; 2],
    dtype: DType,
    view: View,
    cast: Cast,
) {
    let t = match view {
        View::Contiguous => tensor::<B, 2>(x.to_vec(), shape),
        View::Transposed => tensor::<B, 2>(transpose(x, shape), [cols, rows]).transpose(),
        View::Sliced => {
            let mut wide = vec![f32::NAN; (rows + 3) * (cols + 2)];
            (0..rows).for_each(|r| wide[(r + 2) * (cols + 2) + 1..][..cols].copy_from_slice(&x[r * cols..][..cols]));
            tensor::<B, 2>(wide, [rows + 3, cols + 2]).slice(s![2..rows + 2, 1..cols + 1])
        }
    };
    // x holds values of the dtype, so a runtime without it gets the same values.
    let t = if B::fp8_facts(&Default::default()).supports(dtype) { t.cast(dtype) } else { t };
    let operands = [(x.to_vec(), shape), (transpose(x, shape), [cols, rows])];
    for (ours, (x, shape)) in quantize::<B>(t, cast).into_iter().zip(operands) {
        let HostCodes { codes, inv_scales, dims, format, granularity, .. } = ours;
        let ours = HostMatrix { codes, inv_scales, shape: dims, format, granularity };
        let same = ours.must_be(&HostMatrix::cast(&x, shape, cast));
        same.unwrap_or_else(|failure| panic!("{runtime} {shape:?} {dtype:?} {view:?} {cast:?}: {failure}"));
    }
}

fn side() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1usize..40, 1 => 120usize..270]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_runtime_gives_the_same_codes(
        shape in [side(), side()],
        seed: u64,
        is_bf16: bool,
        view in select(vec![View::Contiguous, View::Transposed, View::Sliced]),
        cast in select(casts().collect::<Vec<_>>()),
    ) {
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        // Truncates to bf16. The quiet bit keeps NaN a NaN.
        let truncate = |x: f32| f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() & 0xffff_0000 });
        let x = Random::new(seed).spiced(shape[0] * shape[1], 100).into_iter();
        let x: Vec<_> = if is_bf16 { x.map(truncate).collect() } else { x.collect() };
        check::<Flex>("flex", &x, shape, dtype, view, cast);
        if has_wgpu() {
            check::<Fused>("wgpu fused", &x, shape, dtype, view, cast);
            check::<Eager>("wgpu", &x, shape, dtype, view, cast);
        }
    }
}
