//! A linear on the backend that computes: its forward, and what its node keeps for the two GEMMs of its backward.
//!
//! ```text
//! fprop   y  [M,N] = x  [M,K] · w [K,N] + b   reads x by rows,    w transposed
//! dgrad   dx [M,K] = dy [M,N] · wᵀ[N,K]       reads dy by rows,   w by rows
//! wgrad   dw [K,N] = xᵀ [K,M] · dy[M,N]       reads x transposed, dy transposed
//! ```
//!
//! M is the product of the leading dimensions. x may be bf16 while w is an f32 master weight: each is quantized from
//! its own dtype, y and dx have x's dtype, dw has w's, db has b's.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::call::{GemmCall, Use, zeros};
use crate::backend::{Float8Backend, in_dtype};
use crate::layer::Layer;
use crate::profile::operation;
use crate::step::{DeviceState, Observation, Sample, on_backward};
use crate::tensor::{
    CastRequest, Float8Tensor, Fp8Copy, View, Wrapped, clear_recent, fp8_copy, push_sample, sample, source_of,
    take_sample,
};
use crate::terms::{Gemm, Operand};

/// Which gradients a node is to give.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) x: bool,
    pub(super) w: bool,
    pub(super) bias: bool,
    /// None, as there is no autodiff.
    pub(super) evaluates: bool,
}

impl Wanted {
    /// Those of a forward without autodiff.
    pub(super) const EVALUATION: Self = Self { x: false, w: false, bias: false, evaluates: true };

    pub(super) fn any(self) -> bool {
        self.x || self.w || self.bias
    }
}

/// What wgrad reads of x.
#[derive(Clone)]
pub(super) enum SavedInput<T> {
    /// Nothing: the weight wants no gradient, or there are no rows.
    None,
    /// xᵀ in FP8.
    Float8(T),
    /// x, in high precision.
    Full,
}

impl<T> SavedInput<T> {
    /// Whether wgrad reads x itself.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Self::Full)
    }
}

/// What a linear's node keeps from forward for its backward.
#[derive(Clone)]
pub(super) struct Saved<B: Float8Backend> {
    used: Use,
    pub(super) x: SavedInput<Arc<Fp8Copy<B>>>,
    /// If x wants a gradient.
    w: Option<Float8Tensor<B>>,
    x_shape: Shape,
    /// K and N.
    weight_shape: [usize; 2],
    x_dtype: DType,
    weight_dtype: DType,
    bias_dtype: Option<DType>,
    seen: Seen<B>,
}

impl<B: Float8Backend> core::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of {:?} and {:?}", self.used, self.x_shape, self.weight_shape)
    }
}

/// What the casts of a forward found out, which counts once backward comes to its node.
#[derive(Clone)]
pub(super) struct Seen<B: Float8Backend> {
    observations: Vec<Arc<Observation<B>>>,
    samples: Vec<Sample<B>>,
}

impl<B: Float8Backend> Default for Seen<B> {
    fn default() -> Self {
        Self { observations: vec![], samples: vec![] }
    }
}

impl<B: Float8Backend> Seen<B> {
    /// A cast of forward.
    pub(super) fn add(&mut self, copy: &Fp8Copy<B>) {
        self.observations.extend(copy.result.observation.clone());
    }

    /// Samples a tensor that forward read, if statistics are taken in this step.
    pub(super) fn sample(&mut self, t: &Float8Tensor<B>, view: View<'_, B>, request: CastRequest<'_>) {
        if is_sampled(request.layer, t) {
            self.samples.extend(take_sample(t, view, request));
        }
    }

    /// No backward can come to the forward.
    pub(super) fn count_without_backward(self, wanted: Wanted) {
        if !wanted.evaluates {
            self.observations.iter().for_each(|observation| observation.note_without_backward());
        }
    }

    /// Backward has come to the node.
    pub(super) fn count(self, layer: &Layer, device: &Device<B>) {
        on_backward::<B>(layer, device);
        self.observations.iter().for_each(|observation| observation.confirm());
        if !self.samples.is_empty() {
            let state = DeviceState::of(layer, device);
            self.samples.into_iter().for_each(|sample| push_sample(&state, sample));
        }
    }
}

/// Whether the layers of a conversion are sampled at all, and there is something to sample: of codes alone nobody knows what they were
/// cast from.
fn is_sampled<B: Float8Backend>(layer: &Layer, t: &Float8Tensor<B>) -> bool {
    layer.conversion().config().statistics.is_some() && !t.is_fp8_only() && t.shape().iter().all(|dim| *dim > 0)
}

