//! A cast of a tensor for a linear: what is asked for, what tells it from others, and where its scale comes from.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_backend::tensor::{Device, FloatTensor};

use super::cache::{CastKey, CastResult, CopyKey, Entries, Fp8Copy, Held, HistoryKey, Layout};
use super::wrapped::Float8Tensor;
use crate::backend::{Float8Backend, Quantized, ScaleFrom};
use crate::config::{CastPlan, LinearPlan};
use crate::layer::Layer;
use crate::profile::{Work, time};
use crate::step::{DeviceState, Observation, Observed, TrackedCast};
use crate::terms::{Operand, Role};

/// Which cast of a tensor, and for whom.
#[derive(Clone, Copy)]
pub(crate) struct CastRequest<'a> {
    pub(crate) operand: Operand,
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) plan: &'a LinearPlan,
    /// Whether another GEMM will read the tensor's other copy.
    pub(crate) both: bool,
    /// Whether no backward can follow: the next forward is to find the copy of a weight also where training casts it anew each time.
    pub(crate) evaluates: bool,
}

/// As which matrix a tensor is cast: its own, or one that is computed from it when it is needed.
pub(crate) enum View<'a, B: Float8Backend> {
    /// The tensor, in both orientations where that saves a pass.
    Own,
    /// This matrix, in the orientation that is asked for.
    Computed(Layout, &'a dyn Fn() -> FloatTensor<B>),
}

impl<B: Float8Backend> Clone for View<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Float8Backend> Copy for View<'_, B> {}

impl<B: Float8Backend> View<'_, B> {
    pub(super) fn of(&self, t: &Float8Tensor<B>) -> FloatTensor<B> {
        match self {
            Self::Own => t.clone().into_values("cast"),
            Self::Computed(_, compute) => compute(),
        }
    }

    pub(super) fn layout(&self) -> Layout {
        match self {
            Self::Own => Layout::Matrix,
            Self::Computed(layout, _) => *layout,
        }
    }
}

impl CastRequest<'_> {
    /// Whether nothing but the GEMM holds the copy, as of a weight that is cast again in backward.
    pub(super) fn is_transient(&self) -> bool {
        self.operand.role == Role::Weight && self.plan.recasts_weight && !self.evaluates
    }

    pub(super) fn key(&self) -> CastKey {
        let CastPlan { cast, delayed } = self.plan.cast(self.operand).expect("a GEMM in FP8 casts its operands");
        let conversion = self.layer.conversion().number();
        CastKey { cast, delayed: delayed.map(|scaling| HistoryKey { scaling, conversion }) }
    }
}

impl<B: Float8Backend> Entries<B> {
    pub(super) fn find(&self, key: CopyKey) -> Option<Arc<Fp8Copy<B>>> {
        let (_, held) = self.copies.iter().find(|(k, _)| *k == key)?;
        match held {
            Held::Strong(copy) => Some(copy.clone()),
            Held::Weak(weak) => weak.upgrade(),
        }
    }

    /// What is known of a cast whose copies all have one scale; other granularities have other scales along the other axis.
    pub(super) fn known(&self, key: CastKey) -> Option<Arc<CastResult<B>>> {
        let result = self.results.iter().find(|(k, _)| *k == key).filter(|_| key.has_one_scale());
        result.map(|(_, result)| result.clone())
    }

    /// Keeps what a cast found out; what another thread's cast of the same tensor has found out meanwhile, where copies share it.
    pub(super) fn keep(&mut self, key: CastKey, result: Arc<CastResult<B>>) -> Arc<CastResult<B>> {
        match self.results.iter_mut().find(|(k, _)| *k == key) {
            Some((_, known)) if key.has_one_scale() => return known.clone(),
            Some((_, known)) => *known = result.clone(),
            None => self.results.push((key, result.clone())),
        }
        result
    }
}

/// Casts, by `run`, with the scale `known` that the tensor's copies have already, else that of its history, else that of its own amax: of `own`
/// where that is known without reading the tensor.
pub(super) fn quantize<B: Float8Backend>(
    device: &Device<B>,
    request: CastRequest<'_>,
    known: Option<Arc<CastResult<B>>>,
    own: Option<&dyn Fn() -> ScaleFrom<FloatTensor<B>>>,
    run: impl FnOnce(ScaleFrom<FloatTensor<B>>) -> Quantized<B>,
) -> (Quantized<B>, Arc<CastResult<B>>) {
    let CastRequest { operand, layer, .. } = request;
    let key = request.key();
    let timed = |scale| {
        let _timer = time(Work::Cast { role: operand.role, format: key.cast.format });
        run(scale)
    };
    if let Some(known) = known {
        let amax = ScaleFrom::Amax { amax: known.scaling.clone(), observe: false };
        return (timed(amax), known);
    }
    let history = key.delayed.map(|HistoryKey { scaling: delayed, .. }| {
        let state = DeviceState::<B>::of(layer, device);
        let scaling = state.scaling_amax(layer, operand.role, delayed);
        (state, delayed, scaling)
    });
    let scaling = history.as_ref().and_then(|(.., scaling)| scaling.clone());
    let from = match &scaling {
        // With one scale the amax is the same whatever the orientation: the first cast observes it.
        Some(amax) => ScaleFrom::Amax { amax: amax.clone(), observe: true },
        None => own.map_or(ScaleFrom::Dynamic, |own| own()),
    };
    let quantized = timed(from);
    let observed = quantized.amax.clone();
    let observation = history.map(|(state, scaling, _)| {
        let (layer, role, initial) = (layer.name().to_string(), operand.role, key.cast.format.max());
        let observed = Observed { cast: TrackedCast { layer, role, scaling, initial }, amax: observed.clone() };
        Arc::new(Observation { state, observed, is_confirmed: AtomicBool::new(false) })
    });
    let scaling = scaling.unwrap_or_else(|| observed.clone());
    (quantized, Arc::new(CastResult { scaling, observed: Some(observed), observation }))
}
