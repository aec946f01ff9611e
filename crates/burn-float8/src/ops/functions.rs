//! What a model calls by name, of each `Float8` backend, found by the backend's type: a model that is generic over the backend names no
//! other bound.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};
use parking_lot::RwLock;

use super::Float8;
use crate::backend::{AdamWFn, AdamWStep, AdamWTensors, Attention, CachedAttention, CachedHeads, Float8Backend, Fused};
use crate::error::wrong_order;
use crate::layer::Mark;
use crate::profile::operation;
use crate::tensor::{Adapter, Adapters, Float8Tensor, Wrapped};

type AttentionFn<B> = fn(Attention<B>) -> FloatTensor<B>;
type FullTensorFn<B> = fn(FloatTensor<B>) -> FloatTensor<B>;
type GroupedFn<B> = fn(FloatTensor<B>, FloatTensor<B>, IntTensor<B>) -> FloatTensor<B>;

/// The functions of one backend.
pub(crate) struct Functions<B: Backend> {
    /// The grouped linear of x, w and the ends of groups.
    pub(crate) grouped_linear: GroupedFn<B>,
    /// Attention by the node.
    pub(crate) attention: AttentionFn<B>,
    /// Attention over a cache, where the backend reads what it keeps.
    pub(crate) cached_attention: fn(CachedAttention<B>) -> Option<FloatTensor<B>>,
    /// [`Fused::SwiGlu`] of a and b.
    pub(crate) swiglu: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
    /// [`Fused::RmsNorm`] of x and γ, with ε.
    pub(crate) rms_norm: fn(FloatTensor<B>, FloatTensor<B>, f64) -> FloatTensor<B>,
    /// [`Fused::Rotary`] of x by cos and sin.
    pub(crate) rotary: fn(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
    /// [`Fused::LogLikelihood`] of logits and targets.
    pub(crate) log_likelihood: fn(FloatTensor<B>, IntTensor<B>) -> FloatTensor<B>,
    /// A step of AdamW in one pass, on a backend without autodiff that makes it so.
    pub(crate) adamw: Option<AdamWFn<B>>,
    /// The whole of a weight, of which this process may have some rows.
    pub(crate) full_tensor: FullTensorFn<B>,
    /// A weight with one more adapter beside it.
    pub(crate) with_adapter: fn(FloatTensor<B>, Adapter<B>) -> FloatTensor<B>,
    /// The sum of a weight and its adapters, in the weight's place of autodiff; none for a weight without adapters.
    pub(crate) merge_adapters: fn(FloatTensor<B>) -> Option<FloatTensor<B>>,
}

impl<B: Backend> Clone for Functions<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Functions<B> {}

type Registry = HashMap<TypeId, Box<dyn Any + Send + Sync>>;
static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(RwLock::default);

/// Registers `Float8<W>` and the backend of its `valid()`. All operations that make a tensor of none call this, so it comes before a
/// model has parameters.
pub(crate) fn register<W: Wrapped>() {
    if !REGISTRY.read().contains_key(&TypeId::of::<Float8<W>>()) {
        accept::<W::Plain>(W::Plain::adamw().map(|_| adamw::<W::Plain> as _));
        accept::<W>(None);
        refuse::<Autodiff<Float8<W::Plain>, NoCheckpointing>>();
        refuse::<Autodiff<Float8<W::Plain>, BalancedCheckpointing>>();
    }
}

fn insert<B: Backend>(functions: Functions<B>) {
    REGISTRY.write().entry(TypeId::of::<B>()).or_insert_with(|| Box::new(functions));
}

fn accept<W: Wrapped>(adamw: Option<AdamWFn<Float8<W>>>) {
    insert(Functions::<Float8<W>> {
        grouped_linear: |x, weight, ends| Float8Tensor::new(W::fp8_grouped_linear(x, weight, ends)),
        attention: |attention| Float8Tensor::new(W::attention_node(inner(attention))),
        cached_attention: |attention| W::cached_attention(inner_cached(attention)).map(Float8Tensor::new),
        swiglu: |a, b| fused(Fused::SwiGlu, [a, b]),
        rms_norm: |x, gamma, epsilon| fused(Fused::RmsNorm { epsilon }, [x, gamma]),
        rotary: |x, cos, sin| {
            let [cos, sin] = [cos, sin].map(|table| W::plain(table.full()).clone());
            fused(Fused::Rotary { cos, sin }, [x])
        },
        log_likelihood: |logits, targets| fused(Fused::LogLikelihood { targets: W::plain_int(targets) }, [logits]),
        adamw,
        full_tensor: W::fp8_full_tensor,
        with_adapter: |weight, adapter| {
            let all = Adapters::with(weight.adapters().map(|all| &**all), adapter.map(Float8Tensor::into_full));
            weight.with_adapters(Some(Arc::new(all)))
        },
        merge_adapters: |weight| {
            let adapters = weight.adapters()?.map(|t| W::plain(&t).clone());
            let values = weight.plain().with_adapters(Some(Arc::new(adapters))).into_values("merge");
            // A weight of the same layer.
            let mark = weight.mark().cloned();
            Some(Float8Tensor::new(W::replace(weight.full().clone(), values)).with_mark(mark))
        },
    });
}

fn fused<W: Wrapped, const N: usize>(op: Fused<W::Plain>, inputs: [Float8Tensor<W>; N]) -> Float8Tensor<W> {
    Float8Tensor::new(W::fused_node(op, inputs.map(Float8Tensor::into_full).into()))
}

/// The new parameter is the weight that the old one was.
fn adamw<B: Float8Backend>(
    step: &AdamWStep,
    tensors: AdamWTensors<Float8<B>>,
    grad: Float8Tensor<B>,
) -> AdamWTensors<Float8<B>> {
    let AdamWTensors { param, moments } = tensors;
    let fused = B::adamw().expect("the backend has it");
    let _timer = operation("adamw");
    let mark = param.mark().cloned().map(|mark| mark.after(1));
    let of_moments = moments.each_ref().map(|moment| Mark::either(moment.mark().cloned(), grad.mark().cloned()));
    let tensors = AdamWTensors { param: param.into_full(), moments: moments.map(Float8Tensor::into_full) };
    let AdamWTensors { param, moments: [first, second] } = fused(step, tensors, grad.into_full());
    let [of_first, of_second] = of_moments;
    AdamWTensors {
        param: Float8Tensor::new(param).with_mark(mark),
        moments: [Float8Tensor::new(first).with_mark(of_first), Float8Tensor::new(second).with_mark(of_second)],
    }
}

/// What attention reads, on the wrapped backend.
fn inner<W: Wrapped>(attention: Attention<Float8<W>>) -> Attention<W> {
    let Attention { query, key, value, mask, bias, documents, options } = attention;
    let [query, key, value] = [query, key, value].map(Float8Tensor::into_full);
    Attention { query, key, value, mask, bias: bias.map(Float8Tensor::into_full), documents, options }
}

fn inner_cached<W: Wrapped>(attention: CachedAttention<Float8<W>>) -> CachedAttention<W> {
    let CachedAttention { query, key, value, head_dim, hidden, options } = attention;
    let [key, value] = [key, value].map(|heads| match heads {
        CachedHeads::Float(values) => CachedHeads::Float(values.into_full()),
        CachedHeads::E4m3 { codes, inv_scales } => CachedHeads::E4m3 { codes, inv_scales: inv_scales.into_full() },
    });
    CachedAttention { query: query.into_full(), key, value, head_dim, hidden, options }
}

/// `Autodiff<Float8<B>>`, which cannot differentiate them.
fn refuse<B: Backend>() {
    insert(Functions::<B> {
        grouped_linear: |_, _, _| wrong_order(),
        attention: |_| wrong_order(),
        cached_attention: |_| wrong_order(),
        swiglu: |_, _| wrong_order(),
        rms_norm: |_, _, _| wrong_order(),
        rotary: |_, _, _| wrong_order(),
        log_likelihood: |_, _| wrong_order(),
        adamw: None,
        full_tensor: |_| wrong_order(),
        with_adapter: |_, _| wrong_order(),
        merge_adapters: |_| wrong_order(),
    });
}

/// None if `B` has no FP8.
pub(crate) fn find<B: Backend>() -> Option<Functions<B>> {
    REGISTRY.read().get(&TypeId::of::<B>())?.downcast_ref().copied()
}