/// y = x · w + b, and what its node keeps if a gradient is wanted. `x: [.., K]`, `w: [K, N]`, `bias: [N]`, y: `[.., N]`, of shapes that
/// [fit](fits).
pub(super) fn forward<B: Float8Backend>(
    x: &Float8Tensor<B>,
    w: &Float8Tensor<B>,
    bias: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> (FloatTensor<B>, Option<Saved<B>>) {
    let (xs, [k, n], device) = (x.shape(), matrix(&w.whole_shape()), x.device());
    let (m, dtype, out) = (rows(&xs), x.dtype(), with_last(&xs, n));
    let bias_dtype = bias.as_ref().map(|bias| bias.dtype());
    let used = Use { evaluates: wanted.evaluates, ..Use::of(w) };
    let dtypes = [Some(dtype), Some(w.dtype()), bias_dtype];
    let call = GemmCall::new(&used, Gemm::Fprop, [m, k, n]);
    let mut seen = Seen::default();
    let wgrad_plan = wanted.w.then(|| {
        let call = GemmCall::new(&used, Gemm::Wgrad, [m, k, n]);
        call.decide::<B>(&device, [dtype, w.dtype()]).ok()
    });
    let y = match call.plan::<B>(&device, dtypes.into_iter().flatten()) {
        Some(plan) => {
            let reads_both = wgrad_plan.flatten().is_some();
            let [a, b] = call.copies([(x, View::Own, reads_both), (w, View::Own, wanted.x)], plan);
            seen.add(&a);
            seen.add(&b);
            call.run([&a, &b], bias, None, (out, dtype), (&device, plan))
        }
        None if m == 0 => {
            let joined = call.join(w, (dtype, dtypes.into_iter().flatten()), &device);
            joined.iter().for_each(|copy| seen.add(copy));
            zeros::<B>(out, dtype, &device)
        }
        None => {
            let (w, bias) = (w.clone().into_whole(dtype), bias.map(|bias| in_dtype::<B>(bias, dtype)));
            let _timer = operation("linear");
            B::linear(x.full().clone(), w, bias)
        }
    };
    if !wanted.any() {
        seen.count_without_backward(wanted);
        return (y, None);
    }
    let saved_input = match wgrad_plan {
        None => SavedInput::None,
        _ if m == 0 => SavedInput::None,
        Some(None) => SavedInput::Full,
        Some(Some(plan)) => {
            let copy = fp8_copy(x, View::Own, used.request(Operand::INPUT_T, plan, false));
            seen.add(&copy);
            SavedInput::Float8(copy)
        }
    };
    if let Ok(plan) = &used.plan {
        // Where dgrad runs it samples the weight.
        let of_x = [Operand::INPUT, Operand::INPUT_T].map(|operand| (x, operand)).into_iter().filter(|_| wanted.w);
        for (t, operand) in of_x.chain((!wanted.x).then_some((w, Operand::WEIGHT_T))) {
            seen.sample(t, View::Own, used.request(operand, plan, false));
        }
    }
    let saved = Saved {
        x: saved_input,
        w: wanted.x.then(|| w.clone()),
        x_shape: xs,
        weight_shape: [k, n],
        x_dtype: dtype,
        weight_dtype: w.dtype(),
        bias_dtype,
        seen,
        used,
    };
    (y, Some(saved))
}

/// [`Wrapped::fp8_linear`], and what the weight's adapters add to it.
pub(super) fn adapted<W: Wrapped>(
    x: Float8Tensor<W>,
    w: Float8Tensor<W>,
    bias: Option<FloatTensor<W>>,
) -> FloatTensor<W> {
    match w.adapters().cloned() {
        None => W::fp8_linear(x, w, bias),
        Some(adapters) => {
            // Whatever reads the values of a weight with adapters gets all.
            let y = W::fp8_linear(x.clone(), w.with_adapters(None), bias);
            adapters.add_to(y, x.into_full())
        }
    }
}

/// The gradients of x, w and b that are wanted. `x` is the tensor itself if forward has asked to keep it.
pub(super) fn backward<B: Float8Backend>(
    saved: Saved<B>,
    dy: FloatTensor<B>,
    x: Option<FloatTensor<B>>,
    wanted: Wanted,
) -> [Option<FloatTensor<B>>; 3] {
    clear_recent();
    let device = B::float_device(&dy);
    let dy = Float8Tensor::<B>::new(in_dtype::<B>(dy, saved.x_dtype));
    let Saved { used, x: saved_input, w, x_shape, weight_shape: [k, n], weight_dtype, bias_dtype, seen, .. } = saved;
    seen.count(&used.layer, &device);
    let dims = [rows(&x_shape), k, n];
    let dx = w.filter(|_| wanted.x).map(|w| dgrad(&used, w, &dy, (dims, x_shape), wanted.w));
    let dw = wanted.w.then(|| wgrad(&used, saved_input, x, &dy, dims, weight_dtype));
    let db = wanted.bias.then(|| bias_grad::<B>(dy.into_full(), bias_dtype, &device));
    [dx, dw, db]
}

/// dx = dy · wᵀ. `w: [K, N]`, `dy: [.., N]`, dx: `[.., K]`.
fn dgrad<B: Float8Backend>(
    used: &Use,
    w: Float8Tensor<B>,
    dy: &Float8Tensor<B>,
    (dims, out): ([usize; 3], Shape),
    wants_wgrad: bool,
) -> FloatTensor<B> {
    let (dtype, device) = (dy.dtype(), B::float_device(dy.full()));
    w.cache().note_dgrad();
    let call = GemmCall::new(used, Gemm::Dgrad, dims);
    let dx = call.plan::<B>(&device, [dtype, w.dtype()]).map(|plan| {
        let reads_both = wants_wgrad && plan.gemm(Gemm::Wgrad).is_some();
        let [a, b] = call.copies([(dy, View::Own, reads_both), (&w, View::Own, false)], plan);
        call.run([&a, &b], None, None, (out.clone(), dtype), (&device, plan))
    });
    sample_operands(used, [Operand::WEIGHT_T, Operand::WEIGHT].map(|operand| (&w, View::Own, operand)));
    sample_operands(used, [(dy, View::Own, Operand::GRAD_OUTPUT)]);
    dx.unwrap_or_else(|| {
        if dims[0] == 0 {
            call.join(&w, (dtype, [dtype, w.dtype()]), &device);
            return zeros::<B>(out, dtype, &device);
        }
        let w = w.into_whole(dtype);
        let _timer = operation("linear_x_backward");
        B::linear_x_backward(w, dy.full().clone())
    })
}

/// dw = xᵀ · dy, summed over the leading dimensions. `x: [.., K]`, `dy: [.., N]`, dw: `[K, N]`; of the rows that this process has, where
/// those are not all.
fn wgrad<B: Float8Backend>(
    used: &Use,
    saved_input: SavedInput<Arc<Fp8Copy<B>>>,
    x: Option<FloatTensor<B>>,
    dy: &Float8Tensor<B>,
    dims: [usize; 3],
    dtype: DType,
) -> FloatTensor<B> {
    let ([_, k, n], device) = (dims, B::float_device(dy.full()));
    let out = Shape::from(vec![k, n]);
    let call = GemmCall::new(used, Gemm::Wgrad, dims);
    let plan = call.plan::<B>(&device, [dy.dtype(), dtype]);
    let dw = match (plan, saved_input, x) {
        (Some(plan), SavedInput::Float8(x), _) => {
            let dy = call.copy((dy, View::Own, false), Operand::GRAD_OUTPUT_T, plan);
            call.run([&x, &dy], None, None, (out, dtype), (&device, plan))
        }
        (_, _, Some(x)) => {
            let timer = operation("linear_weight_backward");
            let dw = B::linear_weight_backward(x, dy.full().clone());
            drop(timer);
            in_dtype::<B>(dw, dtype)
        }
        _ => zeros::<B>(out, dtype, &device),
    };
    sample_operands(used, [(dy, View::Own, Operand::GRAD_OUTPUT_T)]);
    reduced::<B>(&used.layer, dw)
}

/// The gradient of a weight, of the rows that this process has, where those are not all.
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
    // Cast first: a sum over all tokens loses too much in bf16.
    let dy = in_dtype::<B>(dy, dtype);
    let _timer = operation("linear_bias_backward");
    B::linear_bias_backward(dy)
}

/// Samples operands that backward is given, each as the matrix that its GEMM reads, if statistics are taken in this step.
pub(super) fn sample_operands<B: Float8Backend, const N: usize>(
    used: &Use,
    operands: [(&Float8Tensor<B>, View<'_, B>, Operand); N],
) {
    let Ok(plan) = &used.plan else { return };
    for (tensor, view, operand) in operands {
        if is_sampled(&used.layer, tensor) {
            sample(tensor, view, used.request(operand, plan, false));
        }
    }
}

/// Whether these are an x `[.., K]`, a w `[K, N]` and a bias `[N]`.
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

/// The product of all dimensions but the last.
fn rows(shape: &Shape) -> usize {
    shape.iter().take(shape.num_dims() - 1).product()
}

fn with_last(shape: &Shape, n: usize) -> Shape {
    let mut dims = shape.to_vec();
    *dims.last_mut().expect("a linear's tensors have rank 1 or more") = n;
    Shape::from(dims)
}
