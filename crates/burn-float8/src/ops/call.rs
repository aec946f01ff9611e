//! [`GemmCall`]: one GEMM of a linear, with groups or without: whether it runs in FP8, and how.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType};
use burn_std::Shape;

use crate::backend::{Float8Backend, GroupEnds, OperandSize, memo};
use crate::config::{Float8LinearConfig, Policy, Untagged};
use crate::error::Float8Error;
use crate::layer::{LastOperand, Layer, is_autocast_enabled, untagged, untagged_choice};
use crate::profile::{Work, operation, time};
use crate::step::on_weight_read;
use crate::tensor::{CastRequest, Float8Tensor, Fp8Copy, View, fp8_copy, note_forward};
use crate::terms::{Gemm, Reason};

/// The layer of a weight, and what holds for this use of it.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) layer: Arc<Layer>,
    /// Why it runs in high precision, whatever the layer is configured for.
    pub(super) off: Option<Reason>,
}

impl Owner {
    /// The owner of a weight.
    pub(super) fn of<B: Float8Backend>(w: &Float8Tensor<B>) -> Self {
        match w.tag() {
            Some(tag) => Self { layer: tag.layer.clone(), off: (!tag.enabled).then_some(Reason::WithoutFloat8) },
            None => Self { layer: untagged::<B>(&B::float_device(w.full())), off: None },
        }
    }

    /// The owner of a weight that fprop reads; begins an optimizer step if this is the first weight that the step has built.
    pub(super) fn of_fprop<B: Float8Backend>(w: &Float8Tensor<B>) -> Self {
        note_forward();
        w.cache().note_fprop();
        if let Some(tag) = w.tag() {
            on_weight_read::<B>(tag, &B::float_device(w.full()));
        }
        Self::of_forward(w)
    }

    /// The owner of a weight that a forward running here and now reads.
    pub(super) fn of_forward<B: Float8Backend>(w: &Float8Tensor<B>) -> Self {
        let owner = Self::of(w);
        if is_autocast_enabled() { owner } else { owner.autocast_off() }
    }

    /// The owner of a weight that Autodiff has saved for a dgrad of so many rows.
    pub(super) fn of_dgrad<B: Float8Backend>(w: &Float8Tensor<B>, rows: usize) -> Self {
        let owner = Self::of(w);
        if w.take_autocast_off(rows) { owner.autocast_off() } else { owner }
    }

    /// The layer's configuration where this use of it may run in FP8: histories and statistics are of such uses.
    pub(super) fn float8_config(&self) -> Option<Float8LinearConfig> {
        let is_on = self.off.is_none() && self.layer.is_enabled();
        self.layer.float8_config().filter(|_| is_on)
    }

    fn autocast_off(self) -> Self {
        Self { off: self.off.or(Some(Reason::Autocast)), ..self }
    }
}

/// One GEMM of a linear with these M, K and N.
pub(super) struct GemmCall<'a> {
    pub(super) owner: &'a Owner,
    pub(super) gemm: Gemm,
    pub(super) dims: [usize; 3],
    /// Weights of K by N; 1 without groups.
    pub(super) groups: usize,
    /// How much of the contraction is no padding, where rows were put between groups.
    pub(super) unpadded: Option<usize>,
}

impl<'a> GemmCall<'a> {
    /// A GEMM without groups.
    pub(super) fn new(owner: &'a Owner, gemm: Gemm, dims: [usize; 3]) -> Self {
        Self { owner, gemm, dims, groups: 1, unpadded: None }
    }

    /// The layer's configuration if this GEMM, which reads and writes these dtypes, can and may run in FP8; if not, its reason is
    /// recorded.
    ///
    /// # Panics
    ///
    /// In strict mode, if nobody asked for high precision; if the weight carries no layer and a configuration says that this is an
    /// error.
    pub(super) fn float8_config<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Option<Float8LinearConfig> {
        match self.decide::<B>(device, dtypes) {
            Ok(config) => Some(config),
            Err(reason) => {
                self.record_high_precision(reason);
                None
            }
        }
    }

