//! SwiGLU, RMSNorm, rotary positions and log-likelihoods as nodes, their results and gradients, against their definitions in f64.
use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_float8::{
    Float8, Float8Config, Recipe,
    backend::Float8Backend,
    begin_float8_step,
    config::StatisticsConfig,
    nn::{log_likelihood, rms_norm, rotary, swiglu},
    without_float8,
};

use float8_kernels::reference::fused as reference;

use crate::on_every_runtime;
use crate::support::linear::layer;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{max_error, normal};

type A<B> = Float8<Autodiff<B>>;

/// The node's result and the gradients of its inputs, where the result's is `dy`.
fn got<B: Float8Backend, const D: usize, const E: usize>(
    dtype: DType,
    inputs: &[(Vec<f32>, Vec<usize>)],
    dy: &[f32],
    run: impl Fn(Tensor<A<B>, D>, Option<Tensor<A<B>, D>>, Option<Tensor<A<B>, 1>>) -> Tensor<A<B>, E>,
) -> Vec<Vec<f32>> {
    let leaf = |(values, shape): &(Vec<f32>, Vec<usize>)| {
        let shape: [usize; D] = shape.clone().try_into().expect("D axes");
        tensor::<A<B>, D>(values.clone(), shape).cast(dtype).require_grad()
    };
    let x = leaf(&inputs[0]);
    let (mut second, mut vector) = (None, None);
    match inputs.get(1) {
        Some((values, shape)) if shape.len() == 1 => {
            vector = Some(tensor::<A<B>, 1>(values.clone(), [shape[0]]).require_grad());
        }
        Some(other) => second = Some(leaf(other)),
        None => {}
    }
    let y = run(x.clone(), second.clone(), vector.clone());
    assert_eq!(y.dtype(), dtype);
    let shape = y.dims();
    let grads = (y.clone() * tensor::<A<B>, E>(dy.to_vec(), shape).cast(dtype)).sum().backward();
    let mut results = vec![values(y.inner()), values(x.grad(&grads).expect("a gradient"))];
    results.extend(second.map(|t| values(t.grad(&grads).expect("a gradient"))));
    results.extend(vector.map(|t| values(t.grad(&grads).expect("a gradient"))));
    results
}

fn assert_close(what: &str, got: &[Vec<f32>], want: &[Vec<f64>], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
        let largest = want.iter().fold(1e-3, |max: f64, x| max.max(f64::from(x.abs())));
        let error = max_error(got, &want);
        assert!(error <= tolerance * largest, "{what}: result {i} differs by {error:e} of {largest:e}");
    }
}

fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

fn swiglu_want(a: &[f32], b: &[f32], dy: &[f32]) -> Vec<Vec<f64>> {
    [vec![reference::swiglu(a, b)], reference::swiglu_backward(a, b, dy).to_vec()].concat()
}

/// Many values, so that several tasks have some; and those whose exponentials overflow.
fn gates(len: usize) -> Vec<f32> {
    let mut gates: Vec<f32> = normal(len, 1).into_iter().map(|x| 3.0 * x).collect();
    let special = [0.0, -0.0, 100.0, -100.0, 1e30, -1e30, 87.5, -87.5];
    gates[..special.len()].copy_from_slice(&special);
    gates
}

fn swiglu_on<B: Float8Backend>(runtime: &str) {
    for shape in [vec![1, 9], vec![300, 257]] {
        let len = shape.iter().product();
        let (a, mut b, dy) = (gates(len), normal(len, 2), normal(len, 3));
        // 1e30 times what is small is finite.
        b.iter_mut().zip(&a).filter(|(_, a)| a.abs() > 1e3).for_each(|(b, _)| *b = 1e-25);
        let want = swiglu_want(&a, &b, &dy);
        let inputs = [(a, shape.clone()), (b, shape)];
        let got = got::<B, 2, 2>(DType::F32, &inputs, &dy, |a, b, _| swiglu(a, b.unwrap()));
        // The derivative where the gate is 1e30 is of that size: by itself.
        let near = |results: &[Vec<f32>]| results.iter().map(|x| [&x[..4], &x[6..]].concat()).collect::<Vec<_>>();
        let want_near: Vec<Vec<f64>> = want.iter().map(|x| [&x[..4], &x[6..]].concat()).collect();
        assert_close(&format!("{runtime} swiglu"), &near(&got), &want_near, 1e-6);
        for (got, want) in got.iter().zip(&want) {
            for i in 4..6 {
                let error = (f64::from(got[i]) - want[i]).abs();
                assert!(error <= 1e-5 * want[i].abs().max(1.0), "{runtime}: {:e}, not {:e}", got[i], want[i]);
            }
        }
    }
}

