//! y, dx and dw of linear.safetensors, through `Float8<Autodiff<B>>` as in user code.
use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear as NnLinear;
use burn::tensor::{DType, Tensor};
use burn_float8::{Float8, Float8Config, Recipe, backend::Float8Backend, report};
use std::io::Write;
use test_data::{Golden, transpose};

use crate::on_every_runtime;
use crate::support::operand::{tensor, values};
use crate::support::{relative_error, sqnr};

/// torchao's recipes in the file, and whether wgrad is in high precision.
const RECIPES: [(Recipe, bool); 3] =
    [(Recipe::Tensorwise, false), (Recipe::Rowwise, false), (Recipe::RowwiseWithGwHp, true)];

struct Linear {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// `[out, in]`, as in the file.
    dw: Vec<f32>,
}

/// torch stores weights as `[out, in]`, Burn as `[in, out]`.
fn run<B: Float8Backend>(golden: &Golden, dtype: DType, (recipe, gw_hp): (Recipe, bool)) -> Linear {
    type A<B> = Float8<Autodiff<B>>;
    let load = |name: &str, dims: [usize; 2], data: Vec<f32>| -> Tensor<A<B>, 2> {
        let t = tensor::<A<B>, 2>(data, dims);
        if name == "dy" { t.cast(dtype) } else { t.cast(dtype).detach().require_grad() }
    };
    let x = load("x", golden.matrix("x"), golden.floats("x"));
    let [n, k] = golden.matrix("weight");
    let w = load("weight", [k, n], transpose(&golden.floats("weight"), [n, k]));
    let dy = load("dy", golden.matrix("dy"), golden.floats("dy"));
    let linear = NnLinear { weight: Param::initialized(ParamId::new(), w), bias: None };
    let linear = Float8Config::new(recipe).apply(linear).unwrap().0;
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy).sum().backward();
    let ran = &report(&linear).layers[0];
    let calls = ran.gemms().map(|(_, g)| [g.native + g.emulated, g.high_precision]);
    assert_eq!(calls, [[1, 0], [1, 0], if gw_hp { [0, 1] } else { [1, 0] }], "{recipe}: {ran:?}");
    Linear {
        y: values(y),
        dx: values(x.grad(&grads).unwrap()),
        dw: transpose(&values(linear.weight.grad(&grads).unwrap()), [k, n]),
    }
}

fn linear_on<B: Float8Backend>(runtime: &str) {
    let golden = Golden::open("linear.safetensors");
    // bf16 results differ where f32 sums round to another bf16 value, which is rare.
    for (hp, dtype, tolerance) in [("f32", DType::F32, 1e-5), ("bf16", DType::BF16, 1e-3)] {
        if !B::fp8_facts(&Default::default()).supports(dtype) {
            writeln!(std::io::stdout(), "{runtime}: {hp} skipped, the device has no {hp}")
                .expect("standard output is open");
            continue;
        }
        for (recipe, gw_hp) in RECIPES {
            let ours = run::<B>(&golden, dtype, (recipe, gw_hp));
            for (name, ours, floor) in [("y", ours.y, 18.0), ("dx", ours.dx, 17.0), ("dw", ours.dw, 17.0)] {
                let torchao = golden.floats(&format!("{recipe}_{hp}_{name}"));
                let error = relative_error(&ours, &torchao);
                let sqnr = sqnr(&ours, &golden.floats(&format!("exact_{name}")));
                println!("{runtime} {recipe} {hp} {name}: {error:.2e} from torchao, SQNR {sqnr:.1} dB");
                assert!(error < tolerance, "{runtime} {recipe} {hp} {name}: {error:e} from torchao");
                assert!(sqnr > floor, "{runtime} {recipe} {hp} {name}: SQNR {sqnr} dB");
                if hp == "f32" {
                    let largest = torchao.iter().fold(0f32, |m, v| m.max(v.abs()));
                    let worst = crate::support::max_error(&ours, &torchao) / f64::from(largest);
                    assert!(
                        worst < tolerance,
                        "{runtime} {recipe} {name}: one element is {worst:e} of the largest off"
                    );
                }
            }
        }
    }
}

#[test]
fn golden_linear_on_every_runtime() {
    on_every_runtime!(linear_on);
}
