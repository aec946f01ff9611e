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
use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_std::{IntDType, Shape};
use float8_kernels::{GROUP_ALIGN, Grouping};

use super::Float8;
use super::call::{GemmCall, Owner};
use super::linear::{enter_dgrad, enter_wgrad, sample_operands};
use crate::backend::host::ranges;
use crate::backend::{Float8Backend, GroupEnds, in_dtype};
use crate::error::Float8Error;
use crate::profile::operation;
use crate::tensor::{Float8Tensor, Layout, View, confirm};
use crate::terms::{Gemm, Operand};

/// # Panics
///
/// [`Float8Error::GroupedShapes`], in words, if the shapes do not fit.
pub(crate) fn check_shapes<B: Backend>(x: &Tensor<B, 2>, weight: &Tensor<B, 3>, ends: &Tensor<B, 1, Int>) {
    let (x, weight, [ends]) = (x.dims(), weight.dims(), ends.dims());
    if x[1] != weight[1] || ends != weight[0] || weight.contains(&0) {
        panic!("{}", Float8Error::GroupedShapes { x, weight, ends });
    }
}

/// What [`grouped_linear`](crate::grouped_linear) computes, of the same x `[M, K]`, weight `[G, K, N]` and ends `[G]`, in x's dtype and by Burn's own
/// operations on any backend: a matmul for each group that has rows. The ends are read, which waits for the device.
///
/// # Panics
///
/// [`Float8Error::GroupedShapes`], in words, if the shapes do not fit.
pub fn grouped_matmul<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 3>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    check_shapes(&x, &weight, &ends);
    let (rows, dtype, device) = (x.dims()[0], x.dtype(), x.device());
    let n = weight.dims()[2];
    let weight = weight.cast(dtype);
    let ranges = ranges::<B>(&ends.into_primitive(), rows);
    let rest = rows - ranges.last().map_or(0, |last| last.end);
    let full = ranges.into_iter().enumerate().filter(|(_, range)| !range.is_empty());
    let of_group = |(g, range)| x.clone().slice(range).matmul(weight.clone().slice(g..g + 1).squeeze_dim(0));
    let mut parts: Vec<_> = full.map(of_group).collect();
    if rest > 0 || parts.is_empty() {
        parts.push(Tensor::zeros([rest, n], (&device, dtype)));
    }
    Tensor::cat(parts, 0)
}

/// M, G, K and N.
#[derive(Clone, Copy)]
struct Dims {
    m: usize,
    groups: usize,
    k: usize,
    n: usize,
}

impl Dims {
    fn of<B: Float8Backend>(rows: &Float8Tensor<B>, w: &Float8Tensor<B>) -> Self {
        let ws = w.shape();
        Self { m: rows.shape()[0], groups: ws[0], k: ws[1], n: ws[2] }
    }

    fn call<'a>(&self, owner: &'a Owner, gemm: Gemm) -> GemmCall<'a> {
        // wgrad contracts the rows as they are padded.
        let rows = if gemm == Gemm::Wgrad && self.m > 0 { padded_rows(self.m, self.groups) } else { self.m };
        let unpadded = (gemm == Gemm::Wgrad).then_some(self.m);
        GemmCall { owner, gemm, dims: [rows, self.k, self.n], groups: self.groups, unpadded }
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
    let _timer = operation("int_cast");
    Some(GroupEnds { ends: B::int_cast(ends, IntDType::I32), grouping })
}

/// The weight as a matrix whose transpose is fprop's operand, `[K, G·N]`.
fn experts_along_n<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let _timer = operation("float_reshape");
    let [groups, k, n] = w.shape().dims();
    let transposed = B::float_reshape(B::float_swap_dims(w, 1, 2), Shape::from(vec![groups * n, k]));
    B::float_transpose(transposed)
}

/// The weight as dgrad's operand, `[G·K, N]`.
fn experts_along_k<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let _timer = operation("float_reshape");
    let [groups, k, n] = w.shape().dims();
    B::float_reshape(w, Shape::from(vec![groups * k, n]))
}

