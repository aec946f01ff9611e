//! [`Fused::Attention`](super::Fused::Attention) by the kernels of `float8-kernels`, on devices where
//! they are the faster way.
use std::sync::LazyLock;

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{DType, FloatDType, IntDType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::device::Device as _;
use float8_kernels::KernelError;
use float8_kernels::attention::{
    AttentionInputs, AttentionKernel, AttentionOutput, HeadsView, attention_backward, attention_forward, has_attention,
    prefers_attention,
};

use super::attention::{self, Attention, scale};
use super::operand::tensor;
use super::{Float8Backend, FusedBackward, self_check};

/// Implementation that `FLOAT8_ATTENTION` requests.
static REQUESTED: LazyLock<Option<&'static str>> = LazyLock::new(|| {
    let value = std::env::var("FLOAT8_ATTENTION").ok().filter(|value| !value.is_empty())?;
    let requested =
        AttentionKernel::ALL.map(AttentionKernel::name).into_iter().chain(["blocks"]).find(|name| *name == value);
    if requested.is_none() {
        log::warn!("FLOAT8_ATTENTION is {value:?}: expected wgmma, mma, tiles or blocks; ignored");
    }
    requested
});

/// Fastest implementation that this device may use. Fixed for a process.
pub(super) fn path<R: CubeRuntime>(client: &ComputeClient<R>) -> &'static str {
    if !has_attention(client) {
        return "blocks";
    }
    let default = if prefers_attention(client) { "wgmma" } else { "blocks" };
    let requested = REQUESTED.unwrap_or(default);
    let mut kernels = AttentionKernel::ALL.into_iter().skip_while(|kernel| kernel.name() != requested);
    kernels.find(|kernel| kernel.runs_on(client)).map_or("blocks", AttentionKernel::name)
}

/// y and the logarithms of the sums of exponentials, or the gradients. None where Burn's operations
/// compute them.
pub(super) fn compute<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    attention: &Attention<CubeBackend<R, F, I, BT>>,
    inputs: [&CubeTensor<R>; 3],
    backward: Option<&FusedBackward<'_, CubeBackend<R, F, I, BT>>>,
) -> Option<Vec<CubeTensor<R>>> {
    let (client, device) = (&inputs[0].client, &inputs[0].device);
    let [query, key, value] = inputs.map(|input| input.shape().dims::<4>());
    let facts = CubeBackend::<R, F, I, BT>::fp8_facts(device);
    if !facts.has_attention_kernel(inputs[0].dtype, [query[3], value[3]]) {
        return None;
    }
    let kernel = AttentionKernel::ALL.into_iter().find(|kernel| kernel.name() == facts.attention)?;
    let arguments = arguments(attention, inputs, kernel);
    let check = |dy: Option<&HeadsView>| self_check::of(client, device.to_id()).attention(client, &arguments, dy);
    let on_device = |handle, shape: [usize; 4]| tensor(client, device, handle, shape, inputs[0].dtype);
    match backward {
        None => {
            let [batch, heads, queries, _] = query;
            let lse = [batch, heads, queries];
            let made = check(None).and_then(|()| attention_forward(client, &arguments));
            Some(match made {
                Ok(AttentionOutput { y, lse: sums }) => {
                    let y = on_device(y, [batch, queries, heads, value[3]]);
                    let y = CubeBackend::<R, F, I, BT>::float_swap_dims(y, 1, 2);
                    vec![y, tensor(client, device, sums, lse, DType::F32)]
                }
                Err(error) => {
                    expect_disabled(&error);
                    let y = attention::forward(attention, inputs);
                    // Not read: backward is computed in blocks too.
                    let shape = Shape::from(lse.to_vec());
                    vec![y, CubeBackend::<R, F, I, BT>::float_zeros(shape, device, FloatDType::F32)]
                }
            })
        }
        Some(FusedBackward { outputs: [y, lse], dy }) => {
            let dy = rows(dy);
            let made = check(Some(&dy)).and_then(|()| {
                let lse = into_contiguous(lse.clone()).handle;
                attention_backward(client, &arguments, &rows(y), &lse, &dy)
            });
            match made {
                Ok([dq, dk, dv]) => Some(vec![on_device(dq, query), on_device(dk, key), on_device(dv, value)]),
                Err(error) => {
                    expect_disabled(&error);
                    None
                }
            }
        }
        Some(_) => None,
    }
}

/// The caller has checked shapes and dtypes, so only a failed self-check may stop a kernel.
fn expect_disabled(error: &KernelError) {
    assert!(*error == KernelError::Disabled, "attention: {error}");
}

fn arguments<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    attention: &Attention<CubeBackend<R, F, I, BT>>,
    [query, key, value]: [&CubeTensor<R>; 3],
    kernel: AttentionKernel,
) -> AttentionInputs {
    let Attention { mask, bias, documents, options } = attention;
    AttentionInputs {
        query: rows(query),
        key: rows(key),
        value: rows(value),
        mask: mask.as_ref().map(view),
        bias: bias.as_ref().map(view),
        documents: documents.clone().map(|documents| {
            let documents = CubeBackend::<R, F, I, BT>::int_cast(documents, IntDType::I32);
            into_contiguous(documents).handle
        }),
        scale: scale(&query.shape(), options) as f32,
        softcap: options.softcap.map(|softcap| softcap as f32),
        causal: options.is_causal,
        kernel,
    }
}

/// Heads whose rows are dense. Others are copied: kernels would load them element by element.
fn rows<R: CubeRuntime>(x: &CubeTensor<R>) -> HeadsView {
    let dense = x.meta.strides().last() == Some(&1);
    if dense { view(x) } else { view(&into_contiguous(x.clone())) }
}

/// Four axes of a tensor, with its strides.
fn view<R: CubeRuntime>(x: &CubeTensor<R>) -> HeadsView {
    let strides: Vec<usize> = x.meta.strides().iter().copied().collect();
    HeadsView {
        handle: x.handle.clone(),
        shape: x.shape().dims(),
        strides: strides.try_into().expect("four axes"),
        dtype: x.dtype.into(),
    }
}
