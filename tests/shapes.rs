//! Any M, K and N, any rank, any strides: the result is that of the plain, contiguous, two-dimensional linear.
use burn::backend::Autodiff;
use burn::tensor::module::linear;
use burn::tensor::{Tensor, s};
use burn_float8::{Float8, Float8Backend};

use crate::on_every_runtime;
use crate::support::normal;
use crate::support::operand::{tensor, values};

/// y, dx, dw of a two-dimensional linear.
fn run<B: Float8Backend>(x: Tensor<Autodiff<Float8<B>>, 2>, w: Tensor<Autodiff<Float8<B>>, 2>) -> [Vec<f32>; 3] {
    let (x, w) = (x.detach().require_grad(), w.detach().require_grad());
    let y = linear(x.clone(), w.clone(), None);
    let grads = y.clone().powf_scalar(2.0).sum().backward();
    [values(y), values(x.grad(&grads).unwrap()), values(w.grad(&grads).unwrap())]
}

fn ragged_on<B: Float8Backend>(runtime: &str) {
    type A<B> = Autodiff<Float8<B>>;
    for [m, k, n] in [[1, 1, 1], [1, 5, 3], [3, 1, 2], [2, 3, 1], [17, 33, 65], [64, 64, 64], [5, 130, 7]] {
        let (xs, ws) = (normal(m * k, 1), normal(k * n, 2));
        let [y, dx, dw] = run::<B>(tensor(xs.clone(), [m, k]), tensor(ws.clone(), [k, n]));
        assert_eq!([y.len(), dx.len(), dw.len()], [m * n, m * k, k * n], "{runtime} {m}x{k}x{n}");
        // The same values, padded with zeros to multiples of 16 by hand.
        let [pm, pk, pn] = [m, k, n].map(|d| d.next_multiple_of(16));
        let pad = |v: &[f32], [r, c]: [usize; 2], [pr, pc]: [usize; 2]| {
            let mut padded = vec![0.0; pr * pc];
            (0..r).for_each(|i| padded[i * pc..i * pc + c].copy_from_slice(&v[i * c..][..c]));
            tensor::<A<B>, 2>(padded, [pr, pc])
        };
        let crop = |v: Vec<f32>, [r, c]: [usize; 2], pc: usize| -> Vec<f32> {
            (0..r).flat_map(|i| v[i * pc..i * pc + c].to_vec()).collect()
        };
        let [py, pdx, pdw] = run::<B>(pad(&xs, [m, k], [pm, pk]), pad(&ws, [k, n], [pk, pn]));
        let padded = [crop(py, [m, n], pn), crop(pdx, [m, k], pk), crop(pdw, [k, n], pn)];
        for ((name, ours), padded) in ["y", "dx", "dw"].iter().zip([y, dx, dw]).zip(padded) {
            let largest = padded.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
            let error = crate::support::max_error(&ours, &padded) / f64::from(largest);
            assert!(error < 1e-5, "{runtime} {m}x{k}x{n} {name}: {error:e}");
        }
    }
}

#[test]
fn ragged_shapes_equal_padded_ones() {
    on_every_runtime!(ragged_on);
}

fn strided_on<B: Float8Backend>(runtime: &str) {
    type A<B> = Autodiff<Float8<B>>;
    let [m, k, n] = [12, 20, 9];
    let (xs, ws) = (normal(m * k, 1), normal(k * n, 2));
    let plain = run::<B>(tensor(xs.clone(), [m, k]), tensor(ws.clone(), [k, n]));
    let transposed = |v: &[f32], [r, c]: [usize; 2]| {
        let t: Vec<_> = (0..c).flat_map(|j| (0..r).map(move |i| i * c + j)).map(|i| v[i]).collect();
        tensor::<A<B>, 2>(t, [c, r]).transpose()
    };
    let sliced = |v: &[f32], [r, c]: [usize; 2]| {
        let mut wide = normal((r + 2) * (c + 3), 5);
        (0..r).for_each(|i| wide[(i + 1) * (c + 3) + 2..][..c].copy_from_slice(&v[i * c..][..c]));
        tensor::<A<B>, 2>(wide, [r + 2, c + 3]).slice(s![1..r + 1, 2..c + 2])
    };
    for (name, x, w) in [
        ("transposed", transposed(&xs, [m, k]), transposed(&ws, [k, n])),
        ("sliced", sliced(&xs, [m, k]), sliced(&ws, [k, n])),
    ] {
        for (ours, plain) in run::<B>(x, w).iter().zip(&plain) {
            assert!(crate::support::relative_error(ours, plain) < 1e-6, "{runtime} {name}");
        }
    }
}

#[test]
fn strided_inputs_equal_contiguous_ones() {
    on_every_runtime!(strided_on);
}

fn ranks_on<B: Float8Backend>(runtime: &str) {
    type F<B> = Float8<B>;
    let (xs, ws) = (normal(24 * 10, 1), normal(10 * 6, 2));
    let w: Tensor<F<B>, 2> = tensor(ws, [10, 6]);
    let plain = values(linear(tensor::<F<B>, 2>(xs.clone(), [24, 10]), w.clone(), None));
    let x5 = tensor::<F<B>, 5>(xs.clone(), [2, 3, 1, 4, 10]);
    assert_eq!(values(linear(x5, w.clone(), None)), plain, "{runtime} rank 5");
    let x4 = tensor::<F<B>, 4>(xs.clone(), [2, 3, 4, 10]);
    assert_eq!(values(linear(x4, w.clone(), None)), plain, "{runtime} rank 4");
    // Leading axes out of order: no single row stride.
    let permuted: Vec<_> =
        (0..3).flat_map(|j| (0..2).flat_map(move |i| (0..40).map(move |e| (i * 3 + j) * 40 + e))).collect();
    let x = tensor::<F<B>, 4>(permuted.into_iter().map(|i| xs[i]).collect(), [3, 2, 4, 10]).swap_dims(0, 1);
    assert_eq!(values(linear(x, w.clone(), None)), plain, "{runtime} permuted");
    let x1 = tensor::<F<B>, 1>(xs[..10].to_vec(), [10]);
    assert_eq!(values(linear(x1, w.clone(), None)).len(), 6, "{runtime} rank 1");
    let empty = Tensor::<F<B>, 2>::zeros([0, 10], &Default::default());
    assert_eq!(linear(empty, w, None).dims(), [0, 6], "{runtime} empty batch");
}

#[test]
fn every_rank_and_empty_batches() {
    on_every_runtime!(ranks_on);
}
