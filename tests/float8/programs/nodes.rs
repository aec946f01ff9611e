//! A linear is one autodiff node, which keeps the inputs of its backward. Its y, gradients, counts
//! and histories equal a separate linear's bit for bit, for any other operations in or next to its
//! graph.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe, float8_autocast, set_float8_enabled};

use crate::programs::support::{
    B, F8, Plain, applied, bits, calls, constant, dw, has_float8_wgrad, layer_of, tensor, values,
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

/// Two uses of one linear in one graph, each in FP8 or not: gradients are the sum of both separate
/// ones. Only forward reads [`set_float8_enabled`].
#[test]
fn each_use_keeps_the_precision_of_its_forward() {
    fn forward(l: &Linear<B>, is_on: bool, x: &Tensor<B, 2>) -> Tensor<B, 2> {
        set_float8_enabled(l, is_on);
        l.forward(x.clone())
    }
    /// y, dx and dw.
    fn alone(l: &Linear<B>, is_on: bool, seed: u64, dy: Tensor<B, 2>) -> [Tensor<F8, 2>; 3] {
        let x = x(seed).require_grad();
        let y = forward(l, is_on, &x);
        let grads = (y.clone() * dy).sum().backward();
        [y.inner(), x.grad(&grads).expect("tracked"), dw(l, &grads)]
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
                let [y, z] = [forward(&l, uses[0], &first), forward(&l, uses[1], &second)];
                set_float8_enabled(&l, !uses[1]);
                let grads = ((y.clone() * dy(1)).sum() + (z.clone() * dy(2)).sum()).backward();

                let [want_y, dx, dw_y] = alone(&other, uses[0], seeds[0], dy(1));
                let [want_z, dz, dw_z] = alone(&other, uses[1], seeds[1], dy(2));
                assert_eq!([bits(y), bits(z)], [bits(want_y), bits(want_z)], "{what}");
                assert_eq!(bits(dw(&l, &grads)), bits(dw_y + dw_z), "{what}");
                let [ours, theirs] = [&first, &second].map(|x| bits(x.grad(&grads).expect("tracked")));
                let expected = if is_shared { [dx.clone() + dz.clone(), dx + dz] } else { [dx, dz] };
                assert_eq!([ours, theirs], expected.map(bits), "{what}");
                let on = uses.into_iter().filter(|is_on| *is_on).count() as u64;
                let wgrads = if has_float8_wgrad(recipe) { on } else { 0 };
                let expected = [[on, on, wgrads], [2 - on, 2 - on, 2 - wgrads]];
                assert_eq!(calls(&layer_of(&l, "linear")), expected, "{what}");
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
        let ran = [1, u64::from(is_tracked), 0];
        let expected = if is_on { [ran, [0; 3]] } else { [[0; 3], ran] };
        assert_eq!(calls(&layer_of(&l, "linear")), expected, "{what}");
    }
}

/// Two linears of one shape and one conversion read one x, each with its own recipe or in high
/// precision, under one loss or under two.
#[test]
fn one_x_into_two_linears() {
    let others = |a| Recipe::ALL.into_iter().filter(move |b| *b != a).map(Some).chain([None]);
    for (a, b) in Recipe::ALL.into_iter().flat_map(|a| others(a).map(move |b| (a, b))) {
        let config = Float8Config::new(a).with_strict(true);
        let config = match b {
            Some(b) => config.with_override(["1"], Float8LinearConfig::new(b)),
            None => config.with_filter_fqns(["1"]),
        };
        let new = || applied(&config, [(); 2].map(|()| LinearConfig::new(K, N).init::<B>(&Default::default())));
        for is_tracked in [true, false] {
            let what = format!("{a} and {b:?}, {is_tracked}");
            let x = || x(1).set_require_grad(is_tracked);
            let loss = |i: usize, y: &Tensor<B, 2>| (y.clone() * dy(i as u64)).sum();
            // y, dw and calls of each use, and dx.
            let run = |uses: &[usize]| {
                let (model, x) = (new(), x());
                let ys: Vec<_> = uses.iter().map(|i| model[*i].forward(x.clone())).collect();
                let losses = uses.iter().zip(&ys).map(|(i, y)| loss(*i, y));
                let grads = losses.reduce(|a, b| a + b).expect("one at least").backward();
                let found = uses
                    .iter()
                    .zip(ys)
                    .map(|(i, y)| (bits(y), bits(dw(&model[*i], &grads)), calls(&layer_of(&model, &i.to_string()))));
                (found.collect::<Vec<_>>(), x.grad(&grads))
            };
            let [(of_a, dx_of_a), (of_b, dx_of_b)] = [run(&[0]), run(&[1])];
            let alone = [of_a, of_b].concat();
            let (both, dx) = run(&[0, 1]);
            assert_eq!(both, alone, "{what}");
            assert_eq!(dx.map(bits), dx_of_a.zip(dx_of_b).map(|(a, b)| bits(a + b)), "{what}: dx");
            for order in [[0, 1], [1, 0]] {
                let (model, x) = (new(), x());
                let losses = [0, 1].map(|i| loss(i, &model[i].forward(x.clone())));
                for i in order {
                    assert_eq!(bits(dw(&model[i], &losses[i].backward())), alone[i].1, "{what}, {order:?}: dw");
                }
            }
        }
    }
}

/// With `matmul = true`, a product with a weight is its linear. Products of x and y have the shapes
/// of a weight gradient and still equal the products without FP8; their share of the loss is 0.
#[test]
fn a_product_of_inputs_is_no_weight_gradient() {
    type Forward = fn(&Linear<B>, Tensor<B, 2>) -> Tensor<B, 2>;
    let by_linear: Forward = |l, x| l.forward(x);
    let by_matmul: Forward = |l, x| x.matmul(l.weight.val());
    for recipe in Recipe::ALL {
        let config = Float8Config::from(Float8LinearConfig::new(recipe).with_matmul(true)).with_strict(true);
        let run = |forward: Forward, has_products: bool| {
            let l: Linear<B> = applied(&config, LinearConfig::new(K, N).with_bias(false).init(&Default::default()));
            let x = x(1).require_grad();
            let y = forward(&l, x.clone());
            let mut loss = (y.clone() * dy(1)).sum();
            for right in [y.clone(), dy(2)].into_iter().filter(|_| has_products) {
                let product = x.clone().transpose().matmul(right.clone());
                let [plain_x, plain_right]: [Tensor<Plain, 2>; 2] = [x.clone(), right].map(constant);
                assert_eq!(bits(product.clone()), bits(plain_x.transpose().matmul(plain_right)), "{recipe}");
                loss = loss + product.tanh().sum() * 0.0;
            }
            let grads = loss.backward();
            let gradients = [x.grad(&grads).expect("tracked"), dw(&l, &grads)].map(bits);
            (bits(y), gradients, calls(&layer_of(&l, "linear")))
        };
        let expected = run(by_linear, false);
        let wgrads = u64::from(has_float8_wgrad(recipe));
        assert_eq!(expected.2, [[1, 1, wgrads], [0, 0, 1 - wgrads]], "{recipe}");
        for (forward, has_products) in [(by_linear, true), (by_matmul, false), (by_matmul, true)] {
            assert_eq!(run(forward, has_products), expected, "{recipe} {has_products}");
        }
    }
}
