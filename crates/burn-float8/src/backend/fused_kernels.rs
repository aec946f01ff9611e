//! [`Fused`] by the kernels of `float8-kernels`, where they compute it and are right, else by Burn's operations.
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Slice, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::device::Device as _;
use cubecl::server::Handle;
use float8_kernels::fused::{self as kernels, FusedInputs, FusedKernel, WithMaxima};
use float8_kernels::{Cast, KernelError, MAX_INDEX, MatrixView, Orientation, Quantized, amax, quantize_fused};

use super::ScaleFrom;
use super::fused::{self, Fused, FusedOutput};
use super::host::{matrix, read_f32};
use super::operand::tensor;
use super::self_check::{self, Mismatch};

/// The last positions or rows that a check computes again.
const SAMPLED: usize = 64;

/// What the kernels give: y, or the gradients of the inputs.
type Made<R, F, I, BT> = Vec<FusedOutput<CubeBackend<R, F, I, BT>>>;

/// dy, and whether the maxima of gradients are wanted.
type Backward<'a, R> = (&'a CubeTensor<R>, bool);

/// The kernel of an operation, if there is one.
fn kernel<B: Backend>(op: &Fused<B>) -> Option<FusedKernel> {
    match op {
        Fused::SwiGlu => Some(FusedKernel::SwiGlu),
        Fused::RmsNorm { .. } => Some(FusedKernel::RmsNorm),
        Fused::Rotary { .. } => Some(FusedKernel::Rotary),
        Fused::LogLikelihood { .. } => None,
    }
}

/// How many [`maxima`](FusedOutput::maxima) an operation leaves of y or, `backward`, of the gradient of each input. `shape` is that of the first
/// input. None for what no linear casts: y of rotary positions, gradients of RMSNorm, and tensors too large for kernels to index.
pub(super) fn maxima_len<B: Backend>(op: &Fused<B>, shape: &Shape, backward: bool) -> Option<usize> {
    match (kernel(op)?, backward) {
        (FusedKernel::Rotary, false) | (FusedKernel::RmsNorm, true) => None,
        _ if shape.num_elements() as u64 > MAX_INDEX => None,
        (kernel, _) => Some(kernels::maxima_len(kernel, matrix(shape))),
    }
}

/// Forward, with as many maxima as [`maxima_len`] says.
pub(super) fn forward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
) -> FusedOutput<CubeBackend<R, F, I, BT>> {
    if let Some(mut made) = compute(op, inputs, None) {
        return made.remove(0);
    }
    let y = fused::forward(op, inputs);
    let len = maxima_len(op, &inputs[0].shape(), false);
    with_found(y, len)
}

/// The gradients of the inputs, with as many maxima as [`maxima_len`] says where they are wanted.
pub(super) fn backward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    dy: &CubeTensor<R>,
    with_maxima: bool,
) -> Made<R, F, I, BT> {
    compute(op, inputs, Some((dy, with_maxima))).unwrap_or_else(|| {
        let gradients = fused::backward(op, inputs, dy).into_iter();
        let len = with_maxima.then(|| maxima_len(op, &inputs[0].shape(), true)).flatten();
        gradients.map(|gradient| with_found(gradient, len)).collect()
    })
}

/// A tensor with so many maxima, each of which is its amax.
fn with_found<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    y: CubeTensor<R>,
    len: Option<usize>,
) -> FusedOutput<CubeBackend<R, F, I, BT>> {
    let maxima = len.and_then(|len| {
        let found = amax(&y.client, &view(&y)).ok()?;
        let found = tensor(&y.client, &y.device, found, [1], DType::F32);
        Some(into_contiguous(CubeBackend::<R, F, I, BT>::float_expand(found, Shape::from(vec![len]))))
    });
    FusedOutput { y, maxima }
}

