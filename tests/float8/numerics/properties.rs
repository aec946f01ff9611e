//! Random shapes, views, dtypes, values and casts: the same codes on every runtime.
use burn::tensor::{DType, Tensor, TensorData, s};
use burn_float8::backend::{Cast, Float8Backend, HostCodes};
use burn_float8::config::{Format, Granularity, ScaleCalculationMode, ScaleMode};
use float8_kernels::reference;
use proptest::prelude::*;
use test_data::transpose;

use crate::support::operand::quantize;
use crate::support::runtime::{Eager, Flex, Fused, has_wgpu};

/// Layout of a matrix in a larger tensor.
#[derive(Clone, Copy, Debug)]
enum View {
    Contiguous,
    Transposed,
    /// `[2.., 1..]` of a larger tensor.
    Sliced,
    /// `[1, rows, cols]` flattened.
    Reshaped,
}

fn view<B: Float8Backend>(x: &[f32], [rows, cols]: [usize; 2], view: View) -> Tensor<B, 2> {
    let tensor = |values: Vec<f32>, shape: [usize; 2]| {
        Tensor::<B, 2>::from_data(TensorData::new(values, shape), &Default::default())
    };
    match view {
        View::Contiguous => tensor(x.to_vec(), [rows, cols]),
        View::Transposed => tensor(transpose(x, [rows, cols]), [cols, rows]).transpose(),
        View::Sliced => {
            let mut wide = vec![f32::NAN; (rows + 3) * (cols + 2)];
            (0..rows).for_each(|r| wide[(r + 2) * (cols + 2) + 1..][..cols].copy_from_slice(&x[r * cols..][..cols]));
            tensor(wide, [rows + 3, cols + 2]).slice(s![2..rows + 2, 1..cols + 1])
        }
        View::Reshaped => {
            let x = Tensor::<B, 3>::from_data(TensorData::new(x.to_vec(), [1, rows, cols]), &Default::default());
            x.reshape([rows, cols])
        }
    }
}

/// Bits, with one pattern for every NaN.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

fn assert_same(ours: &HostCodes, want: &HostCodes, what: &str) {
    assert_eq!(ours.dims, want.dims, "{what}");
    let scales = |c: &HostCodes| c.inv_scales.iter().map(|s| bits(s.get())).collect::<Vec<_>>();
    assert_eq!(scales(ours), scales(want), "{what}: scales");
    for (i, (ours, want)) in ours.codes.iter().zip(&want.codes).enumerate() {
        assert_eq!(ours, want, "{what}: code {i}");
    }
    assert_eq!(ours.codes.len(), want.codes.len(), "{what}");
}

/// Copies of x by the reference, in both orientations.
fn expected(x: &[f32], [rows, cols]: [usize; 2], cast: Cast) -> [HostCodes; 2] {
    [false, true].map(|transposed| {
        let made = reference::quantize(x, rows, cols, cast, transposed);
        let codes = if transposed { transpose(&made.codes, [rows, cols]) } else { made.codes };
        HostCodes {
            codes,
            dims: if transposed { [cols, rows] } else { [rows, cols] },
            format: cast.format,
            granularity: cast.granularity,
            inv_scales: made.scales.iter().map(|s| s.inverse()).collect(),
            transposed,
        }
    })
}

fn check<B: Float8Backend>(runtime: &str, x: &[f32], shape: [usize; 2], dtype: DType, at: View, cast: Cast) {
    let t = view::<B>(x, shape, at);
    // x holds values of the dtype, so a runtime without it gets the same values.
    let t = if B::fp8_facts(&Default::default()).supports(dtype) { t.cast(dtype) } else { t };
    for (ours, want) in quantize::<B>(t, cast).iter().zip(expected(x, shape, cast)) {
        assert_same(ours, &want, &format!("{runtime} {shape:?} {dtype:?} {at:?} {cast:?}"));
    }
}

/// Mostly ordinary values; sometimes zeros, subnormals, infinities and NaN.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        40 => (-8f32..8.0, -12i32..12).prop_map(|(x, e)| x * 2f32.powi(e)),
        3 => Just(0f32),
        2 => any::<f32>(),
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => prop_oneof![Just(f32::INFINITY), Just(f32::NAN), Just(-0f32), Just(1e-40f32), Just(f32::MAX)],
    ]
}

/// Every granularity with its scale modes, except MX squares.
fn scalings() -> Vec<(Granularity, ScaleMode)> {
    use Granularity::{Block1x32, Block1x128, Block128x128, Row, Tensor};
    let floats = [Tensor, Row, Block1x128, Block128x128].into_iter();
    let floats = floats.flat_map(|granularity| [ScaleMode::F32, ScaleMode::PowerOfTwo].map(|mode| (granularity, mode)));
    floats.chain(ScaleCalculationMode::ALL.map(|mode| (Block1x32, ScaleMode::E8m0(mode)))).collect()
}

fn matrix() -> impl Strategy<Value = (Vec<f32>, [usize; 2])> {
    let side = || prop_oneof![3 => 1usize..40, 1 => 120usize..270];
    (side(), side()).prop_flat_map(|(r, c)| (prop::collection::vec(value(), r * c), Just([r, c])))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_runtime_gives_the_same_codes(
        (x, shape) in matrix(),
        is_bf16: bool,
        at in prop::sample::select(vec![View::Contiguous, View::Transposed, View::Sliced, View::Reshaped]),
        (granularity, scale_mode) in prop::sample::select(scalings()),
        is_e4m3: bool,
    ) {
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        // Truncates to bf16. The quiet bit keeps NaN a NaN.
        let truncate = |x: f32| f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() & 0xffff_0000 });
        let x: Vec<_> = if is_bf16 { x.into_iter().map(truncate).collect() } else { x };
        let cast = Cast {
            format: if is_e4m3 { Format::E4m3 } else { Format::E5m2 },
            granularity,
            scale_mode,
        };
        check::<Flex>("flex", &x, shape, dtype, at, cast);
        if has_wgpu() {
            check::<Fused>("wgpu fused", &x, shape, dtype, at, cast);
            check::<Eager>("wgpu", &x, shape, dtype, at, cast);
        }
    }
}
