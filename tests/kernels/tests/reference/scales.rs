//! Scales of the reference against their formulas: quotients in f64, exponents by logarithms, for
//! every kind of amax.

use float8_kernels::{Format, ScaleCalculationMode, ScaleMode, reference};
use rstest::rstest;
use test_data::{amaxes, binade_edges, same};

use crate::oracle::e8m0_scale;

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_scale_is_the_formula(#[case] format: Format) {
    for amax in amaxes(1 << 16, 5) {
        let scale = reference::amax_to_scale(amax, format, ScaleMode::F32).get();
        let power = reference::amax_to_scale(amax, format, ScaleMode::PowerOfTwo).get();
        if amax.is_nan() {
            assert!(scale.is_nan() && power.is_nan());
            continue;
        }
        let amax = if amax.is_infinite() { f32::MAX } else { amax };
        let want = (f64::from(format.max()) / f64::from(amax).max(1e-12)) as f32;
        assert_eq!(scale.to_bits(), want.to_bits(), "{format} {amax:e}");
        assert!(scale.is_normal() && scale > 0.0);
        // Largest power of two that is not above the scale.
        assert!(power <= scale && scale < 2.0 * power && power.to_bits().trailing_zeros() >= 23, "{amax:e}");
    }
}

#[test]
fn inverse_is_one_correctly_rounded_division() {
    for amax in amaxes(1 << 12, 6).into_iter().filter(|amax| !amax.is_nan()) {
        let scale = reference::amax_to_scale(amax, Format::E4m3, ScaleMode::F32);
        assert_eq!(scale.inverse().get().to_bits(), ((1.0 / f64::from(scale.get())) as f32).to_bits());
    }
}

#[rstest]
fn exponents_are_logarithms(
    #[values(Format::E4m3, Format::E5m2)] format: Format,
    #[values(
        ScaleCalculationMode::Floor,
        ScaleCalculationMode::Ceil,
        ScaleCalculationMode::Even,
        ScaleCalculationMode::Rceil
    )]
    mode: ScaleCalculationMode,
) {
    for amax in binade_edges(2000, 90) {
        let got = reference::amax_to_scale(amax, format, ScaleMode::E8m0(mode)).get();
        let want = e8m0_scale(amax, format, mode);
        assert!(same(got, want), "{format} {mode} {amax:e}: {got:e}, not {want:e}");
        if amax.is_finite() && matches!(mode, ScaleCalculationMode::Ceil) {
            assert!(got.is_nan() || amax * got <= format.max(), "{amax:e} saturates");
        }
    }
}