/// What the kernels give, backward with dy; none where they do not compute this, or were wrong.
fn compute<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<Backward<'_, R>>,
) -> Option<Made<R, F, I, BT>> {
    let kernel = kernel(op)?;
    let (client, device) = (inputs[0].client.clone(), inputs[0].device.to_id());
    let call = || {
        let name = if backward.is_some() { op.backward_name() } else { op.name() };
        format!("{name} of {:?} {:?}", &inputs[0].shape()[..], inputs[0].dtype())
    };
    let launch = || launch(op, inputs, backward);
    let compare = |made: &Made<R, F, I, BT>| compare(op, inputs, backward, made).map_err(Mismatch::Wrong);
    self_check::fused(&client, &self_check::of(&client), device, (kernel, call), launch, compare).ok()
}

/// Whether the kernels make what an operation makes of tensors of these dtypes in the cast that follows.
pub(super) fn defers<R: CubeRuntime, B: Backend>(op: &Fused<B>, client: &ComputeClient<R>, dtypes: [DType; 2]) -> bool {
    kernel(op).is_some_and(|kernel| kernels::casts_fused(client, kernel, dtypes.map(Into::into)))
}

/// [`Float8Backend::inverse_rms`](super::Float8Backend::inverse_rms), which casts by kernels alone read.
pub(super) fn inverse_rms<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    x: &CubeTensor<R>,
    gamma: &CubeTensor<R>,
    epsilon: f64,
) -> CubeTensor<R> {
    type Cube<R, F, I, BT> = CubeBackend<R, F, I, BT>;
    let (client, rows) = (&x.client, view(x).shape[0]);
    let by_burn = |x: &_| fused::inverse_rms_of_rows::<Cube<R, F, I, BT>>(x, gamma, epsilon);
    let call = || format!("inverse_rms of {:?} {:?}", &x.shape()[..], x.dtype());
    let launch = || {
        let made = kernels::inverse_rms(client, &view(x), &view(gamma), epsilon as f32)?;
        Ok(tensor(client, &x.device, made, [rows], DType::F32))
    };
    let compare = |made: &CubeTensor<R>| {
        let sampled = last::<Cube<R, F, I, BT>>(&in_rows::<R, F, I, BT>(x), 0);
        differs::<Cube<R, F, I, BT>>(&last::<Cube<R, F, I, BT>>(made, 0), &by_burn(&sampled))
            .map_err(|how| Mismatch::Wrong(format!("it {how}")))
    };
    let (checks, device) = (self_check::of(client), x.device.to_id());
    self_check::fused(client, &checks, device, (FusedKernel::RmsNormCast, call), launch, compare)
        .unwrap_or_else(|_| by_burn(x))
}

/// The cast of what an operation makes of its inputs, by a kernel that reads those; none where the kernels do not compute this, or were wrong.
pub(super) fn quantize<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    (cast, orientation): (Cast, Orientation),
    scale: &ScaleFrom<CubeTensor<R>>,
) -> Option<Quantized> {
    let [first, second] = [0, 1].map(|i| view(&inputs[i]));
    let (kernel, read) = match (op, inputs) {
        (Fused::SwiGlu, [_, _]) => (FusedKernel::SwiGluCast, FusedInputs::SwiGlu { a: &first, b: &second }),
        (Fused::RmsNorm { .. }, [_, _, inverse]) => {
            let read = FusedInputs::RmsNorm { x: &first, gamma: &second, inverse_rms: &inverse.handle };
            (FusedKernel::RmsNormCast, read)
        }
        _ => return None,
    };
    let (client, dtype) = (inputs[0].client.clone(), inputs[0].dtype);
    let given = match scale {
        ScaleFrom::Dynamic => None,
        ScaleFrom::Amax { amax, observe } => Some((&amax.handle, *observe)),
        ScaleFrom::Maxima(_) => return None,
    };
    let call = || {
        let ([rows, cols], Cast { format, granularity, scale_mode }) = (first.shape, cast);
        let of = format!("{} of [{rows}, {cols}] {dtype:?}", op.name());
        format!("cast of {of} to {format} {granularity} ({scale_mode}), {orientation:?}")
    };
    let quantize = || quantize_fused(&client, read, given, cast, orientation);
    let compare = |made: &Quantized| {
        let y = launch(op, &inputs[..2], None).map_err(|error| Mismatch::Wrong(error.to_string()))?;
        compare(op, &inputs[..2], None, &y).map_err(Mismatch::Wrong)?;
        let given = scale.map(|given| (given.handle.clone(), given.shape().num_elements()));
        self_check::compare_cast(&client, (&view(&y[0].y), dtype), cast, &given, made)
    };
    let (checks, device) = (self_check::of(&client), inputs[0].device.to_id());
    self_check::fused(&client, &checks, device, (kernel, call), quantize, compare).ok()
}

