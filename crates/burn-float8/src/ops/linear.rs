//! A linear on the compute backend: forward, the state of its node, and backward.
//!
//! ```text
//! fprop   y  [M,N] = x  [M,K] · w [K,N] + b   reads x by rows,    w transposed
//! dgrad   dx [M,K] = dy [M,N] · wᵀ[N,K]       reads dy by rows,   w by rows
//! wgrad   dw [K,N] = xᵀ [K,M] · dy[M,N]       reads x transposed, dy transposed
//! ```
//!
//! M is the product of the leading dimensions. x may be bf16 while w is an f32 master weight. Each
//! is quantized from its own dtype. y and dx have x's dtype, dw has w's, db has b's.
use std::cell::OnceCell;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::call::{GemmCall, GemmData, Use, zeros};
use super::parallel::Tokens;
use crate::backend::{Float8Backend, in_dtype};
use crate::layer::Layer;
use crate::profile::operation;
use crate::step::{DeviceState, Observation, Sample, on_backward};
use crate::tensor::{
    CastRequest, Float8Tensor, Fp8Copy, Layout, Wrapped, clear_shared_input_casts, fp8_copy, push_sample, source_of,
    take_sample, with_all_tokens,
};
use crate::terms::{Gemm, Operand, Role};

/// Gradients wanted from a node.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) x: bool,
    pub(super) w: bool,
    pub(super) bias: bool,
    /// Whether this is a forward without autodiff.
    pub(super) evaluates: bool,
}

impl Wanted {
    /// For a forward without autodiff.
    pub(super) const EVALUATION: Self = Self { x: false, w: false, bias: false, evaluates: true };

    pub(super) fn any(self) -> bool {
        self.x || self.w || self.bias
    }
}

/// Input of wgrad saved from x.
#[derive(Clone)]
pub(super) enum SavedInput<T> {
    /// Nothing: the weight wants no gradient, or x has no rows.
    None,
    /// xᵀ in FP8.
    Float8(T),
    /// x in high precision.
    Full,
}

impl<T> SavedInput<T> {
    /// Whether wgrad reads x itself.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Self::Full)
    }
}

/// State of a linear's node for its backward.
#[derive(Clone)]
pub(super) struct SavedLinear<B: Float8Backend> {
    used: Use<B>,
    pub(super) x: SavedInput<Arc<Fp8Copy<B>>>,
    /// Kept if x wants a gradient.
    w: Option<Float8Tensor<B>>,
    x_shape: Shape,
    /// M, K and N.
    dims: [usize; 3],
    statistics: ForwardStatistics<B>,
}

impl<B: Float8Backend> core::fmt::Debug for SavedLinear<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of {:?} and {:?}", self.used, self.x_shape, &self.dims[1..])
    }
}

/// Amaxes and samples of a forward. They count once backward reaches its node.
#[derive(Clone, Default)]
pub(super) struct ForwardStatistics<B: Float8Backend> {
    observations: Vec<Arc<Observation<B>>>,
    samples: Vec<Sample<B>>,
}

impl<B: Float8Backend> ForwardStatistics<B> {
    /// Adds a cast of forward.
    pub(super) fn add(&mut self, copy: &Fp8Copy<B>) {
        self.observations.extend(copy.result.observation.clone());
    }

    /// Samples a tensor that forward reads, if statistics are due.
    pub(super) fn sample(&mut self, request: CastRequest<'_, B>) {
        self.samples.extend(take_sample(request));
    }

    /// Counts a forward that no backward can reach.
    pub(super) fn count_without_backward(self, wanted: Wanted) {
        if !wanted.evaluates {
            self.observations.iter().for_each(|observation| observation.note_without_backward());
        }
    }

    /// Counts a forward once backward reaches its node.
    pub(super) fn count(self, layer: &Layer, device: &Device<B>) {
        on_backward::<B>(layer, device);
        self.observations.iter().for_each(|observation| observation.confirm());
        if !self.samples.is_empty() {
            let state = DeviceState::of(layer, device);
            self.samples.into_iter().for_each(|sample| push_sample(&state, sample));
        }
    }
}

