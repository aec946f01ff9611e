//! The linears of a mixture's experts, one GEMM for all of them in forward and one in each gradient.
//!
//! ```text
//! y  [M, N]     rows of group g:  x · w_g       reads x by rows,   w as [K, G·N] transposed
//! dx [M, K]     rows of group g:  dy · w_gᵀ     reads dy by rows,  w as [G·K, N] by rows
//! dw [G, K, N]                    x_gᵀ · dy_g   reads x and dy transposed, group by group
//! ```
//!
//! Where groups end is known to the device alone. For dw the rows of each group are moved to the next multiple of
//! [`GROUP_ALIGN`], with zeros between, so that no block of scales belongs to two groups. One scale for the tensor is that of x
//! and of dy, as fprop and dgrad have found it: rows of no group count in it.
use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use burn_std::{IntDType, Shape};
use float8_kernels::{GROUP_ALIGN, Grouping};

use super::call::{GemmCall, Use};
use super::linear::{SavedInput, Seen, Wanted, sample_operands};
use crate::backend::host::ranges;
use crate::backend::{Float8Backend, GroupEnds, grouped_matmul, in_dtype};
use crate::profile::operation;
use crate::tensor::{Float8Tensor, Fp8Copy, Layout, View, clear_recent, fp8_copy};
use crate::terms::{Gemm, Operand};

/// M, G, K and N.
#[derive(Clone, Copy, Debug)]
struct Dims {
    m: usize,
    groups: usize,
    k: usize,
    n: usize,
}

impl Dims {
    fn of<B: Float8Backend>(x: &Float8Tensor<B>, w: &Float8Tensor<B>) -> Self {
        let ws = w.shape();
        Self { m: x.shape()[0], groups: ws[0], k: ws[1], n: ws[2] }
    }

    fn call<'a>(&self, used: &'a Use, gemm: Gemm) -> GemmCall<'a> {
        // wgrad contracts the rows as they are padded.
        let rows = if gemm == Gemm::Wgrad && self.m > 0 { padded_rows(self.m, self.groups) } else { self.m };
        let unpadded = (gemm == Gemm::Wgrad).then_some(self.m);
        GemmCall { used, gemm, dims: [rows, self.k, self.n], groups: self.groups, unpadded }
    }
}

/// The most rows that any `m` rows in groups take when each group begins at a multiple of [`GROUP_ALIGN`].
///
/// ```text
/// Σ ceil(s / 128) · 128 ≤ Σ (s + 127)     over the groups that have rows, min(groups, m) at most
/// ```
fn padded_rows(m: usize, groups: usize) -> usize {
    (m + groups.min(m) * (GROUP_ALIGN - 1)) / GROUP_ALIGN * GROUP_ALIGN
}

/// The ends as kernels take them.
fn groups<B: Float8Backend>(ends: IntTensor<B>, grouping: Grouping) -> Option<GroupEnds<IntTensor<B>>> {
    Some(GroupEnds { ends: B::int_cast(ends, IntDType::I32), grouping })
}

/// The weight as a matrix whose transpose is fprop's operand, `[K, G·N]`.
fn experts_along_n<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let [groups, k, n] = w.shape().dims();
    let transposed = B::float_reshape(B::float_swap_dims(w, 1, 2), Shape::from(vec![groups * n, k]));
    B::float_transpose(transposed)
}

/// The weight as dgrad's operand, `[G·K, N]`.
fn experts_along_k<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let [groups, k, n] = w.shape().dims();
    B::float_reshape(w, Shape::from(vec![groups * k, n]))
}

/// x padded and transposed, in FP8, and where its rows come from.
pub(super) type PaddedCopy<B> = (Arc<Fp8Copy<B>>, Padding<B>);

/// What the node of a grouped linear keeps from forward for its backward.
#[derive(Clone)]
pub(super) struct Saved<B: Float8Backend> {
    used: Use,
    pub(super) x: SavedInput<PaddedCopy<B>>,
    /// If x wants a gradient.
    w: Option<Float8Tensor<B>>,
    weight_dtype: DType,
    ends: IntTensor<B>,
    dims: Dims,
    x_dtype: DType,
    seen: Seen<B>,
}

impl<B: Float8Backend> core::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of {:?}", self.used, self.dims)
    }
}

