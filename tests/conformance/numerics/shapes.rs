//! Any M, K and N, any rank and any strides, forward and backward.
//!
//! Results equal the definition, which pads nothing, and the plain contiguous two-dimensional
//! linear.
use burn::backend::Autodiff;
use burn::nn::Linear;
use burn::tensor::{Tensor, s};
use burn_float8::{Float8, Float8Config, Float8LinearConfig, Recipe, backend::Float8Backend};
use test_data::transpose;

use crate::on_every_runtime;
use crate::support::linear::{forward_backward, from_values, layer};
use crate::support::operand::{tensor, values};
use crate::support::{max_error, normal, oracle, relative_error};

type A<B> = Float8<Autodiff<B>>;

fn ragged_on<B: Float8Backend>(runtime: &str) {
    for [m, k, n] in
        [[1, 1, 1], [1, 5, 3], [3, 1, 2], [2, 3, 1], [17, 33, 65], [64, 64, 64], [5, 130, 7], [257, 15, 129]]
    {
        let (x, w, b, dy) = (normal(m * k, 1), normal(k * n, 2), normal(n, 3), normal(m * n, 4));
        for recipe in Recipe::ALL {
            let config = Float8LinearConfig::new(recipe);
            let [mut y, dx, dw] = oracle::linear([&x, &w, &dy], [m, k, n], &config, [None; 3]);
            y.iter_mut().enumerate().for_each(|(i, y)| *y += b[i % n]);
            let db: Vec<_> = (0..n).map(|j| (0..m).map(|i| f64::from(dy[i * n + j])).sum::<f64>() as f32).collect();
            let ours = from_values::<B>(&config.into(), [&x, &w, &dy], [m, k, n], Some(&b));
            for ((name, ours), exact) in ["y", "dx", "dw", "db"].iter().zip(ours).zip([y, dx, dw, db]) {
                let largest = exact.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
                let error = max_error(&ours, &exact) / f64::from(largest);
                assert!(error < 4e-6, "{runtime} {recipe} {m}x{k}x{n} {name}: {error:e} of the largest");
            }
        }
    }
}

#[test]
fn ragged_shapes_equal_their_definition() {
    on_every_runtime!(ragged_on);
}

fn strided_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [12, 20, 9];
    let (xs, ws, dys) = (normal(m * k, 1), normal(k * n, 2), normal(m * n, 3));
    let transposed = |v: &[f32], [r, c]: [usize; 2]| tensor::<A<B>, 2>(transpose(v, [r, c]), [c, r]).transpose();
    let sliced = |v: &[f32], [r, c]: [usize; 2]| {
        let mut wide = normal((r + 2) * (c + 3), 5);
        (0..r).for_each(|i| wide[(i + 1) * (c + 3) + 2..][..c].copy_from_slice(&v[i * c..][..c]));
        tensor::<A<B>, 2>(wide, [r + 2, c + 3]).slice(s![1..r + 1, 2..c + 2])
    };
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe);
        let plain = from_values::<B>(&config, [&xs, &ws, &dys], [m, k, n], None);
        let check = |name: &str, [x, w, dy]: [Tensor<A<B>, 2>; 3]| {
            let ours = forward_backward(&layer::<B>(&config, w, None), x, dy);
            for (ours, plain) in ours.iter().zip(&plain) {
                assert!(relative_error(ours, plain) < 1e-6, "{runtime} {recipe} {name}");
            }
        };
        let inputs = [(&xs, [m, k]), (&ws, [k, n]), (&dys, [m, n])];
        check("transposed", inputs.map(|(v, shape)| transposed(v, shape)));
        check("sliced", inputs.map(|(v, shape)| sliced(v, shape)));
    }
}

#[test]
fn strided_inputs_equal_contiguous_ones() {
    on_every_runtime!(strided_on);
}

/// Leading axes out of order, so there is no single row stride: `[2, 3, 4, c]` as a view of
/// `[3, 2, 4, c]`.
fn permuted<B: Float8Backend>(v: &[f32], c: usize) -> Tensor<A<B>, 4> {
    let block = 4 * c;
    let order = (0..3).flat_map(|j| (0..2).map(move |i| i * 3 + j));
    tensor(order.flat_map(|b| v[b * block..][..block].to_vec()).collect(), [3, 2, 4, c]).swap_dims(0, 1)
}

fn ranks_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [24, 10, 6];
    let (xs, ws, bs, dys) = (normal(m * k, 1), normal(k * n, 2), normal(n, 3), normal(m * n, 4));
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe);
        let new = || layer::<B>(&config, tensor(ws.clone(), [k, n]), Some(tensor(bs.clone(), [n])));
        let plain = from_values::<B>(&config, [&xs, &ws, &dys], [m, k, n], Some(&bs));
        let same = |ours: Vec<Vec<f32>>, plain: &[Vec<f32>], what: &str| {
            for (ours, plain) in ours.iter().zip(plain) {
                assert!(relative_error(ours, plain) < 1e-6, "{runtime} {recipe} {what}");
            }
        };
        let r3 = |v: &[f32], c| tensor::<A<B>, 3>(v.to_vec(), [4, 6, c]);
        let r4 = |v: &[f32], c| tensor::<A<B>, 4>(v.to_vec(), [2, 3, 4, c]);
        let r5 = |v: &[f32], c| tensor::<A<B>, 5>(v.to_vec(), [2, 3, 1, 4, c]);
        same(forward_backward(&new(), r3(&xs, k), r3(&dys, n)), &plain, "rank 3");
        same(forward_backward(&new(), r4(&xs, k), r4(&dys, n)), &plain, "rank 4");
        same(forward_backward(&new(), r5(&xs, k), r5(&dys, n)), &plain, "rank 5");
        same(forward_backward(&new(), permuted::<B>(&xs, k), permuted::<B>(&dys, n)), &plain, "permuted");
        let one = from_values::<B>(&config, [&xs[..k], &ws, &dys[..n]], [1, k, n], Some(&bs));
        let r1 = |v: &[f32], c: usize| tensor::<A<B>, 1>(v[..c].to_vec(), [c]);
        same(forward_backward(&new(), r1(&xs, k), r1(&dys, n)), &one, "rank 1");

        empty_batch(&new(), runtime);
    }
}

/// No rows: empty results, and zero gradients for the parameters.
fn empty_batch<B: Float8Backend>(layer: &Linear<A<B>>, runtime: &str) {
    let [k, n] = layer.weight.dims();
    let x = Tensor::<A<B>, 2>::zeros([0, k], &Default::default()).require_grad();
    let y = layer.forward(x.clone());
    assert_eq!(y.dims(), [0, n], "{runtime} empty batch");
    // Not every backend sums an empty tensor to a loss.
    let grads = y.backward();
    assert_eq!(x.grad(&grads).expect("tracked").dims(), [0, k], "{runtime} empty batch");
    assert_eq!(values(layer.weight.grad(&grads).expect("tracked")), vec![0.0; k * n], "{runtime} empty batch");
    let bias = layer.bias.as_ref().expect("it has one");
    assert_eq!(values(bias.grad(&grads).expect("tracked")), vec![0.0; n], "{runtime} empty batch");
}

#[test]
fn every_rank_and_empty_batches() {
    on_every_runtime!(ranks_on);
}
