//! Scales of the reference against their formulas: quotients in f64, exponents by logarithms, for
//! every kind of amax. E8M0 bytes and their tiles.

use float8_kernels::mx::{from_blocked, to_blocked};
use float8_kernels::{Format, InvScale, ScaleCalculationMode, ScaleMode, reference};
use rstest::rstest;
use test_data::{amaxes, binade_edges, same};

use crate::oracle::e8m0_scale;

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_scale_is_the_formula(#[case] format: Format) {
    for amax in amaxes(1 << 16, 5) {
        let scale = reference::amax_to_scale(amax, format, ScaleMode::F32);
        let power = reference::amax_to_scale(amax, format, ScaleMode::PowerOfTwo).get();
        let (inverse, scale) = (scale.inverse().get(), scale.get());
        if amax.is_nan() {
            assert!(scale.is_nan() && power.is_nan());
            continue;
        }
        let want = (f64::from(format.max()) / f64::from(amax.min(f32::MAX)).max(1e-12)) as f32;
        assert_eq!(scale.to_bits(), want.to_bits(), "{format} {amax:e}");
        assert!(scale.is_normal() && scale > 0.0);
        // One correctly rounded division.
        assert_eq!(inverse.to_bits(), ((1.0 / f64::from(scale)) as f32).to_bits(), "{format} {amax:e}");
        // Largest power of two that is not above the scale.
        assert!(power <= scale && scale < 2.0 * power && power.to_bits().trailing_zeros() >= 23, "{amax:e}");
        // The amax becomes the largest code.
        assert!(amax < 1e-12 || reference::encode(amax * scale, format) == format.max_code(), "{format} {amax:e}");
    }
}

/// The scales of `Ceil` and `Rceil` saturate no element beyond a rounding.
#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn exponents_are_logarithms(#[case] format: Format) {
    for (mode, amax) in
        ScaleCalculationMode::ALL.iter().flat_map(|mode| binade_edges(2000, 90).into_iter().map(move |x| (*mode, x)))
    {
        let got = reference::amax_to_scale(amax, format, ScaleMode::E8m0(mode)).get();
        let want = e8m0_scale(amax, format, mode);
        assert!(same(got, want), "{format} {mode} {amax:e}: {got:e}, not {want:e}");
        let saturates = matches!(mode, ScaleCalculationMode::Floor | ScaleCalculationMode::Even);
        let most = format.max() * (1.0 + f32::EPSILON);
        assert!(saturates || !amax.is_finite() || amax * got <= most, "{mode} {amax:e} saturates");
    }
}

#[test]
fn bytes_are_powers_of_two() {
    for byte in 0..=255 {
        let value = InvScale::from_e8m0(byte);
        assert_eq!(value.to_e8m0(), Some(byte));
        assert!(byte == 255 || f64::from(value.get()) == 2f64.powi(i32::from(byte) - 127));
    }
    assert_eq!([0.0, 3.0, -1.0, f32::INFINITY].map(|x| InvScale::new(x).to_e8m0()), [None; 4]);
}

#[test]
fn tiles_hold_every_scale_once() {
    for (rows, blocks) in [(1, 1), (128, 4), (129, 5), (40, 8), (300, 3)] {
        let scales: Vec<u8> = (0..rows * blocks).map(|i| (i % 251) as u8 + 1).collect();
        let tiles = to_blocked(&scales, rows, blocks);
        assert_eq!(from_blocked(&tiles, rows, blocks), scales);
        assert_eq!(tiles.iter().filter(|&&byte| byte != 0).count(), scales.len());
    }
    // cuBLASLt's tile: rows 0, 32, 64 and 96 are the first 16 bytes.
    let tiles = to_blocked(&(0..512).map(|i| (i / 4) as u8).collect::<Vec<_>>(), 128, 4);
    assert_eq!(tiles[..16], [0, 0, 0, 0, 32, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 96]);
    assert_eq!(tiles[16..20], [1; 4]);
}
