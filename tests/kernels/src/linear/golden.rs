//! Linears against torchao's reference vectors.

use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Recipe, backend::Float8Backend, report};
use test_data::{Golden, relative_error, transpose};

use super::{A, converted, share, step, tolerance};
use crate::case::{Case, Failure};

/// Passes every comparison with linear.safetensors to `visit`, which decides what to run.
pub fn visit_golden_linears<B: Float8Backend>(golden: &Golden, visit: &mut dyn FnMut(Case<'_>)) {
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::RowwiseWithGwHp] {
        for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
            if B::fp8_facts(&Default::default()).supports(dtype) {
                let case_name = format!("golden_linear {recipe} {name}");
                visit(Case::new(case_name, || linear::<B>(golden, recipe, name, dtype)));
            }
        }
    }
}

/// Compares y, dx and dw with torchao's Float8Linear. torch stores weights as `[out, in]`, Burn as
/// `[in, out]`.
fn linear<B: Float8Backend>(golden: &Golden, recipe: Recipe, name: &str, dtype: DType) -> Result<f64, Failure> {
    let read = |name| {
        let data = TensorData::new(golden.floats(name), golden.matrix(name));
        Tensor::<A<B>, 2>::from_data(data, &Default::default()).cast(dtype)
    };
    let linear = converted::<B>(recipe, read("weight").transpose(), None)?;
    let mut got = step::<B>(&linear, read("x"), read("dy"))?;
    let ([m, k], [n, _]) = (golden.matrix("x"), golden.matrix("weight"));
    got[2] = transpose(&got[2], [k, n]);
    let ran = report(&linear);
    let mut worst = 0f64;
    for ((what, contraction), got) in [("y", k), ("dx", n), ("dw", m)].into_iter().zip(got) {
        let error = relative_error(&got, &golden.floats(&format!("{recipe}_{name}_{what}")));
        worst = worst.max(share(what, error, tolerance(&ran, dtype, contraction))?);
    }
    Ok(worst)
}
