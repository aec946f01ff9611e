//! [`CastRequest`]: a cast of a tensor for a linear, with its scale.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_std::Shape;

use super::cache::{CastKey, CastResult, CopyKey, Entries, Fp8Copy, Held, HistoryKey, Layout};
use super::wrapped::Float8Tensor;
use crate::backend::{Float8Backend, GivenAmax};
use crate::layer::{CastPlan, Layer, LinearPlan};
use crate::step::{DeviceState, Observation, Observed, TrackedCast};
use crate::terms::{Operand, Role};

/// A cast of a tensor, and the layer that needs it.
pub(crate) struct CastRequest<'a, B: Float8Backend> {
    pub(crate) tensor: &'a Float8Tensor<B>,
    /// Matrix form of the tensor.
    pub(crate) layout: Layout,
    pub(crate) operand: Operand,
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) plan: &'a LinearPlan,
    /// Whether another GEMM will read the tensor's other copy.
    pub(crate) both: bool,
    /// Whether no backward can follow. The weight then keeps copies that training would recompute.
    pub(crate) evaluates: bool,
}

impl<B: Float8Backend> Clone for CastRequest<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Float8Backend> Copy for CastRequest<'_, B> {}

impl<'a, B: Float8Backend> CastRequest<'a, B> {
    /// A cast of a matrix for one GEMM of a training step.
    pub(crate) const fn new(
        tensor: &'a Float8Tensor<B>,
        operand: Operand,
        layer: &'a Arc<Layer>,
        plan: &'a LinearPlan,
    ) -> Self {
        Self { tensor, layout: Layout::Matrix, operand, layer, plan, both: false, evaluates: false }
    }

    /// The matrix to cast.
    pub(super) fn matrix(&self) -> FloatTensor<B> {
        match self.layout {
            Layout::Matrix => self.tensor.clone().into_values("cast"),
            Layout::ExpertsAlongN => {
                let [groups, k, n] = self.tensor.shape().dims();
                let transposed = B::float_swap_dims(self.tensor.full().clone(), 1, 2);
                B::float_transpose(B::float_reshape(transposed, Shape::from(vec![groups * n, k])))
            }
        }
    }

    /// Whether only the GEMM holds the copy: a weight that is recast in backward.
    pub(super) fn is_transient(&self) -> bool {
        self.operand.role == Role::Weight && self.plan.recasts_weight && !self.evaluates
    }

    pub(super) fn key(&self) -> CopyKey {
        let CastPlan { cast, delayed } = self.plan.cast(self.operand).expect("a GEMM in FP8 casts its operands");
        let applied = self.layer.applied().number;
        let delayed = delayed.map(|scaling| HistoryKey { scaling, applied });
        CopyKey {
            cast: CastKey { cast, delayed, is_parallel: self.layer.divides_tokens() },
            layout: self.layout,
            operand: self.operand,
        }
    }

    /// Scale of the cast: from `known`, the result of the tensor's other copies, else from the
    /// history, else from the tensor's amax.
    pub(super) fn scale(&self, known: Option<Arc<CastResult<B>>>) -> CastScale<B> {
        let key = self.key().cast;
        if let Some(known) = known {
            let given = Some(GivenAmax { amax: known.scaling.clone(), observe: false });
            return CastScale { given, known: Some(known), history: None };
        }
        let history = key.delayed.map(|HistoryKey { scaling, .. }| {
            let state = DeviceState::<B>::of(self.layer, &self.tensor.device());
            let amax = state.scaling_amax(self.layer, self.operand.role, scaling);
            let (layer, role) = (self.layer.name().to_string(), self.operand.role);
            let cast = TrackedCast { layer, role, scaling, initial: key.cast.format.max() };
            History { state, cast, amax }
        });
        // Both orientations have the same amax. The first cast observes it.
        let given = history.as_ref().and_then(|history| history.amax.clone());
        CastScale { given: given.map(|amax| GivenAmax { amax, observe: true }), known: None, history }
    }
}

/// Scale of a cast.
pub(super) struct CastScale<B: Float8Backend> {
    pub(super) given: Option<GivenAmax<FloatTensor<B>>>,
    known: Option<Arc<CastResult<B>>>,
    history: Option<History<B>>,
}

/// A cast with delayed scaling.
struct History<B: Float8Backend> {
    state: Arc<DeviceState<B>>,
    cast: TrackedCast,
    /// Amax of the history, if it has one.
    amax: Option<FloatTensor<B>>,
}

impl<B: Float8Backend> CastScale<B> {
    /// Result of the cast with this observed amax.
    pub(super) fn result(self, amax: FloatTensor<B>) -> Arc<CastResult<B>> {
        if let Some(known) = self.known {
            return known;
        }
        let (mut scaling, mut observation) = (amax.clone(), None);
        if let Some(History { state, cast, amax: given }) = self.history {
            scaling = given.unwrap_or(scaling);
            let observed = Observed { cast, amax: amax.clone() };
            observation = Some(Arc::new(Observation { state, observed, is_confirmed: AtomicBool::new(false) }));
        }
        Arc::new(CastResult { scaling, observed: Some(amax), observation })
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

    /// Result of a cast with one scale for all copies.
    pub(super) fn known(&self, key: CastKey) -> Option<Arc<CastResult<B>>> {
        let result = self.results.iter().find(|(k, _)| *k == key).filter(|_| key.has_one_scale());
        result.map(|(_, result)| result.clone())
    }

    /// Stores the result of a cast. Copies with one scale share the first result.
    pub(super) fn keep(&mut self, key: CastKey, result: Arc<CastResult<B>>) -> Arc<CastResult<B>> {
        match self.results.iter_mut().find(|(k, _)| *k == key) {
            Some((_, known)) if key.has_one_scale() => return known.clone(),
            Some((_, known)) => *known = result.clone(),
            None => self.results.push((key, result.clone())),
        }
        result
    }
}
