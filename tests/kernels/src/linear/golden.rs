//! Linears against torchao's reference vectors.

use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8, Recipe, backend::Float8Backend, report};
use test_data::{Golden, relative_error};

use super::{config, tolerance};
use crate::case::{Case, Failure, wrong};

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
    type A<B> = Float8<Autodiff<B>>;
    let load = |values: Vec<f32>, shape: [usize; 2]| {
        Tensor::<A<B>, 2>::from_data(TensorData::new(values, shape), &Default::default()).cast(dtype)
    };
    let read = |name| load(golden.floats(name), golden.matrix(name));
    let x = read("x").detach().require_grad();
    let w = read("weight").transpose().detach().require_grad();
    let linear = Linear { weight: Param::initialized(ParamId::new(), w), bias: None };
    let linear = config(recipe).apply(linear).map_err(|error| wrong!("{error}"))?.0;
    let y = linear.forward(x.clone());
    let grads = (y.clone() * read("dy")).sum().backward();
    let dw = linear.weight.grad(&grads).ok_or_else(|| wrong!("no dw"))?.transpose();
    let dx = x.grad(&grads).ok_or_else(|| wrong!("no dx"))?;
    let ran = report(&linear);
    let ([m, k], [n, _]) = (golden.matrix("x"), golden.matrix("weight"));
    let values = |data: TensorData| data.convert::<f32>().to_vec::<f32>().map_err(|error| wrong!("{error:?}"));
    let mut worst = 0f64;
    for (what, data, contraction) in [("y", y.into_data(), k), ("dx", dx.into_data(), n), ("dw", dw.into_data(), m)] {
        let allowed = tolerance(&ran, dtype, contraction);
        let error = relative_error(&values(data)?, &golden.floats(&format!("{recipe}_{name}_{what}")));
        if error.is_nan() || error > allowed {
            return Err(wrong!("{what} is {error:.2e} from torchao's, allowed {allowed:.0e}"));
        }
        worst = worst.max(error / allowed);
    }
    Ok(worst)
}
