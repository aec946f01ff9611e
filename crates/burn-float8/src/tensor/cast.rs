//! A cast of a tensor for a linear: what is asked for, what tells it from others, and where its scale comes from.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_backend::tensor::FloatTensor;
use float8_kernels::Orientation;

use super::Float8Tensor;
use super::cache::{CastKey, CastResult, CopyKey, Entries, Fp8Copy, Held, HistoryKey, Layout};
use crate::backend::{Float8Backend, Quantized, ScaleFrom, ShardedAxis};
use crate::config::{Float8LinearConfig, ScalingType};
use crate::layer::Layer;
use crate::profile::{Work, time};
use crate::shard::Sharding;
use crate::step::{DeviceState, Observation};
use crate::terms::{Operand, Role};

/// Which cast of a tensor, and for whom.
#[derive(Clone, Copy)]
pub(crate) struct CastRequest<'a> {
    pub(crate) operand: Operand,
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) config: &'a Float8LinearConfig,
    pub(crate) in_forward: bool,
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
            Self::Own => t.full().clone(),
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

pub(super) fn cast_key(layer: &Layer, config: &Float8LinearConfig, operand: Operand) -> CastKey {
    let is_delayed = config.casts().of(operand).scaling_type == ScalingType::Delayed;
    let history =
        || HistoryKey { scaling: config.delayed_scaling(), conversion: Arc::as_ptr(layer.conversion()) as usize };
    CastKey { cast: config.kernel_cast(operand), delayed: is_delayed.then(history) }
}

/// Whether the scales of a copy are those of the columns of a weight, of which each rank has a part.
pub(super) fn reads_columns(key: CastKey, operand: Operand) -> bool {
    !key.has_one_scale() && ShardedAxis::from(operand.axis).shares_scales(key.cast.granularity)
}

impl<'a> CastRequest<'a> {
    pub(super) fn key(&self) -> CastKey {
        cast_key(self.layer, self.config, self.operand)
    }

    /// Of a sharded weight.
    pub(super) fn sharding(&self) -> Option<&'a Arc<Sharding>> {
        self.layer.sharding().filter(|_| self.operand.role == Role::Weight)
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

    pub(super) fn result(&self, key: CastKey) -> Option<&Arc<CastResult<B>>> {
        self.results.iter().find(|(k, _)| *k == key).map(|(_, result)| result)
    }

    /// Casts with the scale that the tensor's copies have already, else that of its history, else that of its own amax: of all
    /// ranks' rows where it is sharded.
    pub(super) fn quantize(
        &mut self,
        t: &Float8Tensor<B>,
        full: FloatTensor<B>,
        orientation: Orientation,
        request: CastRequest<'_>,
        own_amax: Option<&dyn Fn() -> FloatTensor<B>>,
    ) -> (Quantized<B>, Arc<CastResult<B>>) {
        let CastRequest { operand, layer, in_forward, .. } = request;
        let key = request.key();
        let timed = |scale| {
            let _timer = time(Work::Cast { role: operand.role, format: key.cast.format });
            B::fp8_quantize(full, key.cast, orientation, scale)
        };
        // Other granularities have other scales along the other axis.
        let known = self.result(key).filter(|_| key.has_one_scale()).cloned();
        if let Some(known) = known {
            let amax = ScaleFrom::Amax { amax: known.scaling.clone(), observe: false };
            return (timed(amax), known);
        }
        // An x that gradient checkpointing computes again belongs to the history that it had in forward.
        let owner = || match operand.role {
            Role::Input if !in_forward => layer.input_history_owner(),
            _ => layer.name().to_string(),
        };
        let history = key.delayed.map(|HistoryKey { scaling: delayed, .. }| {
            let (state, owner) = (DeviceState::<B>::of(layer, &B::float_device(t.full())), owner());
            let from_history = || state.lock().histories.scaling_amax(&owner, operand.role, delayed);
            let scaling = if state.has_left(layer) { None } else { from_history() };
            (state, owner, delayed, scaling)
        });
        let scaling = history.as_ref().and_then(|(.., scaling)| scaling.clone());
        let from = match &scaling {
            // With one scale the amax is the same whatever the orientation: the first cast observes it.
            Some(amax) => ScaleFrom::Amax { amax: amax.clone(), observe: true },
            None => own_amax.map_or(ScaleFrom::Dynamic, |amax| ScaleFrom::Amax { amax: amax(), observe: false }),
        };
        let quantized = timed(from);
        let observed = quantized.amax.clone();
        let observation = history.map(|(state, layer, delayed, _)| {
            let (initial, amax) = (key.cast.format.max(), observed.clone());
            let (role, is_confirmed) = (operand.role, AtomicBool::new(false));
            Arc::new(Observation { state, layer, role, delayed, initial, amax, is_confirmed })
        });
        let scaling = scaling.unwrap_or_else(|| observed.clone());
        let result = Arc::new(CastResult { scaling, observed: Some(observed), observation });
        match self.results.iter_mut().find(|(k, _)| *k == key) {
            Some((_, known)) => *known = result.clone(),
            None => self.results.push((key, result.clone())),
        }
        (quantized, result)
    }
}
