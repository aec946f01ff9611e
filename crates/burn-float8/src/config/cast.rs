//! How one operand of one GEMM is cast, and the casts of all six that a linear has; names are torchao's.
use float8_kernels::{Format, Granularity};
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::terms::{ContractionAxis, Gemm, Operand, Role};

/// Where the scale of a cast comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum ScalingType {
    /// From the amax of the tensor itself.
    #[default]
    Dynamic,
    /// From the amaxes of past steps, see [`DelayedScaling`](crate::config::DelayedScaling).
    Delayed,
    /// No cast: the GEMM runs in high precision.
    Disabled,
}

/// How one operand of one GEMM is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "CastConfigFile")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(!try_from, deny_unknown_fields))]
pub struct CastConfig {
    /// Where the scale comes from.
    #[cfg_attr(feature = "schemars", schemars(default))]
    pub scaling_type: ScalingType,
    /// What shares one scale. Needed in a file unless the cast is disabled.
    #[cfg_attr(feature = "schemars", schemars(with = "Option<Granularity>"))]
    pub scaling_granularity: Granularity,
    /// Format of the codes. Needed in a file unless the cast is disabled.
    #[cfg_attr(feature = "schemars", schemars(with = "Option<Format>"))]
    pub target_dtype: Format,
}

/// [`CastConfig`] in a file, where one that is disabled need not say what the cast would be.
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
    /// Scaled by the amax of what shares a scale.
    pub const fn dynamic(scaling_granularity: Granularity, target_dtype: Format) -> Self {
        Self { scaling_type: ScalingType::Dynamic, scaling_granularity, target_dtype }
    }

    /// One scale per tensor, from past amaxes.
    pub const fn delayed(target_dtype: Format) -> Self {
        Self { scaling_type: ScalingType::Delayed, scaling_granularity: Granularity::Tensor, target_dtype }
    }

    /// In high precision.
    pub const fn disabled() -> Self {
        let scaling_type = ScalingType::Disabled;
        Self { scaling_type, scaling_granularity: Granularity::Tensor, target_dtype: Format::E4m3 }
    }

    /// Whether the operand stays in high precision.
    pub const fn is_disabled(&self) -> bool {
        matches!(self.scaling_type, ScalingType::Disabled)
    }
}

/// The casts of the six operands of a linear's three GEMMs.
///
/// ```text
/// fprop   y  = x · w         input, weight
/// dgrad   dx = dy · wᵀ       grad_output, weight_for_grad_input
/// wgrad   dw = xᵀ · dy       input_for_grad_weight, grad_output_for_grad_weight
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Casts {
    /// x in fprop, `[M, K]`.
    pub input: CastConfig,
    /// xᵀ in wgrad, `[K, M]`.
    pub input_for_grad_weight: CastConfig,
    /// wᵀ in fprop, `[N, K]`.
    pub weight: CastConfig,
    /// w in dgrad, `[K, N]`.
    pub weight_for_grad_input: CastConfig,
    /// dy in dgrad, `[M, N]`.
    pub grad_output: CastConfig,
    /// dyᵀ in wgrad, `[N, M]`.
    pub grad_output_for_grad_weight: CastConfig,
}

impl Casts {
    /// Casts each operand alike in both of its GEMMs.
    pub const fn new(input: CastConfig, weight: CastConfig, grad_output: CastConfig) -> Self {
        Self {
            input,
            input_for_grad_weight: input,
            weight,
            weight_for_grad_input: weight,
            grad_output,
            grad_output_for_grad_weight: grad_output,
        }
    }

    /// The cast of an operand.
    pub(crate) fn of(&self, operand: Operand) -> CastConfig {
        match (operand.role, operand.axis) {
            (Role::Input, ContractionAxis::Last) => self.input,
            (Role::Input, ContractionAxis::Leading) => self.input_for_grad_weight,
            (Role::Weight, ContractionAxis::Leading) => self.weight,
            (Role::Weight, ContractionAxis::Last) => self.weight_for_grad_input,
            (Role::GradOutput, ContractionAxis::Last) => self.grad_output,
            (Role::GradOutput, ContractionAxis::Leading) => self.grad_output_for_grad_weight,
        }
    }

    /// Whether this GEMM stays in high precision.
    pub(crate) fn is_disabled(&self, gemm: Gemm) -> bool {
        self.of(gemm.operands()[0]).is_disabled()
    }

    /// Whether any operand is cast with MX scales.
    pub(super) fn any_mx(&self) -> bool {
        let mut casts = Operand::ALL.into_iter().map(|operand| self.of(operand));
        casts.any(|cast| !cast.is_disabled() && cast.scaling_granularity == Granularity::Block1x32)
    }

    /// What shares one scale in the two operands of a GEMM, in the order of the equations above.
    pub fn granularities(&self, gemm: Gemm) -> [Granularity; 2] {
        gemm.operands().map(|operand| self.of(operand).scaling_granularity)
    }

    /// The rules between fields: torchao's, and those of delayed scaling.
    pub(crate) fn validate(&self) -> Result<(), Float8Error> {
        for gemm in Gemm::ALL {
            let casts = gemm.operands().map(|operand| (field(operand), self.of(operand)));
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
        for (operand, first, second) in [
            ("input", self.input, self.input_for_grad_weight),
            ("weight", self.weight, self.weight_for_grad_input),
            ("grad_output", self.grad_output, self.grad_output_for_grad_weight),
        ] {
            let enabled = !first.is_disabled() && !second.is_disabled();
            if enabled && first.target_dtype != second.target_dtype {
                let [first, second] = [first.target_dtype, second.target_dtype];
                let reason =
                    format!("{operand} must have one target_dtype in both of its GEMMs, not {first} and {second}");
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

/// The key of an operand's cast in a file.
fn field(operand: Operand) -> &'static str {
    match (operand.role, operand.axis) {
        (Role::Input, ContractionAxis::Last) => "cast_config_input",
        (Role::Input, ContractionAxis::Leading) => "cast_config_input_for_grad_weight",
        (Role::Weight, ContractionAxis::Leading) => "cast_config_weight",
        (Role::Weight, ContractionAxis::Last) => "cast_config_weight_for_grad_input",
        (Role::GradOutput, ContractionAxis::Last) => "cast_config_grad_output",
        (Role::GradOutput, ContractionAxis::Leading) => "cast_config_grad_output_for_grad_weight",
    }
}
