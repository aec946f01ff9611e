use std::sync::Arc;

use float8_kernels::{Cast, Format, Granularity, ScaleMode, reference};

use super::*;
use crate::backend::host::{HostCodes, read_codes};

const CASTS: [(Granularity, ScaleMode); 6] = [
    (Granularity::Tensor, ScaleMode::F32),
    (Granularity::Row, ScaleMode::F32),
    (Granularity::Block1x128, ScaleMode::F32),
    (Granularity::Block128x128, ScaleMode::F32),
    (Granularity::Block1x32, ScaleMode::E8m0(float8_kernels::ScaleCalculationMode::Rceil)),
    (Granularity::Row, ScaleMode::PowerOfTwo),
];

/// Values of both signs with different magnitudes, so that small ones become subnormal codes.
fn random(len: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    (0..len).map(|i| value(i) * f32::powi(2.0, -((i * 31 + seed) as i32 % 14))).collect()
}

/// Operand `[rows, k]`. Its codes are `[k, rows]` if `transposed`.
fn operand(rows: usize, k: usize, cast: Cast, transposed: bool, seed: usize) -> HostOperand<()> {
    let dims = if transposed { [k, rows] } else { [rows, k] };
    let (codes, scales, _) = loops::quantize(&random(rows * k, seed), dims, cast, transposed);
    HostOperand {
        device: (),
        codes: Arc::new(codes.into()),
        dims,
        transposed,
        inv_scales: Arc::new(Scales::new(scales.iter().map(|scale| scale.inverse()).collect(), cast.granularity)),
        format: cast.format,
        granularity: cast.granularity,
    }
}

/// The same operand with its codes in the other layout.
fn flipped(operand: &HostOperand<()>) -> HostOperand<()> {
    crate::backend::host::write_codes(HostCodes { transposed: !operand.transposed, ..read_codes(operand) }, &())
}

/// Sums multiplied by the missing tensor and row scales.
fn scaled(a: &HostOperand<()>, b: &HostOperand<()>) -> Vec<f32> {
    let mut sums = sums(a, b).expect("few rows, and numbers");
    let of_tensor =
        |o: &HostOperand<()>| if o.granularity == Granularity::Tensor { o.inv_scales.get(0).get() } else { 1.0 };
    let of_rows = |o: &HostOperand<()>, row: usize| {
        if o.granularity == Granularity::Row { o.inv_scales.get(row).get() } else { 1.0 }
    };
    let n = b.matrix()[0];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum *= of_tensor(a) * of_tensor(b) * of_rows(a, i / n) * of_rows(b, i % n);
    }
    sums
}

/// Checks sums against f64. Tolerance: one rounding per element.
fn check(a: &HostOperand<()>, b: &HostOperand<()>, what: &str) {
    let got = scaled(a, b);
    let [codes_a, codes_b] = [a, b].map(read_codes);
    let host = |codes: &HostCodes| {
        let HostCodes { dims: [rows, k], format, granularity, .. } = *codes;
        (rows, k, format, granularity)
    };
    let [(m, k, fa, ga), (n, _, fb, gb)] = [&codes_a, &codes_b].map(host);
    let a = reference::HostOperand {
        codes: &codes_a.codes,
        rows: m,
        k,
        format: fa,
        granularity: ga,
        inv_scales: &codes_a.inv_scales,
    };
    let b = reference::HostOperand {
        codes: &codes_b.codes,
        rows: n,
        k,
        format: fb,
        granularity: gb,
        inv_scales: &codes_b.inv_scales,
    };
    let want = reference::scaled_gemm_f64(&a, &b, None);
    let value = |o: &reference::HostOperand<'_>, r: usize, c: usize| {
        f64::from(reference::decode(o.codes[r * k + c], o.format)) * f64::from(o.inv_scale(r, c))
    };
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let sizes: f64 = (0..k).map(|c| (value(&a, i / n, c) * value(&b, i % n, c)).abs()).sum();
        let error = (f64::from(*got) - want).abs();
        assert!(error <= sizes * (k as f64 + 8.0) * 2_f64.powi(-24), "{what}, {i}: {got:e} is not {want:e}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_granularity_and_shape_agrees_with_f64() {
    for (granularity, scale_mode) in CASTS {
        for format in [Format::E4m3, Format::E5m2] {
            let cast = Cast { format, granularity, scale_mode };
            for [m, k, n] in [[1, 1, 1], [1, 257, 130], [2, 64, 64], [3, 200, 33], [4, 130, 700], [1, 512, 300]] {
                for transposed in [false, true] {
                    let (a, b) = (operand(m, k, cast, false, 1), operand(n, k, cast, transposed, 2));
                    check(&a, &b, &format!("{format} {granularity} {m} {k} {n} {transposed}"));
                }
            }
        }
    }
}