    /// The configuration, or why this GEMM runs in high precision.
    pub(super) fn decide<B: Float8Backend>(
        &self,
        device: &Device<B>,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Result<Float8LinearConfig, Reason> {
        let (Owner { layer, off }, [m, k, n]) = (self.owner, self.dims);
        if layer.is_untagged() {
            match untagged_choice::<B>(device) {
                (Untagged::Default, _) => {}
                (Untagged::HighPrecision, is_configured) => return Err(Reason::Untagged { is_configured }),
                (Untagged::Error, _) => panic!("{}", Float8Error::UntaggedLinear { weight: [k, n] }),
            }
        }
        let config = match layer.active().as_ref() {
            Policy::HighPrecision(reason) => return Err(reason.clone()),
            Policy::Float8(config) => match off {
                Some(reason) => return Err(reason.clone()),
                None if !layer.is_enabled() => return Err(Reason::Schedule),
                None => config.clone(),
            },
        };
        if config.casts().is_disabled(self.gemm) {
            return Err(Reason::Recipe);
        }
        if self.dims.contains(&0) {
            return Err(Reason::Empty { m, k, n });
        }
        if largest(m, k, n, self.groups) > B::fp8_max_elements() {
            return Err(Reason::TooLarge { m, k, n });
        }
        match dtypes.into_iter().find(|dtype| !memo::supports::<B>(device, *dtype)) {
            Some(dtype) => Err(Reason::Dtype(dtype)),
            None => Ok(config),
        }
    }

    /// Takes this rank's part in the gather of a sharded weight, of which a GEMM without rows reads nothing: ranks with rows wait
    /// for it. The copy, if it was in FP8: the amax of this rank's rows counts all the same.
    pub(super) fn join_gather<B: Float8Backend>(
        &self,
        w: &Float8Tensor<B>,
        (dtype, dtypes): (DType, impl IntoIterator<Item = DType>),
        device: &Device<B>,
    ) -> Option<Arc<Fp8Copy<B>>> {
        let Owner { layer, .. } = self.owner;
        layer.sharding()?;
        let [_, k, n] = self.dims;
        let call = Self { dims: [1, k, n], ..*self };
        match call.decide::<B>(device, dtypes) {
            Ok(config) => {
                let [_, operand] = self.gemm.operands();
                let in_forward = self.gemm == Gemm::Fprop;
                Some(fp8_copy(w, View::Own, CastRequest { operand, layer, config: &config, in_forward }))
            }
            Err(_) => {
                w.clone().into_whole(dtype);
                None
            }
        }
    }

    fn record_high_precision(&self, reason: Reason) {
        let layer = &self.owner.layer;
        let is_requested = reason.is_requested();
        layer.count_high_precision(self.gemm, reason.clone());
        if !is_requested && layer.conversion().config().strict {
            let (layer, reason) = (layer.name().into(), reason.to_string());
            panic!("{}", Float8Error::UnrequestedHighPrecision { layer, gemm: self.gemm, reason });
        }
    }

    /// The FP8 copies of its two operands.
    pub(super) fn copies<B: Float8Backend>(
        &self,
        operands: [(&Float8Tensor<B>, View<'_, B>); 2],
        config: &Float8LinearConfig,
    ) -> [Arc<Fp8Copy<B>>; 2] {
        let [a, b] = self.gemm.operands();
        let [t, u] = operands;
        [(t, a), (u, b)].map(|((tensor, view), operand)| {
            let (layer, in_forward) = (&self.owner.layer, self.gemm == Gemm::Fprop);
            fp8_copy(tensor, view, CastRequest { operand, layer, config, in_forward })
        })
    }

    /// Multiplies two operands, and counts.
    pub(super) fn run<B: Float8Backend>(
        &self,
        copies: [&Fp8Copy<B>; 2],
        bias: Option<FloatTensor<B>>,
        groups: Option<GroupEnds<IntTensor<B>>>,
        (shape, dtype): (Shape, DType),
        (device, config): (&Device<B>, &Float8LinearConfig),
    ) -> Float8Tensor<B> {
        let granularities = config.casts().granularities(self.gemm);
        let config = config.gemm_config(self.gemm);
        let path = memo::gemm_path::<B>(device, granularities, config);
        let operands = copies.map(|copy| &copy.operand);
        let timer = time(Work::ScaledGemm(self.gemm));
        let y = B::fp8_matmul(operands, bias, groups, shape, FloatDType::from(dtype), config);
        drop(timer);
        let operand = |copy: &Fp8Copy<B>| {
            let size = B::fp8_size(&copy.operand);
            let size = OperandSize { k: self.unpadded.unwrap_or(size.k), ..size };
            LastOperand { size, cast: copy.cast, amaxes: copy.result.clone() }
        };
        self.owner.layer.count_fp8(self.gemm, path, copies.map(operand));
        Float8Tensor::new(y)
    }
}

/// The result of a GEMM over an empty batch, which not every backend multiplies or sums.
pub(super) fn zeros<B: Float8Backend>(shape: Shape, dtype: DType, like: &FloatTensor<B>) -> Float8Tensor<B> {
    let _timer = operation("float_zeros");
    Float8Tensor::new(B::float_zeros(shape, &B::float_device(like), FloatDType::from(dtype)))
}

/// Elements of the largest of x, all weights and y, each axis padded as the kernels may pad it.
fn largest(m: usize, k: usize, n: usize, groups: usize) -> u64 {
    let [m, k, n] = [m, k, n].map(|d| d.next_multiple_of(16) as u64);
    m.saturating_mul(k).max(k.saturating_mul(n).saturating_mul(groups as u64)).max(m.saturating_mul(n))
}
