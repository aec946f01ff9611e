//! The scalar reference against torch's casts and torchao's scales, codes and values, bit for bit.

use float8_kernels::{Format, InvScale, Scale, ScaleMode, reference};
use kernel_tests::{CastVector, mx_vectors, quantize_vectors};
use test_data::{Golden, transpose};

const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];

/// Bits, with one pattern for every NaN.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Compares codes. A NaN's code has no sign here, as in a GPU's conversion; the file comes from a
/// CPU and keeps signs.
fn assert_codes(ours: &[u8], golden: &[u8], input: &[f32], format: Format, what: &str) {
    assert_eq!(ours.len(), golden.len(), "{what}");
    for ((ours, golden), x) in ours.iter().zip(golden).zip(input) {
        let is_nan = |code| reference::decode(code, format).is_nan();
        let same = if x.is_nan() { *ours == 0x7f && is_nan(*golden) } else { ours == golden };
        assert!(same, "{what}: {x:e} ({:#010x}) casts to {ours:#04x}, golden {golden:#04x}", x.to_bits());
    }
}

/// Casts single values, and whole slices, which the compiler vectorizes.
#[test]
fn golden_casts_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    let names = golden.names();
    let casts: Vec<_> = names.iter().filter_map(|name| name.strip_suffix("_codes")?.split_once('_')).collect();
    assert!(!casts.is_empty(), "no casts in the file");
    for (format_name, input_name) in casts {
        let format = Format::ALL.into_iter().find(|format| format.to_string() == format_name);
        let format = format.unwrap_or_else(|| panic!("{format_name}: unknown format"));
        let source = if input_name == "edge" { format!("{format}_edge_in") } else { format!("{input_name}_in") };
        let (name, input) = (format!("{format}_{input_name}_codes"), golden.floats(&source));
        let want = golden.codes(&name);
        let one_by_one: Vec<_> = input.iter().map(|x| reference::encode(*x, format)).collect();
        assert_codes(&one_by_one, &want, &input, format, &name);
        let mut whole = vec![0; input.len()];
        reference::cast(&input, Scale::new(1.0), format, &mut whole);
        assert_codes(&whole, &want, &input, format, &name);
    }
}

#[test]
fn golden_decodes_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    for format in Format::ALL {
        let ours: Vec<_> = (0..=255).map(|code| reference::decode(code, format)).collect();
        assert_eq!(bits(&ours), bits(&golden.floats(&format!("{format}_decode"))), "{format}");
    }
}

#[test]
fn golden_scales_of_the_reference() {
    let golden = Golden::open("quantize.safetensors");
    let amaxes = golden.floats("amax");
    for format in Format::ALL {
        for (suffix, mode) in MODES {
            let ours: Vec<_> = amaxes.iter().map(|amax| reference::amax_to_scale(*amax, format, mode).get()).collect();
            assert_eq!(bits(&ours), bits(&golden.floats(&format!("{format}_scale{suffix}"))), "{format}{suffix}");
        }
    }
}

#[test]
fn golden_codes_of_the_reference() {
    let [quantize, mx] = ["quantize", "mx"].map(|name| Golden::open(&format!("{name}.safetensors")));
    for vector in quantize_vectors(&quantize).into_iter().chain(mx_vectors(&mx)) {
        let CastVector { name, x, shape, cast, transposed, .. } = &vector;
        let ours = reference::quantize(x, shape[0], shape[1], *cast, *transposed);
        let inv_scales: Vec<_> = ours.scales.iter().map(|scale| scale.inverse()).collect();
        let of = |scales: &[InvScale]| bits(&scales.iter().map(|scale| scale.get()).collect::<Vec<_>>());
        assert_eq!(of(&inv_scales), of(&vector.inv_scales), "{name}");
        // In the layout of x.
        let codes = if *transposed { transpose(&ours.codes, *shape) } else { ours.codes };
        assert!(codes == vector.codes, "{name}: codes differ");
        if let Some(wanted) = &vector.values {
            let k = vector.dims()[1];
            let value = |(i, code): (usize, &u8)| {
                reference::decode(*code, cast.format) * inv_scales[i / k * k.div_ceil(32) + i % k / 32].get()
            };
            let values: Vec<_> = codes.iter().enumerate().map(value).collect();
            assert!(bits(&values) == bits(wanted), "{name}: values differ");
        }
    }
}
