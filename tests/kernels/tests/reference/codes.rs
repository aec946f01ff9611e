//! Encode and decode, for every code and by search.

use float8_kernels::{Format, Scale, reference};
use kernel_tests::{BF16, F32, encoder_inputs};
use rstest::rstest;

use crate::oracle::{Nearest, magnitudes, value};

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_decodes_every_code_by_definition(#[case] format: Format) {
    let codes: Vec<u8> = (0..=255).collect();
    let mut values = vec![0.0; 256];
    reference::decode_slice(&codes, format, &mut values);
    for (code, in_slice) in codes.into_iter().zip(values) {
        let (got, want) = (reference::decode(code, format), value(code, format));
        assert_eq!(in_slice.to_bits(), got.to_bits(), "{code:#x}");
        assert_eq!(got.is_nan(), want.is_nan(), "{code:#x}");
        assert!(got.is_nan() || f64::from(got).to_bits() == want.to_bits(), "{code:#x}");
    }
    assert_eq!(reference::decode(format.max_code(), format), format.max());
    assert_eq!(magnitudes(format).len(), usize::from(format.max_code()) + 1);
}

/// The edges include every value of a format, infinities and NaN.
#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn reference_encodes_to_the_nearest_value(#[case] format: Format) {
    let nearest = Nearest::new(format);
    let inputs = [F32, BF16].map(|dtype| encoder_inputs(dtype, format, 1 << 20)).concat();
    let mut codes = vec![0; inputs.len()];
    // The compiler vectorizes whole slices.
    reference::cast(&inputs, Scale::new(1.0), format, &mut codes);
    for (x, in_slice) in inputs.into_iter().zip(codes) {
        let (got, want) = (reference::encode(x, format), nearest.encode(x));
        assert_eq!([got, in_slice], [want; 2], "{format} {x:e} = {:#010x}", x.to_bits());
    }
}
