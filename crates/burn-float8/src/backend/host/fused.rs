//! [`Fused`] on the host: each operation in one pass over its rows, on all cores.
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_std::Shape;
use rayon::prelude::*;

use super::loops::TASK;
use super::vector::{dot, exp, exp_minus, max, vectorized};
use super::view::View;
use super::{attention, floats, matrix, read_ints, tensor_on};
use crate::backend::fused::{Fused, FusedBackward};

/// Fills rows of `$width` elements of `$out` in parallel tasks. A row costs as much as `$work`
/// elements. `$fill` gets the first row and a slice of rows. A macro, so that `$fill` is
/// [`vectorized`] too.
macro_rules! by_rows {
    ($out:expr, $width:expr, $work:expr, |$first:ident, $part:ident| $fill:expr) => {{
        let rows = TASK.div_ceil($work);
        $out.par_chunks_mut(rows * $width).enumerate().for_each(|(task, $part)| {
            vectorized!({
                let $first = task * rows;
                $fill;
            })
        });
    }};
}

/// [`Float8Backend::fused`](crate::backend::Float8Backend::fused) on the host.
pub(super) fn compute<B: Backend>(
    op: &Fused<B>,
    inputs: &[FloatTensor<B>],
    backward: Option<&FusedBackward<'_, B>>,
) -> Vec<FloatTensor<B>> {
    match (op, inputs, backward) {
        (Fused::Attention(attention), [q, k, v], None) => attention::forward(attention, [q, k, v]),
        (Fused::Attention(attention), [q, k, v], Some(backward)) => attention::backward(attention, [q, k, v], backward),
        (_, _, None) => vec![forward(op, inputs)],
        (_, _, Some(FusedBackward { dy, .. })) => gradients(op, inputs, dy),
    }
}

fn forward<B: Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>]) -> FloatTensor<B> {
    match (op, inputs) {
        (Fused::SwiGlu, [a, b]) => tensor::<B>(a, swiglu(&floats::<B>(a), &floats::<B>(b)), a.shape()),
        (Fused::RmsNorm { epsilon }, [x, gamma]) => {
            let y = rms_norm(&floats::<B>(x), &floats::<B>(gamma), *epsilon as f32);
            tensor::<B>(x, y, x.shape())
        }
        (Fused::Rotary, [x, cos, sin]) => {
            let [batch, len, heads, dim] = x.shape().dims();
            let y = rotary::<B>(x, [cos, sin], [batch, len, heads, dim], false);
            B::float_swap_dims(tensor::<B>(x, y, [batch, len, heads, dim]), 1, 2)
        }
        (Fused::LogLikelihood { targets }, [logits]) => {
            let [rows, vocab_size] = matrix(&logits.shape());
            let targets = read_ints::<B>(targets);
            let logits_of = &*floats::<B>(logits);
            let mut y = vec![0.0; rows];
            by_rows!(y, 1, vocab_size, |first, y| {
                for (y, row) in y.iter_mut().zip(first..) {
                    let logits = &logits_of[row * vocab_size..][..vocab_size];
                    let (max, log_sum) = log_sum(logits);
                    *y = (logits[targets[row] as usize] - max) - log_sum;
                }
            });
            tensor::<B>(logits, y, [rows, 1])
        }
        _ => unreachable!("{} of {} inputs", op.names()[0], inputs.len()),
    }
}

fn gradients<B: Backend>(op: &Fused<B>, inputs: &[FloatTensor<B>], dy: &FloatTensor<B>) -> Vec<FloatTensor<B>> {
    match (op, inputs) {
        (Fused::SwiGlu, [a, b]) => {
            let [da, db] = swiglu_backward(&floats::<B>(a), &floats::<B>(b), &floats::<B>(dy));
            vec![tensor::<B>(a, da, a.shape()), tensor::<B>(b, db, b.shape())]
        }
        (Fused::RmsNorm { epsilon }, [x, gamma]) => {
            let values = [&*floats::<B>(x), &*floats::<B>(gamma), &*floats::<B>(dy)];
            let [dx, dgamma] = rms_norm_backward(values, *epsilon as f32);
            vec![tensor::<B>(x, dx, x.shape()), tensor::<B>(gamma, dgamma, gamma.shape())]
        }
        (Fused::Rotary, [x, cos, sin]) => {
            let [batch, len, heads, dim] = x.shape().dims();
            let dy = B::float_swap_dims(dy.clone(), 1, 2);
            vec![tensor::<B>(x, rotary::<B>(&dy, [cos, sin], [batch, len, heads, dim], true), x.shape())]
        }
        (Fused::LogLikelihood { targets }, [logits]) => {
            let [_, vocab_size] = matrix(&logits.shape());
            let targets = read_ints::<B>(targets);
            let (values, dy) = (&*floats::<B>(logits), &*floats::<B>(dy));
            let mut dl = vec![0.0; values.len()];
            by_rows!(dl, vocab_size, vocab_size, |first, dl| {
                for (dl, row) in dl.chunks_exact_mut(vocab_size).zip(first..) {
                    let values = &values[row * vocab_size..][..vocab_size];
                    let max = max(values);
                    dl.copy_from_slice(values);
                    let sum = exp_minus(dl, max);
                    let factor = -dy[row] / sum;
                    dl.iter_mut().for_each(|dl| *dl *= factor);
                    dl[targets[row] as usize] += dy[row];
                }
            });
            vec![tensor::<B>(logits, dl, logits.shape())]
        }
        _ => unreachable!("{} of {} inputs", op.names()[0], inputs.len()),
    }
}

