//! [`GemmCall`]: one GEMM of a linear, with groups or without: whether it runs in FP8, and how.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType};
use burn_std::Shape;

use crate::backend::{Float8Backend, GroupEnds, OperandSize, memo};
use crate::config::{LinearPlan, Untagged};
use crate::error::Float8Error;
use crate::layer::{LastOperand, Layer, UntaggedRule, is_autocast_enabled, settle_at_linear, untagged};
use crate::profile::{Work, time};
use crate::step::on_weight_read;
use crate::tensor::{CastRequest, Float8Tensor, Fp8Copy, View, fp8_copy};
use crate::terms::{Gemm, Operand, Reason};

/// One use of a layer: fixed in forward, for all three GEMMs.
#[derive(Clone, Debug)]
pub(super) struct Use {
    pub(super) layer: Arc<Layer>,
    /// How it runs in FP8, or why it does not.
    pub(super) plan: Result<Arc<LinearPlan>, Reason>,
    /// Whether no backward can follow.
    pub(super) evaluates: bool,
}

impl Use {
    /// The use of a weight that a forward reads on this thread now. It begins an optimizer step if it is the first weight that linears
    /// read of those that the optimizer has built.
    ///
    /// # Panics
    ///
    /// If the weight carries no layer and a configuration says that this is an error.
    pub(super) fn of<B: Float8Backend>(w: &Float8Tensor<B>) -> Self {
        let device = B::float_device(w.full());
        w.cache().note_fprop();
        let off = (!is_autocast_enabled()).then_some(Reason::Autocast);
        let Some(tag) = w.tag() else {
            let layer = untagged::<B>(&device);
            let plan = check_untagged::<B>(w, &device).and_then(|()| layer.plan(off));
            return Self { plan, layer, evaluates: false };
        };
        on_weight_read::<B>(tag, &device);
        let off = if tag.enabled { off } else { Some(Reason::WithoutFloat8) };
        Self { plan: tag.layer.plan(off), layer: tag.layer.clone(), evaluates: false }
    }

    /// What a cast of an operand is asked for.
    pub(super) fn request<'a>(&'a self, operand: Operand, plan: &'a LinearPlan, both: bool) -> CastRequest<'a> {
        CastRequest { operand, layer: &self.layer, plan, both, evaluates: self.evaluates }
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
pub(super) struct GemmCall<'a> {
    pub(super) used: &'a Use,
    pub(super) gemm: Gemm,
    pub(super) dims: [usize; 3],
    /// Weights of K by N; 1 without groups.
    pub(super) groups: usize,
    /// How much of the contraction is no padding, where rows were put between groups.
    pub(super) unpadded: Option<usize>,
}

impl<'a> GemmCall<'a> {
    /// A GEMM without groups.
    pub(super) fn new(used: &'a Use, gemm: Gemm, dims: [usize; 3]) -> Self {
        Self { used, gemm, dims, groups: 1, unpadded: None }
    }

    /// How this GEMM, which reads and writes these dtypes, runs in FP8, if it can and may; if not, its reason is recorded.
    ///
    /// # Panics
    ///
    /// In strict mode, if nobody asked for high precision.
    pub(super) fn plan<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Option<&'a LinearPlan> {
        match self.decide::<B>(device, dtypes) {
            Ok(plan) => Some(plan),
            Err(reason) => {
                self.record_high_precision(reason);
                None
            }
        }
    }

