//! Codes of cast.safetensors, bit for bit, without a scale.
use burn::backend::wgpu::{WgpuDevice, WgpuRuntime};
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, Scale, ScaleMode, quantize_with_amax, reference,
};

use crate::support::goldens::Golden;
use crate::support::runtime::has_wgpu;

/// `(format, name, input, codes)` of every cast in the file.
fn casts(golden: &Golden) -> Vec<(Format, String, Vec<f32>, Vec<u8>)> {
    let names = golden.names();
    let casts: Vec<_> = names
        .iter()
        .filter_map(|name| {
            let stem = name.strip_suffix("_codes")?;
            let (fmt, input) = stem.split_once('_')?;
            let format = match fmt {
                "e4m3" => Format::E4m3,
                "e5m2" => Format::E5m2,
                _ => panic!("{name}: unknown format"),
            };
            let input = if input == "edge" { format!("{fmt}_edge_in") } else { format!("{input}_in") };
            Some((format, name.clone(), golden.floats(&input), golden.codes(name)))
        })
        .collect();
    assert!(!casts.is_empty(), "no casts in the file");
    casts
}

fn is_nan(code: u8, format: Format) -> bool {
    reference::decode(code, format).is_nan()
}

/// A NaN's code is one for all, as a GPU's conversion has it; the file's, made on a CPU, keep signs.
fn assert_codes(ours: &[u8], golden: &[u8], input: &[f32], format: Format, what: &str) {
    assert_eq!(ours.len(), golden.len(), "{what}");
    for ((ours, golden), x) in ours.iter().zip(golden).zip(input) {
        let same = if x.is_nan() { *ours == 0x7f && is_nan(*golden, format) } else { ours == golden };
        assert!(same, "{what}: {x:e} ({:#010x}) casts to {ours:#04x}, golden {golden:#04x}", x.to_bits());
    }
}

#[test]
fn golden_casts_of_the_reference() {
    for (format, name, input, codes) in casts(&Golden::open("cast.safetensors")) {
        let ours: Vec<_> = input.iter().map(|x| reference::encode(*x, format)).collect();
        assert_codes(&ours, &codes, &input, format, &name);
    }
}

/// The CPU backend casts whole slices, which the compiler vectorizes.
#[test]
fn golden_casts_of_the_cpu_backend() {
    for (format, name, input, codes) in casts(&Golden::open("cast.safetensors")) {
        let mut ours = vec![0; input.len()];
        reference::cast(&input, Scale::new(1.0), format, &mut ours);
        assert_codes(&ours, &codes, &input, format, &name);
    }
}

#[test]
fn golden_casts_on_wgpu() {
    if !has_wgpu("golden_casts_on_wgpu") {
        return;
    }
    let client = WgpuRuntime::client(&WgpuDevice::default());
    for (format, name, input, codes) in casts(&Golden::open("cast.safetensors")) {
        let n = input.len();
        let x = MatrixView {
            handle: client.create_from_slice(f32::as_bytes(&input)),
            shape: [1, n],
            strides: [n, 1],
            dtype: f32::as_type_native_unchecked().storage_type(),
        };
        // The amax whose scale is 1.
        let amax = client.create_from_slice(f32::as_bytes(&[format.max()]));
        let spec = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
        let copies = quantize_with_amax::<WgpuRuntime>(&client, &x, &amax, false, spec, Orientation::Rows);
        let rows = copies.expect("a valid view").rows.expect("asked for");
        let bytes = client.read_one(rows.codes).expect("readable");
        assert_codes(&bytes[..n], &codes, &input, format, &name);
    }
}

#[test]
fn golden_decodes_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    for (fmt, format) in [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)] {
        let values = golden.floats(&format!("{fmt}_decode"));
        for (code, value) in values.into_iter().enumerate() {
            let ours = reference::decode(code as u8, format);
            assert!(ours.to_bits() == value.to_bits() || ours.is_nan() && value.is_nan(), "{fmt} {code:#04x}: {ours}");
        }
    }
}
