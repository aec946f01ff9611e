//! Linears of a mixture's experts: one GEMM for all of them in forward and in each gradient.
//!
//! ```text
//! y  [M, N]     rows of group g:  x · w_g       reads x by rows,   w as [K, G·N] transposed
//! dx [M, K]     rows of group g:  dy · w_gᵀ     reads dy by rows,  w as [G·K, N] by rows
//! dw [G, K, N]                    x_gᵀ · dy_g   reads x and dy transposed, group by group
//! ```
//!
//! Only the device knows the group ends. For dw, each group is moved to the next row at a multiple
//! of [`GROUP_ALIGN`], with zeros in between. No block of scales then belongs to two groups. With
//! one scale per tensor, wgrad reuses the scales of x and dy from fprop and dgrad. These include
//! rows outside of the groups.
use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_std::{IntDType, Shape};
use float8_kernels::{GROUP_ALIGN, Grouping};

use super::call::{GemmCall, GemmData, Use};
use super::linear::{ForwardStatistics, SavedInput, Wanted};
use crate::backend::host::ranges;
use crate::backend::{Float8Backend, GroupEnds, grouped_matmul, in_dtype};
use crate::profile::operation;
use crate::tensor::{CastRequest, Float8Tensor, Fp8Copy, Layout, clear_shared_input_casts, fp8_copy};
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

    fn call<'a, B: Float8Backend>(&self, used: &'a Use<B>, gemm: Gemm) -> GemmCall<'a, B> {
        // wgrad contracts the padded rows.
        let rows = if gemm == Gemm::Wgrad && self.m > 0 { padded_rows(self.m, self.groups) } else { self.m };
        let unpadded = (gemm == Gemm::Wgrad).then_some(self.m);
        GemmCall { used, gemm, dims: [rows, self.k, self.n], groups: self.groups, unpadded }
    }
}

/// Maximum number of rows that `m` rows in groups take if each group begins at a multiple of
/// [`GROUP_ALIGN`].
///
/// ```text
/// Σ ceil(s / 128) · 128 ≤ Σ (s + 127)     over the groups that have rows, min(groups, m) at most
/// ```
fn padded_rows(m: usize, groups: usize) -> usize {
    (m + groups.min(m) * (GROUP_ALIGN - 1)) / GROUP_ALIGN * GROUP_ALIGN
}

/// Group ends in the kernels' dtype, i32.
fn groups<B: Float8Backend>(ends: IntTensor<B>, grouping: Grouping) -> Option<GroupEnds<IntTensor<B>>> {
    Some(GroupEnds { ends: B::int_cast(ends, IntDType::I32), grouping })
}

/// Padded and transposed FP8 copy of x, with its padding.
pub(super) type PaddedCopy<B> = (Arc<Fp8Copy<B>>, Padding<B>);

/// State of a grouped linear's node for its backward.
#[derive(Clone)]
pub(super) struct SavedGrouped<B: Float8Backend> {
    used: Use<B>,
    pub(super) x: SavedInput<PaddedCopy<B>>,
    /// Kept if x wants a gradient.
    w: Option<Float8Tensor<B>>,
    ends: IntTensor<B>,
    dims: Dims,
    statistics: ForwardStatistics<B>,
}

impl<B: Float8Backend> core::fmt::Debug for SavedGrouped<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of {:?}", self.used, self.dims)
    }
}

