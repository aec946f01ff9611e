//! [`Use`]: one use of a layer by a linear; [`GemmCall`]: one of its GEMMs, in FP8 or in high precision.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::Shape;

use crate::backend::{Float8Backend, GemmRequest, GroupEnds, OperandSize};
use crate::config::Untagged;
use crate::error::Float8Error;
use crate::layer::{
    LastOperand, Layer, LinearDtypes, LinearPlan, UntaggedRule, is_autocast_enabled, settle_at_linear, untagged,
};
use crate::profile::{Work, time};
use crate::step::on_weight_read;
use crate::tensor::{CastRequest, Float8Tensor, Fp8Copy, Layout, fp8_copy, sample};
use crate::terms::{Gemm, Operand, Reason};

/// One use of a layer: fixed in forward, for all three GEMMs.
#[derive(Clone, Debug)]
pub(super) struct Use<B: Float8Backend> {
    pub(super) layer: Arc<Layer>,
    /// How it runs in FP8, or why it does not.
    pub(super) plan: Result<Arc<LinearPlan>, Reason>,
    pub(super) device: Device<B>,
    pub(super) dtypes: LinearDtypes,
    /// Whether no backward can follow.
    pub(super) evaluates: bool,
}

impl<B: Float8Backend> Use<B> {
    /// The use of a weight that a forward reads on this thread now. It begins an optimizer step if
    /// the weight is the first that linears read after the optimizer.
    ///
    /// # Panics
    ///
    /// If the weight carries no layer and a configuration says that this is an error.
    pub(super) fn of(x: &Float8Tensor<B>, w: &Float8Tensor<B>, bias: Option<DType>, evaluates: bool) -> Self {
        let (device, dtypes) = (w.device(), LinearDtypes { x: x.dtype(), w: w.dtype(), bias });
        w.cache().note_fprop();
        let off = (!is_autocast_enabled()).then_some(Reason::Autocast);
        let (layer, plan) = match w.tag() {
            None => {
                let layer = untagged::<B>(&device);
                let plan = check_untagged::<B>(w, &device).and_then(|()| layer.plan_on::<B>(&device, dtypes, off));
                (layer, plan)
            }
            Some(tag) => {
                on_weight_read::<B>(tag, &device);
                let off = if tag.enabled { off } else { Some(Reason::WithoutFloat8) };
                (tag.layer.clone(), tag.layer.plan_on::<B>(&device, dtypes, off))
            }
        };
        Self { layer, plan, device, dtypes, evaluates }
    }

    /// The cast of an operand.
    pub(super) fn request<'a>(
        &'a self,
        plan: &'a LinearPlan,
        tensor: &'a Float8Tensor<B>,
        operand: Operand,
    ) -> CastRequest<'a, B> {
        let Self { layer, evaluates, .. } = self;
        let layout = Layout::Matrix;
        CastRequest { tensor, layout, operand, layer, plan, both: false, evaluates: *evaluates }
    }

    /// Samples an operand that backward reads, if statistics are due.
    pub(super) fn sample(&self, tensor: &Float8Tensor<B>, layout: Layout, operand: Operand) {
        if let Ok(plan) = &self.plan {
            sample(CastRequest { layout, ..self.request(plan, tensor, operand) });
        }
    }
}

/// Whether linears without a layer may run in FP8.
fn check_untagged<B: Float8Backend>(w: &Float8Tensor<B>, device: &Device<B>) -> Result<(), Reason> {
    let UntaggedRule { choice, is_configured } = settle_at_linear::<B>(device);
    match choice {
        Untagged::Default => Ok(()),
        Untagged::HighPrecision => Err(Reason::Untagged { is_configured }),
        Untagged::Error => {
            let [.., k, n] = w.whole_shape().to_vec()[..] else { unreachable!("a weight is a matrix, or several") };
            panic!(
                "a linear with weight [{k}, {n}] carries no layer: it was not in the model that Float8Config was applied to"
            )
        }
    }
}

/// One GEMM of a linear with these M, K and N.
pub(super) struct GemmCall<'a, B: Float8Backend> {
    pub(super) used: &'a Use<B>,
    pub(super) gemm: Gemm,
    pub(super) dims: [usize; 3],
    /// Weights of K by N; 1 without groups.
    pub(super) groups: usize,
    /// Length of the contraction without padding, where there are rows of padding between groups.
    pub(super) unpadded: Option<usize>,
}

