//! Casts: each code by search, each scale from all elements of its group, and the effect of
//! non-finite values.

use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleCalculationMode, ScaleMode, reference};
use kernel_tests::casts;
use test_data::{Random, same, transpose};

use crate::oracle::{Nearest, e8m0_scale};

/// Rows and columns of a group of an operand `[rows, k]`.
fn group(granularity: Granularity, [rows, k]: [usize; 2]) -> [usize; 2] {
    match granularity {
        Granularity::Tensor => [rows, k],
        Granularity::Row => [1, k],
        Granularity::Block1x128 => [1, 128],
        Granularity::Block128x128 => [128, 128],
        Granularity::Block1x32 => [1, 32],
    }
}

/// Codes and scales of the operand `x [rows, k]`. Each scale uses all elements of its group.
fn by_definition(x: &[f32], shape: [usize; 2], cast: Cast) -> (Vec<u8>, Vec<f32>) {
    let [rows, k] = shape;
    let [height, width] = group(cast.granularity, shape);
    let [scale_rows, scale_cols] = [rows.div_ceil(height), k.div_ceil(width)];
    assert_eq!(cast.granularity.scale_dims(rows, k), [scale_rows, scale_cols]);
    // A square of 32 rows has one scale, which each row of the layout repeats.
    let shared = match cast.scale_mode {
        ScaleMode::E8m0Square(_) => 32,
        _ => 1,
    };
    let group_of = |r: usize, c: usize| r / height / shared * shared * scale_cols + c / width;
    let elements = || (0..rows).flat_map(|r| (0..k).map(move |c| (r, c)));
    let mut amax = vec![0f32; scale_rows * scale_cols];
    for (r, c) in elements() {
        let (amax, x) = (&mut amax[group_of(r, c)], x[r * k + c].abs());
        *amax = if amax.is_nan() || x.is_nan() { f32::NAN } else { amax.max(x) };
    }
    let scale = |amax: f32| {
        let scale = (f64::from(cast.format.max()) / f64::from(amax.min(f32::MAX)).max(1e-12)) as f32;
        match cast.scale_mode {
            _ if amax.is_nan() => f32::NAN,
            ScaleMode::F32 => scale,
            ScaleMode::PowerOfTwo => f64::from(scale).log2().floor().exp2() as f32,
            ScaleMode::E8m0(mode) | ScaleMode::E8m0Square(mode) => e8m0_scale(amax, cast.format, mode),
        }
    };
    let scales: Vec<f32> = (0..scale_rows)
        .flat_map(|r| (0..scale_cols).map(move |c| r / shared * shared * scale_cols + c))
        .map(|group| scale(amax[group]))
        .collect();
    let nearest = Nearest::new(cast.format);
    let code = |(r, c): (usize, usize)| {
        let (x, scale) = (x[r * k + c], scales[group_of(r, c)]);
        nearest.encode(x * scale)
    };
    (elements().map(code).collect(), scales)
}

fn check(x: &[f32], [rows, cols]: [usize; 2], cast: Cast) {
    for transposed in [false, true] {
        let got = reference::quantize(x, rows, cols, cast, transposed);
        let (codes, scales) = if transposed {
            let (codes, scales) = by_definition(&transpose(x, [rows, cols]), [cols, rows], cast);
            (transpose(&codes, [cols, rows]), scales)
        } else {
            by_definition(x, [rows, cols], cast)
        };
        assert_eq!(got.scales.len(), scales.len());
        for (i, (got, want)) in got.scales.iter().zip(scales).enumerate() {
            assert!(same(got.get(), want), "{cast:?} {transposed} scale {i}: {got:?}, not {want}");
        }
        assert_eq!(got.codes, codes, "{cast:?} {transposed} [{rows}, {cols}]");
        assert!(same(got.amax, reference::amax(x)));
    }
}

fn squares() -> impl Iterator<Item = Cast> {
    let modes = ScaleCalculationMode::ALL.map(|mode| (Granularity::Block1x32, ScaleMode::E8m0Square(mode)));
    modes.into_iter().map(|(granularity, scale_mode)| Cast { format: Format::E4m3, granularity, scale_mode })
}

#[test]
fn every_cast_is_the_definition() {
    let shapes = [[1, 1], [1, 300], [300, 1], [3, 5], [128, 128], [129, 127], [200, 260]];
    let casts: Vec<_> = casts().chain(squares()).collect();
    for (shape, (seed, cast)) in shapes.into_iter().flat_map(|shape| casts.iter().enumerate().map(move |c| (shape, c)))
    {
        let len = shape[0] * shape[1];
        check(&Random::new(50 + seed as u64).values(len), shape, *cast);
        check(&Random::new(90 + seed as u64).spiced(len, 400), shape, *cast);
    }
    for seed in 0..64 {
        let random = &mut Random::new(7000 + seed);
        let shape = [200, 300].map(|most| 1 + random.below(most));
        check(&random.spiced(shape[0] * shape[1], 300), shape, casts[random.below(casts.len())]);
    }
}

#[test]
fn scales_of_nothing() {
    for cast in casts() {
        for (shape, transposed) in [([0, 5], false), ([0, 5], true), ([5, 0], false), ([5, 0], true), ([0, 0], false)] {
            let [rows, cols] = shape;
            let got = reference::quantize(&[], rows, cols, cast, transposed);
            let [rows, k] = if transposed { [cols, rows] } else { shape };
            let [height, width] = cast.granularity.scale_dims(rows, k);
            assert_eq!((got.codes.len(), got.scales.len(), got.amax), (0, height * width, 0.0), "{cast:?} {shape:?}");
        }
    }
}

#[test]
fn dimensions_and_names() {
    let both = Orientation::Both;
    let cases = [
        (Granularity::Tensor, [1, 1], 1, "tensorwise"),
        (Granularity::Row, [130, 1], 130, "rowwise"),
        (Granularity::Block1x128, [130, 3], 6, "1x128"),
        (Granularity::Block128x128, [2, 3], 6, "128x128"),
        (Granularity::Block1x32, [130, 9], 6, "1x32"),
    ];
    for (granularity, dims, amax_len, name) in cases {
        assert_eq!(granularity.scale_dims(130, 257), dims);
        assert_eq!(granularity.amax_len(130, 257, both), amax_len);
        assert_eq!(granularity.to_string(), name);
    }
    assert_eq!(Granularity::Row.amax_len(130, 257, Orientation::Rows), 130);
    assert_eq!(Granularity::Row.amax_len(130, 257, Orientation::Cols), 257);
}

/// NaN wins over infinity. No elements, and zeros of any sign, have amax 0.
#[test]
fn amax_of_anything() {
    assert_eq!(reference::amax(&[1.0, f32::NEG_INFINITY, 2.0]), f32::INFINITY);
    assert!(reference::amax(&[1.0, f32::NEG_INFINITY, -f32::NAN, 2.0]).is_nan());
    assert_eq!(reference::amax(&[0.0, -f32::from_bits(1)]).to_bits(), 1);
    assert_eq!([reference::amax(&[]), reference::amax(&[-0.0; 12])].map(f32::to_bits), [0; 2]);
}
