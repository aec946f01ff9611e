//! Common terms of all modules: GEMMs, operands, recipes, and reasons for high precision.
use burn_backend::DType;
use float8_kernels::Orientation;
use serde::{Deserialize, Serialize};

/// GEMMs of a linear, for x `[M, K]`, w `[K, N]` and dy `[M, N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gemm {
    /// y `[M, N]` = x · w
    Fprop,
    /// dx `[M, K]` = dy · wᵀ
    Dgrad,
    /// dw `[K, N]` = xᵀ · dy
    Wgrad,
}

impl Gemm {
    /// All three, in the order of a step.
    pub const ALL: [Self; 3] = [Self::Fprop, Self::Dgrad, Self::Wgrad];

    /// Its two operands, in the order of the equations above.
    pub(crate) const fn operands(self) -> [Operand; 2] {
        match self {
            Self::Fprop => [Operand::INPUT, Operand::WEIGHT_T],
            Self::Dgrad => [Operand::GRAD_OUTPUT, Operand::WEIGHT],
            Self::Wgrad => [Operand::INPUT_T, Operand::GRAD_OUTPUT_T],
        }
    }
}

impl core::fmt::Display for Gemm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        })
    }
}

/// Role of an operand. It determines the FP8 format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// x
    Input,
    /// w
    Weight,
    /// dy
    GradOutput,
}

impl Role {
    /// All three roles.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::GradOutput];

    /// Name in configurations: `input`, `weight`, `grad_output`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::GradOutput => "grad_output",
        }
    }
}

/// Axis of a tensor `[rows, cols]` that a GEMM contracts. The axis is contiguous in its FP8 copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ContractionAxis {
    /// The last axis: the copy is `[rows, cols]`.
    Last,
    /// All other axes: the copy is `[cols, rows]`.
    Leading,
}

impl ContractionAxis {
    /// Orientation with only the copy along this axis.
    pub(crate) fn orientation(self) -> Orientation {
        match self {
            Self::Last => Orientation::Rows,
            Self::Leading => Orientation::Cols,
        }
    }
}

/// One of the six FP8 copies that the GEMMs of a linear read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Operand {
    pub(crate) role: Role,
    pub(crate) axis: ContractionAxis,
}

impl Operand {
    /// x in fprop.
    pub const INPUT: Self = Self { role: Role::Input, axis: ContractionAxis::Last };
    /// xᵀ in wgrad.
    pub const INPUT_T: Self = Self { role: Role::Input, axis: ContractionAxis::Leading };
    /// w in dgrad.
    pub const WEIGHT: Self = Self { role: Role::Weight, axis: ContractionAxis::Last };
    /// wᵀ in fprop.
    pub const WEIGHT_T: Self = Self { role: Role::Weight, axis: ContractionAxis::Leading };
    /// dy in dgrad.
    pub const GRAD_OUTPUT: Self = Self { role: Role::GradOutput, axis: ContractionAxis::Last };
    /// dyᵀ in wgrad.
    pub const GRAD_OUTPUT_T: Self = Self { role: Role::GradOutput, axis: ContractionAxis::Leading };

    /// All six.
    pub const ALL: [Self; 6] =
        [Self::INPUT, Self::INPUT_T, Self::WEIGHT, Self::WEIGHT_T, Self::GRAD_OUTPUT, Self::GRAD_OUTPUT_T];

    /// Name of its role, with the suffix `_t` if a GEMM reads the transpose of the tensor.
    pub(crate) fn name(self) -> &'static str {
        ["input", "input_t", "weight", "weight_t", "grad_output", "grad_output_t"][self.index()]
    }

    /// Key of its cast in a file.
    pub(crate) fn key(self) -> &'static str {
        [
            "cast_config_input",
            "cast_config_input_for_grad_weight",
            "cast_config_weight_for_grad_input",
            "cast_config_weight",
            "cast_config_grad_output",
            "cast_config_grad_output_for_grad_weight",
        ][self.index()]
    }

    /// The other copy of the same tensor, which another GEMM reads.
    pub(crate) fn other(self) -> Self {
        Self::ALL[self.index() ^ 1]
    }

    /// Index in an array of all six.
    pub(crate) const fn index(self) -> usize {
        2 * self.role as usize + self.axis as usize
    }
}

