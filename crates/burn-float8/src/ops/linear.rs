//! The three GEMMs of a linear, the only operations that [`Float8`](crate::Float8) changes.
//!
//! ```text
//! fprop   y  [M,N] = x  [M,K] · w [K,N] + b   reads x by rows,    w transposed
//! dgrad   dx [M,K] = dy [M,N] · wᵀ[N,K]       reads dy by rows,   w by rows
//! wgrad   dw [K,N] = xᵀ [K,M] · dy[M,N]       reads x transposed, dy transposed
//! ```
//!
//! M is the product of the leading dimensions. x may be bf16 while w is an f32 master weight: each is quantized from
//! its own dtype, y and dx have x's dtype, dw has w's.
use std::sync::Arc;

use burn_backend::tensor::Device;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::call::{GemmCall, Owner, zeros};
use crate::backend::{Float8Backend, in_dtype};
use crate::layer::{Layer, Mark};
use crate::profile::operation;
use crate::step::{DeviceState, on_backward};
use crate::tensor::{CastRequest, Float8Tensor, LinearUse, View, confirm, is_sampled, note_backward, sample};
use crate::terms::{Gemm, Operand, Reason};

/// y = x · w + b. `x: [.., K]`, `w: [K, N]`, `bias: [N]`, y: `[.., N]`.
pub(crate) fn forward<B: Float8Backend>(
    x: Float8Tensor<B>,
    w: Float8Tensor<B>,
    bias: Option<Float8Tensor<B>>,
) -> Float8Tensor<B> {
    let (xs, ws) = (x.shape(), w.whole_shape());
    // Wrong ranks and mismatched dimensions: let Burn's own linear say so.
    let fits = xs.num_dims() > 0
        && ws.num_dims() == 2
        && last(&xs) == ws[0]
        && bias.as_ref().is_none_or(|b| b.shape().num_dims() == 1 && b.shape()[0] == ws[1]);
    if !fits {
        return Float8Tensor::new(B::linear(x.into_full(), w.into_full(), bias.map(Float8Tensor::into_full)));
    }
    let ([k, n], device) = ([ws[0], ws[1]], B::float_device(x.full()));
    let (m, dtype, out) = (rows(&xs), x.dtype(), with_last(&xs, n));
    let owner = Owner::of_fprop(&w);
    let layer = &owner.layer;
    let bias_dtype = bias.as_ref().map(|bias| bias.dtype());
    if let Some(dtype) = bias_dtype {
        layer.set_bias_dtype(dtype);
    }
    let [saved, saved_weight] = Float8Tensor::saved_clones(&x, &w);
    if let Some(clone) = saved_weight {
        let is_autocast_off = owner.off == Some(Reason::Autocast);
        if is_autocast_off || layer.has_matmul() || w.has_forwards() {
            w.add_forward(clone, m, is_autocast_off);
        }
    }
    if saved.is_some() {
        w.cache().set_trained();
    }
    let mut used =
        LinearUse { bias_dtype, saved, ..LinearUse::new(layer.clone(), owner.off.clone(), w.dtype(), [k, n]) };
    let call = GemmCall::new(&owner, Gemm::Fprop, [m, k, n]);
    let dtypes = [Some(dtype), Some(w.dtype()), bias_dtype];
    let Some(config) = call.float8_config::<B>(&device, dtypes.into_iter().flatten()) else {
        if m == 0 {
            let joined = call.join_gather(&w, (dtype, dtypes.into_iter().flatten()), &device);
            used.weight_observation = joined.and_then(|copy| copy.result.observation.clone());
            x.add_use(used);
            return zeros(out, dtype, x.full());
        }
        x.add_use(used);
        let (w, bias) = (w.into_whole(dtype), bias.map(|bias| in_dtype::<B>(bias.into_full(), dtype)));
        let _timer = operation("linear");
        return Float8Tensor::new(B::linear(x.into_full(), w, bias));
    };
    let [a, b] = call.copies([(&x, View::Own), (&w, View::Own)], &config);
    used.weight_observation = b.result.observation.clone();
    used.sampled_weight = is_sampled::<B>(layer, &device).then(|| w.clone());
    x.add_use(used);
    if let Some(observation) = a.result.observation.clone().filter(|_| !is_trained(&w, layer)) {
        w.cache().push_unconfirmed(&x, m, observation);
    }
    call.run([&a, &b], bias.map(Float8Tensor::into_full), None, (out, dtype), (&device, &config))
}

/// dx = dy · wᵀ, where Autodiff has saved w. `w: [K, N]`, `dy: [.., N]`, dx: `[.., K]`.
pub(crate) fn dgrad<B: Float8Backend>(w: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let owner = Owner::of_dgrad(&w, rows(&dy.shape()));
    dgrad_of(&owner, w, dy)
}

