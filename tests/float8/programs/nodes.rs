//! A linear is one autodiff node, which keeps the inputs of its backward. Its y, gradients, counts
//! and histories equal a separate linear's bit for bit, for any other operations in or next to its
//! graph.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe, float8_autocast, set_float8_enabled, without_float8};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{
    B, F8, Plain, applied, bits, constant, float8_calls, has_float8_wgrad, high_precision_calls, layer_of, mean_square,
    tensor, values,
};

const M: usize = 9;
const K: usize = 40;
const N: usize = 24;

fn x(seed: u64) -> Tensor<B, 2> {
    tensor([M, K], seed)
}

fn dy(seed: u64) -> Tensor<B, 2> {
    tensor([M, N], 100 + seed)
}

fn linear(config: &Float8Config) -> Linear<B> {
    applied(config, LinearConfig::new(K, N).init(&Default::default()))
}

/// Input of [`Mlp`]. Growing amaxes reveal a scale from another step.
fn input(step: u64) -> Tensor<B, 2> {
    tensor::<B, 2>([6, D], step) * (1.0 + step as f32)
}

fn dws(model: &Mlp<B>, grads: &<B as AutodiffBackend>::Gradients) -> [Vec<u32>; 2] {
    [&model.first, &model.second].map(|l| bits(l.weight.grad(grads).expect("tracked")))
}

/// FP8 and high-precision calls of both linears.
fn calls(model: &Mlp<B>) -> [[[u64; 3]; 2]; 2] {
    ["first", "second"].map(|name| {
        let layer = layer_of(model, name);
        [float8_calls(&layer), high_precision_calls(&layer)]
    })
}

/// Two uses of one linear in one graph, each in FP8 or not: gradients are the sum of both separate
/// ones.
#[test]
fn each_use_keeps_the_precision_of_its_forward() {
    /// y, dx and dw.
    fn alone(l: &Linear<B>, is_on: bool, seed: u64, dy: Tensor<B, 2>) -> [Tensor<F8, 2>; 3] {
        let x = x(seed).require_grad();
        let y = float8_autocast(is_on, || l.forward(x.clone()));
        let grads = (y.clone() * dy).sum().backward();
        [y.inner(), x.grad(&grads).expect("tracked"), l.weight.grad(&grads).expect("tracked")]
    }
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe).with_strict(true);
        let other = linear(&config);
        let [on, off] = [true, false].map(|is_on| alone(&other, is_on, 1, dy(1)).map(bits));
        assert!(on[0] != off[0] && on[1] != off[1], "{recipe}");
        assert_eq!(on[2] != off[2], has_float8_wgrad(recipe), "{recipe}");
        for uses in [[true, true], [true, false], [false, true], [false, false]] {
            for is_shared in [true, false] {
                let what = format!("{recipe} {uses:?} {is_shared}");
                let seeds = [1, if is_shared { 1 } else { 2 }];
                let first = x(seeds[0]).require_grad();
                let second = if is_shared { first.clone() } else { x(seeds[1]).require_grad() };
                let l = linear(&config);
                let y = float8_autocast(uses[0], || l.forward(first.clone()));
                let z = float8_autocast(uses[1], || l.forward(second.clone()));
                let grads = ((y.clone() * dy(1)).sum() + (z.clone() * dy(2)).sum()).backward();

                let [want_y, dx, dw] = alone(&other, uses[0], seeds[0], dy(1));
                let [want_z, dz, dv] = alone(&other, uses[1], seeds[1], dy(2));
                assert_eq!([bits(y), bits(z)], [bits(want_y), bits(want_z)], "{what}");
                assert_eq!(bits(l.weight.grad(&grads).expect("tracked")), bits(dw + dv), "{what}");
                let [ours, theirs] = [&first, &second].map(|x| bits(x.grad(&grads).expect("tracked")));
                if is_shared {
                    assert_eq!(ours, bits(dx + dz), "{what}");
                } else {
                    assert_eq!([ours, theirs], [bits(dx), bits(dz)], "{what}");
                }
                let on = uses.into_iter().filter(|is_on| *is_on).count() as u64;
                let wgrads = if has_float8_wgrad(recipe) { on } else { 0 };
                let layer = layer_of(&l, "linear");
                assert_eq!(float8_calls(&layer), [on, on, wgrads], "{what}");
                assert_eq!(high_precision_calls(&layer), [2 - on, 2 - on, 2 - wgrads], "{what}");
            }
        }
    }
}

