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
use float8_kernels::fused::{self as kernels, FusedKernel};
use float8_kernels::{KernelError, MatrixView};

use super::fused::{self, Fused};
use super::host::matrix;
use super::operand::tensor;
use super::self_check::{self, Mismatch};

/// The last positions or rows that a check computes again.
const SAMPLED: usize = 64;

/// The kernel of an operation, if there is one.
fn kernel<B: Backend>(op: &Fused<B>) -> Option<FusedKernel> {
    match op {
        Fused::SwiGlu => Some(FusedKernel::SwiGlu),
        Fused::RmsNorm { .. } => Some(FusedKernel::RmsNorm),
        Fused::Rotary { .. } => Some(FusedKernel::Rotary),
        Fused::LogLikelihood { .. } => None,
    }
}

pub(super) fn forward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
) -> CubeTensor<R> {
    compute(op, inputs, None).map_or_else(|| fused::forward(op, inputs), |mut made| made.remove(0))
}

/// The gradients of the inputs.
pub(super) fn backward<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    dy: &CubeTensor<R>,
) -> Vec<CubeTensor<R>> {
    compute(op, inputs, Some(dy)).unwrap_or_else(|| fused::backward(op, inputs, dy))
}

/// The kernels' results, those of backward with dy; none where they do not compute this, or were wrong.
fn compute<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<&CubeTensor<R>>,
) -> Option<Vec<CubeTensor<R>>> {
    let kernel = kernel(op)?;
    let (client, device) = (inputs[0].client.clone(), inputs[0].device.to_id());
    let call = || {
        let name = if backward.is_some() { op.backward_name() } else { op.name() };
        format!("{name} of {:?} {:?}", &inputs[0].shape()[..], inputs[0].dtype())
    };
    let launch = || launch(op, inputs, backward);
    let compare = |made: &Vec<CubeTensor<R>>| compare(op, inputs, backward, made).map_err(Mismatch::Wrong);
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
    backward: Option<&CubeTensor<R>>,
) -> Result<Vec<CubeTensor<R>>, KernelError> {
    let x = &inputs[0];
    let (client, shape, dtype) = (&x.client, x.shape(), x.dtype);
    let on_device = |handle: Handle, shape: Shape, dtype| tensor(client, &x.device, handle, shape, dtype);
    match (op, inputs, backward) {
        (Fused::SwiGlu, [a, b], None) => {
            Ok(vec![on_device(kernels::swiglu(client, &view(a), &view(b))?, shape, dtype)])
        }
        (Fused::SwiGlu, [a, b], Some(dy)) => {
            let gradients = kernels::swiglu_backward(client, &view(a), &view(b), &view(dy))?;
            Ok(gradients.map(|gradient| on_device(gradient, shape.clone(), dtype)).into())
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], None) => {
            let y = kernels::rms_norm(client, &view(x), &view(gamma), *epsilon as f32)?;
            Ok(vec![on_device(y, shape, dtype)])
        }
        (Fused::RmsNorm { epsilon }, [x, gamma], Some(dy)) => {
            let [dx, dgamma] = kernels::rms_norm_backward(client, &view(x), &view(gamma), &view(dy), *epsilon as f32)?;
            let dgamma = on_device(dgamma, gamma.shape(), DType::F32);
            let dgamma = super::in_dtype::<CubeBackend<R, F, I, BT>>(dgamma, gamma.dtype);
            Ok(vec![on_device(dx, shape, dtype), dgamma])
        }
        (Fused::Rotary { cos, sin }, [_], backward) => {
            let [batch, len, heads, dim] = shape.dims();
            let (from, back) = (backward.unwrap_or(x), backward.is_some());
            let to = if back { [batch, len, heads, dim] } else { [batch, heads, len, dim] };
            let tables = [&view(cos), &view(sin)];
            let y = kernels::rotary(client, &view(from), tables, [batch, len, heads], back)?;
            Ok(vec![on_device(y, Shape::from(to.to_vec()), dtype)])
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

/// Compares the last rows of the results, and all that the kernels make of those rows alone, with what Burn's operations make of them.
///
/// # Errors
/// What differs.
fn compare<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<&CubeTensor<R>>,
    made: &[CubeTensor<R>],
) -> Result<(), String> {
    type Cube<R, F, I, BT> = CubeBackend<R, F, I, BT>;
    let last = last::<Cube<R, F, I, BT>>;
    let dy = backward;
    let (op, inputs, dy, sampled): (_, Vec<_>, _, Vec<_>) = match op {
        Fused::Rotary { cos, sin } => {
            let (by_position, by_head) = (1, 2);
            let [cos, sin] = [cos, sin].map(|table| last(table, 0));
            let to = if dy.is_some() { by_position } else { by_head };
            let sampled = vec![last(&made[0], to)];
            let dy = dy.map(|dy| last(dy, by_head));
            (Fused::Rotary { cos, sin }, vec![last(&inputs[0], by_position)], dy, sampled)
        }
        op => {
            // γ has one row, and its gradient is one of all rows.
            let cut = |tensor: &CubeTensor<R>| {
                if tensor.rank() == 1 { tensor.clone() } else { last(&in_rows::<R, F, I, BT>(tensor), 0) }
            };
            let sampled = made.iter().filter(|tensor| tensor.rank() > 1).map(&cut);
            (op.clone(), inputs.iter().map(&cut).collect(), dy.map(&cut), sampled.collect())
        }
    };
    let want = match &dy {
        None => vec![fused::forward(&op, &inputs)],
        Some(dy) => fused::backward(&op, &inputs, dy),
    };
    let alone = launch(&op, &inputs, dy.as_ref()).map_err(|error| error.to_string())?;
    let got = sampled.iter().chain(&alone);
    for (i, (got, want)) in got.zip(want.iter().take(sampled.len()).chain(&want)).enumerate() {
        differs::<Cube<R, F, I, BT>>(got, want).map_err(|how| format!("result {i} {how}"))?;
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