/// y = x · w + b, and the state of its node if a gradient is wanted. `x: [.., K]`, `w: [K, N]`,
/// `bias: [N]`, y: `[.., N]`. The shapes must [fit](fits).
pub(super) fn forward<B: Float8Backend>(
    x: &Float8Tensor<B>,
    w: &Float8Tensor<B>,
    bias: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> (FloatTensor<B>, Option<SavedLinear<B>>) {
    let used = Use::of(x, w, bias.as_ref().map(|bias| bias.dtype()), wanted.evaluates);
    let tokens = Tokens::<B>::of(&used.layer);
    let (x_shape, [k, n], dtype) = (x.shape(), matrix(&w.whole_shape()), used.dtypes.x);
    let whole_x = tokens.whole(Role::Input, &x_shape);
    let (m, shape) = (rows(&whole_x), with_last(&whole_x, n));
    // Added to the sum over ranks, not to each term.
    let (bias, bias_of_sum) = if tokens.sums(Role::GradOutput) { (None, bias) } else { (bias, None) };
    let (call, wgrad) = (GemmCall::new(&used, Gemm::Fprop, [m, k, n]), GemmCall::new(&used, Gemm::Wgrad, [m, k, n]));
    let wgrad = if wanted.w { wgrad.decide().ok() } else { None };
    let mut statistics = ForwardStatistics::default();
    let y = match call.plan() {
        Some(plan) => {
            let a = fp8_copy(CastRequest { both: wgrad.is_some(), ..used.request(plan, x, Operand::INPUT) });
            let b = fp8_copy(CastRequest { both: wanted.x, ..used.request(plan, w, Operand::WEIGHT_T) });
            statistics.add(&a);
            statistics.add(&b);
            call.run(plan, GemmData { copies: [&a, &b], bias, groups: None, shape, dtype })
        }
        None if m == 0 => {
            call.join(w).iter().for_each(|copy| statistics.add(copy));
            zeros::<B>(shape, dtype, &used.device)
        }
        None => {
            let (w, bias) = (w.clone().into_whole(dtype), bias.map(|bias| in_dtype::<B>(bias, dtype)));
            call.run_high_precision(tokens.gathered(Role::Input, x.full().clone()), w, bias, dtype)
        }
    };
    let y = tokens.reduced(Role::GradOutput, y);
    let y = match bias_of_sum {
        Some(bias) => {
            let bias =
                B::float_reshape(in_dtype::<B>(bias, dtype), with_last(&Shape::from(vec![1; y.shape().num_dims()]), n));
            B::float_add(y, bias)
        }
        None => y,
    };
    if !wanted.any() {
        statistics.count_without_backward(wanted);
        return (y, None);
    }
    let saved_input = match wgrad {
        _ if !wanted.w || m == 0 => SavedInput::None,
        None => SavedInput::Full,
        Some(plan) => SavedInput::Float8(fp8_copy(used.request(plan, x, Operand::INPUT_T))),
    };
    if let SavedInput::Float8(copy) = &saved_input {
        statistics.add(copy);
    }
    if let Ok(plan) = &used.plan {
        if wanted.w {
            statistics.sample(used.request(plan, x, Operand::INPUT));
            statistics.sample(used.request(plan, x, Operand::INPUT_T));
        }
        // If dgrad runs, it samples the weight.
        if !wanted.x {
            statistics.sample(used.request(plan, w, Operand::WEIGHT_T));
        }
    }
    let w = wanted.x.then(|| w.clone());
    (y, Some(SavedLinear { x: saved_input, w, x_shape, dims: [m, k, n], statistics, used }))
}

/// Wanted gradients of x, w and b. `x` is the tensor itself if forward kept it.
pub(super) fn backward<B: Float8Backend>(
    saved: SavedLinear<B>,
    dy: FloatTensor<B>,
    x: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> [Option<FloatTensor<B>>; 3] {
    clear_shared_input_casts();
    let SavedLinear { used, x: saved_input, w, x_shape, dims, statistics } = saved;
    let dy = GradOutput::<B> { own: Float8Tensor::new(in_dtype::<B>(dy, used.dtypes.x)), all: OnceCell::new() };
    statistics.count(&used.layer, &used.device);
    let dx = w.filter(|_| wanted.x).map(|w| {
        let tokens = Tokens::<B>::of(&used.layer);
        let shape = tokens.whole(Role::Input, &x_shape);
        let dx = dgrad(&GemmCall::new(&used, Gemm::Dgrad, dims), w, &dy, shape, wanted.w);
        tokens.reduced(Role::Input, dx)
    });
    let dw = wanted.w.then(|| wgrad(&GemmCall::new(&used, Gemm::Wgrad, dims), saved_input, x, &dy));
    let db = wanted.bias.then(|| bias_grad::<B>(dy.own.into_full(), used.dtypes.bias, &used.device));
    [dx, dw, db]
}

/// dy of a backward.
struct GradOutput<B: Float8Backend> {
    /// This rank's tokens.
    own: Float8Tensor<B>,
    /// The tokens of all ranks in high precision, once a GEMM has read them.
    all: OnceCell<FloatTensor<B>>,
}

impl<B: Float8Backend> GradOutput<B> {
    fn gathered(&self, layer: &Layer) -> FloatTensor<B> {
        let gather = || Tokens::<B>::of(layer).gathered(Role::GradOutput, self.own.full().clone());
        self.all.get_or_init(gather).clone()
    }
}

/// dx = dy · wᵀ. `w: [K, N]`, `dy: [.., N]`, dx: `[.., K]`.
fn dgrad<B: Float8Backend>(
    call: &GemmCall<'_, B>,
    w: Float8Tensor<B>,
    all_dy: &GradOutput<B>,
    shape: Shape,
    wants_wgrad: bool,
) -> FloatTensor<B> {
    let (used, dy, dtype) = (call.used, &all_dy.own, all_dy.own.dtype());
    w.cache().note_dgrad();
    let dx = call.plan().map(|plan| {
        let both = wants_wgrad && plan.gemm(Gemm::Wgrad).is_ok();
        let a = fp8_copy(CastRequest { both, ..used.request(plan, dy, Operand::GRAD_OUTPUT) }).confirmed();
        let b = fp8_copy(used.request(plan, &w, Operand::WEIGHT)).confirmed();
        call.run(plan, GemmData { copies: [&a, &b], bias: None, groups: None, shape: shape.clone(), dtype })
    });
    used.sample(&w, Layout::Matrix, Operand::WEIGHT_T);
    used.sample(&w, Layout::Matrix, Operand::WEIGHT);
    used.sample(dy, Layout::Matrix, Operand::GRAD_OUTPUT);
    dx.unwrap_or_else(|| {
        if call.dims[0] == 0 {
            call.join(&w);
            return zeros::<B>(shape, dtype, &used.device);
        }
        call.run_high_precision(all_dy.gathered(&used.layer), w.into_whole(dtype), None, dtype)
    })
}

/// dw = xᵀ · dy, summed over the leading dimensions. `x: [.., K]`, `dy: [.., N]`, dw: `[K, N]`, or
/// this process' rows of it.
fn wgrad<B: Float8Backend>(
    call: &GemmCall<'_, B>,
    saved_input: SavedInput<Arc<Fp8Copy<B>>>,
    x: Option<FloatTensor<B>>,
    all_dy: &GradOutput<B>,
) -> FloatTensor<B> {
    let (used, dy, [_, k, n], dtype) = (call.used, &all_dy.own, call.dims, call.used.dtypes.w);
    let shape = Shape::from(vec![k, n]);
    let dw = match (call.plan(), saved_input, x) {
        (Some(plan), SavedInput::Float8(x), _) => {
            let (x, dy) = (
                with_all_tokens(x, &used.layer, plan, &used.device),
                fp8_copy(used.request(plan, dy, Operand::GRAD_OUTPUT_T)).confirmed(),
            );
            call.run(plan, GemmData { copies: [&x, &dy], bias: None, groups: None, shape, dtype })
        }
        (_, _, Some(x)) => {
            let x = Tokens::<B>::of(&used.layer).gathered(Role::Input, x);
            call.run_high_precision(x, all_dy.gathered(&used.layer), None, dtype)
        }
        _ => zeros::<B>(shape, dtype, &used.device),
    };
    used.sample(dy, Layout::Matrix, Operand::GRAD_OUTPUT_T);
    reduced::<B>(&used.layer, dw)
}

/// Gradient of a weight. If the weight is sharded, reduces it to this process' rows.
pub(super) fn reduced<B: Float8Backend>(layer: &Layer, dw: FloatTensor<B>) -> FloatTensor<B> {
    match source_of::<B>(layer) {
        Some(source) => source.gradient(dw),
        None => dw,
    }
}

/// db `[N]` = the sum of `dy: [.., N]` over its leading dimensions, in the bias' dtype.
fn bias_grad<B: Float8Backend>(dy: FloatTensor<B>, dtype: Option<DType>, device: &Device<B>) -> FloatTensor<B> {
    let (shape, dtype) = (dy.shape(), dtype.unwrap_or(dy.dtype()));
    if rows(&shape) == 0 {
        return zeros::<B>(Shape::from(vec![last(&shape)]), dtype, device);
    }
    // Cast first: a sum over all tokens in bf16 is too inaccurate.
    let dy = in_dtype::<B>(dy, dtype);
    let _timer = operation("linear_bias_backward");
    B::linear_bias_backward(dy)
}

/// Whether the shapes are x `[.., K]`, w `[K, N]` and bias `[N]`.
pub(super) fn fits<W: Wrapped>(x: &Float8Tensor<W>, w: &Float8Tensor<W>, bias: Option<&FloatTensor<W>>) -> bool {
    let (xs, ws) = (x.shape(), w.whole_shape());
    xs.num_dims() > 0
        && ws.num_dims() == 2
        && last(&xs) == ws[0]
        && bias.is_none_or(|b| b.shape().num_dims() == 1 && b.shape()[0] == ws[1])
}

fn matrix(shape: &Shape) -> [usize; 2] {
    [shape[0], shape[1]]
}

fn last(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// Product of all dimensions except the last.
fn rows(shape: &Shape) -> usize {
    shape.iter().take(shape.num_dims() - 1).product()
}

fn with_last(shape: &Shape, n: usize) -> Shape {
    let mut dims = shape.to_vec();
    *dims.last_mut().expect("a linear's tensors have rank 1 or more") = n;
    Shape::from(dims)
}
