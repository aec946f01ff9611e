//! `GroupedLinear` and `grouped_linear`: matmuls of groups on a backend without FP8, and close to
//! these on one with FP8.
use burn::module::Module;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_float8::{Float8Config, Float8State, GroupedLinear, Recipe, float8_autocast, grouped_linear};

use crate::programs::support::models::D;
use crate::programs::support::{
    B, Plain, applied, float8_calls, high_precision_calls, layer_of, tensor, train, values, with_parameters,
};

const N: usize = 12;

#[derive(Module, Debug)]
struct Experts<B: Backend> {
    experts: GroupedLinear<B>,
}

/// Ends of the groups' rows; the second group is empty.
const ENDS: [i32; 3] = [4, 4, 9];

fn ends<A: Backend>() -> Tensor<A, 1, Int> {
    Tensor::from_ints(ENDS, &Default::default())
}

#[test]
fn grouped_linears_on_a_plain_backend_are_matmuls_of_their_groups() {
    let (x, w) = (tensor::<Plain, 2>([9, D], 1).require_grad(), tensor::<Plain, 3>([3, D, N], 2).require_grad());
    let y = grouped_linear(x.clone(), w.clone(), ends());
    let grads = y.clone().powf_scalar(2.0).sum().backward();
    let (mut begin, mut parts) = (0, vec![]);
    let (own_x, own_w) = (x.clone().detach().require_grad(), w.clone().detach().require_grad());
    for (group, end) in ENDS.into_iter().enumerate() {
        let end = end as usize;
        if end > begin {
            let rows = own_x.clone().slice([begin..end, 0..D]);
            let weight = own_w.clone().slice([group..group + 1, 0..D, 0..N]).reshape([D, N]);
            parts.push(rows.matmul(weight));
        }
        begin = end;
    }
    let expected = Tensor::cat(parts, 0);
    let expected_grads = expected.clone().powf_scalar(2.0).sum().backward();
    let close = |a: Vec<f32>, b: Vec<f32>| {
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs())), "{a:?}\n{b:?}");
    };
    close(values(y), values(expected));
    close(values(x.grad(&grads).unwrap()), values(own_x.grad(&expected_grads).unwrap()));
    close(values(w.grad(&grads).unwrap()), values(own_w.grad(&expected_grads).unwrap()));
}

/// One module for both backends: a model with it trains with and without FP8.
#[test]
fn grouped_linears_train_on_both_backends() {
    fn losses<A: burn_float8::Float8Stack + AutodiffBackend>() -> Vec<f32> {
        let weight = burn::module::Param::from_tensor(Tensor::ones([3, D, N], &Default::default()));
        let model = Experts { experts: GroupedLinear { weight } };
        let model: Experts<A> = applied(&Float8Config::tensorwise().with_strict(true), model);
        train(model, 0..8, loss).1
    }
    fn loss<A: AutodiffBackend>(m: &Experts<A>, _: u64) -> Tensor<A, 1> {
        let y = m.experts.forward(tensor::<A, 2>([9, D], 1), ends());
        (y - tensor::<A, 2>([9, N], 2).tanh()).powf_scalar(2.0).mean()
    }
    let float8 = losses::<B>();
    let weight = burn::module::Param::from_tensor(Tensor::ones([3, D, N], &Default::default()));
    let plain: Experts<Plain> = with_parameters(Experts { experts: GroupedLinear { weight } }, 1);
    let plain = train(plain, 0..8, loss).1;
    crate::programs::support::assert_falls(&float8);
    crate::programs::support::assert_falls(&plain);
    let apart = float8.iter().zip(&plain).map(|(a, b)| (a - b).abs() / b).fold(0f32, f32::max);
    assert!(apart > 0.0 && apart < 0.1, "near, but not the same: {apart}");
}

/// Backward passes through a frozen one, so its x and dy have a history.
#[test]
fn frozen_grouped_linears_learn_their_histories() {
    let weight = burn::module::Param::from_tensor(Tensor::ones([3, D, N], &Default::default()));
    let frozen = Experts { experts: GroupedLinear { weight } }.no_grad();
    let model: Experts<B> = applied(&Float8Config::new(Recipe::Delayed), frozen);
    model.experts.forward(tensor::<B, 2>([9, D], 1).require_grad(), ends()).powf_scalar(2.0).sum().backward();
    assert_eq!(float8_calls(&layer_of(&model, "experts")), [1, 1, 0]);
    let state = &Float8State::export(&model).layers["experts"];
    assert!(state.input.is_some() && state.grad_output.is_some(), "{state:?}");
}

/// Backward has the precision of its forward.
#[test]
fn a_forward_in_high_precision_has_such_a_backward() {
    let weight = burn::module::Param::from_tensor(Tensor::ones([3, D, N], &Default::default()));
    let model: Experts<B> = applied(&Float8Config::tensorwise(), Experts { experts: GroupedLinear { weight } });
    let forward = || model.experts.forward(tensor::<B, 2>([9, D], 1).require_grad(), ends());
    float8_autocast(false, forward).sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&model, "experts")), [1; 3]);
    let y = forward();
    float8_autocast(false, || y.sum().backward());
    assert_eq!(float8_calls(&layer_of(&model, "experts")), [1; 3]);
}
