//! [`Use`]: one use of a layer by a linear. [`GemmCall`]: one of its GEMMs, in FP8 or high
//! precision.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::Shape;

use crate::backend::{Float8Backend, GemmRequest, GroupEnds, HighPrecisionGemm, OperandSize};
use crate::config::Untagged;
use crate::error::Float8Error;
use crate::layer::{
    LastOperand, Layer, LinearDtypes, LinearPlan, UntaggedRule, is_autocast_enabled, settle_at_linear, untagged,
};
use crate::profile::{Work, operation, time};
use crate::step::on_weight_read;
use crate::tensor::{CastRequest, Float8Tensor, Fp8Copy, Layout, fp8_copy, sample};
use crate::terms::{Gemm, Operand, Reason};

/// One use of a layer. Forward fixes it for all three GEMMs.
#[derive(Clone, Debug)]
pub(super) struct Use<B: Float8Backend> {
    pub(super) layer: Arc<Layer>,
    /// Its FP8 plan, or the reason for high precision.
    pub(super) plan: Result<Arc<LinearPlan>, Reason>,
    pub(super) device: Device<B>,
    pub(super) dtypes: LinearDtypes,
    /// Whether no backward can follow.
    pub(super) evaluates: bool,
}

impl<B: Float8Backend> Use<B> {
    /// Use of a weight in a forward on this thread. Begins an optimizer step if this is the first
    /// read of a weight after an optimizer update.
    ///
    /// # Panics
    ///
    /// If the weight has no layer and a configuration makes that an error.
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

    /// Cast request for an operand.
    pub(super) fn request<'a>(
        &'a self,
        plan: &'a LinearPlan,
        tensor: &'a Float8Tensor<B>,
        operand: Operand,
    ) -> CastRequest<'a, B> {
        CastRequest { evaluates: self.evaluates, ..CastRequest::new(tensor, operand, &self.layer, plan) }
    }

    /// Samples an operand that backward reads, if statistics are due.
    pub(super) fn sample(&self, tensor: &Float8Tensor<B>, layout: Layout, operand: Operand) {
        if let Ok(plan) = &self.plan {
            sample(CastRequest { layout, ..self.request(plan, tensor, operand) });
        }
    }
}

/// Checks whether untagged linears may run in FP8.
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

/// One GEMM of a linear, with its M, K and N.
pub(super) struct GemmCall<'a, B: Float8Backend> {
    pub(super) used: &'a Use<B>,
    pub(super) gemm: Gemm,
    pub(super) dims: [usize; 3],
    /// Number of K by N weights; 1 without groups.
    pub(super) groups: usize,
    /// Length of the contraction without padding, if groups are padded.
    pub(super) unpadded: Option<usize>,
}

/// Inputs of a GEMM, and shape and dtype of its output.
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

    /// The plan if this GEMM runs in FP8. Otherwise records the reason.
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
        if !reason.is_requested() && layer.applied().config.strict {
            let (layer, reason) = (layer.name().into(), reason.to_string());
            panic!("{}", Float8Error::UnrequestedHighPrecision { layer, gemm: self.gemm, reason });
        }
        None
    }

    /// The plan, or the reason for high precision.
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

    /// Gathers a sharded weight for a GEMM without rows, since processes with rows wait for this
    /// one. Returns the copy if it was gathered in FP8, because the amax of its rows counts.
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

    /// Multiplies two operands and counts the call.
    ///
    /// # Panics
    ///
    /// If the device has lost results, or in strict mode, if one of its kernels was wrong.
    pub(super) fn run(&self, plan: &LinearPlan, data: GemmData<'_, B>) -> FloatTensor<B> {
        let GemmData { copies: [a, b], bias, groups, shape, dtype } = data;
        let gemm = plan.gemm(self.gemm).expect("decided");
        let sizes = [a, b].map(|copy| B::fp8_size(&copy.operand));
        let rows = groups.is_none().then_some(sizes[0].rows);
        let timer = time(Work::ScaledGemm(self.gemm));
        let (dtype, config) = (FloatDType::from(dtype), gemm.config);
        let y = B::fp8_matmul(GemmRequest { a: &a.operand, b: &b.operand, bias, groups, shape, dtype, config });
        drop(timer);
        // After the launch, whose kernel may have been disabled.
        let path = plan.device().gemm_path(rows, gemm.granularities, gemm.config);
        match B::fp8_self_check(&self.used.device, false).fault() {
            // The next path already computed the result.
            Some(Float8Error::SelfCheck(_)) if !self.used.layer.applied().config.strict => {}
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

    /// Multiplies in high precision: x and w, dy and w, or x and dy.
    pub(super) fn run_high_precision(
        &self,
        a: FloatTensor<B>,
        b: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        dtype: DType,
    ) -> FloatTensor<B> {
        let &Self { used: Use { layer, device, .. }, gemm, .. } = self;
        let request = HighPrecisionGemm { gemm, a, b, bias, dtype };
        layer.set_high_precision_kernel(gemm, request.kernel(|| B::fp8_facts(device)));
        let _timer = operation(["linear", "linear_x_backward", "linear_weight_backward"][gemm as usize]);
        B::high_precision_matmul(request)
    }
}

/// Result of a GEMM over an empty batch, which some backends cannot multiply or sum.
pub(super) fn zeros<B: Float8Backend>(shape: Shape, dtype: DType, device: &Device<B>) -> FloatTensor<B> {
    B::float_zeros(shape, device, FloatDType::from(dtype))
}

/// Elements of the largest of x, all weights and y, with the maximum padding of the kernels.
fn largest(m: usize, k: usize, n: usize, groups: usize) -> u64 {
    let [m, k, n] = [m, k, n].map(|d| d.next_multiple_of(16) as u64);
    m.saturating_mul(k).max(k.saturating_mul(n).saturating_mul(groups as u64)).max(m.saturating_mul(n))
}
