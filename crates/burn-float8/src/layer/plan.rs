//! [`LinearPlan`]: the GEMMs and casts of a linear, resolved once from its configuration.
use burn_backend::DType;
use float8_kernels::{Cast, GemmConfig, GemmPath, Granularity};

use crate::backend::DeviceFacts;
use crate::config::{Casts, DelayedScaling, Float8LinearConfig, ScalingType};
use crate::terms::{Gemm, Operand, Reason};

/// One of the six casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CastPlan {
    /// Kernel settings of the cast.
    pub(crate) cast: Cast,
    /// Settings of its history, with delayed scaling.
    pub(crate) delayed: Option<DelayedScaling>,
}

/// One of the three GEMMs in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmPlan {
    /// Granularities of the operands.
    pub(crate) granularities: [Granularity; 2],
    /// Accumulation and emulation.
    pub(crate) config: GemmConfig,
}

/// The dtypes of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearDtypes {
    /// Dtype of x, y and their gradients.
    pub(crate) x: DType,
    /// Dtype of w and its gradient.
    pub(crate) w: DType,
    pub(crate) bias: Option<DType>,
}

/// Execution of a linear as decided by its configuration, device and dtypes. Shapes and disabled
/// kernels decide the rest.
#[derive(Clone, Debug)]
pub(crate) struct LinearPlan {
    /// None where the operand stays in high precision.
    casts: Casts<Option<CastPlan>>,
    /// Settings of each GEMM, or the reason for high precision.
    gemms: [Result<GemmPlan, Reason>; 3],
    /// Whether the weight's FP8 copies are recomputed in backward.
    pub(crate) recasts_weight: bool,
    /// Whether `Tensor::matmul` with the weight on the right runs as an FP8 linear.
    pub(crate) matmul: bool,
    device: Option<DeviceFacts>,
}

impl LinearPlan {
    /// Plan before device and dtypes are known.
    pub(crate) fn new(config: &Float8LinearConfig) -> Self {
        let casts = config.casts();
        let cast = |operand: Operand| {
            let own = casts[operand];
            let delayed = (own.scaling_type == ScalingType::Delayed).then(|| config.delayed_scaling());
            (!own.is_disabled()).then(|| CastPlan { cast: config.kernel_cast(operand), delayed })
        };
        let gemm = |gemm: Gemm| match casts.is_disabled(gemm) {
            true => Err(Reason::Recipe),
            false => Ok(GemmPlan { granularities: casts.granularities(gemm), config: config.gemm_config(gemm) }),
        };
        Self {
            casts: Casts::of(cast),
            gemms: Gemm::ALL.map(gemm),
            recasts_weight: config.force_recompute_fp8_weight_in_bwd(),
            matmul: config.matmul(),
            device: None,
        }
    }

    /// Resolves the plan for dtypes on a device. GEMMs for which the device has no kernel left run in
    /// high precision. With a sharded weight the host computes them instead, since the other processes
    /// exchange codes.
    pub(crate) fn on(&self, device: DeviceFacts, dtypes: LinearDtypes, is_sharded: bool) -> Self {
        let LinearDtypes { x, w, bias } = dtypes;
        let missing = |dtypes: &[DType]| dtypes.iter().copied().find(|dtype| !device.supports(*dtype));
        let (both, all) = (missing(&[x, w]), missing(&[x, w, bias.unwrap_or(w)]));
        let mut plan = Self { device: Some(device), ..self.clone() };
        for (gemm, missing) in plan.gemms.iter_mut().zip([all, both, both]) {
            let Ok(GemmPlan { granularities, config }) = *gemm else { continue };
            if let Some(dtype) = missing {
                *gemm = Err(Reason::Dtype(dtype));
            } else if !is_sharded
                && device
                    .gemm
                    .is_some_and(|gemm| !gemm.has_casts() || gemm.path(None, granularities, config) == GemmPath::Host)
            {
                *gemm = Err(Reason::Disabled);
            }
        }
        plan
    }

    /// Device of a resolved plan.
    pub(crate) fn device(&self) -> DeviceFacts {
        self.device.expect("resolved for a device")
    }

    /// None if this operand stays in high precision.
    pub(crate) fn cast(&self, operand: Operand) -> Option<CastPlan> {
        self.casts[operand]
    }

    /// Settings of a GEMM, or the reason for high precision.
    pub(crate) fn gemm(&self, gemm: Gemm) -> Result<GemmPlan, &Reason> {
        self.gemms[gemm as usize].as_ref().copied()
    }

    /// Whether one pass over a tensor makes both of its copies: both are needed, and have the same
    /// cast.
    pub(crate) fn is_one_cast(&self, operand: Operand) -> bool {
        self.cast(operand).is_some() && self.cast(operand) == self.cast(operand.other())
    }

    /// Whether both copies of a tensor have the same codes, and therefore the same statistics.
    pub(crate) fn has_one_set_of_codes(&self, operand: Operand) -> bool {
        let is_alike =
            |cast: CastPlan| matches!(cast.cast.granularity, Granularity::Tensor | Granularity::Block128x128);
        self.is_one_cast(operand) && self.cast(operand).is_some_and(is_alike)
    }
}