/// The inputs of a GEMM, and its output.
pub(super) struct GemmData<'a, B: Float8Backend> {
    pub(super) copies: [&'a Fp8Copy<B>; 2],
    pub(super) bias: Option<FloatTensor<B>>,
    pub(super) groups: Option<GroupEnds<IntTensor<B>>>,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

impl<'a, B: Float8Backend> GemmCall<'a, B> {
    /// A GEMM without groups.
    pub(super) fn new(used: &'a Use<B>, gemm: Gemm, dims: [usize; 3]) -> Self {
        Self { used, gemm, dims, groups: 1, unpadded: None }
    }

    /// The plan if this GEMM runs in FP8. Else the reason is recorded.
    ///
    /// # Panics
    ///
    /// In strict mode, if the reason was not requested.
    pub(super) fn plan(&self) -> Option<&'a LinearPlan> {
        let reason = match self.decide() {
            Ok(plan) => return Some(plan),
            Err(reason) => reason,
        };
        let layer = &self.used.layer;
        layer.count_high_precision(self.gemm, reason.clone());
        if !reason.is_requested() && layer.conversion().config().strict {
            let (layer, reason) = (layer.name().into(), reason.to_string());
            panic!("{}", Float8Error::UnrequestedHighPrecision { layer, gemm: self.gemm, reason });
        }
        None
    }

    /// The plan, or why this GEMM runs in high precision.
    pub(super) fn decide(&self) -> Result<&'a LinearPlan, Reason> {
        let (plan, [m, k, n]) = (self.used.plan.as_ref().map_err(Clone::clone)?, self.dims);
        match plan.gemm(self.gemm) {
            Err(Reason::Recipe) => Err(Reason::Recipe),
            _ if self.dims.contains(&0) => Err(Reason::Empty { m, k, n }),
            _ if largest(m, k, n, self.groups) > plan.device().max_elements => Err(Reason::TooLarge { m, k, n }),
            Err(reason) => Err(reason.clone()),
            Ok(_) => Ok(plan),
        }
    }

    /// Gathers the weight of a GEMM without rows, which reads none, if it has a source: processes that have rows wait for this one.
    /// Gives the copy, if it was gathered in FP8: the amax of its rows counts.
    pub(super) fn join(&self, w: &Float8Tensor<B>) -> Option<Arc<Fp8Copy<B>>> {
        self.used.layer.source()?;
        let [_, k, n] = self.dims;
        match (Self { dims: [1, k, n], ..*self }).decide() {
            Ok(plan) => {
                let [_, operand] = self.gemm.operands();
                Some(fp8_copy(self.used.request(plan, w, operand)))
            }
            Err(_) => {
                w.clone().into_whole(self.used.dtypes.x);
                None
            }
        }
    }

    /// Multiplies two operands, and counts.
    ///
    /// # Panics
    ///
    /// If the device has lost results; in strict mode, if one of its kernels was found to be wrong.
    pub(super) fn run(&self, plan: &LinearPlan, data: GemmData<'_, B>) -> FloatTensor<B> {
        let GemmData { copies: [a, b], bias, groups, shape, dtype } = data;
        let gemm = plan.gemm(self.gemm).expect("decided");
        let sizes = [a, b].map(|copy| B::fp8_size(&copy.operand));
        let rows = groups.is_none().then_some(sizes[0].rows);
        let path = plan.device().gemm_path(rows, gemm.granularities, gemm.config);
        let timer = time(Work::ScaledGemm(self.gemm));
        let (dtype, config) = (FloatDType::from(dtype), gemm.config);
        let y = B::fp8_matmul(GemmRequest { a: &a.operand, b: &b.operand, bias, groups, shape, dtype, config });
        drop(timer);
        match B::fp8_self_check(&self.used.device, false).fault() {
            // The next path computed it.
            Some(Float8Error::SelfCheck(_)) if !self.used.layer.conversion().config().strict => {}
            Some(error) => panic!("{error}"),
            None => {}
        }
        let operand = |copy: &Fp8Copy<B>, size: OperandSize| {
            let size = OperandSize { k: self.unpadded.unwrap_or(size.k), ..size };
            LastOperand { size, cast: copy.cast, amaxes: copy.result.clone() }
        };
        self.used.layer.count_fp8(self.gemm, path, [operand(a, sizes[0]), operand(b, sizes[1])]);
        y
    }
}

/// The result of a GEMM over an empty batch, which not every backend multiplies or sums.
pub(super) fn zeros<B: Float8Backend>(shape: Shape, dtype: DType, device: &Device<B>) -> FloatTensor<B> {
    B::float_zeros(shape, device, FloatDType::from(dtype))
}

/// Elements of the largest of x, all weights and y, each axis padded as the kernels may pad it.
fn largest(m: usize, k: usize, n: usize, groups: usize) -> u64 {
    let [m, k, n] = [m, k, n].map(|d| d.next_multiple_of(16) as u64);
    m.saturating_mul(k).max(k.saturating_mul(n).saturating_mul(groups as u64)).max(m.saturating_mul(n))
}
