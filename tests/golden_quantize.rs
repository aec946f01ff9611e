//! Scales and codes of quantize.safetensors, bit for bit.
use burn::tensor::DType;
use burn_float8::{Cast, Float8Backend, Format, Granularity, ScaleMode};
use float8_kernels::reference;

use crate::on_every_runtime;
use crate::support::goldens::Golden;
use crate::support::operand::{quantize, tensor};

const FORMATS: [(&str, Format); 2] = [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)];
const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn golden_scales_of_the_reference() {
    let golden = Golden::open("quantize.safetensors");
    let amax = golden.floats("amax");
    for (fmt, format) in FORMATS {
        for (suffix, mode) in MODES {
            let scales: Vec<_> = amax.iter().map(|a| reference::amax_to_scale(*a, format, mode).get()).collect();
            assert_eq!(bits(&scales), bits(&golden.floats(&format!("{fmt}_scale{suffix}"))), "{fmt}{suffix}");
        }
    }
}

/// Each amax as a tensor of one element, so that the device computes its scale.
fn scales_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("quantize.safetensors");
    for (fmt, format) in FORMATS {
        for (suffix, scale_mode) in MODES {
            let scales = golden.floats(&format!("{fmt}_scale{suffix}"));
            let cast = Cast { format, granularity: Granularity::Tensor, scale_mode };
            for (amax, scale) in golden.floats("amax").into_iter().zip(scales) {
                let [rows, _] = quantize::<B>(tensor(vec![amax], [1, 1]), cast);
                let want = 1.0 / scale;
                assert_eq!(rows.inv_scale.get().to_bits(), want.to_bits(), "{runtime} {fmt}{suffix} amax {amax:e}");
            }
        }
    }
}

#[test]
fn golden_scales_on_every_runtime() {
    on_every_runtime!(scales_on);
}

#[test]
fn golden_tensorwise_codes_of_the_reference() {
    let golden = Golden::open("quantize.safetensors");
    for hp in ["f32", "bf16"] {
        let x = golden.floats(&format!("x_{hp}"));
        let [rows, cols] = golden.matrix(&format!("x_{hp}"));
        for (fmt, format) in FORMATS {
            for (suffix, scale_mode) in MODES {
                let name = format!("{hp}_{fmt}_tensorwise{suffix}");
                let cast = Cast { format, granularity: Granularity::Tensor, scale_mode };
                let (ours, _, scale) = reference::quantize(&x, rows, cols, cast);
                assert_eq!(bits(&[scale.get()]), bits(&golden.floats(&format!("{name}_scale"))), "{name}");
                assert!(ours == golden.codes(&format!("{name}_codes")), "{name}: codes differ");
            }
        }
    }
}

fn tensorwise_codes_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("quantize.safetensors");
    for (hp, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let x = golden.floats(&format!("x_{hp}"));
        let [rows, cols] = golden.matrix(&format!("x_{hp}"));
        let x = tensor::<B, 2>(x, [rows, cols]);
        // A device without bf16 gets the same values in f32: the codes must not depend on it.
        let x = if B::fp8_supports(&Default::default(), dtype) { x.cast(dtype) } else { x };
        for (fmt, format) in FORMATS {
            for (suffix, scale_mode) in MODES {
                let name = format!("{hp}_{fmt}_tensorwise{suffix}");
                let cast = Cast { format, granularity: Granularity::Tensor, scale_mode };
                let [by_rows, by_cols] = quantize::<B>(x.clone(), cast);
                let codes = golden.codes(&format!("{name}_codes"));
                let inv_scale = 1.0 / golden.floats(&format!("{name}_scale"))[0];
                let transposed: Vec<_> =
                    (0..cols).flat_map(|c| (0..rows).map(move |r| r * cols + c)).map(|i| codes[i]).collect();
                for (copy, codes, dims) in [(by_rows, codes, [rows, cols]), (by_cols, transposed, [cols, rows])] {
                    assert_eq!(copy.inv_scale.get().to_bits(), inv_scale.to_bits(), "{runtime} {name}");
                    assert_eq!(copy.dims, dims, "{runtime} {name}");
                    assert!(copy.codes == codes, "{runtime} {name}: codes differ");
                }
            }
        }
    }
}

#[test]
fn golden_tensorwise_codes_on_every_runtime() {
    on_every_runtime!(tensorwise_codes_on);
}