/// y. `x: [M, K]`, `w: [G, K, N]`, `ends: [G]`.
pub(crate) fn forward<B: Float8Backend>(x: Float8Tensor<B>, w: Float8Tensor<B>, ends: IntTensor<B>) -> Float8Tensor<B> {
    let (dims, dtype, device) = (Dims::of(&x, &w), x.dtype(), B::float_device(x.full()));
    let owner = Owner::of_fprop(&w);
    let call = dims.call(&owner, Gemm::Fprop);
    let Some(config) = call.float8_config::<B>(&device, [dtype, w.dtype()]) else {
        let _timer = operation("grouped_matmul");
        let y = grouped_matmul::<B>(float(x.into_full()), float(w.into_full()), Tensor::from_primitive(ends));
        return Float8Tensor::new(y.into_primitive().tensor());
    };
    let along_n = || experts_along_n::<B>(w.full().clone());
    let [a, b] = call.copies([(&x, View::Own), (&w, View::Computed(Layout::ExpertsAlongN, &along_n))], &config);
    let out = (Shape::from(vec![dims.m, dims.n]), dtype);
    call.run([&a, &b], None, groups::<B>(ends, Grouping::Rows), out, (&device, &config))
}

/// dx. `w: [G, K, N]`, `dy: [M, N]`, `ends: [G]`.
fn dgrad<B: Float8Backend>(
    owner: &Owner,
    w: Float8Tensor<B>,
    dy: Float8Tensor<B>,
    ends: IntTensor<B>,
) -> Float8Tensor<B> {
    let (dims, dtype, device) = (Dims::of(&dy, &w), dy.dtype(), B::float_device(dy.full()));
    let call = dims.call(owner, Gemm::Dgrad);
    let (along_n, along_k) = (|| experts_along_n::<B>(w.full().clone()), || experts_along_k::<B>(w.full().clone()));
    let weight_views = [View::Computed(Layout::ExpertsAlongN, &along_n), View::Computed(Layout::Matrix, &along_k)];
    let dx = call.float8_config::<B>(&device, [dtype, w.dtype()]).map(|config| {
        // By rows alone: wgrad reads another transpose.
        let rows = || dy.full().clone();
        let [a, b] = call.copies([(&dy, View::Computed(Layout::Matrix, &rows)), (&w, weight_views[1])], &config);
        let out = (Shape::from(vec![dims.m, dims.k]), dtype);
        call.run([&a, &b], None, groups::<B>(ends.clone(), Grouping::Rows), out, (&device, &config))
    });
    let weights = [(&w, weight_views[0], Operand::WEIGHT_T), (&w, weight_views[1], Operand::WEIGHT)];
    sample_operands(owner, weights);
    sample_operands(owner, [(&dy, View::Own, Operand::GRAD_OUTPUT)]);
    dx.unwrap_or_else(|| {
        let _timer = operation("grouped_matmul");
        let transposed = float::<B, 3>(w.into_full()).swap_dims(1, 2);
        let dx = grouped_matmul::<B>(float(dy.into_full()), transposed, Tensor::from_primitive(ends));
        Float8Tensor::new(dx.into_primitive().tensor())
    })
}