#[test]
fn swiglu_is_its_definition() {
    on_every_runtime!(swiglu_on);
}

const EPSILON: f64 = 1e-5;

fn rms_norm_want(x: &[f32], gamma: &[f32], dy: &[f32]) -> Vec<Vec<f64>> {
    let y = reference::rms_norm(x, gamma, EPSILON);
    [vec![y], reference::rms_norm_backward(x, gamma, dy, EPSILON).to_vec()].concat()
}

fn rms_norm_on<B: Float8Backend>(runtime: &str) {
    for [rows, width] in [[1, 1], [3, 5], [700, 96]] {
        let (mut x, gamma, dy) = (normal(rows * width, 4), normal(width, 5), normal(rows * width, 6));
        // A row of zeros is one of zeros, with a gradient.
        x[..width].fill(0.0);
        let want = rms_norm_want(&x, &gamma, &dy);
        let inputs = [(x, vec![rows, width]), (gamma, vec![width])];
        let got = got::<B, 2, 2>(DType::F32, &inputs, &dy, |x, _, gamma| rms_norm(x, gamma.unwrap(), EPSILON));
        assert_close(&format!("{runtime} rms_norm {rows} x {width}"), &got, &want, 3e-6);
    }
}

#[test]
fn rms_norm_is_its_definition() {
    on_every_runtime!(rms_norm_on);
}

const SHAPE: [usize; 4] = [2, 7, 3, 10];

fn angles() -> [Vec<f32>; 2] {
    let angle = |i: usize| (i / 5) as f32 * 0.3f32.powi((i % 5) as i32);
    [f32::cos, f32::sin].map(|function| (0..7 * 5).map(|i| function(angle(i))).collect())
}

fn rotary_want(x: &[f32], dy: &[f32]) -> Vec<Vec<f64>> {
    let [cos, sin] = angles();
    let turned = |x, back| reference::rotary(x, [&cos, &sin], SHAPE, back);
    vec![turned(x, false), turned(dy, true)]
}

fn rotary_on<B: Float8Backend>(runtime: &str) {
    let len = SHAPE.iter().product();
    let (x, dy) = (normal(len, 7), normal(len, 8));
    let want = rotary_want(&x, &dy);
    let [cos, sin] = angles().map(|table| tensor::<A<B>, 2>(table, [7, 5]));
    let got = got::<B, 4, 4>(DType::F32, &[(x, SHAPE.to_vec())], &dy, |x, _, _| rotary(x, cos.clone(), sin.clone()));
    assert_close(&format!("{runtime} rotary"), &got, &want, 1e-6);
}

#[test]
fn rotary_is_its_definition() {
    on_every_runtime!(rotary_on);
}

fn log_likelihood_want(logits: &[f32], targets: &[usize], dy: &[f32]) -> Vec<Vec<f64>> {
    let width = logits.len() / targets.len();
    let (mut y, mut dl) = (vec![], vec![]);
    for ((logits, &target), dy) in f64s(logits).chunks(width).zip(targets).zip(f64s(dy)) {
        let log_sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
        y.push(logits[target] - log_sum);
        let onehot = |i| if i == target { 1.0 } else { 0.0 };
        dl.extend(logits.iter().enumerate().map(|(i, l)| dy * (onehot(i) - (l - log_sum).exp())));
    }
    vec![y, dl]
}