/// [`dgrad`] of a known use of w.
pub(super) fn dgrad_of<B: Float8Backend>(owner: &Owner, w: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let (ws, dys) = (w.whole_shape(), dy.shape());
    let ([k, n], device) = ([ws[0], ws[1]], B::float_device(w.full()));
    let (m, dtype, out) = (rows(&dys), dy.dtype(), with_last(&dys, k));
    enter_dgrad(&w, owner);
    if !is_trained(&w, &owner.layer)
        && let Some(observation) = w.cache().pop_unconfirmed(m)
    {
        observation.confirm();
    }
    dy.cache().set_use(LinearUse::new(owner.layer.clone(), owner.off.clone(), w.dtype(), [k, n]));
    let call = GemmCall::new(owner, Gemm::Dgrad, [m, k, n]);
    let dx = call.float8_config::<B>(&device, [dtype, w.dtype()]).map(|config| {
        let [a, b] = call.copies([(&dy, View::Own), (&w, View::Own)], &config);
        call.run([&a, &b], None, None, (out.clone(), dtype), (&device, &config))
    });
    let weights = [Operand::WEIGHT_T, Operand::WEIGHT].map(|operand| (&w, View::Own, operand));
    sample_operands(owner, weights);
    sample_operands(owner, [(&dy, View::Own, Operand::GRAD_OUTPUT)]);
    dx.unwrap_or_else(|| {
        if m == 0 {
            call.join_gather(&w, (dtype, [dtype, w.dtype()]), &device);
            return zeros(out, dtype, dy.full());
        }
        let w = w.into_whole(dtype);
        let _timer = operation("linear_x_backward");
        Float8Tensor::new(B::linear_x_backward(w, dy.into_full()))
    })
}

/// dw = xᵀ · dy, summed over the leading dimensions. `x: [.., K]`, `dy: [.., N]`, dw: `[K, N]`.
pub(crate) fn wgrad<B: Float8Backend>(x: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let (xs, dys, device) = (x.shape(), dy.shape(), B::float_device(x.full()));
    let (m, [k, n]) = (rows(&xs), [last(&xs), last(&dys)]);
    let mut used = take_use(&x, &dy, [k, n]);
    let (weight_dtype, out) = (used.weight_dtype, Shape::from(vec![k, n]));
    let owner = Owner { layer: used.layer.clone(), off: used.off.clone() };
    let layer = &owner.layer;
    enter_wgrad::<B>(layer, &device);
    if let Some(observation) = used.weight_observation.take() {
        observation.confirm();
    }
    if let Some(config) = owner.float8_config() {
        confirm(&x, layer, &config, Operand::INPUT);
    }
    let call = GemmCall::new(&owner, Gemm::Wgrad, [m, k, n]);
    let dw = call.float8_config::<B>(&device, [x.dtype(), dy.dtype(), weight_dtype]).map(|config| {
        let [a, b] = call.copies([(&x, View::Own), (&dy, View::Own)], &config);
        call.run([&a, &b], None, None, (out.clone(), weight_dtype), (&device, &config))
    });
    sample_operands(&owner, [Operand::INPUT, Operand::INPUT_T].map(|operand| (&x, View::Own, operand)));
    sample_operands(&owner, [(&dy, View::Own, Operand::GRAD_OUTPUT_T)]);
    if let Some(w) = used.sampled_weight.take() {
        sample_operands(&owner, [(&w, View::Own, Operand::WEIGHT_T)]);
    }
    // The bias gradient follows and is given nothing but dy.
    dy.cache().set_use(LinearUse { pending: false, ..used });
    let dw = dw.unwrap_or_else(|| {
        if m == 0 {
            return zeros(out, weight_dtype, x.full());
        }
        let timer = operation("linear_weight_backward");
        let dw = B::linear_weight_backward(x.into_full(), dy.into_full());
        drop(timer);
        Float8Tensor::new(in_dtype::<B>(dw, weight_dtype))
    });
    reduced(layer, dw)
}

/// The gradient of a weight, of this rank's rows where it is sharded.
pub(super) fn reduced<B: Float8Backend>(layer: &Arc<Layer>, dw: Float8Tensor<B>) -> Float8Tensor<B> {
    match layer.sharding() {
        Some(sharding) => {
            let _timer = operation("reduce_scatter");
            let own = Float8Tensor::new(sharding.reduce_scatter::<B>(dw.into_full()));
            if sharding.is_divided() { own.with_mark(Some(Mark::ShardGradient(layer.clone()))) } else { own }
        }
        None => dw,
    }
}

/// db `[N]` = the sum of `dy: [.., N]` over its leading dimensions, in the bias' dtype.
pub(crate) fn bias_grad<B: Float8Backend>(dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let recorded =
        dy.cache().with_uses(|uses| uses.first().and_then(|used| used.bias_dtype.or_else(|| used.layer.bias_dtype())));
    // No record at all: neither x nor w wanted a gradient.
    let dtype = recorded.unwrap_or(dy.dtype());
    bias_grad_as(dy, dtype)
}