/// dw. `x: [M, K]`, `dy: [M, N]`, `ends: [G]`; `w` is the weight.
fn wgrad<B: Float8Backend>(
    owner: &Owner,
    w: &Float8Tensor<B>,
    x: Float8Tensor<B>,
    dy: Float8Tensor<B>,
    ends: IntTensor<B>,
) -> Float8Tensor<B> {
    let (dims, dtype, device) = (Dims::of(&x, w), w.dtype(), B::float_device(dy.full()));
    enter_wgrad::<B>(&owner.layer, &device);
    sample_operands(owner, [(&x, View::Own, Operand::INPUT)]);
    let along_n = || experts_along_n::<B>(w.full().clone());
    sample_operands(owner, [(w, View::Computed(Layout::ExpertsAlongN, &along_n), Operand::WEIGHT_T)]);
    let call = dims.call(owner, Gemm::Wgrad);
    if let Some(config) = call.float8_config::<B>(&device, [x.dtype(), dy.dtype(), dtype]) {
        let timer = operation("group_padding");
        let padding = Padding::<B>::new(ends, dims, &device);
        // Tensors of their own, so that nothing takes these copies for those of x and dy; zeros change no amax.
        let [x, dy] = [x, dy].map(|t| {
            let padded = Float8Tensor::<B>::new(padding.apply(t.full().clone()));
            padded.cache().inherit(t.cache(), t.full().shape().num_elements() as u64);
            padded
        });
        drop(timer);
        let (x_rows, dy_rows) = (|| x.full().clone(), || dy.full().clone());
        let views = [View::Computed(Layout::Matrix, &x_rows), View::Computed(Layout::Matrix, &dy_rows)];
        let [a, b] = call.copies([(&x, views[0]), (&dy, views[1])], &config);
        sample_operands(owner, [(&x, View::Own, Operand::INPUT_T), (&dy, View::Own, Operand::GRAD_OUTPUT_T)]);
        let groups = groups::<B>(padding.ends.into_primitive(), Grouping::Contraction);
        return call.run([&a, &b], None, groups, (w.shape(), dtype), (&device, &config));
    }
    let _timer = operation("grouped_matmul");
    let (x, dy) = (float::<B, 2>(in_dtype::<B>(x.into_full(), dy.dtype())), float::<B, 2>(dy.into_full()));
    let parts = ranges::<B>(&ends, dims.m).into_iter().map(|rows| {
        if rows.is_empty() {
            return Tensor::zeros([dims.k, dims.n], (&device, dy.dtype()));
        }
        x.clone().slice(rows.clone()).transpose().matmul(dy.clone().slice(rows))
    });
    let dw = Tensor::stack::<3>(parts.collect(), 0).into_primitive().tensor();
    Float8Tensor::new(in_dtype::<B>(dw, dtype))
}

/// Where the rows of wgrad's operands come from.
struct Padding<B: Backend> {
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

    /// `[M, C]` → `[padded rows, C]`.
    fn apply(&self, t: FloatTensor<B>) -> FloatTensor<B> {
        let t = float::<B, 2>(t).select(0, self.source.clone());
        let dims = t.dims();
        t.mask_fill(self.missing.clone().expand(dims), 0.0).into_primitive().tensor()
    }
}

fn float<B: Backend, const D: usize>(t: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(t))
}

/// What backward needs.
#[derive(Clone, Debug)]
struct State<B: Float8Backend> {
    owner: Owner,
    x: Float8Tensor<B>,
    weight: Float8Tensor<B>,
    ends: IntTensor<B>,
}

#[derive(Debug)]
struct GroupedLinearBackward;

impl<B: Float8Backend> Backward<Float8<B>, 2> for GroupedLinearBackward {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<Float8<B>>(&ops.node);
        let State { owner, x, weight, ends } = ops.state;
        let [x_node, weight_node] = ops.parents;
        enter(&owner, &x, &weight);
        if let Some(node) = x_node {
            grads.register::<Float8<B>>(node.id, dgrad(&owner, weight.clone(), dy.clone(), ends.clone()));
        }
        if let Some(node) = weight_node {
            grads.register::<Float8<B>>(node.id, wgrad(&owner, &weight, x, dy, ends));
        }
    }
}

/// Backward has come to a grouped linear, which keeps both of what fprop read: what their casts found out counts.
fn enter<B: Float8Backend>(owner: &Owner, x: &Float8Tensor<B>, w: &Float8Tensor<B>) {
    enter_dgrad(w, owner);
    if let Some(config) = owner.float8_config() {
        confirm(x, &owner.layer, &config, Operand::INPUT);
    }
}

/// [`forward`] with both gradients.
pub(crate) fn forward_autodiff<B: Float8Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<Float8<B>, C>>,
    weight: FloatTensor<Autodiff<Float8<B>, C>>,
    ends: IntTensor<B>,
) -> FloatTensor<Autodiff<Float8<B>, C>> {
    let y = || forward(x.primitive.clone(), weight.primitive.clone(), ends.clone());
    let nodes = [x.node.clone(), weight.node.clone()];
    match GroupedLinearBackward.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let y = y();
            let owner = Owner::of_forward(&weight.primitive);
            prep.finish(State { owner, x: x.primitive, weight: weight.primitive, ends }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y()),
    }
}