    /// The plan, or why this GEMM runs in high precision.
    pub(super) fn decide<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Result<&'a LinearPlan, Reason> {
        let (plan, [m, k, n]) = (self.used.plan.as_ref().map_err(Clone::clone)?, self.dims);
        if plan.gemm(self.gemm).is_none() {
            return Err(Reason::Recipe);
        }
        if self.dims.contains(&0) {
            return Err(Reason::Empty { m, k, n });
        }
        let facts = memo::facts::<B>(device);
        if largest(m, k, n, self.groups) > facts.max_elements {
            return Err(Reason::TooLarge { m, k, n });
        }
        match dtypes.into_iter().find(|dtype| !facts.supports(*dtype)) {
            Some(dtype) => Err(Reason::Dtype(dtype)),
            None => Ok(plan),
        }
    }

    /// Gathers the weight of a GEMM without rows, which reads none, if it has a source: processes that have rows wait for this one.
    /// Gives the copy, if it was gathered in FP8: the amax of its rows counts.
    pub(super) fn join<B: Float8Backend>(
        &self,
        w: &Float8Tensor<B>,
        (dtype, dtypes): (DType, impl IntoIterator<Item = DType>),
        device: &Device<B>,
    ) -> Option<Arc<Fp8Copy<B>>> {
        self.used.layer.source()?;
        let [_, k, n] = self.dims;
        let call = Self { dims: [1, k, n], ..*self };
        match call.decide::<B>(device, dtypes) {
            Ok(plan) => {
                let [_, operand] = self.gemm.operands();
                Some(fp8_copy(w, View::Own, self.used.request(operand, plan, false)))
            }
            Err(_) => {
                w.clone().into_whole(dtype);
                None
            }
        }
    }

    fn record_high_precision(&self, reason: Reason) {
        let layer = &self.used.layer;
        let is_requested = reason.is_requested();
        layer.count_high_precision(self.gemm, reason.clone());
        if !is_requested && layer.conversion().config().strict {
            let (layer, reason) = (layer.name().into(), reason.to_string());
            panic!("{}", Float8Error::UnrequestedHighPrecision { layer, gemm: self.gemm, reason });
        }
    }

    /// The FP8 copies of its two operands, each of a tensor: `both` if another GEMM will read that tensor's other copy.
    pub(super) fn copies<B: Float8Backend>(
        &self,
        [first, second]: [(&Float8Tensor<B>, View<'_, B>, bool); 2],
        plan: &LinearPlan,
    ) -> [Arc<Fp8Copy<B>>; 2] {
        let [a, b] = self.gemm.operands();
        [self.copy(first, a, plan), self.copy(second, b, plan)]
    }

    /// One of them.
    pub(super) fn copy<B: Float8Backend>(
        &self,
        (tensor, view, both): (&Float8Tensor<B>, View<'_, B>, bool),
        operand: Operand,
        plan: &LinearPlan,
    ) -> Arc<Fp8Copy<B>> {
        let copy = fp8_copy(tensor, view, self.used.request(operand, plan, both));
        // An amax that forward has seen counts later, once backward comes to the node.
        if self.gemm != Gemm::Fprop {
            copy.result.observation.iter().for_each(|observation| observation.confirm());
        }
        copy
    }

    /// Multiplies two operands, and counts.
    ///
    /// # Panics
    ///
    /// If the device has lost results; in strict mode, if one of its kernels was found to be wrong.
    pub(super) fn run<B: Float8Backend>(
        &self,
        copies: [&Fp8Copy<B>; 2],
        bias: Option<FloatTensor<B>>,
        groups: Option<GroupEnds<IntTensor<B>>>,
        (shape, dtype): (Shape, DType),
        (device, plan): (&Device<B>, &LinearPlan),
    ) -> FloatTensor<B> {
        let gemm = plan.gemm(self.gemm).expect("decided");
        let operands = copies.map(|copy| &copy.operand);
        let rows = groups.is_none().then(|| B::fp8_size(operands[0]).rows);
        let path = memo::gemm_path::<B>(device, rows, gemm.granularities, gemm.config);
        let timer = time(Work::ScaledGemm(self.gemm));
        let y = B::fp8_matmul(operands, bias, groups, shape, FloatDType::from(dtype), gemm.config);
        drop(timer);
        match B::fp8_self_check(device, false).fault() {
            // The next path computed it.
            Some(Float8Error::SelfCheck(_)) if !self.used.layer.conversion().config().strict => {}
            Some(error) => panic!("{error}"),
            None => {}
        }
        let operand = |copy: &Fp8Copy<B>| {
            let size = B::fp8_size(&copy.operand);
            let size = OperandSize { k: self.unpadded.unwrap_or(size.k), ..size };
            LastOperand { size, cast: copy.cast, amaxes: copy.result.clone() }
        };
        self.used.layer.count_fp8(self.gemm, path, copies.map(operand));
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