/// y, and the state of its node if a gradient is wanted. `x: [M, K]`, `w: [G, K, N]`, `ends: [G]`.
pub(super) fn forward<B: Float8Backend>(
    x: &Float8Tensor<B>,
    w: &Float8Tensor<B>,
    ends: IntTensor<B>,
    wanted: Wanted,
) -> (FloatTensor<B>, Option<SavedGrouped<B>>) {
    let (dims, used) = (Dims::of(x, w), Use::of(x, w, None, false));
    let (dtype, mut statistics) = (used.dtypes.x, ForwardStatistics::default());
    let call = dims.call(&used, Gemm::Fprop);
    let layout = Layout::ExpertsAlongN;
    let y = match call.plan() {
        None => {
            let _timer = operation("grouped_matmul");
            let (x, w) = (float(x.full().clone()), float(w.full().clone()));
            grouped_matmul::<B>(x, w, Tensor::from_primitive(ends.clone())).into_primitive().tensor()
        }
        Some(plan) => {
            let a = fp8_copy(used.request(plan, x, Operand::INPUT));
            let b = fp8_copy(CastRequest { layout, ..used.request(plan, w, Operand::WEIGHT_T) });
            statistics.add(&a);
            statistics.add(&b);
            let (groups, shape) = (groups::<B>(ends.clone(), Grouping::Rows), Shape::from(vec![dims.m, dims.n]));
            call.run(plan, GemmData { copies: [&a, &b], bias: None, groups, shape, dtype })
        }
    };
    if !wanted.any() {
        statistics.count_without_backward(wanted);
        return (y, None);
    }
    if let Ok(plan) = &used.plan {
        if wanted.w {
            statistics.sample(used.request(plan, x, Operand::INPUT));
        }
        if !wanted.x {
            statistics.sample(CastRequest { layout, ..used.request(plan, w, Operand::WEIGHT_T) });
        }
    }
    let saved_input = match dims.call(&used, Gemm::Wgrad).decide() {
        _ if !wanted.w => SavedInput::None,
        Err(_) => SavedInput::Full,
        Ok(plan) => {
            let padding = Padding::<B>::new(ends.clone(), dims, &used.device);
            let padded = padding.apply(x);
            let request = used.request(plan, &padded, Operand::INPUT_T);
            let copy = fp8_copy(request);
            statistics.add(&copy);
            statistics.sample(request);
            SavedInput::Float8((copy, padding))
        }
    };
    let w = wanted.x.then(|| w.clone());
    (y, Some(SavedGrouped { x: saved_input, w, ends, dims, statistics, used }))
}

