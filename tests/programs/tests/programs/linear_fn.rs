//! `burn_float8::linear` and `GroupedLinear`: Burn's own operations on a backend without FP8, on one with it the same bits as
//! `nn::Linear`, with less memory.
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_float8::{Float8Config, GroupedLinear, Recipe, float8_autocast, grouped_linear};

use crate::support::models::D;
use crate::support::{
    B, Plain, applied, bits, float8_calls, forward_backward, high_precision_calls, layer_of, tensor, train, values,
    with_parameters,
};

const N: usize = 12;

fn new<A: Backend>() -> Linear<A> {
    LinearConfig::new(D, N).init(&Default::default())
}

/// y, dx, dw by `nn::Linear` and by `burn_float8::linear`, and db by both.
fn both<A: AutodiffBackend>(l: &Linear<A>) -> [([Vec<u32>; 3], Vec<u32>); 2] {
    let (x, dy) = (tensor::<A, 3>([2, 5, D], 1), tensor::<A, 3>([2, 5, N], 2));
    let bias = || l.bias.as_ref().expect("it has one");
    let run = |forward: &dyn Fn(Tensor<A, 3>) -> Tensor<A, 3>| {
        let grads = (forward(x.clone()) * dy.clone()).sum().backward();
        let db = bits(bias().grad(&grads).expect("tracked"));
        (forward_backward(x.clone(), l.weight.val(), dy.clone(), forward), db)
    };
    let function = |x| burn_float8::linear(x, l.weight.val(), Some(bias().val()));
    [run(&|x| l.forward(x)), run(&function)]
}

#[test]
fn on_a_plain_backend_it_is_burns_own() {
    let linear = with_parameters::<Plain, _>(new(), 1);
    let [theirs, ours] = both(&linear);
    assert_eq!(ours, theirs);
}

#[test]
fn on_a_float8_backend_its_gradients_are_those_of_the_linear() {
    for recipe in Recipe::ALL {
        let linear: Linear<B> = applied(&Float8Config::new(recipe).with_strict(true), new());
        let [theirs, ours] = both(&linear);
        assert_eq!(ours, theirs, "{recipe}");
    }
    let filtered: Linear<B> = new();
    let [theirs, ours] = both(&filtered);
    assert_eq!(ours, theirs, "without a layer");
}

/// Between forward and backward it is x's FP8 operand that lives, however many linears follow.
#[test]
fn it_saves_the_float8_operand_of_x() {
    let live = |saved: bool| {
        let linear: Linear<B> = applied(&Float8Config::tensorwise(), new());
        let other: Linear<B> = applied(&Float8Config::tensorwise(), new());
        let x = tensor::<B, 2>([6, D], 1);
        let bias = linear.bias.as_ref().map(|bias| bias.val());
        let y = if saved { burn_float8::linear(x, linear.weight.val(), bias) } else { linear.forward(x) };
        // The last activations are kept until the thread's next linears.
        (2..5).for_each(|seed| drop(other.forward(tensor::<B, 2>([6, D], seed))));
        let before = layer_of(&linear, "linear");
        let grads = y.sum().backward();
        let dw = bits(linear.weight.grad(&grads).expect("tracked"));
        let after = layer_of(&linear, "linear");
        (before.live_copies, after.casts[0] - before.casts[0], dw)
    };
    let (copies, casts, dw) = live(false);
    let (saved_copies, saved_casts, saved_dw) = live(true);
    assert_eq!(saved_copies, copies + 1, "the operand of x, beside the weight's");
    assert_eq!([casts, saved_casts], [1, 0], "casts of x in backward");
    assert_eq!(saved_dw, dw);
}

/// As with `nn::Linear`, backward runs as its forward did.
#[test]
fn a_forward_in_high_precision_has_such_a_backward() {
    let linear: Linear<B> = applied(&Float8Config::tensorwise(), new());
    let y = float8_autocast(false, || {
        burn_float8::linear(tensor::<B, 2>([6, D], 1).require_grad(), linear.weight.val(), None)
    });
    y.sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&linear, "linear")), [1; 3]);
    let y = burn_float8::linear(tensor::<B, 2>([6, D], 1).require_grad(), linear.weight.val(), None);
    float8_autocast(false, || y.sum().backward());
    assert_eq!(float8_calls(&layer_of(&linear, "linear")), [1; 3]);
    // An x that wants no gradient, evaluated in FP8 between.
    let x = tensor::<B, 2>([6, D], 1);
    let y = float8_autocast(false, || burn_float8::linear(x.clone(), linear.weight.val(), None));
    linear.forward(x);
    y.sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&linear, "linear")), [2, 1, 2]);
    assert_eq!(float8_calls(&layer_of(&linear, "linear")), [2, 1, 1]);

    let weight = burn::module::Param::from_tensor(Tensor::ones([3, D, N], &Default::default()));
    let model: Experts<B> = applied(&Float8Config::tensorwise(), Experts { experts: GroupedLinear { weight } });
    let forward = || model.experts.forward(tensor::<B, 2>([9, D], 1).require_grad(), ends());
    float8_autocast(false, forward).sum().backward();
    assert_eq!(high_precision_calls(&layer_of(&model, "experts")), [1; 3]);
    let y = forward();
    float8_autocast(false, || y.sum().backward());
    assert_eq!(float8_calls(&layer_of(&model, "experts")), [1; 3]);
}

#[derive(Module, Debug)]
struct Experts<B: Backend> {
    experts: GroupedLinear<B>,
}

/// Rows of a group, one after the other; the second group is empty.
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

/// One module for both backends: a model that uses it trains with and without FP8.
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
    crate::support::assert_falls(&float8);
    crate::support::assert_falls(&plain);
    let apart = float8.iter().zip(&plain).map(|(a, b)| (a - b).abs() / b).fold(0f32, f32::max);
    assert!(apart > 0.0 && apart < 0.1, "near, but not the same: {apart}");
}

/// A single row without its axis, as `nn::Linear` takes it, also where GEMMs run in high precision.
#[test]
fn it_takes_vectors() {
    for recipe in Recipe::ALL {
        for filter in [false, true] {
            let config = Float8Config::new(recipe);
            let mut linear: Linear<B> = applied(&config, new());
            if filter {
                linear = burn_float8::without_float8(linear);
            }
            let bias = || linear.bias.as_ref().expect("it has one");
            let run = |forward: &dyn Fn(Tensor<B, 1>) -> Tensor<B, 1>| {
                let x = tensor::<B, 1>([D], 1).require_grad();
                let grads = (forward(x.clone()) * tensor::<B, 1>([N], 2)).sum().backward();
                [bits(x.grad(&grads).unwrap()), bits(linear.weight.grad(&grads).unwrap())]
            };
            let function = |x| burn_float8::linear(x, linear.weight.val(), Some(bias().val()));
            assert_eq!(run(&function), run(&|x| linear.forward(x)), "{recipe} {filter}");
        }
    }
}