#[test]
fn rows_layouts_and_processors_make_no_difference() {
    for (granularity, scale_mode) in CASTS {
        let cast = Cast { format: Format::E4m3, granularity, scale_mode };
        let [k, n] = [333, 271];
        let (a, b) = (operand(4, k, cast, false, 3), operand(n, k, cast, true, 4));
        let all = sums(&a, &b).unwrap();
        assert_eq!(bits(&all), bits(&sums(&a, &flipped(&b)).unwrap()), "{granularity}: the layout");
        for m in 1..4 {
            let some = HostOperand {
                codes: Arc::new(a.codes[..m * k].to_vec().into()),
                dims: [m, k],
                inv_scales: Arc::new(a.inv_scales.at(0..a.granularity.scale_dims(m, k).iter().product())),
                ..a.clone()
            };
            assert_eq!(bits(&all[..m * n]), bits(&sums(&some, &b).unwrap()), "{granularity}: {m} of four rows");
        }
        let x = &pack::<4>(&values(&a), k);
        for b in [&b, &flipped(&b)] {
            let weight = Weight {
                codes: &b.codes,
                format: b.format,
                dims: b.dims,
                k_is_rows: b.transposed,
                scales: b.block().map(|size| Blocks { scales: &b.inv_scales, size, row: b.scale_dims()[1] }),
            };
            let of = |kernel: Kernel| {
                let mut y = vec![0.0; 4 * n.next_multiple_of(BLOCK)];
                kernel(x, &weight, 0, &mut y);
                bits(&y)
            };
            let portable = of(band::<false, 4>);
            kernels::<4>().for_each(|kernel| assert_eq!(portable, of(kernel), "{granularity}"));
        }
    }
}

/// 2^-127 and NaN, which are not exponents of an f32, among other scales.
#[test]
fn each_byte_of_mx_is_its_scale() {
    let cast = Cast {
        format: Format::E4m3,
        granularity: Granularity::Block1x32,
        scale_mode: ScaleMode::E8m0(Default::default()),
    };
    let (a, b) = (operand(1, 64, cast, false, 9), operand(256, 64, cast, true, 10));
    // Scales of the first 32 elements; the others have scale 1.
    let byte = |n: usize| if n == 255 { 255 } else { n.div_ceil(2) as u8 };
    let bytes = (0..2 * 256).map(|i| if i < 256 { byte(i) } else { 127 }).collect();
    let b = HostOperand { inv_scales: Arc::new(Scales::E8m0(bytes)), ..b };
    let x = values(&a);
    let got = sums(&a, &b).unwrap();
    assert!(got[255].is_nan() && sums(&a, &flipped(&b)).unwrap()[255].is_nan());
    assert_eq!(bits(&got[..255]), bits(&sums(&a, &flipped(&b)).unwrap()[..255]));
    for (n, got) in got[..255].iter().enumerate() {
        let scale = |k| if k < 32 { 2_f64.powi(i32::from(byte(n)) - 127) } else { 1.0 };
        let terms = (0..64)
            .map(|k| f64::from(x[k]) * f64::from(reference::decode(b.codes[k * 256 + n], Format::E4m3)) * scale(k));
        let (want, sizes) = terms.fold((0.0, 0.0), |(sum, sizes), term| (sum + term, sizes + term.abs()));
        assert!((f64::from(*got) - want).abs() <= sizes * 72.0 * 2_f64.powi(-24), "{n}: {got:e} is not {want:e}");
    }
}

#[test]
fn a_nan_in_the_weight_and_many_rows_are_for_the_gemm() {
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let (a, b) = (operand(1, 64, cast, false, 5), operand(64, 64, cast, true, 6));
    assert!(sums(&a, &b).is_some() && sums(&operand(5, 64, cast, false, 5), &b).is_none());
    let mut codes = b.codes.to_vec();
    codes[100] = 0xff;
    assert!(sums(&a, &HostOperand { codes: Arc::new(codes.into()), ..b }).is_none());
}

/// NaN or infinity in the other operand, and infinities of e5m2, reach the outputs.
#[test]
fn what_is_not_finite_is_not_lost() {
    let cast = |format| Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let a = operand(1, 40, cast(Format::E4m3), false, 7);
    let b = operand(50, 40, cast(Format::E5m2), true, 8);
    let mut codes = a.codes.to_vec();
    codes[39] = 0x7f;
    let with_nan = HostOperand { codes: Arc::new(codes.into()), ..a.clone() };
    assert!(sums(&with_nan, &b).unwrap().iter().all(|sum| sum.is_nan()));
    let (mut a_codes, mut b_codes) = (a.codes.to_vec(), b.codes.to_vec());
    (a_codes[2], b_codes[2 * 50 + 7]) = (0x38, 0x7c);
    let with =
        |codes: Vec<u8>, operand: &HostOperand<()>| HostOperand { codes: Arc::new(codes.into()), ..operand.clone() };
    let got = sums(&with(a_codes, &a), &with(b_codes, &b)).unwrap();
    assert!(got.iter().enumerate().all(|(n, sum)| if n == 7 { *sum == f32::INFINITY } else { sum.is_finite() }));
}
