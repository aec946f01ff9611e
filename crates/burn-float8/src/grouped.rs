//! [`grouped_linear`]: the linears of a mixture's experts, one GEMM for all of them in forward and one in each gradient.
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
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use burn_std::{IntDType, Shape};
use float8_kernels::{GROUP_ALIGN, Grouping};

use crate::backend::{Extent, Float8, Float8Backend, Float8Ops};
use crate::config::Float8LinearConfig;
use crate::copies::{CastOf, Fp8Copy, View, fp8_copy, fp8_copy_of};
use crate::error::Float8Error;
use crate::layer::{Along, Gemm, Layer, Role};
use crate::linear::{Call, cast, enter_backward, layer_of, weight_layer};
use crate::tensor::Float8Tensor;

/// y `[M, N]`: each row of x `[M, K]` times the weight of its group, of `weight: [G, K, N]`.
///
/// Group `g` is the rows from `ends[g - 1]` (from 0 for the first) to `ends[g]`; `ends: [G]` ascends. Rows after the last end give
/// zeros. The three GEMMs run in FP8 by the recipe of the weight's layer, as those of a linear do, and count in its report;
/// with one scale for the tensor all groups share it, and rows of no group may count in it. Nothing is read from the device,
/// whatever the sizes of the groups, but where a GEMM runs in high precision: that is a matmul for each group, for which the
/// ends are read.
///
/// A weight gets its layer from [`Float8Config::apply`](crate::Float8Config::apply) if it is that of a
/// [`GroupedLinear`](crate::GroupedLinear); another one runs by the device's default, as that of any untagged linear.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::{Int, Tensor};
/// type B = Autodiff<burn_float8::Float8<Flex>>;
///
/// let device = Default::default();
/// let x = Tensor::<B, 2>::ones([5, 32], &device);
/// let w = Tensor::<B, 3>::ones([3, 32, 16], &device).require_grad();
/// // Two rows for the first expert, none for the second, three for the third.
/// let ends = Tensor::<B, 1, Int>::from_ints([2, 2, 5], &device);
/// let y = burn_float8::grouped_linear(x, w.clone(), ends);
/// assert_eq!(y.dims(), [5, 16]);
/// assert_eq!(w.grad(&y.sum().backward()).unwrap().dims(), [3, 32, 16]);
/// # }
/// ```
///
/// # Panics
///
/// [`Float8Error::GroupedShapes`], in words, if the shapes do not fit; in strict mode, as a linear does, if the weight has no layer or
/// a GEMM cannot run in FP8.
pub fn grouped_linear<B: Float8Ops>(x: Tensor<B, 2>, weight: Tensor<B, 3>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    check_shapes(&x, &weight, &ends);
    let y = B::grouped_linear(
        x.into_primitive().tensor(),
        weight.into_primitive().tensor(),
        B::inner_int(ends.into_primitive()),
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// # Panics
///
/// [`Float8Error::GroupedShapes`], in words, if the shapes do not fit.
fn check_shapes<B: Backend>(x: &Tensor<B, 2>, weight: &Tensor<B, 3>, ends: &Tensor<B, 1, Int>) {
    let (x, weight, [ends]) = (x.dims(), weight.dims(), ends.dims());
    if x[1] != weight[1] || ends != weight[0] || weight.contains(&0) {
        panic!("{}", Float8Error::GroupedShapes { x, weight, ends });
    }
}

/// What [`grouped_linear`] computes, of the same x `[M, K]`, weight `[G, K, N]` and ends `[G]`, in x's dtype and by Burn's own
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

    fn call<'a>(&self, layer: &'a Arc<Layer>, gemm: Gemm) -> Call<'a> {
        // wgrad contracts the rows as they are padded.
        let rows = if gemm == Gemm::Wgrad && self.m > 0 { padded_rows(self.m, self.groups) } else { self.m };
        Call { layer, gemm, dims: [rows, self.k, self.n], groups: self.groups }
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

/// A grouped GEMM of two operands in FP8, over a contraction of so many without padding.
fn run<B: Float8Backend>(
    call: &Call<'_>,
    [a, b]: [&Fp8Copy<B>; 2],
    ends: IntTensor<B>,
    (grouping, contracted): (Grouping, usize),
    (shape, dtype): (Shape, DType),
    config: &Float8LinearConfig,
) -> Float8Tensor<B> {
    let device = B::int_device(&ends);
    let (granularities, config) = (config.casts().granularities(call.gemm), config.gemm_config(call.gemm));
    let path = B::fp8_grouped_gemm_path(&device, granularities, config);
    let ends = B::int_cast(ends, IntDType::I32);
    let y = B::fp8_grouped_matmul(&a.operand, &b.operand, ends, grouping, shape, FloatDType::from(dtype), config);
    let extents = [a, b].map(|copy| {
        let extent = B::fp8_extent(&copy.operand);
        // What was put between the groups is padding.
        Extent { k: contracted, ..extent }
    });
    call.layer.count_fp8(call.gemm, path, extents);
    Float8Tensor::new(y)
}

/// The weight as a matrix whose transpose is fprop's operand, `[K, G·N]`.
fn side_by_side<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let [groups, k, n] = w.shape().dims();
    let transposed = B::float_reshape(B::float_swap_dims(w, 1, 2), Shape::from(vec![groups * n, k]));
    B::float_transpose(transposed)
}

