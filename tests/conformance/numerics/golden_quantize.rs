//! Scales, codes and values of quantize.safetensors and mx.safetensors, bit for bit.
use burn::tensor::DType;
use burn_float8::{
    backend::{Cast, Float8Backend},
    config::{Format, Granularity, ScaleMode},
};
use checks::{mx_vectors, quantize_vectors};
use float8_kernels::{InvScale, Scale};
use test_data::Golden;

use crate::on_every_runtime;
use crate::support::operand::{dequantized, quantize, tensor};

const FORMATS: [(&str, Format); 2] = [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)];
const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];
/// Each amax as a row of one element, so that the device computes its scale.
fn scales_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("quantize.safetensors");
    let amax = golden.floats("amax");
    for (fmt, format) in FORMATS {
        for (suffix, scale_mode) in MODES {
            let want: Vec<_> =
                golden.floats(&format!("{fmt}_scale{suffix}")).into_iter().map(|s| Scale::new(s).inverse()).collect();
            let cast = Cast { format, granularity: Granularity::Row, scale_mode };
            let [rows, _] = quantize::<B>(tensor(amax.clone(), [amax.len(), 1]), cast);
            assert_eq!(rows.inv_scales, want, "{runtime} {fmt}{suffix}, by row");
            let cast = Cast { granularity: Granularity::Tensor, ..cast };
            // Only every 16th amax, since each is a separate launch.
            for (amax, want) in amax.iter().zip(&want).step_by(16) {
                let [rows, _] = quantize::<B>(tensor(vec![*amax], [1, 1]), cast);
                assert_eq!(rows.inv_scales, [*want], "{runtime} {fmt}{suffix} amax {amax:e}");
            }
        }
    }
}

#[test]
fn golden_scales_on_every_runtime() {
    on_every_runtime!(scales_on);
}

fn codes_on<B: Float8Backend>(runtime: &str) {
    let [quantized, mx] = ["quantize", "mx"].map(|name| Golden::open(&format!("{name}.safetensors")));
    for vector in quantize_vectors(&quantized).into_iter().chain(mx_vectors(&mx)) {
        let what = format!("{runtime} {}", vector.name);
        let x = tensor::<B, 2>(vector.x.clone(), vector.shape);
        let dtype = if vector.dtype == "bf16" { DType::BF16 } else { DType::F32 };
        // A device without bf16 gets the same values in f32. The codes must not depend on the
        // dtype.
        let x = if B::fp8_facts(&Default::default()).supports(dtype) { x.cast(dtype) } else { x };
        let [by_rows, by_cols] = quantize::<B>(x, vector.cast);
        let copy = if vector.transposed { by_cols } else { by_rows };
        assert_eq!(copy.dims, vector.dims(), "{what}");
        let bits = |scales: &[InvScale]| scales.iter().map(|scale| scale.get().to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&copy.inv_scales), bits(&vector.inv_scales), "{what}");
        assert!(copy.codes == vector.codes, "{what}: codes differ");
        if let Some(values) = &vector.values {
            // Every NaN has the same bits here.
            let bits = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
            assert!(dequantized(&copy).iter().map(bits).eq(values.iter().map(bits)), "{what}: values differ");
        }
    }
}

#[test]
fn golden_codes_on_every_runtime() {
    on_every_runtime!(codes_on);
}