/// A tensor as kernels read it.
fn view<R: CubeRuntime>(tensor: &CubeTensor<R>) -> MatrixView {
    let tensor = into_contiguous(tensor.clone());
    let shape = matrix(&tensor.shape());
    MatrixView { shape, strides: [shape[1], 1], dtype: tensor.dtype.into(), handle: tensor.handle }
}

fn launch<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<Backward<'_, R>>,
) -> Result<Made<R, F, I, BT>, KernelError> {
    let x = &inputs[0];
    let (client, shape, dtype) = (&x.client, x.shape(), x.dtype);
    let on_device = |handle: Handle, shape: Shape, dtype| tensor(client, &x.device, handle, shape, dtype);
    let output = |WithMaxima { y, maxima }, y_shape: Shape| FusedOutput {
        y: on_device(y, y_shape, dtype),
        maxima: maxima.map(|maxima| {
            let len = maxima_len(op, &shape, backward.is_some()).expect("it leaves maxima");
            on_device(maxima, Shape::from(vec![len]), DType::F32)
        }),
    };
    let alone = |y| FusedOutput { y, maxima: None };
    match (op, inputs, backward) {
        (Fused::SwiGlu, [a, b], None) => Ok(vec![output(kernels::swiglu(client, &view(a), &view(b))?, shape.clone())]),
        (Fused::SwiGlu, [a, b], Some((dy, with_maxima))) => {
            let gradients = kernels::swiglu_backward(client, &view(a), &view(b), &view(dy), with_maxima)?;
            Ok(gradients.map(|gradient| output(gradient, shape.clone())).into())
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], None) => {
            let y = kernels::rms_norm(client, &view(x), &view(gamma), *epsilon as f32)?;
            Ok(vec![output(y, shape.clone())])
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], Some((dy, _))) => {
            let [dx, dgamma] = kernels::rms_norm_backward(client, &view(x), &view(gamma), &view(dy), *epsilon as f32)?;
            let dgamma = on_device(dgamma, gamma.shape(), DType::F32);
            let dgamma = super::in_dtype::<CubeBackend<R, F, I, BT>>(dgamma, gamma.dtype);
            Ok(vec![alone(on_device(dx, shape.clone(), dtype)), alone(dgamma)])
        }
        (Fused::Rotary { cos, sin }, [_], backward) => {
            let [batch, len, heads, dim] = shape.dims();
            let (from, back) = (backward.map_or(x, |(dy, _)| dy), backward.is_some());
            let to = if back { [batch, len, heads, dim] } else { [batch, heads, len, dim] };
            let with_maxima = backward.is_some_and(|(_, with_maxima)| with_maxima);
            let tables = [&view(cos), &view(sin)];
            let y = kernels::rotary(client, &view(from), tables, [batch, len, heads], (back, with_maxima))?;
            Ok(vec![output(y, Shape::from(to.to_vec()))])
        }
        _ => unreachable!("{} of {} inputs", op.name(), inputs.len()),
    }
}

/// The tensor as `[rows, cols]`.
fn in_rows<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(tensor: &CubeTensor<R>) -> CubeTensor<R> {
    let shape = Shape::from(matrix(&tensor.shape()).to_vec());
    CubeBackend::<R, F, I, BT>::float_reshape(tensor.clone(), shape)
}

/// The last of some positions or rows along an axis.
fn last<B: Backend>(tensor: &FloatTensor<B>, axis: usize) -> FloatTensor<B> {
    let len = tensor.shape()[axis];
    let mut slices = vec![Slice::full(); tensor.shape().num_dims()];
    slices[axis] = Slice::from(len.saturating_sub(SAMPLED)..len);
    B::float_slice(tensor.clone(), &slices)
}

