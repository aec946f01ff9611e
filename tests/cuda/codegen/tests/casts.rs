//! Casts and fused operations on interpreted devices with and without `cvt.rn.satfinite`: a part of
//! the checks for a GPU, with casts compared bit for bit.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use codegen::variants::sample;
use cubecl_core::Runtime;
use kernel_tests::{Size, run};

/// Devices with the integer encoder and with `cvt`.
const MACHINES: [u16; 2] = [80, 90];

/// Runs the checks with these name prefixes, at least `least` for each, on both devices. Many checks
/// are halved between them, as kernels differ by the encoder alone.
fn check(beginnings: &[&str], least: usize) {
    let Some(_running) = execute(Execution { seed: 3 }) else { return };
    on_each(MACHINES, |sm| {
        let client = &GenerateCuda::client(&OfflineDevice::new(sm));
        for beginning in beginnings {
            let is_sampled = sample(u32::from(sm == 90));
            let wanted = |name: &str| name.starts_with(beginning) && (least < 10 || is_sampled());
            let count = run(client, Size::Small, wanted);
            let count = count.unwrap_or_else(|failure| panic!("sm_{sm}: {failure}"));
            assert!(count >= if least < 10 { least } else { least / 2 }, "{count} of {beginning}");
        }
    });
}

/// Every 16-bit float, and f32 at and between all values of a format.
#[test]
fn every_code() {
    check(&["encode "], 6);
}

/// Every kind of amax.
#[test]
fn every_scale() {
    check(&["scale e4m3 tensorwise", "scale e5m2 rowwise", "scale e4m3 1x128"], 2);
    check(&["scale e4m3 1x32", "scale e5m2 1x32"], 4);
}

/// Every format, granularity, scale mode and orientation, for rows that are not whole vectors and
/// for many blocks.
#[test]
fn every_kernel() {
    check(&["quantize 37x140 bf16", "quantize 70x300 f32 row-major"], 72);
}

/// Whole tiles, ragged tiles and less than one tile, in several memory orders.
#[test]
fn shapes() {
    let shapes = ["1x1 f32 row-major", "129x257 f16 pitched", "66x128 bf16 column-major", "128x132 f32 offset"];
    check(&shapes.map(|shape| format!("quantize {shape}")).each_ref().map(String::as_str), 15);
}

/// NaN, infinities, zeros and subnormals, and the extent of the first two.
#[test]
fn special_values() {
    check(&["quantize 139x261"], 20);
    let inputs = ["f32 row-major spiced", "f16 row-major subnormals", "bf16 row-major huge", "f32 row-major ties"];
    check(&inputs.map(|input| format!("quantize 35x150 {input}")).each_ref().map(String::as_str), 10);
}

/// Whole, ragged and single-line tiles, transposed; values of every code.
#[test]
fn codes_that_serve_both_ways() {
    check(&["transpose", "dequantize_to_f32"], 36);
}

/// Scales from a given amax, and the amax that is observed in the same cast.
#[test]
fn given_amaxes() {
    check(&["quantize_with_amax 70x128", "quantize_with_amax 300x500"], 3);
}

/// AdamW with each kind of moments, and rounded at random.
#[test]
fn adamw() {
    check(&["adamw f32 f32", "adamw f32 bf16", "adamw bf16 bf16"], 1);
}

/// SwiGLU, RMSNorm and rotary positions in bf16, and with rows that are not whole vectors.
#[test]
fn fused_operations() {
    check(&["swiglu 3x17 bf16", "swiglu 70x96 f32 row-major"], 1);
    check(&["rms_norm 3x17 f16", "rms_norm 70x96 bf16 row-major", "rms_norm 9x2056 f32 row-major"], 1);
    check(&["rotary 2x7x3x10 bf16", "rotary 2x5x4x64 f32"], 1);
}