fn log_likelihood_on<B: Float8Backend>(runtime: &str) {
    for [rows, width] in [[1, 1], [5, 3], [90, 700]] {
        let (logits, dy) = (normal(rows * width, 9).into_iter().map(|x| 4.0 * x).collect::<Vec<_>>(), normal(rows, 10));
        let targets: Vec<usize> = (0..rows).map(|i| i * 37 % width).collect();
        let want = log_likelihood_want(&logits, &targets, &dy);
        let ids: Vec<i32> = targets.iter().map(|&target| target as i32).collect();
        let ids = Tensor::<A<B>, 1, Int>::from_data(TensorData::new(ids, [rows]), &Default::default());
        let inputs = [(logits, vec![rows, width])];
        let got = got::<B, 2, 2>(DType::F32, &inputs, &dy, |logits, _, _| log_likelihood(logits, ids.clone()));
        assert_close(&format!("{runtime} log_likelihood {rows} x {width}"), &got, &want, 2e-6);
    }
}

#[test]
fn log_likelihood_is_its_definition() {
    on_every_runtime!(log_likelihood_on);
}

/// bf16 goes in and out, and nothing is rounded between.
#[test]
fn fused_operations_in_bf16() {
    let round = |x: Vec<f32>| {
        let len = x.len();
        values(tensor::<Flex, 1>(x, [len]).cast(DType::BF16))
    };
    let [a, b, dy] = [1, 2, 3].map(|seed| round(normal(600, seed)));
    let gamma = normal(20, 4);
    let two = [(a.clone(), vec![30, 20]), (b.clone(), vec![30, 20])];
    let result = got::<Flex, 2, 2>(DType::BF16, &two, &dy, |a, b, _| swiglu(a, b.unwrap()));
    assert_close("swiglu", &result, &swiglu_want(&a, &b, &dy), 4e-3);
    let two = [(a.clone(), vec![30, 20]), (gamma.clone(), vec![20])];
    let result = got::<Flex, 2, 2>(DType::BF16, &two, &dy, |x, _, gamma| rms_norm(x, gamma.unwrap(), EPSILON));
    assert_close("rms_norm", &result, &rms_norm_want(&a, &gamma, &dy), 4e-3);
    let len = SHAPE.iter().product();
    let [x, dy] = [5, 6].map(|seed| round(normal(len, seed)));
    let [cos, sin] = angles().map(|table| tensor::<A<Flex>, 2>(table, [7, 5]));
    let one = [(x.clone(), SHAPE.to_vec())];
    let result = got::<Flex, 4, 4>(DType::BF16, &one, &dy, |x, _, _| rotary(x, cos.clone(), sin.clone()));
    assert_close("rotary", &result, &rotary_want(&x, &dy), 4e-3);
}

/// On a backend that is no `Float8`, and in f64, the same by Burn's operations.
#[test]
fn fused_operations_elsewhere() {
    let device = Default::default();
    let ours = |values: &[f32]| tensor::<A<Flex>, 2>(values.to_vec(), [6, 10]);
    let plain = |values: &[f32]| tensor::<Flex, 2>(values.to_vec(), [6, 10]);
    let [a, b] = [1, 2].map(|seed| normal(60, seed));
    let gamma = normal(10, 3);
    let table = |i: usize| angles()[i][..15].to_vec();
    let heads = |x: Vec<f32>| -> [usize; 4] { [2, 3, 1, x.len() / 6] };
    let ids = vec![1, 9, 0, 4, 4, 2];
    let all = [
        (values(swiglu(ours(&a), ours(&b)).inner()), values(swiglu(plain(&a), plain(&b)))),
        (
            values(rms_norm(ours(&a), tensor(gamma.clone(), [10]), EPSILON).inner()),
            values(rms_norm(plain(&a), tensor(gamma.clone(), [10]), EPSILON)),
        ),
        (
            values(
                rotary(ours(&a).reshape(heads(a.clone())), tensor(table(0), [3, 5]), tensor(table(1), [3, 5])).inner(),
            ),
            values(rotary(plain(&a).reshape(heads(a.clone())), tensor(table(0), [3, 5]), tensor(table(1), [3, 5]))),
        ),
        (
            values(log_likelihood(ours(&a), Tensor::from_data(TensorData::new(ids.clone(), [6]), &device)).inner()),
            values(log_likelihood(plain(&a), Tensor::from_data(TensorData::new(ids, [6]), &device))),
        ),
    ];
    for (ours, plain) in all {
        assert!(max_error(&ours, &plain) < 1e-6);
    }
    let double = || ours(&a).cast(DType::F64);
    assert_eq!(swiglu(double(), double()).dtype(), DType::F64);
    assert_eq!(rms_norm(double(), tensor(gamma, [10]), EPSILON).dtype(), DType::F64);
}

