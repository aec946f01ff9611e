//! Functions of each `Float8` backend, found by the backend's type. A model that is generic over
//! its backend then needs no additional trait bound.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use parking_lot::RwLock;

use super::Float8;
use crate::backend::{
    AdamWDtypes, AdamWFn, AdamWRequest, AdamWResult, AdamWTensors, CachedAttention, CachedHeads, Float8Backend, Fused,
};
use crate::error::wrong_order;
use crate::layer::Mark;
use crate::profile::operation;
use crate::tensor::{Adapter, Adapters, Direction, Float8Tensor, Route, Wrapped, experts_of, parallel_of};

type FullTensorFn<B> = fn(FloatTensor<B>) -> FloatTensor<B>;
type LogLikelihoodFn<B> = fn(&FloatTensor<B>, &IntTensor<B>, weight: &FloatTensor<B>) -> Option<FloatTensor<B>>;
type GroupedFn<B> = fn(FloatTensor<B>, FloatTensor<B>, IntTensor<B>) -> FloatTensor<B>;
type CachedAttentionFn<B> = fn(CachedAttention<B>) -> Option<FloatTensor<B>>;
type FindAdamW<B> = fn(&Device<B>, AdamWDtypes) -> Option<AdamWFn<B>>;

/// Functions of one backend.
pub(crate) struct Functions<B: Backend> {
    /// Grouped linear of x, w and the ends of groups.
    pub(crate) grouped_linear: GroupedFn<B>,
    /// A fused operation as one node.
    pub(crate) fused: fn(Fused<B>, Vec<FloatTensor<B>>) -> FloatTensor<B>,
    /// Attention over a KV cache, only without autodiff.
    pub(crate) cached_attention: Option<CachedAttentionFn<B>>,
    /// AdamW in one pass, only without autodiff.
    pub(crate) adamw: Option<FindAdamW<B>>,
    /// Gathers a weight if it is sharded.
    pub(crate) full_tensor: FullTensorFn<B>,
    /// Number of ranks that divide a weight.
    pub(crate) parallel_ranks: fn(&FloatTensor<B>) -> usize,
    /// x with the tokens of all ranks, if ranks divide the weight.
    pub(crate) parallel_tokens: fn(x: FloatTensor<B>, weight: &FloatTensor<B>) -> FloatTensor<B>,
    /// Log-likelihood of logits and targets over all ranks. None if ranks do not divide the weight.
    pub(crate) parallel_log_likelihood: LogLikelihoodFn<B>,
    /// Rows of x, with these ends of experts, on the ranks that divide the weight. None if no ranks do.
    pub(crate) dispatch: DispatchFn<B>,
    /// Rows back from the ranks of a route.
    pub(crate) combine: fn(rows: FloatTensor<B>, route: &AnyRoute) -> FloatTensor<B>,
    /// Attaches one more adapter to a weight.
    pub(crate) with_adapter: fn(FloatTensor<B>, Adapter<B>) -> FloatTensor<B>,
    /// Merges the adapters of a weight into it, at the same autodiff node. None without adapters.
    pub(crate) merge_adapters: fn(FloatTensor<B>) -> Option<FloatTensor<B>>,
}

type DispatchFn<B> = fn(&FloatTensor<B>, &IntTensor<B>, weight: &FloatTensor<B>) -> Option<ExpertRows<B>>;

/// A [`Route`] of any backend.
pub(crate) type AnyRoute = Arc<dyn Any + Send + Sync>;

/// Rows on the ranks of their experts.
pub(crate) struct ExpertRows<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    pub(crate) ends: IntTensor<B>,
    pub(crate) route: AnyRoute,
}

type Registry = HashMap<TypeId, &'static (dyn Any + Send + Sync)>;
static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(RwLock::default);

/// Registers `Float8<W>` and the backend of its `valid()`. Every operation that creates a tensor
/// calls this, so it runs before a model has parameters.
pub(crate) fn register<W: Wrapped>() {
    if !REGISTRY.read().contains_key(&TypeId::of::<Float8<W>>()) {
        let find_adamw: FindAdamW<Float8<W::Plain>> =
            |device, dtypes| W::Plain::adamw(device, dtypes).map(|_| adamw::<W::Plain> as _);
        accept::<W::Plain>(Some(cached_attention::<W::Plain>), Some(find_adamw));
        accept::<W>(None, None);
        // These wrap in the wrong order.
        insert::<Autodiff<Float8<W::Plain>, NoCheckpointing>>(None);
        insert::<Autodiff<Float8<W::Plain>, BalancedCheckpointing>>(None);
    }
}

fn insert<B: Backend>(functions: Option<Functions<B>>) {
    REGISTRY.write().entry(TypeId::of::<B>()).or_insert_with(|| Box::leak(Box::new(functions)));
}

