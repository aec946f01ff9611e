//! Encode and decode: the reference against the search oracle, the device against the reference bit for bit.

use cubecl::ir::StorageType;
use float8_kernels::{Format, GemmConfig, Orientation, ScaleMode, quantize_with_amax, reference, scaled_gemm};
use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use crate::common::*;
use crate::oracle::{Nearest, edges, value};

/// Bit patterns all over f32, NaNs and subnormals included.
fn any_bits(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| f32::from_bits(random.bits())).collect()
}

/// f32 values within and just around the range of a format.
fn in_range(len: usize, format: Format, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let (low, high) = match format {
        Format::E4m3 => (-13.0, 10.0),
        Format::E5m2 => (-20.0, 17.0),
    };
    let binade = move |random: &mut Random| (low + (high - low) * (random.unit() + 1.0) / 2.0).exp2();
    (0..len).map(|_| random.unit().signum() * binade(&mut random)).collect()
}

fn all_bf16() -> Vec<f32> {
    (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()).collect()
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_decodes_every_code_by_definition(#[case] format: Format) {
    for code in 0..=255 {
        let (got, want) = (reference::decode(code, format), value(code, format));
        if want.is_nan() {
            assert!(got.is_nan(), "{code:#x}");
        } else {
            assert_eq!(f64::from(got).to_bits(), want.to_bits(), "{code:#x}");
        }
    }
    assert_eq!(reference::decode(format.max_code(), format), format.max());
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_encodes_to_the_nearest_value(#[case] format: Format) {
    let nearest = Nearest::new(format);
    let inputs = [edges(format), all_bf16(), any_bits(1 << 20, 1), in_range(1 << 20, format, 2)].concat();
    for x in inputs {
        let (got, want) = (reference::encode(x, format), nearest.encode(x));
        assert_eq!(got, want, "{format} {x:e} = {:#010x}", x.to_bits());
    }
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn every_code_survives_a_round_trip(#[case] format: Format) {
    for code in 0..=255 {
        let x = reference::decode(code, format);
        let back = reference::encode(x, format);
        if x.is_finite() {
            assert_eq!(back, code);
        } else if x.is_infinite() {
            assert_eq!(back, (code & 0x80) | format.max_code());
        } else {
            assert_eq!(back, 0x7f);
        }
    }
}

proptest! {
    #[test]
    fn encoding_is_monotone_and_odd(a: f32, b: f32) {
        for format in FORMATS {
            let (low, high) = (a.min(b), a.max(b));
            let value = |x| reference::decode(reference::encode(x, format), format);
            prop_assert!(value(low) <= value(high));
            prop_assert_eq!(reference::encode(-a, format), reference::encode(a, format) ^ 0x80);
        }
    }
}

/// Codes of `x` under the scale of a given amax, from the device.
fn device_cast(client: &Client, x: &[f32], format: Format, amax: f32, dtype: StorageType) -> Vec<u8> {
    let view = upload(client, x, [1, x.len()], Layout::RowMajor, dtype);
    let amax = upload_f32(client, &[amax]);
    let cast = tensorwise(format, ScaleMode::F32);
    let done = quantize_with_amax(client, &view, &amax, false, cast, Orientation::Rows).unwrap();
    read_codes(client, &done.rows.unwrap())
}

fn assert_cast_matches(client: &Client, x: &[f32], format: Format, amax: f32, dtype: StorageType) {
    let got = device_cast(client, x, format, amax, dtype);
    let mut want = vec![0; x.len()];
    reference::cast(x, reference::amax_to_scale(amax, format, ScaleMode::F32), format, &mut want);
    for ((&x, got), want) in x.iter().zip(got).zip(want) {
        assert_eq!(got, want, "{format} {dtype} {x:e} = {:#010x}, amax {amax:e}", x.to_bits());
    }
}

/// amaxes whose scales are 1, an odd number above and below it, the largest, the smallest and NaN.
fn amaxes(format: Format) -> [f32; 6] {
    [format.max(), format.max() / 0.7371, format.max() / 3.0e7, 0.0, f32::INFINITY, f32::NAN]
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn device_casts_as_the_reference(#[case] format: Format) {
    let Some(client) = client() else { return };
    let inputs = [edges(format), any_bits(1 << 18, 3), in_range(1 << 18, format, 4)].concat();
    for amax in amaxes(format) {
        assert_cast_matches(&client, &inputs, format, amax, F32);
    }
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn device_casts_every_16_bit_float(#[case] format: Format) {
    let Some(client) = client() else { return };
    let f16: Vec<f32> = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32()).collect();
    for amax in &amaxes(format)[..3] {
        assert_cast_matches(&client, &all_bf16(), format, *amax, BF16);
        assert_cast_matches(&client, &f16, format, *amax, F16);
    }
}

/// A product with the code of one is the value of the other code: every code of either operand.
#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn device_decodes_every_code(#[case] format: Format) {
    let Some(client) = client() else { return };
    let codes: Vec<u8> = (0..=255).collect();
    let all = upload_codes(&client, &codes, [256, 1], format, 1.0);
    for one_format in FORMATS {
        let one = upload_codes(&client, &[reference::encode(1.0, one_format)], [1, 1], one_format, 1.0);
        let left = read_f32(&client, scaled_gemm(&client, &all, &one, None, F32, GemmConfig::default()).unwrap());
        let right = read_f32(&client, scaled_gemm(&client, &one, &all, None, F32, GemmConfig::default()).unwrap());
        for code in codes.iter().copied() {
            let want = reference::decode(code, format);
            for got in [left[code as usize], right[code as usize]] {
                assert!(got == want || (got.is_nan() && want.is_nan()), "{format} {code:#x}: {got}, not {want}");
            }
        }
    }
}