/// A linear casts what stands before it with the maxima that this leaves: the same bits as from the tensor alone.
fn maxima_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [48, 96, 32];
    let [x, dy] = [(1, m * k), (2, m * n)].map(|(seed, len)| normal(len, seed));
    for (recipe, special) in [(Recipe::Tensorwise, 0.5), (Recipe::Tensorwise, f32::NAN), (Recipe::Rowwise, 0.5)] {
        let weight = tensor::<A<B>, 2>(normal(k * n, 3), [k, n]);
        let layer = layer::<B>(&Float8Config::new(recipe), weight, None);
        let run = |own: bool| {
            let mut x = x.clone();
            x[m * k - 1] = special;
            let (x, gamma) = (tensor::<A<B>, 3>(x, [2, m / 2, k]).require_grad(), tensor(normal(k, 4), [k]));
            let h = swiglu(x.clone(), x.clone());
            let [h, normed] = [h.clone(), rms_norm(x.clone(), gamma, EPSILON)].map(|h| if own { h } else { h * 1.0 });
            let y = layer.forward(h) + layer.forward(normed);
            let grads = (y.clone() * tensor::<A<B>, 3>(dy.clone(), [2, m / 2, n])).sum().backward();
            [y.inner(), x.grad(&grads).expect("a gradient")].map(values).concat()
        };
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let (own, found) = (run(true), run(false));
        assert_eq!(own.iter().any(|x| x.is_nan()), special.is_nan(), "{runtime} {recipe}");
        assert_eq!(bits(own), bits(found), "{runtime} {recipe}");
    }
}

/// What is deferred, of two tensors: `[M, K]` both, or γ the second.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DeferredOp {
    SwiGlu,
    RmsNorm,
}

impl DeferredOp {
    fn second<B: Backend>(self, [m, k]: [usize; 2]) -> Tensor<B, 2> {
        let rows = if self == Self::SwiGlu { m } else { 1 };
        tensor(normal(rows * k, 2), [rows, k])
    }

    fn of<B: Backend>(self, a: Tensor<B, 2>, b: Tensor<B, 2>) -> Tensor<B, 2> {
        match self {
            Self::SwiGlu => swiglu(a, b),
            Self::RmsNorm => rms_norm(a, b.squeeze_dim(0), EPSILON),
        }
    }
}

/// What a cast makes, or something else: the same bits as where it is written first, whatever reads it and in whatever order.
fn deferred_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [140, 96, 32];
    type Reader<B> = fn(Tensor<A<B>, 2>, &Linear<A<B>>) -> Tensor<A<B>, 2>;
    let readers: [(&str, Reader<B>); 7] = [
        ("alone", |h, layer| layer.forward(h)),
        ("before", |h, layer| {
            let sum = h.clone().sum_dim(1);
            layer.forward(h) * sum
        }),
        ("after", |h, layer| layer.forward(h.clone()) * h.sum_dim(1)),
        ("twice", |h, layer| layer.forward(h.clone()) * layer.forward(h).abs()),
        ("reshaped", |h, layer| layer.forward(h.reshape([2, 70, 96])).reshape([140, 32])),
        ("detached", |h, layer| layer.forward(h.clone().detach()) + layer.forward(h)),
        ("read", |h, layer| {
            let all: f32 = h.clone().inner().into_data().to_vec::<f32>().expect("f32").iter().sum();
            layer.forward(h) * all
        }),
    ];
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let of_swiglu =
        readers.iter().flat_map(|reader| [(reader, DeferredOp::SwiGlu, false), (reader, DeferredOp::SwiGlu, true)]);
    let cases =
        of_swiglu.chain([&readers[0], &readers[2]].into_iter().map(|reader| (reader, DeferredOp::RmsNorm, false)));
    for (recipe, ((name, reader), op, statistics)) in
        Recipe::ALL.into_iter().flat_map(|r| cases.clone().map(move |c| (r, c)))
    {
        let run = |own: bool| {
            let config = Float8Config::new(recipe);
            let config = if statistics { config.with_statistics(StatisticsConfig::every(1)) } else { config };
            let layer = layer::<B>(&config, tensor::<A<B>, 2>(normal(k * n, 3), [k, n]), None);
            let step = |seed: u64| {
                let a = tensor::<A<B>, 2>(normal(m * k, seed), [m, k]).require_grad();
                let b = op.second::<A<B>>([m, k]).require_grad();
                let between = |h: Tensor<A<B>, 2>| if own { h } else { h * 1.0 };
                let y = reader(between(op.of(a.clone(), b.clone())), &layer);
                let dy = tensor::<A<B>, 2>(normal(m * n, 4), [m, n]);
                let grads = (y.clone() * dy).sum().backward();
                let gradient = |t: &Tensor<A<B>, 2>| values(t.grad(&grads).expect("a gradient"));
                let made = [gradient(&a), gradient(&b), gradient(&layer.weight), values(y.inner())].concat();
                begin_float8_step(&layer);
                // Without gradients, and without FP8.
                let layer = layer.clone().no_grad();
                let h = between(op.of(a.detach(), b.detach()));
                let evaluated = [layer.forward(h.clone()), without_float8(layer).forward(h)];
                [made, evaluated.map(|y| values(y.inner())).concat()].concat()
            };
            // The second has a history.
            [step(1), step(5)].concat()
        };
        assert!(bits(run(true)) == bits(run(false)), "{runtime} {recipe}, {op:?} {name}, statistics: {statistics}");
    }
}

