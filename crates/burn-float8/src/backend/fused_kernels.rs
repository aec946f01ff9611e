//! [`Fused`] by the kernels of `float8-kernels`, where they compute it and are right, else by Burn's operations.
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Slice, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::device::Device as _;
use cubecl::server::Handle;
use float8_kernels::fused::{self as kernels, FusedKernel, WithMaxima};
use float8_kernels::{KernelError, MAX_INDEX, MatrixView, amax};

use super::fused::{self, Fused, FusedOutput};
use super::host::{matrix, read_f32};
use super::operand::tensor;
use super::self_check;

/// The last positions or rows that a check computes again.
const SAMPLED: usize = 64;

/// What the kernels give: y, or the gradients of the inputs; and the maxima that y leaves.
struct Made<R: CubeRuntime> {
    tensors: Vec<CubeTensor<R>>,
    maxima: Option<CubeTensor<R>>,
}

/// The kernel of an operation, if there is one.
fn kernel<B: Backend>(op: &Fused<B>) -> Option<FusedKernel> {
    match op {
        Fused::SwiGlu => Some(FusedKernel::SwiGlu),
        Fused::RmsNorm { .. } => Some(FusedKernel::RmsNorm),
        Fused::Rotary { .. } => Some(FusedKernel::Rotary),
        Fused::LogLikelihood { .. } => None,
    }
}

/// How many [`maxima`](FusedOutput::maxima) an operation leaves of y, which has the shape of its first input; none of a tensor that is too
/// large for kernels to index, and is cast by none.
pub(super) fn maxima_len<B: Backend>(op: &Fused<B>, shape: &Shape) -> Option<usize> {
    match kernel(op)? {
        FusedKernel::Rotary => None,
        _ if shape.num_elements() as u64 > MAX_INDEX => None,
        kernel => Some(kernels::maxima_len(kernel, matrix(shape))),
    }
}

/// Forward, with as many maxima as [`maxima_len`] says.
pub(super) fn forward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
) -> FusedOutput<CubeBackend<R, F, I, BT>> {
    if let Some(Made { mut tensors, maxima }) = compute(op, inputs, None) {
        return FusedOutput { y: tensors.remove(0), maxima };
    }
    let y = fused::forward(op, inputs);
    let maxima = maxima_len(op, &y.shape()).and_then(|len| {
        let found = amax(&y.client, &view(&y)).ok()?;
        let found = tensor(&y.client, &y.device, found, [1], DType::F32);
        Some(into_contiguous(CubeBackend::<R, F, I, BT>::float_expand(found, Shape::from(vec![len]))))
    });
    FusedOutput { y, maxima }
}

/// The gradients of the inputs.
pub(super) fn backward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    dy: &CubeTensor<R>,
) -> Vec<CubeTensor<R>> {
    match compute(op, inputs, Some(dy)) {
        Some(made) => made.tensors,
        None => fused::backward(op, inputs, dy),
    }
}

/// What the kernels give, backward with dy; none where they do not compute this, or were wrong.
fn compute<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    dy: Option<&CubeTensor<R>>,
) -> Option<Made<R>> {
    let kernel = kernel(op)?;
    let (client, device) = (inputs[0].client.clone(), inputs[0].device.to_id());
    let call = || {
        let name = if dy.is_some() { op.backward_name() } else { op.name() };
        format!("{name} of {:?} {:?}", &inputs[0].shape()[..], inputs[0].dtype())
    };
    let launch = || launch(op, inputs, dy);
    let compare = |made: &Made<R>| compare(op, inputs, dy, made);
    self_check::fused(&client, &self_check::of(&client), device, (kernel, call), launch, compare).ok()
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
    dy: Option<&CubeTensor<R>>,
) -> Result<Made<R>, KernelError> {
    let x = &inputs[0];
    let (client, shape, dtype) = (&x.client, x.shape(), x.dtype);
    let on_device = |handle: Handle, shape: Shape, dtype| tensor(client, &x.device, handle, shape, dtype);
    let result = |handle| on_device(handle, shape.clone(), dtype);
    let with_maxima = |WithMaxima { y, maxima }| {
        let len = maxima_len(op, &shape).expect("it leaves maxima");
        let maxima = on_device(maxima, Shape::from(vec![len]), DType::F32);
        Made { tensors: vec![result(y)], maxima: Some(maxima) }
    };
    let only = |tensors| Made { tensors, maxima: None };
    match (op, inputs, dy) {
        (Fused::SwiGlu, [a, b], None) => Ok(with_maxima(kernels::swiglu(client, &view(a), &view(b))?)),
        (Fused::SwiGlu, [a, b], Some(dy)) => {
            let gradients = kernels::swiglu_backward(client, &view(a), &view(b), &view(dy))?;
            Ok(only(gradients.map(result).to_vec()))
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], None) => {
            Ok(with_maxima(kernels::rms_norm(client, &view(x), &view(gamma), *epsilon as f32)?))
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], Some(dy)) => {
            let [dx, dgamma] = kernels::rms_norm_backward(client, &view(x), &view(gamma), &view(dy), *epsilon as f32)?;
            let dgamma = on_device(dgamma, gamma.shape(), DType::F32);
            Ok(only(vec![result(dx), super::in_dtype::<CubeBackend<R, F, I, BT>>(dgamma, gamma.dtype)]))
        }
        (Fused::Rotary { cos, sin }, [_], dy) => {
            let [batch, len, heads, dim] = shape.dims();
            let from = dy.unwrap_or(x);
            let dims = if dy.is_some() { [batch, len, heads, dim] } else { [batch, heads, len, dim] };
            let y = kernels::rotary(client, &view(from), [&view(cos), &view(sin)], [batch, len, heads], dy.is_some())?;
            Ok(only(vec![on_device(y, Shape::from(dims.to_vec()), dtype)]))
        }
        _ => unreachable!("{} of {} inputs", op.name(), inputs.len()),
    }
}

