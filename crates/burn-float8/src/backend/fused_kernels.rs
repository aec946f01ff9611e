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
        Fused::Rotary { .. } => Some(FusedKernel::Rotary),
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
    let variant = FusedVariant {
        kernel,
        backward: backward.is_some(),
        cols: matrix(&inputs[0].shape())[1],
        dtype: inputs[0].dtype.into(),
        gamma: inputs[inputs.len() - 1].dtype.into(),
    };
    self_check::of(&client).fused((&client, device), variant);
    launch(op, inputs, backward).ok()
}

/// A contiguous matrix for the kernels.
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
        _ => unreachable!("{} of {} inputs", op.names()[0], inputs.len()),
    }
}
