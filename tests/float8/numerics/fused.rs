//! SwiGLU, RMSNorm, rotary positions and log-likelihoods as autodiff nodes: results and gradients
//! against f64 definitions.
use burn::backend::Autodiff;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_float8::Float8;
use burn_float8::backend::Float8Backend;
use burn_float8::nn::{log_likelihood, rms_norm, rotary, swiglu};
use float8_kernels::reference::fused as reference;

use crate::on_cpu_and_wgpu;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{max_error, normal};

type A<B> = Float8<Autodiff<B>>;

/// Result of the node, and gradients of its inputs for the output gradient `dy`.
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

/// Enough values for several tasks, and some whose exponentials overflow.
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
        // 1e30 times a small value is finite.
        b.iter_mut().zip(&a).filter(|(_, a)| a.abs() > 1e3).for_each(|(b, _)| *b = 1e-25);
        let want = swiglu_want(&a, &b, &dy);
        let inputs = [(a, shape.clone()), (b, shape)];
        let got = got::<B, 2, 2>(DType::F32, &inputs, &dy, |a, b, _| swiglu(a, b.unwrap()));
        // The derivative at a gate of 1e30 has that magnitude, so it is compared separately.
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
    on_cpu_and_wgpu!(swiglu_on);
}

const EPSILON: f64 = 1e-5;

fn rms_norm_want(x: &[f32], gamma: &[f32], dy: &[f32]) -> Vec<Vec<f64>> {
    let y = reference::rms_norm(x, gamma, EPSILON);
    [vec![y], reference::rms_norm_backward(x, gamma, dy, EPSILON).to_vec()].concat()
}

fn rms_norm_on<B: Float8Backend>(runtime: &str) {
    for [rows, width] in [[1, 1], [3, 5], [700, 96]] {
        let (mut x, gamma, dy) = (normal(rows * width, 4), normal(width, 5), normal(rows * width, 6));
        // A row of zeros gives a row of zeros, with a gradient.
        x[..width].fill(0.0);
        let want = rms_norm_want(&x, &gamma, &dy);
        let inputs = [(x, vec![rows, width]), (gamma, vec![width])];
        let got = got::<B, 2, 2>(DType::F32, &inputs, &dy, |x, _, gamma| rms_norm(x, gamma.unwrap(), EPSILON));
        assert_close(&format!("{runtime} rms_norm {rows} x {width}"), &got, &want, 3e-6);
    }
}

#[test]
fn rms_norm_is_its_definition() {
    on_cpu_and_wgpu!(rms_norm_on);
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
    on_cpu_and_wgpu!(rotary_on);
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
    on_cpu_and_wgpu!(log_likelihood_on);
}

/// Inputs and outputs are bf16; nothing in between is rounded to it.
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

/// On a backend without `Float8`, and in f64, Burn's operations give the same.
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