/// The weight as dgrad's operand, `[G·K, N]`.
fn above_each_other<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let [groups, k, n] = w.shape().dims();
    B::float_reshape(w, Shape::from(vec![groups * k, n]))
}

/// y. `x: [M, K]`, `w: [G, K, N]`, `ends: [G]`.
pub(crate) fn forward<B: Float8Backend>(x: Float8Tensor<B>, w: Float8Tensor<B>, ends: IntTensor<B>) -> Float8Tensor<B> {
    let (dims, dtype) = (Dims::of(&x, &w), x.dtype());
    let layer = weight_layer(&w);
    layer.forget_fprop();
    let (call, device) = (dims.call(&layer, Gemm::Fprop), B::float_device(x.full()));
    let out = Shape::from(vec![dims.m, dims.n]);
    match call.decide::<B>(&device, [dtype, w.dtype()]) {
        Ok(config) => {
            let of = |role, along| CastOf { role, along, layer: &layer, config: &config };
            let a = fp8_copy(&x, of(Role::Input, Along::Rows), true);
            let view: View<'_, B> = Some(&|| side_by_side::<B>(w.full().clone()));
            let b = fp8_copy_of(&w, view, of(Role::Weight, Along::Cols), true);
            run(&call, [&a, &b], ends, (Grouping::Rows, dims.k), (out, dtype), &config)
        }
        Err(reason) => {
            call.refuse(reason);
            let y = grouped_matmul::<B>(float(x.into_full()), float(w.into_full()), Tensor::from_primitive(ends));
            Float8Tensor::new(y.into_primitive().tensor())
        }
    }
}

/// dx. `w: [G, K, N]`, `dy: [M, N]`, `ends: [G]`.
fn dgrad<B: Float8Backend>(w: Float8Tensor<B>, dy: Float8Tensor<B>, ends: IntTensor<B>) -> Float8Tensor<B> {
    let (dims, dtype) = (Dims::of(&dy, &w), dy.dtype());
    let (layer, device) = (layer_of(&w), B::float_device(dy.full()));
    enter_backward::<B>(&device, &layer);
    let call = dims.call(&layer, Gemm::Dgrad);
    let out = Shape::from(vec![dims.m, dims.k]);
    match call.decide::<B>(&device, [dtype, w.dtype()]) {
        Ok(config) => {
            let of = |role, along| CastOf { role, along, layer: &layer, config: &config };
            // By rows alone: wgrad reads another transpose.
            let a = fp8_copy_of(&dy, Some(&|| dy.full().clone()), of(Role::GradOutput, Along::Rows), false);
            let view: View<'_, B> = Some(&|| above_each_other::<B>(w.full().clone()));
            let b = fp8_copy_of(&w, view, of(Role::Weight, Along::Rows), false);
            run(&call, [&a, &b], ends, (Grouping::Rows, dims.n), (out, dtype), &config)
        }
        Err(reason) => {
            call.refuse(reason);
            let transposed = float::<B, 3>(w.into_full()).swap_dims(1, 2);
            let dx = grouped_matmul::<B>(float(dy.into_full()), transposed, Tensor::from_primitive(ends));
            Float8Tensor::new(dx.into_primitive().tensor())
        }
    }
}

