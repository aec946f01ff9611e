//! [`Fused`] in the stream of `Fusion<B>`. Operations with a kernel in `B` become custom
//! operations. The others use Burn's operations, which fuse.
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_fusion::{Fusion, FusionBackend};
use burn_ir::{CustomOpIr, TensorIr};
use burn_std::Shape;

use super::attention::Attention;
use super::fused::{Fused, FusedBackward};
use super::stream::{Handles, register};
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
        execute::<B>(&op, count, &ir.inputs, ir, handles);
    }))
}

/// [`attention_kernels::compute`](super::attention_kernels::compute) in the stream.
pub(super) fn attention<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>>(
    attention: &Attention<Fusion<B>>,
    inputs: [&FloatTensor<Fusion<B>>; 3],
    backward: Option<&FusedBackward<'_, Fusion<B>>>,
) -> Option<Vec<FloatTensor<Fusion<B>>>> {
    let [query, _, value] = inputs.map(|input| input.shape().dims::<4>());
    let ([batch, heads, queries, dim], [.., width]) = (query, value);
    let dtype = inputs[0].dtype();
    let facts = B::fp8_facts(inputs[0].client.device());
    let has_outputs = backward.is_none_or(|backward| !backward.outputs.is_empty());
    if !has_outputs || !facts.has_attention_kernel(dtype, [dim, width]) {
        return None;
    }
    let outputs = match backward {
        None => vec![
            (Shape::from(vec![batch, heads, queries, width]), dtype),
            (Shape::from(vec![batch, heads, queries]), DType::F32),
        ],
        Some(_) => inputs.map(|input| (input.shape(), dtype)).into(),
    };
    let Attention { mask, bias, documents, options } = attention.clone();
    let has = [mask.is_some(), bias.is_some(), documents.is_some()];
    let of_backward = backward.iter().flat_map(|backward| backward.outputs.iter().chain([backward.dy]));
    let all = inputs.into_iter().chain(of_backward).cloned().chain(mask).chain(bias).chain(documents).collect();
    let is_backward = backward.is_some();
    let name = Fused::Attention(attention.clone()).names()[usize::from(is_backward)];
    Some(register(name, all, outputs, move |ir, handles| {
        let (floats, rest) = ir.inputs.split_at(if is_backward { 6 } else { 3 });
        let mut rest = rest.iter();
        let mut next = |has: bool| has.then(|| rest.next().expect("registered with its tensors"));
        let [mask, bias, documents] = has.map(&mut next);
        let op = Fused::Attention(Attention {
            mask: mask.map(|mask| handles.get_bool_tensor::<B>(mask)),
            bias: bias.map(|bias| handles.get_float_tensor::<B>(bias)),
            documents: documents.map(|documents| handles.get_int_tensor::<B>(documents)),
            options,
        });
        execute::<B>(&op, 3, floats, ir, handles);
    }))
}

/// Runs the operation below fusion. `floats` are its `count` inputs, then for backward the outputs
/// that it reads, and dy.
fn execute<B: FusionBackend + Float8Backend>(
    op: &Fused<B>,
    count: usize,
    floats: &[TensorIr],
    ir: &CustomOpIr,
    handles: &mut Handles<B::FusionRuntime>,
) {
    let floats: Vec<_> = floats.iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
    let (inputs, of_backward) = floats.split_at(count);
    let backward = match of_backward {
        [outputs @ .., dy] => Some(FusedBackward { outputs, dy }),
        [] => None,
    };
    for (output, tensor) in ir.outputs.iter().zip(B::fused(op, inputs, backward.as_ref())) {
        handles.register_float_tensor::<B>(&output.id, tensor);
    }
}
