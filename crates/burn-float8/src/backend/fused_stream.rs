//! [`Fused`] in the stream of `Fusion<B>`: those that `B` has kernels for as custom operations, others by Burn's, which fuse.
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};
use burn_ir::TensorIr;
use burn_std::Shape;

use super::fused::{self, Fused};
use super::stream::{Handles, register};
use super::{DeviceOperand, Float8Backend};

/// An operation without its tensors, which come behind its inputs.
#[derive(Clone, Copy)]
enum Described {
    SwiGlu,
    RmsNorm { epsilon: f64 },
    Rotary,
}

impl Described {
    fn of<B: FusionBackend>(op: &Fused<Fusion<B>>) -> Option<(Self, Vec<FloatTensor<Fusion<B>>>)> {
        match op {
            Fused::SwiGlu => Some((Self::SwiGlu, vec![])),
            Fused::RmsNorm { epsilon } => Some((Self::RmsNorm { epsilon: *epsilon }, vec![])),
            Fused::Rotary { cos, sin } => Some((Self::Rotary, vec![cos.clone(), sin.clone()])),
            Fused::LogLikelihood { .. } => None,
        }
    }

    /// The operation below fusion, whose tensors are these.
    fn resolve<B: FusionBackend>(self, tensors: &[TensorIr], handles: &mut Handles<B::FusionRuntime>) -> Fused<B> {
        match self {
            Self::SwiGlu => Fused::SwiGlu,
            Self::RmsNorm { epsilon } => Fused::RmsNorm { epsilon },
            Self::Rotary => {
                let [cos, sin] = [0, 1].map(|i| handles.get_float_tensor::<B>(&tensors[i]));
                Fused::Rotary { cos, sin }
            }
        }
    }
}

pub(super) fn forward<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    op: &Fused<Fusion<B>>,
    inputs: &[FloatTensor<Fusion<B>>],
) -> FloatTensor<Fusion<B>> {
    let Some((described, tensors)) = Described::of(op) else { return fused::forward(op, inputs) };
    let shape = match described {
        Described::Rotary => {
            let [batch, len, heads, dim] = inputs[0].shape().dims();
            Shape::from(vec![batch, heads, len, dim])
        }
        _ => inputs[0].shape(),
    };
    let (count, outputs) = (inputs.len(), vec![(shape, inputs[0].dtype())]);
    let all = inputs.iter().cloned().chain(tensors).collect();
    register(op.name(), all, outputs, move |ir, handles| {
        let inputs: Vec<_> = ir.inputs[..count].iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        let op = described.resolve::<B>(&ir.inputs[count..], handles);
        handles.register_float_tensor::<B>(&ir.outputs[0].id, B::fused_forward(&op, &inputs));
    })
    .remove(0)
}

pub(super) fn backward<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    op: &Fused<Fusion<B>>,
    inputs: &[FloatTensor<Fusion<B>>],
    dy: &FloatTensor<Fusion<B>>,
) -> Vec<FloatTensor<Fusion<B>>> {
    let Some((described, tensors)) = Described::of(op) else { return fused::backward(op, inputs, dy) };
    let outputs = inputs.iter().map(|input| (input.shape(), input.dtype())).collect();
    let count = inputs.len();
    let all = inputs.iter().chain([dy]).cloned().chain(tensors).collect();
    register(op.backward_name(), all, outputs, move |ir, handles| {
        let mut inputs: Vec<_> = ir.inputs[..=count].iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        let dy = inputs.pop().expect("registered with dy");
        let op = described.resolve::<B>(&ir.inputs[count + 1..], handles);
        for (output, tensor) in ir.outputs.iter().zip(B::fused_backward(&op, &inputs, &dy)) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
    })
}
