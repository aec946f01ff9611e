//! Scales and codes of quantize.safetensors, bit for bit.
use burn::tensor::DType;
use burn_float8::{
    backend::{Cast, Float8Backend, HostCodes},
    config::{Format, Granularity, ScaleMode},
};
use float8_kernels::Scale;
use test_data::{Golden, transpose};

use crate::on_every_runtime;
use crate::support::operand::{quantize, tensor};

const FORMATS: [(&str, Format); 2] = [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)];
const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];
/// The name in the file, what shares a scale, and whether that is a column of x, so a row of the transposed copy.
const GRANULARITIES: [(&str, Granularity, bool); 3] = [
    ("tensorwise", Granularity::Tensor, false),
    ("rowwise", Granularity::Row, false),
    ("colwise", Granularity::Row, true),
];

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
            // A sample of them: each is a launch of its own.
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

/// Every cast of a matrix in the file: `check(name, x, shape, dtype, cast, columns, codes, scales)`, codes as stored, by
/// rows of x.
fn each_cast(mut check: impl FnMut(&str, &[f32], [usize; 2], DType, Cast, bool, &[u8], &[Scale])) {
    let golden = Golden::open("quantize.safetensors");
    let mut compared = 0;
    for (hp, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let (x, shape) = (golden.floats(&format!("x_{hp}")), golden.matrix(&format!("x_{hp}")));
        for (fmt, format) in FORMATS {
            for (kind, granularity, columns) in GRANULARITIES {
                for (suffix, scale_mode) in MODES {
                    let name = format!("{hp}_{fmt}_{kind}{suffix}");
                    let cast = Cast { format, granularity, scale_mode };
                    let codes = golden.codes(&format!("{name}_codes"));
                    let scales: Vec<_> = golden.floats(&format!("{name}_scale")).into_iter().map(Scale::new).collect();
                    check(&name, &x, shape, dtype, cast, columns, &codes, &scales);
                    compared += 1;
                }
            }
        }
    }
    let in_file = golden.names().iter().filter(|n| n.ends_with("_codes")).count();
    assert_eq!(compared, in_file, "every cast in the file");
}

fn codes_on<B: Float8Backend>(runtime: &str) {
    each_cast(|name, x, shape, dtype, cast, columns, codes, scales| {
        let x = tensor::<B, 2>(x.to_vec(), shape);
        // A device without bf16 gets the same values in f32: the codes must not depend on it.
        let x = if B::fp8_supports(&Default::default(), dtype) { x.cast(dtype) } else { x };
        let [by_rows, by_cols] = quantize::<B>(x, cast);
        let inverse: Vec<_> = scales.iter().map(|s| s.inverse()).collect();
        let check = |copy: HostCodes, codes: &[u8], dims| {
            assert_eq!(copy.inv_scales, inverse, "{runtime} {name}");
            assert_eq!(copy.dims, dims, "{runtime} {name}");
            assert!(copy.codes == codes, "{runtime} {name}: codes differ");
        };
        let [rows, cols] = shape;
        if !columns {
            check(by_rows, codes, [rows, cols]);
        }
        if columns || cast.granularity == Granularity::Tensor {
            check(by_cols, &transpose(codes, shape), [cols, rows]);
        }
    });
}

#[test]
fn golden_codes_on_every_runtime() {
    on_every_runtime!(codes_on);
}