/// y, and what its node keeps if a gradient is wanted. `x: [M, K]`, `w: [G, K, N]`, `ends: [G]`.
pub(super) fn forward<B: Float8Backend>(
    x: &Float8Tensor<B>,
    w: &Float8Tensor<B>,
    ends: IntTensor<B>,
    wanted: Wanted,
) -> (FloatTensor<B>, Option<Saved<B>>) {
    let (dims, dtype, device) = (Dims::of(x, w), x.dtype(), B::float_device(x.full()));
    let (used, mut seen) = (Use::of(w), Seen::default());
    let call = dims.call(&used, Gemm::Fprop);
    let along_n = || experts_along_n::<B>(w.full().clone());
    let weight_view = View::Computed(Layout::ExpertsAlongN, &along_n);
    let y = match call.plan::<B>(&device, [dtype, w.dtype()]) {
        None => {
            let _timer = operation("grouped_matmul");
            let (x, w) = (float(x.full().clone()), float(w.full().clone()));
            grouped_matmul::<B>(x, w, Tensor::from_primitive(ends.clone())).into_primitive().tensor()
        }
        Some(plan) => {
            let [a, b] = call.copies([(x, View::Own, false), (w, weight_view, false)], plan);
            seen.add(&a);
            seen.add(&b);
            let out = (Shape::from(vec![dims.m, dims.n]), dtype);
            call.run([&a, &b], None, groups::<B>(ends.clone(), Grouping::Rows), out, (&device, plan))
        }
    };
    if !wanted.any() {
        seen.count_without_backward(wanted);
        return (y, None);
    }
    if let Ok(plan) = &used.plan {
        if wanted.w {
            seen.sample(x, View::Own, used.request(Operand::INPUT, plan, false));
        }
        if !wanted.x {
            seen.sample(w, weight_view, used.request(Operand::WEIGHT_T, plan, false));
        }
    }
    let call = dims.call(&used, Gemm::Wgrad);
    let saved_input = match call.decide::<B>(&device, [dtype, w.dtype()]) {
        _ if !wanted.w => SavedInput::None,
        Err(_) => SavedInput::Full,
        Ok(plan) => {
            let padding = Padding::<B>::new(ends.clone(), dims, &device);
            let padded = padding.apply(x);
            let request = used.request(Operand::INPUT_T, plan, false);
            let copy = fp8_copy(&padded, View::Computed(Layout::Matrix, &|| padded.full().clone()), request);
            seen.add(&copy);
            seen.sample(&padded, View::Own, request);
            SavedInput::Float8((copy, padding))
        }
    };
    let (weight_dtype, w) = (w.dtype(), wanted.x.then(|| w.clone()));
    let saved = Saved { x: saved_input, w, weight_dtype, ends, dims, x_dtype: dtype, seen, used };
    (y, Some(saved))
}

