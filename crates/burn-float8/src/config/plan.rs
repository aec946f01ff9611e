//! [`LinearPlan`]: what the three GEMMs and six casts of a linear read of its configuration, resolved once.
use float8_kernels::{Cast, GemmConfig, Granularity};

use super::cast::{Casts, ScalingType};
use super::delayed::DelayedScaling;
use super::linear::Float8LinearConfig;
use crate::terms::{Gemm, Operand};

/// One of the six casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CastPlan {
    /// What the kernels are asked for.
    pub(crate) cast: Cast,
    /// Whether a history gives the scale, and how.
    pub(crate) delayed: Option<DelayedScaling>,
}

/// One of the three GEMMs in FP8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmPlan {
    /// What shares one scale in each of its operands.
    pub(crate) granularities: [Granularity; 2],
    /// Accumulation and emulation.
    pub(crate) config: GemmConfig,
}

/// A linear's configuration as its GEMMs read it.
#[derive(Clone, Debug)]
pub(crate) struct LinearPlan {
    /// None where the operand stays in high precision.
    casts: Casts<Option<CastPlan>>,
    gemms: [Option<GemmPlan>; 3],
    /// Whether the weight's FP8 copies are made again in backward.
    pub(crate) recasts_weight: bool,
    /// Whether `Tensor::matmul` with the weight on the right is a linear in FP8.
    pub(crate) matmul: bool,
}

impl LinearPlan {
    pub(crate) fn new(config: &Float8LinearConfig) -> Self {
        let casts = config.casts();
        let cast = |operand: Operand| {
            let own = casts[operand];
            let delayed = (own.scaling_type == ScalingType::Delayed).then(|| config.delayed_scaling());
            (!own.is_disabled()).then(|| CastPlan { cast: config.kernel_cast(operand), delayed })
        };
        let gemm = |gemm: Gemm| {
            let enabled = !casts.is_disabled(gemm);
            enabled.then(|| GemmPlan { granularities: casts.granularities(gemm), config: config.gemm_config(gemm) })
        };
        Self {
            casts: Casts::of(cast),
            gemms: Gemm::ALL.map(gemm),
            recasts_weight: config.force_recompute_fp8_weight_in_bwd(),
            matmul: config.matmul(),
        }
    }

    /// None if this operand stays in high precision.
    pub(crate) fn cast(&self, operand: Operand) -> Option<CastPlan> {
        self.casts[operand]
    }

    /// None if this GEMM stays in high precision.
    pub(crate) fn gemm(&self, gemm: Gemm) -> Option<GemmPlan> {
        self.gemms[gemm as usize]
    }

    /// Whether one pass over a tensor makes both of its copies: both are read, by the same cast.
    pub(crate) fn is_one_cast(&self, operand: Operand) -> bool {
        self.cast(operand).is_some() && self.cast(operand) == self.cast(operand.other())
    }

    /// Whether both copies of a tensor have the same codes, and so the same statistics.
    pub(crate) fn has_one_set_of_codes(&self, operand: Operand) -> bool {
        let is_alike =
            |cast: CastPlan| matches!(cast.cast.granularity, Granularity::Tensor | Granularity::Block128x128);
        self.is_one_cast(operand) && self.cast(operand).is_some_and(is_alike)
    }
}