/// x is bf16, parameters are f32, and only the bias is trained.
#[test]
fn a_frozen_weight_with_a_trained_bias() {
    // Sums of small integers are exact in bf16 too.
    let dy: Vec<f32> = (0..M * N).map(|i| (i * 7 % 5) as f32 - 2.0).collect();
    let db: Vec<f32> = (0..N).map(|n| dy.iter().skip(n).step_by(N).sum()).collect();
    for (is_on, is_tracked) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut l = linear(&Float8Config::tensorwise().with_strict(true));
        l.weight = l.weight.set_require_grad(false);
        let x = x(1).cast(DType::BF16).detach().set_require_grad(is_tracked);
        let y = float8_autocast(is_on, || l.forward(x));
        let dy = Tensor::<B, 2>::from_data(TensorData::new(dy.clone(), [M, N]), &Default::default());
        let grads = (y.clone() * dy.cast(DType::BF16)).sum().backward();
        assert!(l.weight.grad(&grads).is_none());
        let ours = l.bias.as_ref().and_then(|bias| bias.grad(&grads)).expect("tracked");
        let what = format!("{is_on} {is_tracked}");
        assert_eq!((y.dtype(), ours.dtype(), values(ours)), (DType::BF16, DType::F32, db.clone()), "{what}");
        let layer = layer_of(&l, "linear");
        let ran = [1, u64::from(is_tracked), 0];
        let calls = if is_on { [ran, [0; 3]] } else { [[0; 3], ran] };
        assert_eq!([float8_calls(&layer), high_precision_calls(&layer)], calls, "{what}");
    }
}

#[derive(Module, Debug)]
struct Pair<B: Backend> {
    a: Linear<B>,
    b: Linear<B>,
}

/// Two linears of one shape and one conversion read one x, each with its own recipe.
#[test]
fn one_x_into_two_recipes() {
    let pairs = Recipe::ALL.into_iter().flat_map(|a| Recipe::ALL.map(|b| (a, b))).filter(|(a, b)| a != b);
    for (a, b) in pairs {
        let config = Float8Config::new(a).with_override(["b"], Float8LinearConfig::new(b)).with_strict(true);
        for is_tracked in [true, false] {
            let run = |uses: [bool; 2]| {
                let new = || LinearConfig::new(K, N).init(&Default::default());
                let model: Pair<B> = applied(&config, Pair { a: new(), b: new() });
                let (linears, x) = ([&model.a, &model.b], x(1).set_require_grad(is_tracked));
                let ys = [0, 1].map(|i| uses[i].then(|| linears[i].forward(x.clone())));
                let losses = [0, 1].map(|i| ys[i].clone().map(|y| (y * dy(i as u64)).sum()));
                let grads = losses.into_iter().flatten().reduce(|a, b| a + b).expect("one at least").backward();
                let dw = linears.map(|l| l.weight.grad(&grads).map(bits));
                let calls = ["a", "b"].map(|name| {
                    let layer = layer_of(&model, name);
                    [float8_calls(&layer), high_precision_calls(&layer)]
                });
                (ys.map(|y| y.map(bits)), dw, calls, x.grad(&grads))
            };
            let what = format!("{a} and {b}, {is_tracked}");
            let (both, of_a, of_b) = (run([true, true]), run([true, false]), run([false, true]));
            assert_eq!(both.0, [of_a.0[0].clone(), of_b.0[1].clone()], "{what}: y");
            assert_eq!(both.1, [of_a.1[0].clone(), of_b.1[1].clone()], "{what}: dw");
            assert_eq!(both.2, [of_a.2[0], of_b.2[1]], "{what}: calls");
            assert_eq!(both.3.is_some(), is_tracked, "{what}");
            let dx = of_a.3.zip(of_b.3).map(|(a, b)| bits(a + b));
            assert_eq!(both.3.map(bits), dx, "{what}: dx");
        }
    }
}

/// Two models of two conversions read one x, under one loss or under two, with either backward
/// first.
#[test]
fn one_x_into_two_models() {
    let float8: Mlp<B> = applied(&Float8Config::tensorwise(), Mlp::new());
    let off = without_float8(applied(&Float8Config::tensorwise(), Mlp::new()));
    for other in [applied(&Float8Config::new(Recipe::RowwiseWithGwHp), Mlp::new()), off] {
        let models = [&float8, &other];
        let want = models.map(|m| dws(m, &mean_square(m.forward(input(1))).backward()));
        assert_ne!(want[0], want[1], "by other recipes");
        for order in [[0, 1], [1, 0]] {
            let x = input(1);
            let losses = models.map(|m| mean_square(m.forward(x.clone())));
            for i in order {
                assert_eq!(dws(models[i], &losses[i].backward()), want[i], "{order:?}");
            }
        }
        let x = input(1);
        let grads = (mean_square(float8.forward(x.clone())) + mean_square(other.forward(x))).backward();
        assert_eq!(models.map(|m| dws(m, &grads)), want);
    }
}

