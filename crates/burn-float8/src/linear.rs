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

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::Shape;

use crate::backend::{Float8Backend, untagged};
use crate::copies::{Along, Use, fp8_copy};
use crate::layer::{Gemm, Layer, Policy, Reason, Role};
use crate::tensor::Float8Tensor;

/// An operand of a GEMM: a tensor, its role, and the axis that the GEMM contracts.
struct Operand<'a, B: Float8Backend> {
    tensor: &'a Float8Tensor<B>,
    role: Role,
    along: Along,
}

/// Decides the path of one GEMM of a linear with these M, K and N, and runs it in FP8 if that is the path.
fn run<B: Float8Backend>(
    layer: &Arc<Layer>,
    gemm: Gemm,
    a: Operand<'_, B>,
    b: Operand<'_, B>,
    bias: Option<&Float8Tensor<B>>,
    out: (Shape, DType),
    [m, k, n]: [usize; 3],
) -> Option<Float8Tensor<B>> {
    let device = B::float_device(a.tensor.full());
    let dtypes = [Some(a.tensor.dtype()), Some(b.tensor.dtype()), bias.map(|b| b.dtype()), Some(out.1)];
    let recipe = match layer.policy() {
        Policy::HighPrecision(reason) => Err(reason),
        Policy::Float8(_) if [m, k, n].contains(&0) => Err(Reason::Empty { m, k, n }),
        Policy::Float8(_) if largest(m, k, n) > B::fp8_max_elements() => Err(Reason::TooLarge { m, k, n }),
        Policy::Float8(recipe) => match dtypes.into_iter().flatten().find(|d| !B::fp8_supports(&device, *d)) {
            Some(dtype) => Err(Reason::Dtype(dtype)),
            None => Ok(recipe),
        },
    };
    let recipe = match recipe {
        Ok(recipe) => recipe,
        Err(reason) => {
            layer.count_high_precision(gemm, reason);
            return None;
        }
    };
    let [a, b] = [a, b].map(|o| fp8_copy(o.tensor, o.role, recipe.cast(o.role), o.along, layer));
    let (shape, dtype) = out;
    let bias = bias.map(|b| b.full().clone());
    let y = B::fp8_matmul(&a.operand, &b.operand, bias, shape, FloatDType::from(dtype));
    layer.count_fp8(gemm, B::fp8_gemm_path(&device));
    Some(Float8Tensor::new(y))
}

/// y = x · w + b. `x: [.., K]`, `w: [K, N]`, `bias: [N]`, y: `[.., N]`.
pub(crate) fn forward<B: Float8Backend>(
    x: Float8Tensor<B>,
    w: Float8Tensor<B>,
    bias: Option<Float8Tensor<B>>,
) -> Float8Tensor<B> {
    let (xs, ws) = (x.shape(), w.shape());
    // Wrong ranks and mismatched dimensions: let Burn's own linear say so.
    let fits = xs.num_dims() > 0
        && ws.num_dims() == 2
        && last(&xs) == ws[0]
        && bias.as_ref().is_none_or(|b| b.shape().num_dims() == 1 && b.shape()[0] == ws[1]);
    if !fits {
        return Float8Tensor::new(B::linear(x.into_full(), w.into_full(), bias.map(Float8Tensor::into_full)));
    }
    let layer = layer_of(&w);
    let [k, n] = [ws[0], ws[1]];
    x.companion().add_use(Use {
        layer: layer.clone(),
        weight_dtype: w.dtype(),
        weight_shape: [k, n],
        pending: true,
        bias_dtype: bias.as_ref().map(|b| b.dtype()),
    });
    if let Some(bias) = &bias {
        layer.set_bias_dtype(bias.dtype());
    }
    let out = (with_last(&xs, n), x.dtype());
    let a = Operand { tensor: &x, role: Role::Input, along: Along::Rows };
    let b = Operand { tensor: &w, role: Role::Weight, along: Along::Cols };
    run(&layer, Gemm::Fprop, a, b, bias.as_ref(), out, [rows(&xs), k, n]).unwrap_or_else(|| {
        let dtype = x.dtype();
        let [w, bias] = [Some(w), bias].map(|t| t.map(|t| cast::<B>(t.into_full(), dtype)));
        Float8Tensor::new(B::linear(x.into_full(), w.unwrap(), bias))
    })
}

/// dx = dy · wᵀ. `w: [K, N]`, `dy: [.., N]`, dx: `[.., K]`.
pub(crate) fn dgrad<B: Float8Backend>(w: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let (ws, dys) = (w.shape(), dy.shape());
    let layer = layer_of(&w);
    let [k, n] = [ws[0], ws[1]];
    dy.companion().set_use(Use {
        layer: layer.clone(),
        weight_dtype: w.dtype(),
        weight_shape: [k, n],
        pending: true,
        bias_dtype: None,
    });
    let out = (with_last(&dys, k), dy.dtype());
    let a = Operand { tensor: &dy, role: Role::GradOutput, along: Along::Rows };
    let b = Operand { tensor: &w, role: Role::Weight, along: Along::Rows };
    run(&layer, Gemm::Dgrad, a, b, None, out, [rows(&dys), k, n]).unwrap_or_else(|| {
        let w = cast::<B>(w.into_full(), dy.dtype());
        Float8Tensor::new(B::linear_x_backward(w, dy.into_full()))
    })
}

