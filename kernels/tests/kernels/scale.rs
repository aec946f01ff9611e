//! Scales: the reference against the formula in f64, the device's integer divisions against the reference.

use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleMode, quantize, reference};
use rstest::rstest;

use crate::common::*;

/// amax values at which a scale can go wrong.
fn amaxes() -> Vec<f32> {
    let eps = 1e-12f32;
    let mut x = vec![0.0, 448.0, 57344.0, 1.0, 1.5, 1.75, 1.75f32.next_up(), 1.75f32.next_down(), 3.5, 7.0, 0.875];
    x.extend([eps, eps.next_up(), eps.next_down(), 9.9e-13, 1.1e-12, f32::MIN_POSITIVE, f32::from_bits(1), 1e-40]);
    x.extend([f32::MAX, f32::MAX.next_down(), 1e38, f32::INFINITY, f32::NAN]);
    x.extend((-39..=127).flat_map(|e| {
        let power = 2f32.powi(e);
        [power, power.next_up(), power.next_down()]
    }));
    x
}

/// Positive normal f32 bits from 1e-12 up.
fn random_amaxes(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let (low, high) = (1e-12f32.to_bits(), f32::MAX.to_bits());
    (0..len).map(|_| f32::from_bits(low + random.bits() % (high - low))).collect()
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_scale_is_the_formula(#[case] format: Format) {
    for amax in [amaxes(), random_amaxes(1 << 16, 5)].concat() {
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
        // The largest power of two that is not above the scale.
        assert!(power <= scale && scale < 2.0 * power && power.to_bits().trailing_zeros() >= 23, "{amax:e}");
    }
}

#[test]
fn inverse_is_one_correctly_rounded_division() {
    for amax in random_amaxes(1 << 12, 6) {
        let scale = reference::amax_to_scale(amax, Format::E4m3, ScaleMode::F32);
        assert_eq!(scale.inverse().get().to_bits(), ((1.0 / f64::from(scale.get())) as f32).to_bits());
    }
}

#[rstest]
fn device_scale_is_the_reference_to_the_bit(
    #[values(Format::E4m3, Format::E5m2)] format: Format,
    #[values(ScaleMode::F32, ScaleMode::PowerOfTwo)] mode: ScaleMode,
) {
    let Some(client) = client() else { return };
    let amaxes = [amaxes(), random_amaxes(300, 7)].concat();
    let handles = amaxes
        .iter()
        .flat_map(|&amax| {
            let view = upload(&client, &[-amax], [1, 1], Layout::RowMajor, F32);
            let done = quantize(&client, &view, tensorwise(format, mode), Orientation::Rows).unwrap();
            [done.amax, done.rows.unwrap().inv_scale]
        })
        .collect();
    sync(&client);
    let read = client.read(handles);
    for (amax, got) in amaxes.iter().zip(read.chunks_exact(2)) {
        let [got_amax, inverse] = [0, 1].map(|i| f32::from_ne_bytes(got[i][..4].try_into().unwrap()));
        let want = reference::amax_to_scale(*amax, format, mode);
        assert!(same(got_amax, *amax), "amax {got_amax:e}, not {amax:e}");
        assert!(same(inverse, want.inverse().get()), "{format} {mode:?} {amax:e}: inverse {inverse:e}");
    }
}

/// The scale itself is seen through the codes: `amax · scale` is within a rounding of the format's largest value.
#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn the_amax_maps_to_the_largest_code(#[case] format: Format) {
    let Some(client) = client() else { return };
    let amaxes = random_amaxes(1 << 12, 8);
    let view = upload(&client, &amaxes, [amaxes.len(), 1], Layout::Pitched, F32);
    let cast = Cast { granularity: Granularity::Row, ..tensorwise(format, ScaleMode::F32) };
    let codes = read_codes(&client, &quantize(&client, &view, cast, Orientation::Rows).unwrap().rows.unwrap());
    assert_eq!(codes, vec![format.max_code(); amaxes.len()]);
}
