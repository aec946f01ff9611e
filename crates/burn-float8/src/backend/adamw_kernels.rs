//! AdamW by the kernel of `float8-kernels`, and as an operation in the stream of `Fusion<B>`.
use burn_backend::{DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::{Fusion, FusionBackend};
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::device::Device as _;
use float8_kernels::adamw::{AdamWArgs, AdamWVariant, adamw};

use super::adamw::{AdamWDtypes, AdamWRequest, AdamWResult, AdamWTensors};
use super::fused_kernels::view;
use super::operand::tensor;
use super::stream::register;
use super::{DeviceOperand, Float8Backend, self_check};

/// Whether the kernel takes these dtypes. The first call checks it.
pub(super) fn is_available<R: CubeRuntime>(client: &ComputeClient<R>, device: &R::Device, dtypes: AdamWDtypes) -> bool {
    let AdamWDtypes { param, moments, grad } = dtypes;
    let rounded = [param, moments].map(|dtype| dtype == DType::BF16);
    let [param, moments, grad] = [param, moments, grad].map(Into::into);
    let variant = AdamWVariant { param, moments, grad, rounded };
    variant.is_supported(client) && self_check::of(client, device.to_id()).adamw(client, variant)
}

/// Runs the kernel in place, on copies of tensors that have other handles.
pub(super) fn run<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    request: AdamWRequest<CubeBackend<R, F, I, BT>>,
) -> AdamWResult<CubeBackend<R, F, I, BT>> {
    let AdamWRequest { step, tensors: AdamWTensors { param, moments: [first, second] }, grad, wants_amax } = request;
    let [param, first, second] = [param, first, second].map(exclusive);
    let (client, device, shape) = (param.client.clone(), param.device.clone(), param.shape());
    let args = AdamWArgs { param: view(&param), moments: [view(&first), view(&second)], grad: view(&grad) };
    let amax = adamw(&client, &step, &args, &shape, wants_amax).expect("the caller checked dtypes and shapes");
    let amax = amax.map(|amax| tensor(&client, &device, amax, [1], DType::F32));
    AdamWResult { tensors: AdamWTensors { param, moments: [first, second] }, amax }
}

/// A contiguous tensor that no other handle reads.
fn exclusive<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    match (tensor.is_contiguous(), tensor.can_mut()) {
        (true, true) => tensor,
        (true, false) => tensor.copy(),
        (false, _) => into_contiguous(tensor),
    }
}

/// Adds the step of `B` to the stream.
pub(super) fn run_fused<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    request: AdamWRequest<Fusion<B>>,
) -> AdamWResult<Fusion<B>> {
    let dtypes = request.dtypes();
    let AdamWRequest { step, tensors: AdamWTensors { param, moments: [first, second] }, grad, wants_amax } = request;
    let device = param.client.device().clone();
    let mut outputs: Vec<_> = [&param, &first, &second].map(|tensor| (tensor.shape(), tensor.dtype())).into();
    outputs.extend(wants_amax.then(|| (Shape::from(vec![1]), DType::F32)));
    let mut made = register("float8_adamw", vec![param, first, second, grad], outputs, move |ir, handles| {
        let run = B::adamw(&device, dtypes).expect("the backend had it when the operation was added");
        let [param, first, second, grad] = [0, 1, 2, 3].map(|i| handles.get_float_tensor::<B>(&ir.inputs[i]));
        let tensors = AdamWTensors { param, moments: [first, second] };
        let AdamWResult { tensors, amax } = run(AdamWRequest { step: step.clone(), tensors, grad, wants_amax });
        let AdamWTensors { param, moments: [first, second] } = tensors;
        for (output, tensor) in ir.outputs.iter().zip([param, first, second].into_iter().chain(amax)) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
    })
    .into_iter();
    let mut next = || made.next().expect("one tensor for each output");
    let tensors = AdamWTensors { param: next(), moments: [next(), next()] };
    AdamWResult { tensors, amax: wants_amax.then(next) }
}
