//! y, dx and dw of linear.safetensors, through `Autodiff<Float8<B>>` as a user would get them.
use burn::backend::Autodiff;
use burn::tensor::module::linear;
use burn::tensor::{DType, Tensor};
use burn_float8::{Float8, Float8Backend};

use crate::on_every_runtime;
use crate::support::goldens::Golden;
use crate::support::operand::{tensor, values};
use crate::support::{relative_error, sqnr};

/// `[rows, cols]` to `[cols, rows]`: torch keeps weights as `[out, in]`, Burn as `[in, out]`.
fn transpose(values: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| r * cols + c)).map(|i| values[i]).collect()
}

struct Linear {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// `[out, in]`, as in the file.
    dw: Vec<f32>,
}

fn run<B: Float8Backend>(golden: &Golden, dtype: DType) -> Linear {
    type A<B> = Autodiff<Float8<B>>;
    let load = |name: &str, dims: [usize; 2], data: Vec<f32>| -> Tensor<A<B>, 2> {
        let t = tensor::<A<B>, 2>(data, dims);
        if name == "dy" { t.cast(dtype) } else { t.cast(dtype).detach().require_grad() }
    };
    let x = load("x", golden.matrix("x"), golden.floats("x"));
    let [n, k] = golden.matrix("weight");
    let w = load("weight", [k, n], transpose(&golden.floats("weight"), [n, k]));
    let dy = load("dy", golden.matrix("dy"), golden.floats("dy"));
    let y = linear(x.clone(), w.clone(), None);
    let grads = (y.clone() * dy).sum().backward();
    Linear {
        y: values(y),
        dx: values(x.grad(&grads).unwrap()),
        dw: transpose(&values(w.grad(&grads).unwrap()), [k, n]),
    }
}

fn tensorwise_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("linear.safetensors");
    // bf16 results differ by roundings of the f32 sums to bf16, of which few fall on the other side.
    for (hp, dtype, tolerance) in [("f32", DType::F32, 1e-5), ("bf16", DType::BF16, 1e-3)] {
        if !B::fp8_supports(&Default::default(), dtype) {
            println!("{runtime}: {hp} skipped, the device has no {hp}");
            continue;
        }
        let ours = run::<B>(&golden, dtype);
        for (name, ours, floor) in [("y", ours.y, 18.0), ("dx", ours.dx, 17.0), ("dw", ours.dw, 17.0)] {
            let torchao = golden.floats(&format!("tensorwise_{hp}_{name}"));
            let error = relative_error(&ours, &torchao);
            let sqnr = sqnr(&ours, &golden.floats(&format!("exact_{name}")));
            println!("{runtime} tensorwise {hp} {name}: {error:.2e} from torchao, SQNR {sqnr:.1} dB");
            assert!(error < tolerance, "{runtime} {hp} {name}: {error:e} from torchao");
            assert!(sqnr > floor, "{runtime} {hp} {name}: SQNR {sqnr} dB");
            if hp == "f32" {
                let largest = torchao.iter().fold(0f32, |m, v| m.max(v.abs()));
                let worst = crate::support::max_error(&ours, &torchao) / f64::from(largest);
                assert!(worst < tolerance, "{runtime} {name}: one element is {worst:e} of the largest off");
            }
        }
    }
}

#[test]
fn golden_tensorwise_linear_on_every_runtime() {
    on_every_runtime!(tensorwise_on);
}
