//! MXFP8: codes and scales of mx.safetensors bit for bit, and what the recipes promise on a linear of usual size.
use burn::backend::Autodiff;
use burn::tensor::DType;
use burn_float8::{
    Float8Config, Recipe,
    backend::{Cast, Float8Backend, HostCodes},
    config::{Format, Granularity, ScaleCalculationMode, ScaleMode},
    report,
};
use test_data::{Golden, transpose};

use crate::on_every_runtime;
use crate::support::linear::{forward_backward, layer};
use crate::support::operand::{dequantized, quantize, tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, sqnr};

/// Bits, every NaN being one.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

fn golden_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("mx.safetensors");
    let mut compared = 0;
    for (hp, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let (x, shape @ [rows, k]) = (golden.floats(&format!("x_{hp}")), golden.matrix(&format!("x_{hp}")));
        // A device without bf16 gets the same values in f32: the codes must not depend on it.
        let has_dtype = B::fp8_supports(&Default::default(), dtype);
        let load = |x: Vec<f32>, shape| {
            let x = tensor::<B, 2>(x, shape);
            if has_dtype { x.cast(dtype) } else { x }
        };
        for (fmt, format) in [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)] {
            for mode in ScaleCalculationMode::ALL {
                let cast = Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) };
                let name = |what: &str| format!("{hp}_{fmt}_{mode}_{what}");
                let scales = golden.codes(&name("scale"));
                assert_eq!(scales.len(), rows * k.div_ceil(32), "{}", name("scale"));
                let check = |copy: &HostCodes, how: &str| {
                    let what = format!("{runtime} {} {how}", name("codes"));
                    assert_eq!(copy.dims, shape, "{what}");
                    let bytes: Option<Vec<_>> = copy.inv_scales.iter().map(|scale| scale.to_e8m0()).collect();
                    assert_eq!(bytes.as_ref(), Some(&scales), "{what}: scales");
                    assert!(copy.codes == golden.codes(&name("codes")), "{what}");
                    assert!(bits(&dequantized(copy)) == bits(&golden.floats(&name("dequant"))), "{what}: values");
                };
                let [by_rows, _] = quantize::<B>(load(x.clone(), shape), cast);
                check(&by_rows, "by rows");
                // The transpose in memory, contracted over its rows.
                let [_, by_cols] = quantize::<B>(load(transpose(&x, shape), [k, rows]), cast);
                check(&by_cols, "by columns");
                compared += 1;
            }
        }
    }
    let in_file = golden.names().iter().filter(|name| name.ends_with("_codes")).count();
    assert_eq!(compared, in_file, "every cast in the file");
}

#[test]
fn golden_mx_on_every_runtime() {
    on_every_runtime!(golden_on);
}

/// Against f32 on x `[1024, 1024]` and w `[1024, 2048]`, normal: 27, 25 and 24 dB of y, dx and dw, 34 of a dw whose GEMM is
/// in high precision.
#[test]
fn a_linear_keeps_its_signal() {
    let [m, k, n] = [1024, 1024, 2048];
    let (x, w, dy) = (normal(m * k, 1), normal(k * n, 2), normal(m * n, 3));
    let load = |values: &[f32], shape| tensor::<Autodiff<Flex>, 2>(values.to_vec(), shape).require_grad();
    let (x_hp, w_hp) = (load(&x, [m, k]), load(&w, [k, n]));
    let y_hp = x_hp.clone().matmul(w_hp.clone());
    let grads = (y_hp.clone() * load(&dy, [m, n])).sum().backward();
    let exact = [values(y_hp), values(x_hp.grad(&grads).unwrap()), values(w_hp.grad(&grads).unwrap())];
    for (recipe, floors) in [(Recipe::Mxfp8, [27.0, 25.0, 24.0]), (Recipe::Mxfp8WgradWithHp, [27.0, 25.0, 34.0])] {
        let layer = layer::<Flex>(&Float8Config::new(recipe), tensor(w.clone(), [k, n]), None);
        let ours = forward_backward(&layer, tensor(x.clone(), [m, k]), tensor::<_, 2>(dy.clone(), [m, n]));
        let calls = report(&layer).layers[0].gemms().map(|(_, gemm)| [gemm.emulated, gemm.high_precision]);
        let wgrad = if recipe == Recipe::Mxfp8 { [1, 0] } else { [0, 1] };
        assert_eq!(calls, [[1, 0], [1, 0], wgrad], "{recipe}");
        for (((what, ours), exact), floor) in ["y", "dx", "dw"].iter().zip(&ours).zip(&exact).zip(floors) {
            let sqnr = sqnr(ours, exact);
            println!("{recipe} {what}: {sqnr:.1} dB");
            assert!(sqnr >= floor, "{recipe} {what}: {sqnr} dB");
        }
    }
}
