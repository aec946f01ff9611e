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

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::Shape;

use crate::backend::{Float8Backend, untagged};
use crate::config::Float8LinearConfig;
use crate::copies::{CastOf, Fp8Copy, Use, fp8_copy};
use crate::error::Float8Error;
use crate::health;
use crate::layer::{Along, Gemm, Layer, Policy, Reason, Role};
use crate::tensor::Float8Tensor;

/// One GEMM of a linear with these M, K and N.
pub(crate) struct Call<'a> {
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) gemm: Gemm,
    pub(crate) dims: [usize; 3],
    /// Weights of K by N.
    pub(crate) groups: usize,
}

impl Call<'_> {
    /// The layer's configuration if this GEMM, which reads and writes these dtypes, can and may run in FP8.
    ///
    /// # Errors
    ///
    /// Why it runs in high precision.
    pub(crate) fn decide<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Result<Float8LinearConfig, Reason> {
        let [m, k, n] = self.dims;
        let config = match self.layer.policy() {
            Policy::HighPrecision(reason) => return Err(reason),
            Policy::Float8(_) if self.layer.group().is_paused() => return Err(Reason::Schedule),
            Policy::Float8(config) => config,
        };
        if config.casts().is_disabled(self.gemm) {
            return Err(Reason::Recipe);
        }
        if self.dims.contains(&0) {
            return Err(Reason::Empty { m, k, n });
        }
        if largest(m, k, n, self.groups) > B::fp8_max_elements() {
            return Err(Reason::TooLarge { m, k, n });
        }
        match dtypes.into_iter().find(|d| !B::fp8_supports(device, *d)) {
            Some(dtype) => Err(Reason::Dtype(dtype)),
            None => Ok(config),
        }
    }

    /// Counts a GEMM in high precision.
    ///
    /// # Panics
    ///
    /// In strict mode, if nobody asked for it.
    pub(crate) fn refuse(&self, reason: Reason) {
        let unrequested = !reason.is_requested();
        self.layer.count_high_precision(self.gemm, reason.clone());
        if unrequested && self.layer.group().is_strict() {
            let (layer, reason) = (self.layer.name().into(), reason.to_string());
            panic!("{}", Float8Error::UnrequestedHighPrecision { layer, gemm: self.gemm, reason });
        }
    }

    /// Multiplies two operands.
    fn run<B: Float8Backend>(
        &self,
        [a, b]: [&Fp8Copy<B>; 2],
        bias: Option<&Float8Tensor<B>>,
        (shape, dtype): (Shape, DType),
        device: &Device<B>,
        config: &Float8LinearConfig,
    ) -> Float8Tensor<B> {
        let granularities = config.casts().granularities(self.gemm);
        let (bias, config) = (bias.map(|b| b.full().clone()), config.gemm_config(self.gemm));
        let path = B::fp8_gemm_path(device, granularities, config);
        let y = B::fp8_matmul(&a.operand, &b.operand, bias, shape, FloatDType::from(dtype), config);
        let extents = [a, b].map(|copy| B::fp8_extent(&copy.operand));
        self.layer.count_fp8(self.gemm, path, extents);
        Float8Tensor::new(y)
    }
}

/// An operand of a GEMM: a tensor, its role, and the axis that the GEMM contracts.
struct Operand<'a, B: Float8Backend> {
    tensor: &'a Float8Tensor<B>,
    role: Role,
    along: Along,
}