fn accept<W: Wrapped>(cached_attention: Option<CachedAttentionFn<Float8<W>>>, adamw: Option<FindAdamW<Float8<W>>>) {
    insert(Some(Functions::<Float8<W>> {
        grouped_linear: |x, weight, ends| Float8Tensor::new(W::fp8_grouped_linear(x, weight, ends)),
        fused: |op, inputs| {
            let op = op.map(|tensor: Float8Tensor<W>| W::plain(&tensor.into_full()).clone());
            Float8Tensor::new(W::fused_node(op, inputs.into_iter().map(Float8Tensor::into_full).collect()))
        },
        cached_attention,
        adamw,
        full_tensor: W::fp8_full_tensor,
        parallel_ranks: |weight| {
            weight.layer().and_then(|layer| parallel_of::<W::Plain>(layer)).map_or(1, |hooks| hooks.part().ranks)
        },
        parallel_tokens: |x, weight| match weight.layer().filter(|layer| layer.parallel().is_some()) {
            Some(layer) => Float8Tensor::new(W::parallel_tokens(x.into_full(), layer, Direction::Dispatch)),
            None => x,
        },
        parallel_log_likelihood: |logits, targets, weight| {
            let layer = weight.layer().filter(|layer| layer.parallel().is_some())?;
            let y = W::parallel_log_likelihood(logits.full().clone(), targets.clone(), layer);
            Some(Float8Tensor::new(y))
        },
        dispatch: |x, ends, weight| {
            let hooks = experts_of::<W::Plain>(weight.layer()?)?;
            let route = Arc::new(Route::new(hooks.clone(), x.shape()[0], ends, &x.device()));
            let x = W::expert_rows(x.full().clone(), &route, Direction::Dispatch);
            Some(ExpertRows { x: Float8Tensor::new(x), ends: route.ends.clone(), route })
        },
        combine: |rows, route| {
            let route = route.clone().downcast().expect("rows go back on the backend of their route");
            Float8Tensor::new(W::expert_rows(rows.into_full(), &route, Direction::Combine))
        },
        with_adapter: |weight, adapter| {
            let all = Adapters::with(weight.adapters().map(|all| &**all), adapter.map(Float8Tensor::into_full));
            weight.with_adapters(Some(Arc::new(all)))
        },
        merge_adapters: |weight| {
            let adapters = weight.adapters()?.map(|t| W::plain(&t).clone());
            let values = weight.plain().with_adapters(Some(Arc::new(adapters))).into_values("merge");
            // The result is a weight of the same layer.
            let mark = weight.mark().cloned();
            Some(Float8Tensor::new(W::replace(weight.full().clone(), values)).with_mark(mark))
        },
    }));
}

/// AdamW step. The new parameter keeps the tag of the old one, and the amax that its next cast
/// wants.
fn adamw<B: Float8Backend>(request: AdamWRequest<Float8<B>>) -> AdamWResult<Float8<B>> {
    let run = B::adamw(&request.tensors.param.device(), request.dtypes()).expect("the caller found it");
    let AdamWRequest { step, tensors: AdamWTensors { param, moments }, grad, .. } = request;
    let _timer = operation("adamw");
    let mark = param.mark().cloned().map(|mark| mark.after(1));
    let of_moments = moments.each_ref().map(|moment| Mark::either(moment.mark().cloned(), grad.mark().cloned()));
    let casts = param.amax_casts();
    let tensors = AdamWTensors { param: param.into_full(), moments: moments.map(Float8Tensor::into_full) };
    let wants_amax = !casts.is_empty();
    let AdamWResult { tensors, amax } = run(AdamWRequest { step, tensors, grad: grad.into_full(), wants_amax });
    let AdamWTensors { param, moments: [first, second] } = tensors;
    let param = Float8Tensor::new(param).with_mark(mark);
    if let Some(amax) = amax {
        param.cache().expect_casts(casts, &amax);
    }
    let [of_first, of_second] = of_moments;
    let moments = [Float8Tensor::new(first).with_mark(of_first), Float8Tensor::new(second).with_mark(of_second)];
    AdamWResult { tensors: AdamWTensors { param, moments }, amax: None }
}

fn cached_attention<B: Float8Backend>(attention: CachedAttention<Float8<B>>) -> Option<Float8Tensor<B>> {
    let CachedAttention { query, key, value, head_dim, hidden, options } = attention;
    let [key, value] = [key, value].map(|heads| match heads {
        CachedHeads::Float(values) => CachedHeads::Float(values.into_full()),
        CachedHeads::E4m3 { codes, inv_scales } => CachedHeads::E4m3 { codes, inv_scales: inv_scales.into_full() },
    });
    let _timer = operation("attention");
    let attention = CachedAttention { query: query.into_full(), key, value, head_dim, hidden, options };
    B::cached_attention(&attention).map(Float8Tensor::new)
}

/// Functions of `B`. None if `B` has no FP8.
pub(crate) fn find<B: Backend>() -> Option<&'static Functions<B>> {
    let functions = REGISTRY.read().get(&TypeId::of::<B>())?.downcast_ref::<Option<Functions<B>>>()?;
    Some(functions.as_ref().unwrap_or_else(|| wrong_order()))
}