#[test]
fn swiglu_and_rms_norm_are_made_by_the_cast_that_follows() {
    on_every_runtime!(deferred_on);
}

#[test]
fn a_cast_with_the_maxima_of_its_neighbour() {
    on_every_runtime!(maxima_on);
}

/// What an operation leaves of the gradient of a linear's output, the linear casts with its maxima: the same bits as from the gradient alone,
/// whatever else reads the output.
fn gradient_maxima_on<B: Float8Backend>(runtime: &str) {
    let [batch, len, heads, dim, k] = [2, 7, 3, 10, 48];
    let n = heads * dim;
    let leaf = |seed: u64, shape: [usize; 3]| tensor::<A<B>, 3>(normal(shape.iter().product(), seed), shape);
    let table = |i: usize| tensor::<A<B>, 2>(angles()[i].clone(), [len, dim / 2]);
    let recipes = [Recipe::Tensorwise, Recipe::Delayed, Recipe::Rowwise];
    let cases = recipes.into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)]);
    for (recipe, read_again) in cases {
        let weights = [3, 4, 5].map(|seed| tensor::<A<B>, 2>(normal(k * n, seed), [k, n]));
        let layers = weights.map(|weight| layer::<B>(&Float8Config::new(recipe), weight, None));
        for special in [0.5, f32::NAN] {
            let run = |own: bool| {
                let between = |h: Tensor<A<B>, 3>| if own { h } else { h * 1.0 };
                let x = leaf(1, [batch, len, k]).require_grad();
                let [gate, up, q] = layers.each_ref().map(|layer| layer.forward(x.clone()));
                let again = (gate.clone().powi_scalar(2) + q.clone()) * 0.25;
                let turned = rotary(between(q).reshape([batch, len, heads, dim]), table(0), table(1));
                let turned = turned.swap_dims(1, 2).reshape([batch, len, n]);
                let (gate, up) = (between(gate), between(up));
                let mut h = swiglu(gate.clone(), up.clone()) + turned;
                if read_again {
                    h = h + again + swiglu(up, leaf(6, [batch, len, n]));
                }
                let mut dy = normal(batch * len * n, 2);
                dy[5] = special;
                let grads = (h.clone() * tensor::<A<B>, 3>(dy, [batch, len, n])).sum().backward();
                let weights = layers.each_ref().map(|layer| values(layer.weight.grad(&grads).expect("a gradient")));
                [weights.concat(), values(h.inner()), values(x.grad(&grads).expect("a gradient"))].concat()
            };
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let (own, found) = (run(true), run(false));
            assert_eq!(own.iter().any(|x| x.is_nan()), special.is_nan(), "{runtime} {recipe}");
            assert!(bits(own) == bits(found), "{runtime} {recipe}, read again: {read_again}");
        }
    }
}

#[test]
fn a_gradient_is_cast_with_the_maxima_of_its_maker() {
    on_every_runtime!(gradient_maxima_on);
}