/// dw. `x: [M, K]`, `dy: [M, N]`, `ends: [G]`; `w` is the weight.
fn wgrad<B: Float8Backend>(
    w: &Float8Tensor<B>,
    x: Float8Tensor<B>,
    dy: Float8Tensor<B>,
    ends: IntTensor<B>,
) -> Float8Tensor<B> {
    let (dims, dtype) = (Dims::of(&x, w), w.dtype());
    let (layer, device) = (layer_of(w), B::float_device(dy.full()));
    enter_backward::<B>(&device, &layer);
    let call = dims.call(&layer, Gemm::Wgrad);
    let out = w.shape();
    match call.decide::<B>(&device, [x.dtype(), dy.dtype(), dtype]) {
        Ok(config) => {
            let of = |role, along| CastOf { role, along, layer: &layer, config: &config };
            let padding = Padding::<B>::new(ends, dims, &device);
            // Tensors of their own, so that nothing takes these copies for those of x and dy; zeros change no amax.
            let [x, dy] = [x, dy].map(|t| {
                let padded = Float8Tensor::<B>::new(padding.apply(t.full().clone()));
                padded.companion().inherit(t.companion(), t.full().shape().num_elements() as u64);
                padded
            });
            let view = |t: &Float8Tensor<B>| t.full().clone();
            let a = fp8_copy_of(&x, Some(&|| view(&x)), of(Role::Input, Along::Cols), false);
            let b = fp8_copy_of(&dy, Some(&|| view(&dy)), of(Role::GradOutput, Along::Cols), false);
            let grouping = (Grouping::Contraction, dims.m);
            run(&call, [&a, &b], padding.ends.into_primitive(), grouping, (out, dtype), &config)
        }
        Err(reason) => {
            call.refuse(reason);
            let (x, dy) = (float::<B, 2>(cast::<B>(x.into_full(), dy.dtype())), float::<B, 2>(dy.into_full()));
            let ranges = ranges::<B>(&ends, dims.m);
            let parts = ranges.into_iter().map(|rows| {
                if rows.is_empty() {
                    return Tensor::zeros([dims.k, dims.n], (&device, dy.dtype()));
                }
                x.clone().slice(rows.clone()).transpose().matmul(dy.clone().slice(rows))
            });
            let dw = Tensor::stack::<3>(parts.collect(), 0).into_primitive().tensor();
            Float8Tensor::new(cast::<B>(dw, dtype))
        }
    }
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

/// The rows of each group; this waits for the device.
pub(crate) fn ranges<B: Backend>(ends: &IntTensor<B>, m: usize) -> Vec<Range<usize>> {
    let ends = burn_std::future::block_on(B::int_into_data(ends.clone())).expect("a tensor that exists can be read");
    let mut start = 0;
    let range = |end: i64| {
        let end = usize::try_from(end).unwrap_or(0).clamp(start, m);
        core::mem::replace(&mut start, end)..end
    };
    ends.convert::<i64>().to_vec().expect("converted to i64").into_iter().map(range).collect()
}

/// What backward needs.
#[derive(Clone, Debug)]
struct State<B: Float8Backend> {
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
        let State { x, weight, ends } = ops.state;
        let [x_node, weight_node] = ops.parents;
        if let Some(node) = x_node {
            grads.register::<Float8<B>>(node.id, dgrad(weight.clone(), dy.clone(), ends.clone()));
        }
        if let Some(node) = weight_node {
            grads.register::<Float8<B>>(node.id, wgrad(&weight, x, dy, ends));
        }
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
            prep.finish(State { x: x.primitive, weight: weight.primitive, ends }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y()),
    }
}