/// dw = xᵀ · dy, summed over the leading dimensions. `x: [.., K]`, `dy: [.., N]`, dw: `[K, N]`.
pub(crate) fn wgrad<B: Float8Backend>(x: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let (xs, dys) = (x.shape(), dy.shape());
    let weight_shape = [last(&xs), last(&dys)];
    let used = wgrad_use(&x, &dy, weight_shape);
    let (layer, weight_dtype) = (used.layer.clone(), used.weight_dtype);
    let [k, n] = weight_shape;
    let out = (Shape::from(vec![k, n]), weight_dtype);
    let a = Operand { tensor: &x, role: Role::Input, along: Along::Cols };
    let b = Operand { tensor: &dy, role: Role::GradOutput, along: Along::Cols };
    let dw = run(&layer, Gemm::Wgrad, a, b, None, out, [rows(&xs), k, n]);
    // The bias gradient follows and is given nothing but dy.
    dy.companion().set_use(used);
    dw.unwrap_or_else(|| {
        let dw = B::linear_weight_backward(x.into_full(), dy.into_full());
        Float8Tensor::new(cast::<B>(dw, weight_dtype))
    })
}

/// db `[N]` = the sum of `dy: [.., N]` over its leading dimensions, in the bias' dtype.
pub(crate) fn bias_grad<B: Float8Backend>(dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let recorded = dy.companion().uses().first().and_then(|u| u.bias_dtype.or_else(|| u.layer.bias_dtype()));
    // No record at all: neither x nor w wanted a gradient.
    let dtype = recorded.unwrap_or(dy.dtype());
    // Cast first: a sum over all tokens loses too much in bf16.
    let dy = cast::<B>(dy.into_full(), dtype);
    Float8Tensor::new(B::linear_bias_backward(dy))
}

/// The linear whose weight gradient is wanted.
///
/// wgrad is not given the weight, but fprop left a record on x and dgrad one on dy. Several linears may share either:
/// - a residual sum hands one dy to two layers, so dy's record counts only if x's name the same linear, or if x has
///   none (it was recomputed under gradient checkpointing);
/// - x's records alone decide where nothing asked for dx. Linears of one shape then take turns, last one first as
///   backward visits them, so that each is counted once.
fn wgrad_use<B: Float8Backend>(x: &Float8Tensor<B>, dy: &Float8Tensor<B>, weight_shape: [usize; 2]) -> Use {
    let dy_use = dy.companion().uses().iter().find(|u| u.weight_shape == weight_shape).cloned();
    let mut x_uses = x.companion().uses();
    let found = match &dy_use {
        Some(dy_use) if x_uses.is_empty() => return dy_use.clone(),
        Some(dy_use) => x_uses.iter().position(|u| u.same(dy_use)),
        None => None,
    };
    let fits = |u: &Use| u.weight_shape == weight_shape;
    let found =
        found.or_else(|| x_uses.iter().rposition(|u| fits(u) && u.pending)).or_else(|| x_uses.iter().rposition(fits));
    match found {
        Some(i) => {
            x_uses[i].pending = false;
            x_uses[i].clone()
        }
        None => Use {
            layer: untagged::<B>(&B::float_device(x.full())),
            weight_dtype: x.dtype(),
            weight_shape,
            pending: false,
            bias_dtype: None,
        },
    }
}

fn layer_of<B: Float8Backend>(w: &Float8Tensor<B>) -> Arc<Layer> {
    w.layer().cloned().unwrap_or_else(|| untagged::<B>(&B::float_device(w.full())))
}

fn cast<B: Float8Backend>(t: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if t.dtype() == dtype { t } else { B::float_cast(t, FloatDType::from(dtype)) }
}

/// Elements of the largest of x, w and y, each axis padded as the kernels may pad it.
fn largest(m: usize, k: usize, n: usize) -> u64 {
    let [m, k, n] = [m, k, n].map(|d| d.next_multiple_of(16) as u64);
    m.saturating_mul(k).max(k.saturating_mul(n)).max(m.saturating_mul(n))
}

fn last(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// The product of all dimensions but the last.
fn rows(shape: &Shape) -> usize {
    shape.iter().take(shape.num_dims() - 1).product()
}

fn with_last(shape: &Shape, n: usize) -> Shape {
    let mut dims = shape.to_vec();
    *dims.last_mut().expect("a linear's tensors have rank 1 or more") = n;
    Shape::from(dims)
}