/// The gradients of x and w that are wanted. `x` is the tensor itself if forward has asked to keep it.
pub(super) fn backward<B: Float8Backend>(
    saved: Saved<B>,
    dy: FloatTensor<B>,
    x: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> [Option<FloatTensor<B>>; 2] {
    clear_recent();
    let device = B::float_device(&dy);
    let dy = Float8Tensor::<B>::new(in_dtype::<B>(dy, saved.x_dtype));
    let Saved { used, x: saved_input, w, weight_dtype, ends, dims, seen, .. } = saved;
    seen.count(&used.layer, &device);
    let dx = w.filter(|_| wanted.x).map(|w| dgrad(&used, &w, &dy, ends.clone(), dims));
    let dw = wanted.w.then(|| wgrad(&used, saved_input, x, &dy, ends, (dims, weight_dtype)));
    [dx, dw]
}

/// dx. `w: [G, K, N]`, `dy: [M, N]`, `ends: [G]`.
fn dgrad<B: Float8Backend>(
    used: &Use,
    w: &Float8Tensor<B>,
    dy: &Float8Tensor<B>,
    ends: IntTensor<B>,
    dims: Dims,
) -> FloatTensor<B> {
    let (dtype, device) = (dy.dtype(), B::float_device(dy.full()));
    w.cache().note_dgrad();
    let call = dims.call(used, Gemm::Dgrad);
    let (along_n, along_k) = (|| experts_along_n::<B>(w.full().clone()), || experts_along_k::<B>(w.full().clone()));
    let weight_views = [View::Computed(Layout::ExpertsAlongN, &along_n), View::Computed(Layout::Matrix, &along_k)];
    let dx = call.plan::<B>(&device, [dtype, w.dtype()]).map(|plan| {
        // By rows alone: wgrad reads another transpose.
        let [a, b] = call.copies([(dy, View::Own, false), (w, weight_views[1], false)], plan);
        let out = (Shape::from(vec![dims.m, dims.k]), dtype);
        call.run([&a, &b], None, groups::<B>(ends.clone(), Grouping::Rows), out, (&device, plan))
    });
    sample_operands(used, [(w, weight_views[0], Operand::WEIGHT_T), (w, weight_views[1], Operand::WEIGHT)]);
    sample_operands(used, [(dy, View::Own, Operand::GRAD_OUTPUT)]);
    dx.unwrap_or_else(|| {
        let _timer = operation("grouped_matmul");
        let transposed = float::<B, 3>(w.full().clone()).swap_dims(1, 2);
        let dx = grouped_matmul::<B>(float(dy.full().clone()), transposed, Tensor::from_primitive(ends));
        dx.into_primitive().tensor()
    })
}

/// dw `[G, K, N]`. `dy: [M, N]`, `ends: [G]`.
fn wgrad<B: Float8Backend>(
    used: &Use,
    saved_input: SavedInput<PaddedCopy<B>>,
    x: Option<FloatTensor<B>>,
    dy: &Float8Tensor<B>,
    ends: IntTensor<B>,
    (dims, dtype): (Dims, DType),
) -> FloatTensor<B> {
    let device = B::float_device(dy.full());
    let call = dims.call(used, Gemm::Wgrad);
    match (call.plan::<B>(&device, [dy.dtype(), dtype]), saved_input) {
        (Some(plan), SavedInput::Float8((x, padding))) => {
            let padded = padding.apply(dy);
            let matrix = || padded.full().clone();
            let view = View::Computed(Layout::Matrix, &matrix);
            let copy = call.copy((&padded, view, false), Operand::GRAD_OUTPUT_T, plan);
            sample_operands(used, [(&padded, View::Own, Operand::GRAD_OUTPUT_T)]);
            let groups = groups::<B>(padding.ends.into_primitive(), Grouping::Contraction);
            let out = (Shape::from(vec![dims.groups, dims.k, dims.n]), dtype);
            call.run([&x, &copy], None, groups, out, (&device, plan))
        }
        _ => {
            let x = x.expect("kept where wgrad runs in high precision");
            let _timer = operation("grouped_matmul");
            let dtype_of_dy = dy.dtype();
            let (x, dy) = (float::<B, 2>(in_dtype::<B>(x, dtype_of_dy)), float::<B, 2>(dy.full().clone()));
            let parts = ranges::<B>(&ends, dims.m).into_iter().map(|rows| {
                if rows.is_empty() {
                    return Tensor::zeros([dims.k, dims.n], (&device, dtype_of_dy));
                }
                x.clone().slice(rows.clone()).transpose().matmul(dy.clone().slice(rows))
            });
            let dw = Tensor::stack::<3>(parts.collect(), 0).into_primitive().tensor();
            in_dtype::<B>(dw, dtype)
        }
    }
}

/// Where the rows of wgrad's operands come from.
#[derive(Clone)]
pub(super) struct Padding<B: Backend> {
    /// The row of each padded row, any where there is none.
    source: Tensor<B, 1, Int>,
    /// Whether there is none.
    missing: Tensor<B, 2, burn::tensor::Bool>,
    /// Where each group ends in the padded rows.
    ends: Tensor<B, 1, Int>,
}

impl<B: Backend> Padding<B> {
    fn new(ends: IntTensor<B>, Dims { m, groups, .. }: Dims, device: &Device<B>) -> Self {
        // As the kernels take what cannot be: an end beyond the rows for theirs, one below its predecessor for that.
        let ends = Tensor::<B, 1, Int>::from_primitive(ends).clamp(0, m as i64).cummax(0);
        let starts = Tensor::cat(vec![ends.zeros_like().slice(0..1), ends.clone().slice(0..groups - 1)], 0);
        let sizes = ends.clone() - starts.clone();
        let align = GROUP_ALIGN as i64;
        let padded = (sizes.clone() + (align - 1)) / align * align;
        let padded_ends = padded.clone().cumsum(0);
        let padded_starts = padded_ends.clone() - padded;
        let rows = padded_rows(m, groups);
        let row = Tensor::<B, 1, Int>::arange(0..rows as i64, device).cast(ends.dtype());
        // Past the last group its own end says that there is no row.
        let of = row.clone().unsqueeze_dim::<2>(1).expand([rows, groups]);
        let ended = of.greater_equal(padded_ends.unsqueeze_dim::<2>(0).expand([rows, groups]));
        let group = ended.int().cast(ends.dtype()).sum_dim(1).reshape([rows]).clamp_max(groups as i64 - 1);
        let row = row + (starts - padded_starts.clone()).select(0, group.clone());
        Self {
            missing: row.clone().greater_equal(ends.select(0, group)).unsqueeze_dim(1),
            source: row.clamp(0, m as i64 - 1),
            ends: padded_starts + sizes,
        }
    }
}

impl<B: Float8Backend> Padding<B> {
    /// `[M, C]` → `[padded rows, C]`: a tensor of its own, so that nothing takes copies of it for those of `t`; zeros change no amax.
    fn apply(&self, t: &Float8Tensor<B>) -> Float8Tensor<B> {
        let _timer = operation("group_padding");
        let rows = float::<B, 2>(t.full().clone()).select(0, self.source.clone());
        let dims = rows.dims();
        let rows = rows.mask_fill(self.missing.clone().expand(dims), 0.0).into_primitive().tensor();
        let padded = Float8Tensor::<B>::new(rows);
        padded.cache().inherit(t.cache(), t.shape().num_elements() as u64);
        padded
    }
}

fn float<B: Backend, const D: usize>(t: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(t))
}
