//! The scaled GEMM against f64, within the bound of f32 summation, for any two granularities.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, GemmConfig, GemmPath, Granularity, InvScale, Orientation, ScaleMode, gemm_path, quantize, reference,
    scaled_gemm, supports,
};
use half::{bf16, f16};
use proptest::prelude::*;
use rstest::rstest;

use crate::common::*;

const DEFAULT: GemmConfig = GemmConfig { use_fast_accum: false, emulate: false };

pub(crate) fn magnitudes(matrix: &HostMatrix) -> HostMatrix {
    HostMatrix { codes: matrix.codes.iter().map(|code| code & 0x7f).collect(), ..matrix.clone() }
}

/// Elements of `out` as f32.
fn read_out(client: &Client, handle: cubecl::server::Handle, dtype: StorageType) -> Vec<f32> {
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

/// How many roundings an output can go through, each of at most 2^-24 of `Σ |a·b|·inv + |bias|`, as products are exact:
/// the additions of one sum, one for each of the product of the scales, the scaling, the bias and the result; with blocks
/// the additions of the longest block and of the blocks' sums instead.
fn roundings(a: &HostMatrix, b: &HostMatrix) -> usize {
    let k = a.shape[1];
    let blocks =
        |matrix: &HostMatrix| matches!(matrix.granularity, Granularity::Block1x128 | Granularity::Block128x128);
    4 + if blocks(a) || blocks(b) { k.min(128) + k.div_ceil(128) } else { k }
}

fn check(client: &Client, a: &HostMatrix, b: &HostMatrix, bias: Option<(&[f32], usize, StorageType)>) {
    let bias = bias.map(|(x, stride, dtype)| (to_dtype(x, dtype).1, upload_vector(client, x, stride, dtype)));
    let host_bias = bias.as_ref().map(|(x, _)| x.as_slice());
    let bias = bias.as_ref().map(|(_, view)| view);
    let out = scaled_gemm(client, &a.upload(client), &b.upload(client), bias, F32, DEFAULT).unwrap();
    let got = read_out(client, out, F32);
    let want = reference::scaled_gemm_f64(&a.view(), &b.view(), host_bias);
    let abs_bias = host_bias.map(|bias| bias.iter().map(|x| x.abs()).collect::<Vec<_>>());
    let size = reference::scaled_gemm_f64(&magnitudes(a).view(), &magnitudes(b).view(), abs_bias.as_deref());
    assert_eq!(got.len(), want.len());
    for (i, ((&got, want), size)) in got.iter().zip(want).zip(size).enumerate() {
        let bound = roundings(a, b) as f64 * 2f64.powi(-24) * size;
        let error = (f64::from(got) - want).abs();
        let (a, b) = (a.granularity, b.granularity);
        assert!(error <= bound, "{a} by {b}, element {i}: {got}, not {want}: error {error:e} above {bound:e}");
    }
}

/// The f64 reference against sums written out, with the scale of each element looked up by its row and column.
#[test]
fn the_reference_is_the_definition() {
    let (m, n, k) = (131, 3, 260);
    let scale_at = |matrix: &HostMatrix, r: usize, c: usize| {
        let place = match matrix.granularity {
            Granularity::Tensor => 0,
            Granularity::Row => r,
            Granularity::Block1x128 => r * 3 + c / 128,
            Granularity::Block128x128 => r / 128 * 3 + c / 128,
            Granularity::Block1x32 => r * 9 + c / 32,
        };
        f64::from(matrix.inv_scales[place].get())
    };
    let value = |matrix: &HostMatrix, r: usize, c: usize| {
        f64::from(reference::decode(matrix.codes[r * k + c], matrix.format)) * scale_at(matrix, r, c)
    };
    for left in GRANULARITIES {
        for right in GRANULARITIES {
            let a = HostMatrix::random([m, k], Format::E4m3, left, 43);
            let b = HostMatrix::random([n, k], Format::E5m2, right, 44);
            let got = reference::scaled_gemm_f64(&a.view(), &b.view(), Some(&[1.0, -2.0, 0.5]));
            for (i, got) in got.iter().enumerate() {
                let (r, c) = (i / n, i % n);
                let terms: Vec<f64> = (0..k).map(|j| value(&a, r, j) * value(&b, c, j)).collect();
                let want = terms.iter().sum::<f64>() + [1.0, -2.0, 0.5][c];
                let size = terms.iter().map(|term| term.abs()).sum::<f64>();
                assert!((got - want).abs() <= 1e-12 * size, "{left} by {right} [{r}, {c}]: {got}, not {want}");
            }
        }
    }
}

#[rstest]
fn within_the_bound_of_f32_sums(
    #[values([1, 1, 1], [1, 1, 1000], [3, 5, 17], [17, 33, 16], [64, 64, 64], [100, 70, 36], [65, 129, 15], [128, 1, 33], [1, 200, 100], [130, 67, 300])]
    shape: [usize; 3],
    #[values(Format::E4m3, Format::E5m2)] format_a: Format,
    #[values(Format::E4m3, Format::E5m2)] format_b: Format,
) {
    let [m, n, k] = shape;
    let Some(client) = client() else { return };
    let a = HostMatrix::random([m, k], format_a, Granularity::Tensor, 31);
    let b = HostMatrix::random([n, k], format_b, Granularity::Tensor, 32);
    check(&client, &a, &b, None);
}

/// Rows, columns and contraction on both sides of the blocks' edges.
#[rstest]
fn any_two_granularities(
    #[values([1, 1, 1], [5, 3, 128], [70, 130, 129], [129, 257, 300], [2, 3, 513])] shape: [usize; 3],
) {
    let [m, n, k] = shape;
    let Some(client) = client() else { return };
    let bias = Random::new(46).values(n);
    for (i, left) in GRANULARITIES.into_iter().enumerate() {
        for (j, right) in GRANULARITIES.into_iter().enumerate() {
            let a = HostMatrix::random([m, k], FORMATS[i % 2], left, 47);
            let b = HostMatrix::random([n, k], FORMATS[j % 2], right, 48);
            check(&client, &a, &b, ((i + j) % 2 == 1).then_some((bias.as_slice(), 1, F32)));
        }
    }
}

/// What the casts write is what the GEMM reads: `x · wᵀ` from the copies by rows, and by columns of the transposes.
#[test]
fn casts_and_gemm_agree() {
    let Some(client) = client() else { return };
    let ([m, n, k], mut random) = ([140, 133, 270], Random::new(49));
    let (x, w) = (random.values(m * k), random.values(n * k));
    for cast in casts().filter(|cast| cast.scale_mode != ScaleMode::PowerOfTwo) {
        let operands = |layout| {
            [(&x, m), (&w, n)].map(|(x, rows)| {
                let view = upload(&client, x, [rows, k], layout, F32);
                let by_rows = quantize(&client, &view, cast, Orientation::Rows).unwrap().rows.unwrap();
                let view = upload(&client, &transpose(x, [rows, k]), [k, rows], layout, F32);
                let by_cols = quantize(&client, &view, cast, Orientation::Cols).unwrap().cols.unwrap();
                [by_rows, by_cols]
            })
        };
        let [[x_rows, x_cols], [w_rows, w_cols]] = operands(Layout::RowMajor);
        let gemm = |a, b| read_f32(&client, scaled_gemm(&client, a, b, None, F32, DEFAULT).unwrap());
        let want = gemm(&x_rows, &w_rows);
        assert_eq!(gemm(&x_cols, &w_cols), want, "{cast:?}");
        // 2^-4 or 2^-3 of each factor is rounding.
        let step = match cast.format {
            Format::E4m3 => 0.13,
            Format::E5m2 => 0.27,
        };
        for (i, got) in want.iter().enumerate() {
            let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
            let (mut sum, mut size) = (0.0, 0.0);
            for (x, w) in x.iter().zip(w) {
                sum += f64::from(x * w);
                size += f64::from((x * w).abs());
            }
            assert!((f64::from(*got) - sum).abs() <= step * size + 0.5, "{cast:?} {i}: {got}, not {sum}");
        }
    }
}

/// Neither option changes a bit of the emulated path.
#[test]
fn options_change_nothing_when_emulated() {
    let Some(client) = client() else { return };
    let a = HostMatrix::random([33, 300], Format::E4m3, Granularity::Row, 51).upload(&client);
    let b = HostMatrix::random([20, 300], Format::E4m3, Granularity::Block128x128, 52).upload(&client);
    let want = read_u32(&client, scaled_gemm(&client, &a, &b, None, F32, DEFAULT).unwrap());
    for (use_fast_accum, emulate) in [(false, true), (true, false), (true, true)] {
        let config = GemmConfig { use_fast_accum, emulate };
        assert_eq!(gemm_path(&client, [Granularity::Row; 2], config), GemmPath::Emulated);
        assert_eq!(read_u32(&client, scaled_gemm(&client, &a, &b, None, F32, config).unwrap()), want);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_gemm_is_within_the_bound(
        m in 1usize..150,
        n in 1usize..150,
        k in 1usize..420,
        left in 0usize..5,
        right in 0usize..5,
        seed: u64,
    ) {
        let Some(client) = client() else { return Ok(()) };
        // A format for each granularity: compiling a kernel for every combination takes longer than running it.
        let a = HostMatrix::random([m, k], FORMATS[left % 2], GRANULARITIES[left], seed);
        let b = HostMatrix::random([n, k], FORMATS[right % 2], GRANULARITIES[right], !seed);
        let bias = Random::new(seed).values(n);
        check(&client, &a, &b, ((left + right) % 2 == 1).then_some((bias.as_slice(), 1, F32)));
    }
}

#[rstest]
fn bias_of_any_dtype_and_stride(#[values(F32, F16, BF16)] dtype: StorageType, #[values(1, 2, 3)] stride: usize) {
    let Some(client) = client() else { return };
    for n in [1, 70] {
        let a = HostMatrix::random([33, 48], Format::E4m3, Granularity::Tensor, 33);
        let b = HostMatrix::random([n, 48], Format::E5m2, Granularity::Row, 34);
        check(&client, &a, &b, Some((&Random::new(35).values(n), stride, dtype)));
    }
}

/// 16-bit outputs are the f32 outputs rounded once, to nearest even.
#[rstest]
fn half_outputs_are_rounded_once(#[values(F16, BF16)] dtype: StorageType) {
    let Some(client) = client() else { return };
    if !supports(&client, dtype) {
        skip(&format!("the device has no {dtype}"));
        return;
    }
    let a = HostMatrix::random([33, 48], Format::E4m3, Granularity::Tensor, 36).upload(&client);
    let b = HostMatrix::random([70, 48], Format::E4m3, Granularity::Block1x128, 37).upload(&client);
    let bias = upload_vector(&client, &Random::new(38).values(70), 1, F32);
    let [full, half] = [F32, dtype]
        .map(|dtype| read_out(&client, scaled_gemm(&client, &a, &b, Some(&bias), dtype, DEFAULT).unwrap(), dtype));
    assert_eq!(half, to_dtype(&full, dtype).1);
}

/// A NaN code reaches exactly the outputs of its row (of A) or column (of B), through sums and through blocks.
#[rstest]
fn nan_reaches_the_output(#[values(Granularity::Tensor, Granularity::Block1x128)] granularity: Granularity) {
    let Some(client) = client() else { return };
    let (m, n, k) = (20, 30, 150);
    for left in [true, false] {
        let mut a = HostMatrix::random([m, k], Format::E4m3, granularity, 39);
        let mut b = HostMatrix::random([n, k], Format::E5m2, granularity, 40);
        if left {
            a.codes[7 * k + 49] = 0xff;
        } else {
            b.codes[7 * k + 49] = 0x7f;
        }
        let [a, b] = [a, b].map(|matrix| matrix.upload(&client));
        let out = read_f32(&client, scaled_gemm(&client, &a, &b, None, F32, DEFAULT).unwrap());
        for (i, x) in out.iter().enumerate() {
            assert_eq!(x.is_nan(), if left { i / n == 7 } else { i % n == 7 }, "element {i}");
        }
    }
}

/// A NaN scale reaches every output of its group's rows, even if its codes are zeros.
#[test]
fn nan_scales_reach_their_rows() {
    let Some(client) = client() else { return };
    let (m, n, k) = (140, 6, 300);
    for granularity in GRANULARITIES {
        let mut a = HostMatrix::random([m, k], Format::E4m3, granularity, 41);
        a.codes.fill(0);
        *a.inv_scales.last_mut().unwrap() = InvScale::new(f32::NAN);
        let first = match granularity {
            Granularity::Tensor => 0,
            Granularity::Row | Granularity::Block1x128 | Granularity::Block1x32 => 139,
            Granularity::Block128x128 => 128,
        };
        let b = HostMatrix::random([n, k], Format::E4m3, Granularity::Row, 42).upload(&client);
        let out = read_f32(&client, scaled_gemm(&client, &a.upload(&client), &b, None, F32, DEFAULT).unwrap());
        for (i, x) in out.iter().enumerate() {
            assert_eq!(x.is_nan(), i / n >= first, "{granularity} element {i}");
        }
    }
}

/// A NaN in x makes NaN of the GEMM's output, in the rows that share its scale.
#[test]
fn nan_inputs_reach_the_output() {
    let Some(client) = client() else { return };
    let mut x = Random::new(53).values(5 * 40);
    x[3 * 40 + 7] = f32::NAN;
    let w = HostMatrix::random([6, 40], Format::E4m3, Granularity::Tensor, 54).upload(&client);
    for (granularity, all) in [(Granularity::Tensor, true), (Granularity::Row, false)] {
        let cast = Cast { granularity, ..tensorwise(Format::E4m3, ScaleMode::F32) };
        let view = upload(&client, &x, [5, 40], Layout::RowMajor, F32);
        let x = quantize(&client, &view, cast, Orientation::Rows).unwrap().rows.unwrap();
        let out = read_f32(&client, scaled_gemm(&client, &x, &w, None, F32, DEFAULT).unwrap());
        assert!(out.iter().enumerate().all(|(i, out)| out.is_nan() == (all || i / 6 == 3)), "{granularity}");
    }
}

#[test]
fn the_path_is_reported() {
    let Some(client) = client() else { return };
    for granularity in GRANULARITIES {
        assert_eq!(gemm_path(&client, [granularity; 2], DEFAULT), GemmPath::Emulated);
    }
    let names = [(GemmPath::Emulated, "emulated"), (GemmPath::F16Mma, "f16 mma"), (GemmPath::Mma, "mma")];
    assert!(names.into_iter().all(|(path, name)| path.to_string() == name));
    assert_eq!(GemmConfig::default(), DEFAULT);
}
