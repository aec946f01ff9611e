//! [`Fused`] by the kernels of `float8-kernels`, where they compute it and are right, else by Burn's operations.
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::device::Device as _;
use cubecl::server::Handle;
use float8_kernels::check::FusedVariant;
use float8_kernels::fused::{self as kernels, FusedInputs, FusedKernel, WithMaxima};
use float8_kernels::{Cast, KernelError, MAX_INDEX, MatrixView, Orientation, Quantized, amax, quantize_fused};

use super::ScaleFrom;
use super::fused::{self, Fused, FusedOutput};
use super::host::matrix;
use super::operand::tensor;
use super::self_check;

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
    match kernels::inverse_rms(client, &view(x), &view(gamma), epsilon as f32) {
        Ok(made) => tensor(client, &x.device, made, [rows], DType::F32),
        Err(_) => fused::inverse_rms_of_rows::<Cube<R, F, I, BT>>(x, gamma, epsilon),
    }
}

/// The cast of what an operation makes of its inputs, by a kernel that reads those; none where the kernels do not compute this, or were wrong.
pub(super) fn quantize<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    op: &Fused<CubeBackend<R, F, I, BT>>,
    inputs: &[CubeTensor<R>],
    (cast, orientation): (Cast, Orientation),
    scale: &ScaleFrom<CubeTensor<R>>,
) -> Option<Quantized> {
    let [first, second] = [0, 1].map(|i| view(&inputs[i]));
    let read = match (op, inputs) {
        (Fused::SwiGlu, [_, _]) => FusedInputs::SwiGlu { a: &first, b: &second },
        (Fused::RmsNorm { .. }, [_, _, inverse]) => {
            FusedInputs::RmsNorm { x: &first, gamma: &second, inverse_rms: &inverse.handle }
        }
        _ => return None,
    };
    let client = inputs[0].client.clone();
    let given = match scale {
        ScaleFrom::Dynamic => None,
        ScaleFrom::Amax { amax, observe } => Some((&amax.handle, *observe)),
        ScaleFrom::Maxima(_) => return None,
    };
    quantize_fused(&client, read, given, cast, orientation).ok()
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
