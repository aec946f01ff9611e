//! [`CastConfig`] for one operand of one GEMM, and [`Casts`] for all six of a linear. Names follow
//! torchao.
use core::ops::{Index, IndexMut};

use float8_kernels::{Format, Granularity};
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::terms::{Gemm, Operand};

/// Source of the scale of a cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum ScalingType {
    /// The amax of the tensor itself.
    #[default]
    Dynamic,
    /// The amaxes of past steps, see [`DelayedScaling`](crate::config::DelayedScaling).
    Delayed,
    /// No cast: the GEMM runs in high precision.
    Disabled,
}

/// Cast of one operand of one GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "CastConfigFile")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(!try_from, deny_unknown_fields))]
pub struct CastConfig {
    /// Source of the scale.
    #[cfg_attr(feature = "schemars", schemars(default))]
    pub scaling_type: ScalingType,
    /// Granularity of the scales. Required in a file unless the cast is disabled.
    #[cfg_attr(feature = "schemars", schemars(with = "Option<Granularity>"))]
    pub scaling_granularity: Granularity,
    /// Format of the codes. Required in a file unless the cast is disabled.
    #[cfg_attr(feature = "schemars", schemars(with = "Option<Format>"))]
    pub target_dtype: Format,
}

/// [`CastConfig`] in a file. A disabled cast may omit granularity and format.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CastConfigFile {
    #[serde(default)]
    scaling_type: ScalingType,
    scaling_granularity: Option<Granularity>,
    target_dtype: Option<Format>,
}

impl TryFrom<CastConfigFile> for CastConfig {
    type Error = Float8Error;

    fn try_from(file: CastConfigFile) -> Result<Self, Float8Error> {
        let CastConfigFile { scaling_type, scaling_granularity, target_dtype } = file;
        let off = CastConfig::disabled();
        let reason = "missing field: a cast that is not disabled names its scaling_granularity and target_dtype";
        let missing = |key| Float8Error::config(key, "", reason);
        match (scaling_type, scaling_granularity, target_dtype) {
            (ScalingType::Disabled, g, t) => Ok(Self {
                scaling_granularity: g.unwrap_or(off.scaling_granularity),
                target_dtype: t.unwrap_or(off.target_dtype),
                ..off
            }),
            (_, None, _) => Err(missing("scaling_granularity")),
            (_, _, None) => Err(missing("target_dtype")),
            (scaling_type, Some(scaling_granularity), Some(target_dtype)) => {
                Ok(Self { scaling_type, scaling_granularity, target_dtype })
            }
        }
    }
}

impl CastConfig {
    /// Scales computed from the amax of each group of elements that shares a scale.
    pub const fn dynamic(scaling_granularity: Granularity, target_dtype: Format) -> Self {
        Self { scaling_type: ScalingType::Dynamic, scaling_granularity, target_dtype }
    }

    /// One scale per tensor, computed from past amaxes.
    pub const fn delayed(target_dtype: Format) -> Self {
        Self { scaling_type: ScalingType::Delayed, scaling_granularity: Granularity::Tensor, target_dtype }
    }

    /// No cast: the operand stays in high precision.
    pub const fn disabled() -> Self {
        let scaling_type = ScalingType::Disabled;
        Self { scaling_type, scaling_granularity: Granularity::Tensor, target_dtype: Format::E4m3 }
    }

    /// Whether the operand stays in high precision.
    pub const fn is_disabled(&self) -> bool {
        matches!(self.scaling_type, ScalingType::Disabled)
    }

    /// Whether the operand is cast with MX scales.
    pub(super) fn is_mx(&self) -> bool {
        !self.is_disabled() && self.scaling_granularity == Granularity::Block1x32
    }
}

/// One value for each of the six operands of a linear's three GEMMs, by default their casts.
///
/// ```text
/// fprop   y  = x · w         INPUT, WEIGHT_T
/// dgrad   dx = dy · wᵀ       GRAD_OUTPUT, WEIGHT
/// wgrad   dw = xᵀ · dy       INPUT_T, GRAD_OUTPUT_T
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Casts<T = CastConfig>(pub(super) [T; 6]);

impl<T> Casts<T> {
    pub(crate) fn of(value: impl Fn(Operand) -> T) -> Self {
        Self(Operand::ALL.map(value))
    }
}

impl<T> Index<Operand> for Casts<T> {
    type Output = T;

    fn index(&self, operand: Operand) -> &T {
        &self.0[operand.index()]
    }
}

impl<T> IndexMut<Operand> for Casts<T> {
    fn index_mut(&mut self, operand: Operand) -> &mut T {
        &mut self.0[operand.index()]
    }
}

impl Casts {
    /// Casts each operand the same way in both of its GEMMs.
    pub const fn new(input: CastConfig, weight: CastConfig, grad_output: CastConfig) -> Self {
        Self([input, input, weight, weight, grad_output, grad_output])
    }

    /// Replaces the cast of one operand.
    pub const fn with(mut self, operand: Operand, cast: CastConfig) -> Self {
        self.0[operand.index()] = cast;
        self
    }

    /// Runs a GEMM in high precision.
    pub const fn without(self, gemm: Gemm) -> Self {
        let [first, second] = gemm.operands();
        self.with(first, CastConfig::disabled()).with(second, CastConfig::disabled())
    }

    /// Whether this GEMM stays in high precision.
    pub(crate) fn is_disabled(&self, gemm: Gemm) -> bool {
        self[gemm.operands()[0]].is_disabled()
    }

    /// Granularities of the two operands of a GEMM, in the order of the equations above.
    pub fn granularities(&self, gemm: Gemm) -> [Granularity; 2] {
        gemm.operands().map(|operand| self[operand].scaling_granularity)
    }

    /// Checks torchao's rules between casts, and the rules of delayed scaling.
    pub(crate) fn validate(&self) -> Result<(), Float8Error> {
        for gemm in Gemm::ALL {
            let casts = gemm.operands().map(|operand| (operand.key(), self[operand]));
            if casts[0].1.is_disabled() != casts[1].1.is_disabled() {
                let [disabled, enabled] = if casts[0].1.is_disabled() { [0, 1] } else { [1, 0] }.map(|i| casts[i].0);
                let reason =
                    format!("{gemm} cannot run in two precisions: {disabled} is disabled and {enabled} is not");
                return Err(Float8Error::config(disabled, "disabled", reason));
            }
            for (operand, cast) in casts {
                if cast.scaling_type == ScalingType::Delayed && cast.scaling_granularity != Granularity::Tensor {
                    let granularity = cast.scaling_granularity;
                    let reason = format!("delayed scaling is tensorwise, not {granularity}");
                    return Err(Float8Error::config(operand, granularity, reason));
                }
            }
        }
        for operand in [Operand::INPUT, Operand::WEIGHT_T, Operand::GRAD_OUTPUT] {
            let (first, second) = (self[operand], self[operand.other()]);
            let enabled = !first.is_disabled() && !second.is_disabled();
            if enabled && first.target_dtype != second.target_dtype {
                let [first, second] = [first.target_dtype, second.target_dtype];
                let role = operand.role.name();
                let reason =
                    format!("{role} must have one target_dtype in both of its GEMMs, not {first} and {second}");
                return Err(Float8Error::config("target_dtype", first, reason));
            }
        }
        if Gemm::ALL.into_iter().all(|gemm| self.is_disabled(gemm)) {
            let reason = "all six casts are disabled: nothing is left to run in FP8";
            return Err(Float8Error::config("scaling_type", "disabled", reason));
        }
        Ok(())
    }
}
