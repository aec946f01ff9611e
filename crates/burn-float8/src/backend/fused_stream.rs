//! [`Fused`] in the stream of `Fusion<B>`: those that `B` has kernels for as custom operations, others by Burn's, which fuse.
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_fusion::{Fusion, FusionBackend};
use burn_ir::TensorIr;
use burn_std::Shape;

use super::fused::{self, Fused, FusedOutput};
use super::fused_kernels::maxima_len;
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

/// The operation below fusion, if it reads nothing but its inputs.
pub(super) fn without_tensors<B: FusionBackend>(op: &Fused<Fusion<B>>) -> Option<Fused<B>> {
    match op {
        Fused::SwiGlu => Some(Fused::SwiGlu),
        Fused::RmsNorm { epsilon } => Some(Fused::RmsNorm { epsilon: *epsilon }),
        Fused::Rotary { .. } | Fused::LogLikelihood { .. } => None,
    }
}

pub(super) fn forward<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    op: &Fused<Fusion<B>>,
    inputs: &[FloatTensor<Fusion<B>>],
) -> FusedOutput<Fusion<B>> {
    let Some((described, tensors)) = Described::of(op) else {
        return FusedOutput { y: fused::forward(op, inputs), maxima: None };
    };
    let shape = match described {
        Described::Rotary => {
            let [batch, len, heads, dim] = inputs[0].shape().dims();
            Shape::from(vec![batch, heads, len, dim])
        }
        _ => inputs[0].shape(),
    };
    let mut outputs = vec![(shape.clone(), inputs[0].dtype())];
    outputs.extend(maxima_len(op, &inputs[0].shape(), false).map(|len| (Shape::from(vec![len]), DType::F32)));
    let count = inputs.len();
    let all = inputs.iter().cloned().chain(tensors).collect();
    let mut made = register(op.name(), all, outputs, move |ir, handles| {
        let inputs: Vec<_> = ir.inputs[..count].iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        let op = described.resolve::<B>(&ir.inputs[count..], handles);
        let FusedOutput { y, maxima } = B::fused_forward(&op, &inputs);
        for (output, tensor) in ir.outputs.iter().zip([Some(y), maxima]) {
            handles.register_float_tensor::<B>(&output.id, tensor.expect("as many maxima as `maxima_len` says"));
        }
    })
    .into_iter();
    FusedOutput { y: made.next().expect("y"), maxima: made.next() }
}

pub(super) fn backward<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    op: &Fused<Fusion<B>>,
    inputs: &[FloatTensor<Fusion<B>>],
    dy: &FloatTensor<Fusion<B>>,
    with_maxima: bool,
) -> Vec<FusedOutput<Fusion<B>>> {
    let Some((described, tensors)) = Described::of(op) else {
        return fused::backward(op, inputs, dy).into_iter().map(|y| FusedOutput { y, maxima: None }).collect();
    };
    let maxima = with_maxima.then(|| maxima_len(op, &inputs[0].shape(), true)).flatten();
    let maxima = maxima.map(|len| (Shape::from(vec![len]), DType::F32));
    let outputs = inputs.iter().flat_map(|input| [Some((input.shape(), input.dtype())), maxima.clone()]);
    let outputs = outputs.flatten().collect();
    let (count, has_maxima) = (inputs.len(), maxima.is_some());
    let all = inputs.iter().chain([dy]).cloned().chain(tensors).collect();
    let mut made = register(op.backward_name(), all, outputs, move |ir, handles| {
        let mut inputs: Vec<_> = ir.inputs[..=count].iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        let dy = inputs.pop().expect("registered with dy");
        let op = described.resolve::<B>(&ir.inputs[count + 1..], handles);
        let gradients = B::fused_backward(&op, &inputs, &dy, has_maxima).into_iter();
        let tensors =
            gradients.flat_map(|FusedOutput { y, maxima }| [Some(y), maxima.filter(|_| has_maxima)]).flatten();
        for (output, tensor) in ir.outputs.iter().zip(tensors) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
    })
    .into_iter();
    let mut next = || made.next().expect("as many as are registered");
    inputs.iter().map(|_| FusedOutput { y: next(), maxima: has_maxima.then(&mut next) }).collect()
}