/// Only forward reads [`set_float8_enabled`].
#[test]
fn backward_follows_its_forward_through_a_switch() {
    for recipe in Recipe::ALL {
        let run = |forward: bool, backward: bool| {
            let model: Mlp<B> = applied(&Float8Config::new(recipe).with_strict(true), Mlp::new());
            set_float8_enabled(&model, forward);
            let y = model.forward(input(1));
            set_float8_enabled(&model, backward);
            let grads = mean_square(y.clone()).backward();
            let so_far = calls(&model);
            // The next forward follows the current setting.
            model.forward(input(1));
            let next = [0, 1].map(|i| calls(&model)[0][i][0] - so_far[0][i][0]);
            assert_eq!(next, [backward, !backward].map(u64::from), "{recipe}");
            (bits(y), dws(&model, &grads), so_far)
        };
        let [on, off] = [run(true, true), run(false, false)];
        assert_ne!(on.0, off.0, "{recipe}");
        assert_eq!(run(true, false), on, "{recipe}");
        assert_eq!(run(false, true), off, "{recipe}");
        let wgrads = u64::from(has_float8_wgrad(recipe));
        let float8 = [[[1, 0, wgrads], [0, 0, 1 - wgrads]], [[1, 1, wgrads], [0, 0, 1 - wgrads]]];
        assert_eq!(on.2, float8, "{recipe}");
        assert_eq!(off.2, [[[0; 3], [1, 0, 1]], [[0; 3], [1, 1, 1]]], "{recipe}");
    }
}

/// With `matmul = true`, products of x and y have the shapes of a weight gradient and still equal
/// the products without FP8.
#[test]
fn a_product_of_inputs_is_no_weight_gradient() {
    type Forward = fn(&Linear<B>, Tensor<B, 2>) -> Tensor<B, 2>;
    let by_linear: Forward = |l, x| l.forward(x);
    let by_matmul: Forward = |l, x| x.matmul(l.weight.val());
    for recipe in Recipe::ALL {
        let config = Float8Config::from(Float8LinearConfig::new(recipe).with_matmul(true)).with_strict(true);
        // Without products, with products outside of the loss, and with products in it.
        let run = |forward: Forward, in_loss: Option<bool>| {
            let l: Linear<B> = applied(&config, LinearConfig::new(K, N).with_bias(false).init(&Default::default()));
            let x = x(1).require_grad();
            let y = forward(&l, x.clone());
            let products = in_loss.map(|_| [y.clone(), dy(2)].map(|right| x.clone().transpose().matmul(right)));
            let mut loss = (y.clone() * dy(1)).sum();
            for product in products.iter().flatten().filter(|_| in_loss == Some(true)) {
                loss = loss + product.clone().tanh().sum();
            }
            let grads = loss.backward();
            if let Some([of_y, of_dy]) = products {
                let [plain_x, plain_y, plain_dy]: [Tensor<Plain, 2>; 3] = [x.clone(), y.clone(), dy(2)].map(constant);
                assert_eq!(bits(of_y), bits(plain_x.clone().transpose().matmul(plain_y)), "{recipe}");
                assert_eq!(bits(of_dy), bits(plain_x.transpose().matmul(plain_dy)), "{recipe}");
            }
            let layer = layer_of(&l, "linear");
            let calls = [float8_calls(&layer), high_precision_calls(&layer)];
            let gradients = [x.grad(&grads), l.weight.grad(&grads)].map(|grad| bits(grad.expect("tracked")));
            (bits(y), gradients, calls)
        };
        let expected = run(by_linear, None);
        let wgrads = u64::from(has_float8_wgrad(recipe));
        assert_eq!(expected.2, [[1, 1, wgrads], [0, 0, 1 - wgrads]], "{recipe}");
        for forward in [by_linear, by_matmul] {
            for in_loss in [None, Some(false)] {
                assert_eq!(run(forward, in_loss), expected, "{recipe} {in_loss:?}");
            }
        }
        let with_products = run(by_linear, Some(true));
        assert_ne!(with_products.1, expected.1, "{recipe}");
        assert_eq!(with_products.2, expected.2, "{recipe}");
        assert_eq!(run(by_matmul, Some(true)), with_products, "{recipe}");
    }
}