/// Wanted gradients of x and w. `x` is the tensor itself if forward kept it.
pub(super) fn backward<B: Float8Backend>(
    saved: SavedGrouped<B>,
    dy: FloatTensor<B>,
    x: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> [Option<FloatTensor<B>>; 2] {
    clear_shared_input_casts();
    let SavedGrouped { used, x: saved_input, w, ends, dims, statistics } = saved;
    let dy = Float8Tensor::<B>::new(in_dtype::<B>(dy, used.dtypes.x));
    statistics.count(&used.layer, &used.device);
    let dx = w.filter(|_| wanted.x).map(|w| dgrad(&used, &w, &dy, ends.clone(), dims));
    let dw = wanted.w.then(|| wgrad(&used, saved_input, x, &dy, ends, dims));
    [dx, dw]
}

/// dx. `w: [G, K, N]`, `dy: [M, N]`, `ends: [G]`.
fn dgrad<B: Float8Backend>(
    used: &Use<B>,
    w: &Float8Tensor<B>,
    dy: &Float8Tensor<B>,
    ends: IntTensor<B>,
    dims: Dims,
) -> FloatTensor<B> {
    w.cache().note_dgrad();
    let call = dims.call(used, Gemm::Dgrad);
    let dx = call.plan().map(|plan| {
        // Only by rows: wgrad reads a padded transpose.
        let a = fp8_copy(used.request(plan, dy, Operand::GRAD_OUTPUT)).confirmed();
        // As `[G·K, N]`.
        let b = fp8_copy(used.request(plan, w, Operand::WEIGHT)).confirmed();
        let (groups, shape) = (groups::<B>(ends.clone(), Grouping::Rows), Shape::from(vec![dims.m, dims.k]));
        call.run(plan, GemmData { copies: [&a, &b], bias: None, groups, shape, dtype: dy.dtype() })
    });
    used.sample(w, Layout::ExpertsAlongN, Operand::WEIGHT_T);
    used.sample(w, Layout::Matrix, Operand::WEIGHT);
    used.sample(dy, Layout::Matrix, Operand::GRAD_OUTPUT);
    dx.unwrap_or_else(|| {
        let _timer = operation("grouped_matmul");
        let transposed = float::<B, 3>(w.full().clone()).swap_dims(1, 2);
        let dx = grouped_matmul::<B>(float(dy.full().clone()), transposed, Tensor::from_primitive(ends));
        dx.into_primitive().tensor()
    })
}

/// dw `[G, K, N]`. `dy: [M, N]`, `ends: [G]`.
fn wgrad<B: Float8Backend>(
    used: &Use<B>,
    saved_input: SavedInput<PaddedCopy<B>>,
    x: Option<FloatTensor<B>>,
    dy: &Float8Tensor<B>,
    ends: IntTensor<B>,
    dims: Dims,
) -> FloatTensor<B> {
    let (call, dtype) = (dims.call(used, Gemm::Wgrad), used.dtypes.w);
    match (call.plan(), saved_input) {
        (Some(plan), SavedInput::Float8((x, padding))) => {
            let padded = padding.apply(dy);
            let copy = fp8_copy(used.request(plan, &padded, Operand::GRAD_OUTPUT_T)).confirmed();
            used.sample(&padded, Layout::Matrix, Operand::GRAD_OUTPUT_T);
            let groups = groups::<B>(padding.ends.into_primitive(), Grouping::Contraction);
            let shape = Shape::from(vec![dims.groups, dims.k, dims.n]);
            call.run(plan, GemmData { copies: [&x, &copy], bias: None, groups, shape, dtype })
        }
        _ => {
            let x = x.expect("kept where wgrad runs in high precision");
            let _timer = operation("grouped_matmul");
            let dtype_of_dy = dy.dtype();
            let (x, dy) = (float::<B, 2>(in_dtype::<B>(x, dtype_of_dy)), float::<B, 2>(dy.full().clone()));
            let parts = ranges::<B>(&ends, dims.m).into_iter().map(|rows| {
                if rows.is_empty() {
                    return Tensor::zeros([dims.k, dims.n], (&used.device, dtype_of_dy));
                }
                x.clone().slice(rows.clone()).transpose().matmul(dy.clone().slice(rows))
            });
            let dw = Tensor::stack::<3>(parts.collect(), 0).into_primitive().tensor();
            in_dtype::<B>(dw, dtype)
        }
    }
}

/// Mapping from padded rows to the rows of wgrad's operands.
#[derive(Clone)]
pub(super) struct Padding<B: Backend> {
    /// Row index of each padded row; arbitrary for padding.
    source: Tensor<B, 1, Int>,
    /// Whether the padded row is padding.
    missing: Tensor<B, 2, burn::tensor::Bool>,
    /// End of each group in the padded rows.
    ends: Tensor<B, 1, Int>,
}

impl<B: Backend> Padding<B> {
    fn new(ends: IntTensor<B>, Dims { m, groups, .. }: Dims, device: &Device<B>) -> Self {
        // Clamps invalid ends like the kernels: to the number of rows, and to the previous end.
        let ends = Tensor::<B, 1, Int>::from_primitive(ends).clamp(0, m as i64).cummax(0);
        let starts = Tensor::cat(vec![ends.zeros_like().slice(0..1), ends.clone().slice(0..groups - 1)], 0);
        let sizes = ends.clone() - starts.clone();
        let align = GROUP_ALIGN as i64;
        let padded = (sizes.clone() + (align - 1)) / align * align;
        let padded_ends = padded.clone().cumsum(0);
        let padded_starts = padded_ends.clone() - padded;
        let rows = padded_rows(m, groups);
        let row = Tensor::<B, 1, Int>::arange(0..rows as i64, device).cast(ends.dtype());
        // Padded rows after the last group use that group and lie beyond its end, so they are
        // padding.
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
    /// `[M, C]` → `[padded rows, C]`, as a new tensor with its own FP8 copies. Zeros change no
    /// amax.
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