/// Runs a GEMM in FP8 if that is its path.
fn run<B: Float8Backend>(
    call: Call<'_>,
    [a, b]: [Operand<'_, B>; 2],
    bias: Option<&Float8Tensor<B>>,
    out: (Shape, DType),
) -> Option<Float8Tensor<B>> {
    let device = B::float_device(a.tensor.full());
    let dtypes = [Some(a.tensor.dtype()), Some(b.tensor.dtype()), bias.map(|b| b.dtype()), Some(out.1)];
    let config = call.decide::<B>(&device, dtypes.into_iter().flatten()).map_err(|reason| call.refuse(reason)).ok()?;
    let in_forward = call.gemm == Gemm::Fprop;
    let [a, b] = [a, b].map(|Operand { tensor, role, along }| {
        fp8_copy(tensor, CastOf { role, along, layer: call.layer, config: &config }, in_forward)
    });
    Some(call.run([&a, &b], bias, out, &device, &config))
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
    let [k, n] = [ws[0], ws[1]];
    let layer = weight_layer(&w);
    layer.forget_fprop();
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
    let call = Call { layer: &layer, gemm: Gemm::Fprop, dims: [rows(&xs), k, n], groups: 1 };
    run(call, [a, b], bias.as_ref(), out).unwrap_or_else(|| {
        if rows(&xs) == 0 {
            return zeros(with_last(&xs, n), x.dtype(), x.full());
        }
        let dtype = x.dtype();
        let [w, bias] = [Some(w), bias].map(|t| t.map(|t| cast::<B>(t.into_full(), dtype)));
        Float8Tensor::new(B::linear(x.into_full(), w.unwrap(), bias))
    })
}

/// dx = dy · wᵀ. `w: [K, N]`, `dy: [.., N]`, dx: `[.., K]`.
pub(crate) fn dgrad<B: Float8Backend>(w: Float8Tensor<B>, dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let (ws, dys) = (w.shape(), dy.shape());
    let layer = layer_of(&w);
    enter_backward::<B>(&B::float_device(w.full()), &layer);
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
    let call = Call { layer: &layer, gemm: Gemm::Dgrad, dims: [rows(&dys), k, n], groups: 1 };
    run(call, [a, b], None, out).unwrap_or_else(|| {
        if rows(&dys) == 0 {
            return zeros(with_last(&dys, k), dy.dtype(), dy.full());
        }
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
    enter_backward::<B>(&B::float_device(x.full()), &layer);
    let [k, n] = weight_shape;
    let out = (Shape::from(vec![k, n]), weight_dtype);
    let a = Operand { tensor: &x, role: Role::Input, along: Along::Cols };
    let b = Operand { tensor: &dy, role: Role::GradOutput, along: Along::Cols };
    let call = Call { layer: &layer, gemm: Gemm::Wgrad, dims: [rows(&xs), k, n], groups: 1 };
    let dw = run(call, [a, b], None, out);
    // The bias gradient follows and is given nothing but dy.
    dy.companion().set_use(used);
    dw.unwrap_or_else(|| {
        if rows(&xs) == 0 {
            return zeros(Shape::from(vec![k, n]), weight_dtype, x.full());
        }
        let dw = B::linear_weight_backward(x.into_full(), dy.into_full());
        Float8Tensor::new(cast::<B>(dw, weight_dtype))
    })
}

/// The FP8 operand of x that wgrad will read, and how.
pub(crate) struct Saving<B: Float8Backend> {
    pub(crate) copy: Arc<Fp8Copy<B>>,
    pub(crate) layer: Arc<Layer>,
    pub(crate) config: Float8LinearConfig,
}

/// What wgrad will read of x, if it will run in FP8.
pub(crate) fn save_input<B: Float8Backend>(x: &Float8Tensor<B>, w: &Float8Tensor<B>) -> Option<Saving<B>> {
    let (layer, ws) = (layer_of(w), w.shape());
    let call = Call { layer: &layer, gemm: Gemm::Wgrad, dims: [rows(&x.shape()), ws[0], ws[1]], groups: 1 };
    let config = call.decide::<B>(&B::float_device(x.full()), [x.dtype(), w.dtype()]).ok()?;
    let of = CastOf { role: Role::Input, along: Along::Cols, layer: &layer, config: &config };
    let copy = fp8_copy(x, of, true);
    // No wgrad will look for this use.
    x.companion().uses().iter_mut().filter(|u| Arc::ptr_eq(&u.layer, &layer)).for_each(|u| u.pending = false);
    Some(Saving { copy, layer, config })
}

/// [`wgrad`] with the operand of x that [`save_input`] made.
pub(crate) fn wgrad_saved<B: Float8Backend>(
    x: &Fp8Copy<B>,
    dy: &Float8Tensor<B>,
    layer: &Arc<Layer>,
    config: &Float8LinearConfig,
    weight_dtype: DType,
) -> Float8Tensor<B> {
    enter_backward::<B>(&B::float_device(dy.full()), layer);
    let (k, dys) = (B::fp8_extent(&x.operand).rows, dy.shape());
    let n = last(&dys);
    let call = Call { layer, gemm: Gemm::Wgrad, dims: [rows(&dys), k, n], groups: 1 };
    let dy_copy = fp8_copy(dy, CastOf { role: Role::GradOutput, along: Along::Cols, layer, config }, false);
    call.run([x, &dy_copy], None, (Shape::from(vec![k, n]), weight_dtype), &B::float_device(dy.full()), config)
}

/// db `[N]` = the sum of `dy: [.., N]` over its leading dimensions, in the bias' dtype.
pub(crate) fn bias_grad<B: Float8Backend>(dy: Float8Tensor<B>) -> Float8Tensor<B> {
    let recorded = dy.companion().uses().first().and_then(|u| u.bias_dtype.or_else(|| u.layer.bias_dtype()));
    // No record at all: neither x nor w wanted a gradient.
    let dtype = recorded.unwrap_or(dy.dtype());
    bias_grad_as(dy, dtype)
}

/// [`bias_grad`] in a known dtype.
pub(crate) fn bias_grad_as<B: Float8Backend>(dy: Float8Tensor<B>, dtype: DType) -> Float8Tensor<B> {
    let shape = dy.shape();
    if rows(&shape) == 0 {
        return zeros(Shape::from(vec![last(&shape)]), dtype, dy.full());
    }
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

pub(crate) fn layer_of<B: Float8Backend>(w: &Float8Tensor<B>) -> Arc<Layer> {
    w.layer().cloned().unwrap_or_else(|| untagged::<B>(&B::float_device(w.full())))
}

/// The layer of a weight that fprop reads, which may be the first that an optimizer step has built.
///
/// # Panics
///
/// If the weight carries no layer, the last configuration applied on the device is strict, and FP8 is on there.
pub(crate) fn weight_layer<B: Float8Backend>(w: &Float8Tensor<B>) -> Arc<Layer> {
    let layer = layer_of(w);
    w.companion().mark_weight();
    match w.tag() {
        Some(tag) => layer.group().meet::<B>(&B::float_device(w.full()), tag.stamp),
        None => {
            let is_on = !matches!(layer.policy(), Policy::HighPrecision(Reason::Off));
            if is_on && layer.group().is_strict() {
                let shape = w.shape();
                let [k, n] = [2, 1].map(|i| shape[shape.num_dims() - i]);
                panic!("{}", Float8Error::UntaggedLinear { weight: [k, n] });
            }
        }
    }
    layer
}

/// Backward has come to a layer: what its last fprop read was no evaluation.
pub(crate) fn enter_backward<B: Float8Backend>(device: &Device<B>, layer: &Arc<Layer>) {
    layer.tell_histories();
    health::confirm::<B>(device, layer);
}

/// The result of a GEMM over an empty batch, which not every backend multiplies or sums.
fn zeros<B: Float8Backend>(shape: Shape, dtype: DType, like: &FloatTensor<B>) -> Float8Tensor<B> {
    Float8Tensor::new(B::float_zeros(shape, &B::float_device(like), FloatDType::from(dtype)))
}

/// Notes that `Tensor::matmul` reads the weight of `layer`: it is no linear and never in FP8.
///
/// # Panics
///
/// In strict mode, if the layer is to run in FP8.
pub(crate) fn note_weight_matmul(layer: &Layer) {
    layer.count_weight_matmul();
    if layer.group().is_strict() && matches!(layer.policy(), Policy::Float8(_)) {
        panic!("{}", Float8Error::WeightMatmul { layer: layer.name().into() });
    }
}

pub(crate) fn cast<B: Float8Backend>(t: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if t.dtype() == dtype { t } else { B::float_cast(t, FloatDType::from(dtype)) }
}

/// Elements of the largest of x, all weights and y, each axis padded as the kernels may pad it.
fn largest(m: usize, k: usize, n: usize, groups: usize) -> u64 {
    let [m, k, n] = [m, k, n].map(|d| d.next_multiple_of(16) as u64);
    m.saturating_mul(k).max(k.saturating_mul(n).saturating_mul(groups as u64)).max(m.saturating_mul(n))
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
