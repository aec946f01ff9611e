//! [`ParallelHooks`]: a linear that ranks divide among them (tensor parallelism).
//!
//! | style | x `[M, K]` | w `[K, N]` | y `[M, N]` |
//! | --- | --- | --- | --- |
//! | colwise | rows, gathered | columns | columns |
//! | rowwise | columns | rows | rows of the sum over ranks |
//!
//! dy is divided like y, and dx like x. Each rank casts its part with the scales of the whole tensor.
use std::any::Any;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use float8_kernels::Granularity;

use super::cache::{CastResult, Fp8Copy};
use super::cast::CastRequest;
use super::experts::{ExpertHooks, experts_of};
use super::linear_part::{Axis, LinearPart, ParallelStyle};
use super::source::{CastAmax, WeightCast};
use crate::backend::{Float8Backend, Quantized};
use crate::layer::{Layer, LinearPlan};
use crate::terms::{ContractionAxis, Operand, Role};

/// A linear's part on this rank. All ranks call these in the same order.
pub trait ParallelHooks<B: Float8Backend>: Any + Send + Sync {
    /// This rank and its axis.
    fn part(&self) -> LinearPart;

    /// Operand of this rank's part of a tensor, with the scales of the whole tensor, and the amax of
    /// the cast.
    fn cast(&self, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>);

    /// Operand of all ranks' tokens: the rows of `part`, or its contraction.
    fn gather(&self, part: &B::Operand, tokens: Axis, device: &Device<B>) -> B::Operand;

    /// All ranks' rows `[ranks · M, C]`, from this rank's `[M, C]`.
    fn gather_rows(&self, rows: FloatTensor<B>) -> FloatTensor<B>;

    /// This rank's rows `[M, C]` of the sum over all ranks, from `[ranks · M, C]`.
    fn reduce_rows(&self, all: FloatTensor<B>) -> FloatTensor<B>;
}

/// Part of a layer on this rank, if ranks divide it.
pub(crate) fn parallel_of<B: Float8Backend>(layer: &Layer) -> Option<&Arc<dyn ParallelHooks<B>>> {
    layer.parallel().map(|hooks| hooks.downcast_ref().expect("all weights of a layer are of one backend"))
}

/// Axis of a copy that holds the tokens of x or dy, its rows or its contraction.
fn tokens_of(operand: Operand) -> Axis {
    match operand.axis {
        ContractionAxis::Last => Axis::Rows,
        ContractionAxis::Leading => Axis::Cols,
    }
}

/// Axis of a tensor that a GEMM contracts.
fn contracted(operand: Operand) -> Axis {
    match operand.axis {
        ContractionAxis::Last => Axis::Cols,
        ContractionAxis::Leading => Axis::Rows,
    }
}

impl<'a, B: Float8Backend> CastRequest<'a, B> {
    /// Part of the layer on this rank, if ranks divide it.
    pub(super) fn parallel(&self) -> Option<&'a Arc<dyn ParallelHooks<B>>> {
        parallel_of(self.layer)
    }

    /// Whether ranks divide the axis that shares a scale of a row. Ranks of experts divide tokens.
    pub(super) fn divides_rows(&self) -> bool {
        if experts_of::<B>(self.layer).is_some() {
            let is_by_token = self.operand.role == Role::Weight || contracted(self.operand) == Axis::Cols;
            return !is_by_token && self.key().cast.cast.granularity == Granularity::Row;
        }
        let divides = |style: ParallelStyle| style.divided(self.operand.role) == contracted(self.operand);
        self.parallel().is_some_and(|hooks| divides(hooks.part().style))
            && self.key().cast.cast.granularity == Granularity::Row
    }
}

/// Whether backward gathers a copy of forward. If fprop has gathered the same codes, forward keeps
/// them.
fn is_gathered_late(operand: Operand, plan: &LinearPlan) -> bool {
    operand == Operand::INPUT_T && !plan.has_one_set_of_codes(operand)
}

/// x of wgrad with the tokens of all ranks, from the copy that forward has saved.
pub(crate) fn with_all_tokens<B: Float8Backend>(
    saved: Arc<Fp8Copy<B>>,
    layer: &Arc<Layer>,
    plan: &LinearPlan,
    device: &Device<B>,
) -> Arc<Fp8Copy<B>> {
    match parallel_of::<B>(layer) {
        Some(hooks) if hooks.part().style.gathers(Role::Input) && is_gathered_late(Operand::INPUT_T, plan) => {
            let all = hooks.gather(&saved.operand, tokens_of(Operand::INPUT_T), device);
            Fp8Copy::new(all, saved.cast, saved.result.clone(), layer)
        }
        _ => saved,
    }
}

/// Cast for a GEMM of a layer that ranks divide. x for wgrad may be this rank's part:
/// [`with_all_tokens`] gathers the rest in backward.
pub(super) fn parallel_cast<B: Float8Backend>(
    request: CastRequest<'_, B>,
    hooks: &Arc<dyn ParallelHooks<B>>,
) -> (Quantized<B>, Arc<CastResult<B>>) {
    let CastRequest { tensor, operand, plan, .. } = request;
    let gathers = hooks.part().style.gathers(operand.role);
    let other = CastRequest { operand: operand.other(), ..request };
    let gathered = match gathers && plan.has_one_set_of_codes(operand) {
        true => tensor.cache().lock().find(other.key()),
        false => None,
    };
    let (made, result) = match gathered {
        Some(copy) => (B::fp8_transpose(&copy.operand), copy.result.clone()),
        None => {
            let (part, CastAmax(result)) = hooks.cast(&WeightCast::new(request));
            match gathers && !is_gathered_late(operand, plan) {
                true => (hooks.gather(&part, tokens_of(operand), &tensor.device()), result),
                false => (part, result),
            }
        }
    };
    (one_of_both(operand, made, &result), result)
}

/// Cast for a GEMM of a layer whose experts ranks divide.
pub(super) fn expert_cast<B: Float8Backend>(
    request: CastRequest<'_, B>,
    hooks: &Arc<dyn ExpertHooks<B>>,
) -> (Quantized<B>, Arc<CastResult<B>>) {
    let (made, CastAmax(result)) = hooks.cast(&WeightCast::new(request));
    (one_of_both(request.operand, made, &result), result)
}

/// A cast in one orientation.
fn one_of_both<B: Float8Backend>(operand: Operand, made: B::Operand, result: &CastResult<B>) -> Quantized<B> {
    let amax = result.scaling.clone();
    match operand.axis {
        ContractionAxis::Last => Quantized { rows: Some(made), cols: None, amax },
        ContractionAxis::Leading => Quantized { rows: None, cols: Some(made), amax },
    }
}