/// The last of some positions or rows along an axis.
fn last<B: Backend>(tensor: &FloatTensor<B>, axis: usize) -> FloatTensor<B> {
    let len = tensor.shape()[axis];
    let mut slices = vec![Slice::full(); tensor.shape().num_dims()];
    slices[axis] = Slice::from(len.saturating_sub(SAMPLED)..len);
    B::float_slice(tensor.clone(), &slices)
}

/// Compares the last rows of the result, and all that the kernels make of those rows alone, with what Burn's operations make of them; and
/// the largest of the maxima with the amax of the result.
///
/// # Errors
/// What differs.
fn compare<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    dy: Option<&CubeTensor<R>>,
    made: &Made<R>,
) -> Result<(), String> {
    type Cube<R, F, I, BT> = CubeBackend<R, F, I, BT>;
    let rows = |tensor: &CubeTensor<R>| {
        Cube::<R, F, I, BT>::float_reshape(tensor.clone(), Shape::from(matrix(&tensor.shape()).to_vec()))
    };
    let last = last::<Cube<R, F, I, BT>>;
    let (op, inputs, dy, sampled): (_, Vec<_>, _, Vec<_>) = match op {
        Fused::Rotary { cos, sin } => {
            let (by_position, by_head) = (1, 2);
            let [cos, sin] = [cos, sin].map(|table| last(table, 0));
            let to = if dy.is_some() { by_position } else { by_head };
            let sampled = vec![last(&made.tensors[0], to)];
            let dy = dy.map(|dy| last(dy, by_head));
            (Fused::Rotary { cos, sin }, vec![last(&inputs[0], by_position)], dy, sampled)
        }
        op => {
            // γ has one row, and its gradient is one of all rows.
            let cut = |tensor: &CubeTensor<R>| if tensor.rank() == 1 { tensor.clone() } else { last(&rows(tensor), 0) };
            let sampled = made.tensors.iter().filter(|tensor| tensor.rank() > 1).map(&cut);
            (op.clone(), inputs.iter().map(&cut).collect(), dy.map(&cut), sampled.collect())
        }
    };
    let want = match &dy {
        None => vec![fused::forward(&op, &inputs)],
        Some(dy) => fused::backward(&op, &inputs, dy),
    };
    let alone = launch(&op, &inputs, dy.as_ref()).map_err(|error| error.to_string())?;
    for (i, (got, want)) in
        sampled.iter().chain(&alone.tensors).zip(want.iter().take(sampled.len()).chain(&want)).enumerate()
    {
        differs::<Cube<R, F, I, BT>>(got, want).map_err(|how| format!("result {i} {how}"))?;
    }
    match (&made.maxima, made.tensors.first()) {
        (Some(maxima), Some(y)) => {
            let found = amax(&y.client, &view(y)).map_err(|error| error.to_string())?;
            let found = tensor(&y.client, &y.device, found, [1], DType::F32);
            let [got, want] = [maxima, &found].map(|t| read_f32::<Cube<R, F, I, BT>>(t.clone()));
            let [got, want] = [got, want].map(|values| float8_kernels::reference::amax(&values));
            let is_same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            if is_same { Ok(()) } else { Err(format!("the largest of its maxima is {got:e}, not {want:e}")) }
        }
        _ => Ok(()),
    }
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
