//! AdamW in one pass: the definition's values, and the next cast's codes.
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor};
use burn_float8::backend::Float8Backend;
use burn_float8::optim::{AdamWDtypes, AdamWStep, FusedAdamW};
use burn_float8::{Float8, Float8Config};
use float8_kernels::reference::adamw::adamw;

use crate::on_cpu_and_wgpu;
use crate::support::linear::{A, layer};
use crate::support::operand::{tensor, values};
use crate::support::{max_error, normal};

const DIMS: [usize; 2] = [70, 45];

fn steps_on<B: Float8Backend>(runtime: &str) {
    let [k, n] = DIMS;
    let random = |seed| normal(k * n, seed);
    let x = || tensor::<A<B>, 2>(normal(9 * k, 7), [9, k]);
    let mut linear: Linear<_> = layer::<B>(&Float8Config::tensorwise(), tensor(random(1), DIMS), None);
    let mut moments = [random(2), random(3).iter().map(|v| v * v).collect()].map(|values| tensor(values, DIMS));
    let dtypes = AdamWDtypes { param: DType::F32, moments: DType::F32, grad: DType::F32 };
    let fused = FusedAdamW::<Float8<B>>::find(&Default::default(), dtypes).unwrap_or_else(|| panic!("{runtime}"));
    for time in 1..=3 {
        // Fills the weight's cache, so that the step gives the next cast its amax.
        linear.forward(x());
        let old = linear.weight.val().inner();
        let grad: Tensor<Float8<B>, 2> = tensor(random(10 + time as u64), DIMS);
        let (betas, rounding) = ([0.9, 0.95], [const { None }; 3]);
        let step = AdamWStep { lr: 0.1, betas, epsilon: 1e-8, decay: Some(0.99), time, rounding };
        let before = [old.clone(), moments[0].clone(), moments[1].clone()].map(values);
        let element = |(i, g): (usize, f32)| adamw(&step, [0, 1, 2].map(|which| before[which][i]), g);
        let expected: Vec<_> = values(grad.clone()).into_iter().enumerate().map(element).collect();
        let kept = old.clone();
        let (weight, after) = fused.step(step, old, moments, grad);
        assert_eq!(values(kept), before[0], "{runtime}: a tensor with another handle changed");
        for (which, got) in [&weight, &after[0], &after[1]].into_iter().enumerate() {
            let want: Vec<f32> = expected.iter().map(|element| element[which] as f32).collect();
            let error = max_error(&values(got.clone()), &want);
            assert!(error < 1e-6, "{runtime}: {which} after step {time} is off by {error}");
        }
        moments = after;
        // The same values, whose amax no step has found.
        let fresh = layer::<B>(&Float8Config::tensorwise(), tensor(values(weight.clone()), DIMS), None);
        let weight = Tensor::from_inner(weight).require_grad();
        linear = Linear { weight: Param::initialized(ParamId::new(), weight), bias: None };
        assert_eq!(values(linear.forward(x())), values(fresh.forward(x())), "{runtime}: step {time}");
    }
}

#[test]
fn steps_are_the_definitions_and_give_the_next_cast_its_amax() {
    on_cpu_and_wgpu!(steps_on);
}