/// [`bias_grad`] in a known dtype.
pub(super) fn bias_grad_as<B: Float8Backend>(dy: Float8Tensor<B>, dtype: DType) -> Float8Tensor<B> {
    let shape = dy.shape();
    if rows(&shape) == 0 {
        return zeros(Shape::from(vec![last(&shape)]), dtype, dy.full());
    }
    // Cast first: a sum over all tokens loses too much in bf16.
    let dy = in_dtype::<B>(dy.into_full(), dtype);
    let _timer = operation("linear_bias_backward");
    Float8Tensor::new(B::linear_bias_backward(dy))
}

/// Whether a weight's gradient is wanted, so that wgrad will confirm what fprop has read. A layer that is frozen in training is found
/// out after a step.
fn is_trained<B: Float8Backend>(w: &Float8Tensor<B>, layer: &Layer) -> bool {
    let state = DeviceState::<B>::of(layer, &B::float_device(w.full()));
    state.is_recent(w.cache().trained_at()) || state.is_recent(layer.wgrad_at())
}

/// Backward has come to a weight.
pub(super) fn enter_dgrad<B: Float8Backend>(w: &Float8Tensor<B>, owner: &Owner) {
    note_backward();
    let layer = &owner.layer;
    on_backward::<B>(layer, &B::float_device(w.full()));
    layer.set_expects_dgrad();
    w.cache().note_dgrad();
    if let Some(config) = owner.float8_config() {
        confirm(w, layer, &config, Operand::WEIGHT_T);
    }
}

/// Marks the layer's last forward as training, so that its amaxes count: backward has come to its weight gradient.
pub(super) fn enter_wgrad<B: Float8Backend>(layer: &Layer, device: &Device<B>) {
    note_backward();
    on_backward::<B>(layer, device);
    layer.note_wgrad();
}

/// Samples operands that backward is given, each as the matrix that its GEMM reads, if statistics are taken in this step.
pub(super) fn sample_operands<B: Float8Backend, const N: usize>(
    owner: &Owner,
    operands: [(&Float8Tensor<B>, View<'_, B>, Operand); N],
) {
    let layer = &owner.layer;
    if layer.conversion().config().statistics.is_none() {
        return;
    }
    let Some(config) = owner.float8_config() else { return };
    for (tensor, view, operand) in operands {
        if !tensor.shape().iter().any(|dim| *dim == 0) {
            sample(tensor, view, CastRequest { operand, layer, config: &config, in_forward: false });
        }
    }
}

/// The linear whose weight gradient is wanted.
///
/// wgrad is not given the weight, but fprop left a record on x and dgrad one on dy. Several linears may share either:
/// - a residual sum hands one dy to two layers, so dy's record counts only while its wgrad is to come, and if x's name the same
///   linear or x has none (it was recomputed under gradient checkpointing);
/// - x's records alone decide where nothing asked for dx: those of the graph that backward walks, which another model on the same
///   batch, or a frozen teacher, is not in. Linears of one shape then take turns, last one first as backward visits them, so that
///   each is counted once.
fn take_use<B: Float8Backend>(x: &Float8Tensor<B>, dy: &Float8Tensor<B>, weight_shape: [usize; 2]) -> LinearUse<B> {
    let fits = |used: &LinearUse<B>| used.weight_shape == weight_shape;
    let of_dy = dy.cache().with_uses(|uses| uses.iter().find(|used| fits(used) && used.pending).cloned());
    let of_x = x.cache().with_uses(|uses| {
        let same = of_dy.as_ref().and_then(|of_dy| {
            let same = |used: &LinearUse<B>| used.is_same(of_dy);
            x.find_use(uses, same).or_else(|| uses.iter().position(same))
        });
        let saved = || x.find_use(uses, fits);
        let pending = || uses.iter().rposition(|used| fits(used) && used.pending);
        let any = || uses.iter().rposition(fits);
        let found = if uses.is_empty() { None } else { same.or_else(saved).or_else(pending).or_else(any) };
        found.map(|i| {
            uses[i].pending = false;
            let taken = uses[i].clone();
            (uses[i].weight_observation, uses[i].sampled_weight) = (None, None);
            taken
        })
    });
    of_x.or(of_dy).unwrap_or_else(|| {
        let Owner { layer, off } = Owner::of(&Float8Tensor::<B>::new(x.full().clone()));
        LinearUse::new(layer, off, x.dtype(), weight_shape)
    })
}

pub(super) fn last(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// The product of all dimensions but the last.
pub(super) fn rows(shape: &Shape) -> usize {
    shape.iter().take(shape.num_dims() - 1).product()
}

fn with_last(shape: &Shape, n: usize) -> Shape {
    let mut dims = shape.to_vec();
    *dims.last_mut().expect("a linear's tensors have rank 1 or more") = n;
    Shape::from(dims)
}