/// A tensor with the dtype of `like`.
fn tensor<B: Backend>(like: &FloatTensor<B>, values: Vec<f32>, shape: impl Into<Shape>) -> FloatTensor<B> {
    tensor_on::<B>(like, values, shape, like.dtype())
}

/// `1 / (1 + e^-x)`
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    // Below -88 the result is 0. NaN stays.
    let x = if x < -88.0 { -88.0 } else { x };
    1.0 / (1.0 + exp(-x))
}

fn swiglu(a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; a.len()];
    by_rows!(y, 1, 1, |first, y| {
        let (a, b) = (&a[first..][..y.len()], &b[first..][..y.len()]);
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a * sigmoid(*a) * b;
        }
    });
    y
}

fn swiglu_backward(a: &[f32], b: &[f32], dy: &[f32]) -> [Vec<f32>; 2] {
    let [mut da, mut db] = [vec![0.0; a.len()], vec![0.0; a.len()]];
    let tasks = da.par_chunks_mut(TASK).zip(db.par_chunks_mut(TASK)).zip(a.par_chunks(TASK)).zip(b.par_chunks(TASK));
    tasks.zip(dy.par_chunks(TASK)).for_each(|((((da, db), a), b), dy)| {
        vectorized!({
            for ((((da, db), a), b), dy) in da.iter_mut().zip(&mut *db).zip(a).zip(b).zip(dy) {
                let s = sigmoid(*a);
                *da = dy * b * (s * (a * (1.0 - s) + 1.0));
                *db = dy * a * s;
            }
        })
    });
    [da, db]
}

#[inline(always)]
fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + epsilon).sqrt()
}

fn rms_norm(x: &[f32], gamma: &[f32], epsilon: f32) -> Vec<f32> {
    let width = gamma.len();
    let mut y = vec![0.0; x.len()];
    by_rows!(y, width, width, |first, y| {
        let rows = x[first * width..][..y.len()].chunks_exact(width);
        for (y, x) in y.chunks_exact_mut(width).zip(rows) {
            let inverse_rms = inverse_rms(x, epsilon);
            for ((y, x), gamma) in y.iter_mut().zip(x).zip(gamma) {
                *y = x * inverse_rms * gamma;
            }
        }
    });
    y
}

fn rms_norm_backward([x, gamma, dy]: [&[f32]; 3], epsilon: f32) -> [Vec<f32>; 2] {
    let width = gamma.len();
    let rows = TASK.div_ceil(width) * width;
    let mut dx = vec![0.0; x.len()];
    let tasks = dx.par_chunks_mut(rows).zip(x.par_chunks(rows)).zip(dy.par_chunks(rows));
    // Partial sums over some rows each, added in order.
    let partial: Vec<Vec<f32>> = tasks
        .map(|((dx, x), dy)| {
            let mut dgamma = vec![0.0; width];
            let mut g = vec![0.0; width];
            vectorized!({
                let rows = dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width));
                for ((dx, x), dy) in rows {
                    let inverse_rms = inverse_rms(x, epsilon);
                    let terms = dgamma.iter_mut().zip(&mut g).zip(gamma).zip(x).zip(dy);
                    for ((((dgamma, g), gamma), x), dy) in terms {
                        *dgamma += dy * (x * inverse_rms);
                        *g = dy * gamma;
                    }
                    let mean = dot(&g, x) * inverse_rms / width as f32;
                    for ((dx, x), g) in dx.iter_mut().zip(x).zip(&g) {
                        *dx = (g - x * inverse_rms * mean) * inverse_rms;
                    }
                }
            });
            dgamma
        })
        .collect();
    let mut dgamma = vec![0.0; width];
    partial.iter().for_each(|part| dgamma.iter_mut().zip(part).for_each(|(sum, term)| *sum += term));
    [dx, dgamma]
}

/// Rotates the two halves of each head of x `[B, T, heads, d]`. Its first three axes may be strided
/// in any order. `back` rotates by the negative angles.
fn rotary<B: Backend>(
    x: &FloatTensor<B>,
    tables: [&FloatTensor<B>; 2],
    [batch, len, heads, dim]: [usize; 4],
    back: bool,
) -> Vec<f32> {
    let half = dim / 2;
    let [cos, sin] = tables.map(floats::<B>);
    let sign = if back { -1.0 } else { 1.0 };
    let x = View::new::<B>(x);
    let mut y = vec![0.0; batch * len * heads * dim];
    by_rows!(y, heads * dim, heads * dim, |first, y| {
        for (y, row) in y.chunks_exact_mut(heads * dim).zip(first..) {
            let (sequence, position) = (row / len, row % len);
            let [cos, sin] = [&cos, &sin].map(|table| &table[position * half..][..half]);
            for (head, y) in y.chunks_exact_mut(dim).enumerate() {
                let (x1, x2) = x.from([sequence, position, head])[..dim].split_at(half);
                let (y1, y2) = y.split_at_mut(half);
                for (((((y1, y2), x1), x2), cos), sin) in y1.iter_mut().zip(y2).zip(x1).zip(x2).zip(cos).zip(sin) {
                    let sin = sign * sin;
                    *y1 = x1 * cos - x2 * sin;
                    *y2 = x2 * cos + x1 * sin;
                }
            }
        }
    });
    y
}

/// Maximum, and `ln Σ exp(l - max)`.
#[inline(always)]
fn log_sum(logits: &[f32]) -> (f32, f32) {
    let max = max(logits);
    let mut sum = 0.0;
    // Parts that stay in registers and the L1 cache.
    for part in logits.chunks(256) {
        let mut buffer = [0.0; 256];
        let buffer = &mut buffer[..part.len()];
        buffer.copy_from_slice(part);
        sum += exp_minus(buffer, max);
    }
    (max, sum.ln())
}
