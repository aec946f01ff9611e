//! [`Fused`] operations by the kernels of `float8-kernels`. Operations without an enabled kernel
//! use Burn's operations.
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::device::Device as _;
use cubecl::server::Handle;
use float8_kernels::check::FusedVariant;
use float8_kernels::fused::{self as kernels, FusedKernel};
use float8_kernels::{KernelError, MatrixView};

use super::fused::Fused;
use super::host::matrix;
use super::operand::tensor;
use super::self_check;

/// Kernel of an operation, if there is one.
fn kernel<B: Backend>(op: &Fused<B>) -> Option<FusedKernel> {
    match op {
        Fused::SwiGlu => Some(FusedKernel::SwiGlu),
        Fused::RmsNorm { .. } => Some(FusedKernel::RmsNorm),
        Fused::Rotary => Some(FusedKernel::Rotary),
        Fused::LogLikelihood { .. } | Fused::Attention(_) => None,
    }
}

/// Outputs of the kernels, or with dy the gradients. None if no kernel computes this, or it is
/// disabled.
pub(super) fn compute<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    backward: Option<&CubeTensor<R>>,
) -> Option<Vec<CubeTensor<R>>> {
    let kernel = kernel(op)?;
    let (client, device) = (inputs[0].client.clone(), inputs[0].device.to_id());
    let matrices: Vec<_> = match (op, inputs) {
        (Fused::Rotary, [x, cos, sin]) => [backward.unwrap_or(x), cos, sin].map(view).into(),
        _ => inputs.iter().chain(backward).map(view).collect(),
    };
    let variant = FusedVariant::of(&client, kernel, backward.is_some(), &matrices).ok()?;
    self_check::of(&client, device).fused(&client, variant);
    launch(op, inputs, &matrices, backward.is_some()).ok()
}

/// A contiguous matrix for the kernels.
pub(super) fn view<R: CubeRuntime>(tensor: &CubeTensor<R>) -> MatrixView {
    let tensor = into_contiguous(tensor.clone());
    let shape = matrix(&tensor.shape());
    MatrixView { shape, strides: [shape[1], 1], dtype: tensor.dtype.into(), handle: tensor.handle }
}

/// Runs the kernel on the matrices of `inputs`, of dy, and of rotary tables.
fn launch<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    matrices: &[MatrixView],
    backward: bool,
) -> Result<Vec<CubeTensor<R>>, KernelError> {
    let x = &inputs[0];
    let (client, shape, dtype) = (&x.client, x.shape(), x.dtype);
    let on_device = |handle: Handle, shape: Shape, dtype| tensor(client, &x.device, handle, shape, dtype);
    match (op, matrices) {
        (Fused::SwiGlu, [a, b]) => Ok(vec![on_device(kernels::swiglu(client, a, b)?, shape, dtype)]),
        (Fused::SwiGlu, [a, b, dy]) => {
            let gradients = kernels::swiglu_backward(client, a, b, dy)?;
            Ok(gradients.map(|gradient| on_device(gradient, shape.clone(), dtype)).into())
        }
        (Fused::RmsNorm { epsilon }, [x, gamma]) => {
            Ok(vec![on_device(kernels::rms_norm(client, x, gamma, *epsilon as f32)?, shape, dtype)])
        }
        (Fused::RmsNorm { epsilon }, [x, gamma, dy]) => {
            let [dx, dgamma] = kernels::rms_norm_backward(client, x, gamma, dy, *epsilon as f32)?;
            let dgamma = on_device(dgamma, inputs[1].shape(), DType::F32);
            let dgamma = super::in_dtype::<CubeBackend<R, F, I, BT>>(dgamma, inputs[1].dtype);
            Ok(vec![on_device(dx, shape, dtype), dgamma])
        }
        (Fused::Rotary, [from, cos, sin]) => {
            let [batch, len, heads, dim] = shape.dims();
            let to = if backward { [batch, len, heads, dim] } else { [batch, heads, len, dim] };
            let y = kernels::rotary(client, from, [cos, sin], [batch, len, heads], backward)?;
            Ok(vec![on_device(y, Shape::from(to.to_vec()), dtype)])
        }
        _ => unreachable!("{} of {} matrices", op.names()[0], matrices.len()),
    }
}
