//! torch's and torchao's results from the golden files, which are part of the program: casts, scales, codes, linears.

use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8, Float8Backend, Float8Config, Recipe, report};
use checks::{Case, Failure, Goldens, visit_goldens};
use cubecl::prelude::*;
use test_data::{Golden, relative_error};

use super::linears::tolerance;
use crate::target::Target;

static CASTS: Goldens = Goldens {
    cast: Golden::embedded(include_bytes!("../../../../../tests/goldens/cast.safetensors")),
    quantize: Golden::embedded(include_bytes!("../../../../../tests/goldens/quantize.safetensors")),
    mx: Golden::embedded(include_bytes!("../../../../../tests/goldens/mx.safetensors")),
};
static LINEAR: Golden = Golden::embedded(include_bytes!("../../../../../tests/goldens/linear.safetensors"));

fn wrong(message: impl Into<String>) -> Failure {
    Failure::Wrong(message.into())
}

pub fn visit<T: Target>(client: &ComputeClient<T::Runtime>, visit: &mut dyn FnMut(Case<'_>)) {
    visit_goldens(client, &CASTS, visit);
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::RowwiseWithGwHp] {
        for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
            if T::Backend::fp8_supports(&Default::default(), dtype) {
                let case_name = format!("golden_linear {recipe} {name}");
                visit(Case::new(case_name, || linear::<T::Backend>(recipe, name, dtype)));
            }
        }
    }
}

/// y, dx and dw of torchao's Float8Linear. torch keeps weights as `[out, in]`, Burn as `[in, out]`.
fn linear<B: Float8Backend>(recipe: Recipe, name: &str, dtype: DType) -> Result<f64, Failure> {
    type A<B> = Autodiff<Float8<B>>;
    let load = |values: Vec<f32>, shape: [usize; 2]| {
        Tensor::<A<B>, 2>::from_data(TensorData::new(values, shape), &Default::default()).cast(dtype)
    };
    let read = |name| load(LINEAR.floats(name), LINEAR.matrix(name));
    let x = read("x").detach().require_grad();
    let w = read("weight").transpose().detach().require_grad();
    let linear = Linear { weight: Param::initialized(ParamId::new(), w), bias: None };
    let failed = |error: burn_float8::Float8Error| wrong(error.to_string());
    let linear = Float8Config::new(recipe).convert(linear).map_err(|error| failed(error.into()))?.0;
    let y = linear.forward(x.clone());
    let grads = (y.clone() * read("dy")).sum().backward();
    let dw = linear.weight.grad(&grads).ok_or_else(|| wrong("no dw"))?.transpose();
    let dx = x.grad(&grads).ok_or_else(|| wrong("no dx"))?;
    let allowed = tolerance(&report(&linear), dtype);
    let values = |data: TensorData| data.convert::<f32>().to_vec::<f32>().map_err(|error| wrong(format!("{error:?}")));
    let mut worst = 0f64;
    for (what, data) in [("y", y.into_data()), ("dx", dx.into_data()), ("dw", dw.into_data())] {
        let error = relative_error(&values(data)?, &LINEAR.floats(&format!("{recipe}_{name}_{what}")));
        if error.is_nan() || error > allowed {
            return Err(wrong(format!("{what} is {error:.2e} from torchao's, allowed {allowed:.0e}")));
        }
        worst = worst.max(error / allowed);
    }
    Ok(worst)
}