/// Recipe of a linear's casts. Names follow torchao, `delayed` TransformerEngine.
///
/// | | x | w | dy | scales |
/// | --- | --- | --- | --- | --- |
/// | `tensorwise` | e4m3 | e4m3 | e5m2 | f32, one per tensor |
/// | `rowwise` | e4m3 | e4m3 | e4m3 | power of two, one per row |
/// | `rowwise_with_gw_hp` | e4m3 | e4m3, dgrad one per tensor | e4m3 | as `rowwise` |
/// | `delayed` | e4m3 | e4m3 | e5m2 | f32, one per tensor, from past amaxes |
/// | `blockwise` | e4m3, 1×128 | e4m3, 128×128 | e4m3, 1×128 | f32, one per block |
/// | `mxfp8` | e4m3 | e4m3 | e4m3 | E8M0, one per 32 elements (OCP MX) |
/// | `mxfp8_wgrad_with_hp` | e4m3 | e4m3 | e4m3, dgrad only | as `mxfp8` |
///
/// Rows and groups of 32 elements run along the contraction. `rowwise_with_gw_hp` and
/// `mxfp8_wgrad_with_hp` run wgrad in high precision. See
/// [`DelayedScaling`](crate::config::DelayedScaling) for `delayed`, and
/// [`ScaleCalculationMode`](crate::config::ScaleCalculationMode) for MX scales.
///
/// Every copy is cast from the high-precision tensor, never from another copy.
///
/// Sources: [torchao](https://github.com/pytorch/ao/tree/36027d82/torchao/float8),
/// [TransformerEngine](https://github.com/NVIDIA/TransformerEngine) for `delayed`,
/// [DeepSeek-V3](https://arxiv.org/abs/2412.19437) for `blockwise`,
/// [OCP MX 1.0](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)
/// for `mxfp8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Recipe {
    /// One scale per tensor.
    #[default]
    Tensorwise,
    /// One scale per row.
    Rowwise,
    /// One scale per row, with the weight gradient in high precision.
    RowwiseWithGwHp,
    /// One scale per tensor, from a history of amaxes.
    Delayed,
    /// One scale per block.
    Blockwise,
    /// OCP MX: one power-of-two scale per 32 elements along the contraction.
    Mxfp8,
    /// OCP MX, with the weight gradient in high precision.
    Mxfp8WgradWithHp,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Self; 7] = [
        Self::Tensorwise,
        Self::Rowwise,
        Self::RowwiseWithGwHp,
        Self::Delayed,
        Self::Blockwise,
        Self::Mxfp8,
        Self::Mxfp8WgradWithHp,
    ];

    /// Name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensorwise => "tensorwise",
            Self::Rowwise => "rowwise",
            Self::RowwiseWithGwHp => "rowwise_with_gw_hp",
            Self::Delayed => "delayed",
            Self::Blockwise => "blockwise",
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp8WgradWithHp => "mxfp8_wgrad_with_hp",
        }
    }
}

impl core::fmt::Display for Recipe {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// Reason why a GEMM ran in high precision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// A name in `filter_fqns` matched.
    #[error("filter {0:?}")]
    Filter(String),
    /// The filter function rejected the linear.
    #[error("filter function")]
    FilterFn,
    /// `auto_filter_small_kn` matched.
    #[error("small: K={k} N={n}")]
    SmallKn {
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
    },
    /// One of the first or last layers.
    #[error("layer {number} of {layers}")]
    EdgeLayer {
        /// Layer number, from 0.
        number: usize,
        /// Number of layers.
        layers: usize,
    },
    /// The recipe keeps this GEMM in high precision.
    #[error("disabled by the recipe")]
    Recipe,
    /// [`set_float8_enabled`](crate::set_float8_enabled) switched the layer off, as a precision
    /// schedule does.
    #[error("precision schedule")]
    Schedule,
    /// [`without_float8`](crate::without_float8) switched this copy of the model off.
    #[error("without_float8")]
    WithoutFloat8,
    /// It ran inside a closure of [`float8_autocast`](crate::float8_autocast) with FP8 off.
    #[error("float8_autocast is off")]
    Autocast,
    /// Statistics crossed a limit.
    #[error("fallback: {0}")]
    Fallback(String),
    /// FP8 is off in the device's default configuration, and the weight was never tagged.
    #[error("FP8 is off on this device")]
    Off,
    /// The weight is untagged, and untagged linears do not run in FP8 on the device; see
    /// [`Untagged`](crate::config::Untagged).
    #[error("untagged: not in a model that Float8Config was applied to")]
    Untagged {
        /// Whether a configuration set this rule.
        is_configured: bool,
    },
    /// The operand's dtype has no FP8 cast on this device.
    #[error("dtype {0:?}")]
    Dtype(DType),
    /// All kernels of the device for this GEMM or its casts are disabled.
    #[error("no kernel of the device is left: self-checks failed")]
    Disabled,
    /// An operand or the output exceeds the index range of the backend's kernels.
    #[error("{m}x{k}x{n} is beyond the kernels' index range")]
    TooLarge {
        /// Rows of x.
        m: usize,
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
    },
    /// M, K or N is zero.
    #[error("empty GEMM {m}x{k}x{n}")]
    Empty {
        /// Rows of x.
        m: usize,
        /// Input features.
        k: usize,
        /// Output features.
        n: usize,
    },
}

impl Reason {
    /// Configuration setting that causes it.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::SmallKn { .. } => "auto_filter_small_kn".into(),
            Self::EdgeLayer { .. } => "first and last layers".into(),
            reason => reason.to_string(),
        }
    }

    /// Whether the user requested it by a filter, recipe, switch, limit or default. Also true for
    /// empty GEMMs.
    pub fn is_requested(&self) -> bool {
        !matches!(
            self,
            Self::Dtype(_) | Self::Disabled | Self::TooLarge { .. } | Self::Untagged { is_configured: false }
        )
    }
}
