//! [`Fused`] in the stream of `Fusion<B>`. Operations with a kernel in `B` become custom
//! operations. The others use Burn's operations, which fuse.
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};
use burn_std::Shape;

use super::fused::{Fused, FusedBackward};
use super::stream::register;
use super::{DeviceOperand, Float8Backend};

/// Outputs of the operation, or with dy its gradients. None if `B` has no kernel for it.
pub(super) fn compute<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    op: &Fused<Fusion<B>>,
    inputs: &[FloatTensor<Fusion<B>>],
    dy: Option<&FloatTensor<Fusion<B>>>,
) -> Option<Vec<FloatTensor<Fusion<B>>>> {
    let names = op.names();
    let op: Fused<B> = match op {
        Fused::SwiGlu => Fused::SwiGlu,
        Fused::RmsNorm { epsilon } => Fused::RmsNorm { epsilon: *epsilon },
        Fused::Rotary => Fused::Rotary,
        Fused::LogLikelihood { .. } | Fused::Attention(_) => return None,
    };
    let (x, count) = (&inputs[0], inputs.len());
    let like = |input: &FloatTensor<Fusion<B>>| (input.shape(), input.dtype());
    let outputs = match (&op, dy) {
        (Fused::Rotary, None) => {
            let [batch, len, heads, dim] = x.shape().dims();
            vec![(Shape::from(vec![batch, heads, len, dim]), x.dtype())]
        }
        (Fused::Rotary, Some(_)) | (_, None) => vec![like(x)],
        (_, Some(_)) => inputs.iter().map(like).collect(),
    };
    let all = inputs.iter().chain(dy).cloned().collect();
    Some(register(names[usize::from(dy.is_some())], all, outputs, move |ir, handles| {
        let tensors: Vec<_> = ir.inputs.iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
        let (inputs, dy) = tensors.split_at(count);
        let backward = dy.first().map(|dy| FusedBackward { outputs: &[], dy });
        for (output, tensor) in ir.outputs.iter().zip(B::fused(&op, inputs, backward.as_ref())) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
    }))
}
