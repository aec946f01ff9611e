//! Encode and decode, for every code and by search.

use float8_kernels::{Format, reference};
use half::bf16;
use rstest::rstest;
use test_data::{Random, encoder_edges};

use crate::oracle::{Nearest, magnitudes, value};

/// Bit patterns from all of f32, including NaN and subnormals.
fn any_bits(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| f32::from_bits(random.bits())).collect()
}

/// f32 values within and slightly outside the range of a format.
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

#[test]
fn codes_decode_alike_alone_and_in_slices() {
    let codes: Vec<u8> = (0..=255).collect();
    for format in Format::ALL {
        let mut values = vec![0.0; 256];
        reference::decode_slice(&codes, format, &mut values);
        for (&code, value) in codes.iter().zip(&values) {
            assert_eq!(value.to_bits(), reference::decode(code, format).to_bits(), "{format} {code:#x}");
        }
    }
}

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_encodes_to_the_nearest_value(#[case] format: Format) {
    let nearest = Nearest::new(format);
    let inputs =
        [encoder_edges(&magnitudes(format)), all_bf16(), any_bits(1 << 20, 1), in_range(1 << 20, format, 2)].concat();
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