/// Compares the last rows of the results, and all that the kernels make of those rows alone, with what Burn's operations make of them; and
/// the largest of the maxima with the amax of what they are left of.
///
/// # Errors
/// What differs.
fn compare<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<Backward<'_, R>>,
    made: &Made<R, F, I, BT>,
) -> Result<(), String> {
    type Cube<R, F, I, BT> = CubeBackend<R, F, I, BT>;
    let last = last::<Cube<R, F, I, BT>>;
    let dy = backward.map(|(dy, _)| dy);
    let (op, inputs, dy, sampled): (_, Vec<_>, _, Vec<_>) = match op {
        Fused::Rotary { cos, sin } => {
            let (by_position, by_head) = (1, 2);
            let [cos, sin] = [cos, sin].map(|table| last(table, 0));
            let to = if dy.is_some() { by_position } else { by_head };
            let sampled = vec![last(&made[0].y, to)];
            let dy = dy.map(|dy| last(dy, by_head));
            (Fused::Rotary { cos, sin }, vec![last(&inputs[0], by_position)], dy, sampled)
        }
        op => {
            // γ has one row, and its gradient is one of all rows.
            let cut = |tensor: &CubeTensor<R>| {
                if tensor.rank() == 1 { tensor.clone() } else { last(&in_rows::<R, F, I, BT>(tensor), 0) }
            };
            let sampled = made.iter().map(|made| &made.y).filter(|tensor| tensor.rank() > 1).map(&cut);
            (op.clone(), inputs.iter().map(&cut).collect(), dy.map(&cut), sampled.collect())
        }
    };
    let want = match &dy {
        None => vec![fused::forward(&op, &inputs)],
        Some(dy) => fused::backward(&op, &inputs, dy),
    };
    let alone = launch(&op, &inputs, dy.as_ref().map(|dy| (dy, false))).map_err(|error| error.to_string())?;
    let got = sampled.iter().chain(alone.iter().map(|made| &made.y));
    for (i, (got, want)) in got.zip(want.iter().take(sampled.len()).chain(&want)).enumerate() {
        differs::<Cube<R, F, I, BT>>(got, want).map_err(|how| format!("result {i} {how}"))?;
    }
    for FusedOutput { y, maxima } in made {
        let Some(maxima) = maxima else { continue };
        let found = amax(&y.client, &view(y)).map_err(|error| error.to_string())?;
        let found = tensor(&y.client, &y.device, found, [1], DType::F32);
        let [got, want] = [maxima, &found].map(|t| read_f32::<Cube<R, F, I, BT>>(t.clone()));
        let [got, want] = [got, want].map(|values| float8_kernels::reference::amax(&values));
        if got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()) {
            return Err(format!("the largest of its maxima is {got:e}, not {want:e}"));
        }
    }
    Ok(())
}

/// Compares a result with Burn's, element by element: they may differ by a rounding error of Burn's largest value. Elements of which Burn's is
/// NaN or infinite are left out.
///
/// # Errors
/// How many differ by more.
fn differs<B: Backend>(got: &FloatTensor<B>, want: &FloatTensor<B>) -> Result<(), String> {
    let tolerance = match want.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => 1e-4,
    };
    let flat = |tensor: &FloatTensor<B>| {
        let flat = B::float_reshape(tensor.clone(), Shape::from(vec![tensor.shape().num_elements()]));
        Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat)).cast(DType::F32)
    };
    let (got, want) = (flat(got), flat(want));
    let is_finite = (want.clone() - want.clone()).equal_elem(0.0);
    let want = want.mask_fill(is_finite.clone().bool_not(), 0.0);
    let largest = want.clone().abs().max() * tolerance;
    let is_near = (got - want.clone()).abs().lower_equal(largest.expand(want.shape()));
    let wrong = is_near.bool_or(is_finite.bool_not()).bool_not().int().sum().into_scalar();
    let wrong: i64 = burn::tensor::ElementConversion::elem(wrong);
    if wrong == 0 { Ok(()) } else { Err(format!("has {wrong} elements of {} that are wrong", want.dims()[0])) }
}
