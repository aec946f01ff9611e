//! [`Float8LinearConfig`]: everything about one linear's three GEMMs, from a [`Recipe`] or cast by cast.
use float8_kernels::{Cast, Format, GemmConfig, Granularity, ScaleCalculationMode, ScaleMode};
use serde::{Deserialize, Serialize};

use super::cast::{CastConfig, Casts, ScaleCalculationModeName};
use crate::error::Float8Error;
use crate::layer::{Along, Gemm, Role};

/// How the operands of a linear are cast (names are torchao's, `delayed` is TransformerEngine's).
///
/// | | x | w | dy | scales |
/// | --- | --- | --- | --- | --- |
/// | `tensorwise` | e4m3 | e4m3 | e5m2 | f32, one per tensor |
/// | `rowwise` | e4m3 | e4m3 | e4m3 | power of two, one per row of the contraction-major operand |
/// | `rowwise_with_gw_hp` | e4m3 | e4m3, dgrad one per tensor | e4m3 | as `rowwise`; wgrad in high precision |
/// | `delayed` | e4m3 | e4m3 | e5m2 | f32, one per tensor, from past amaxes: [`DelayedScaling`] |
/// | `blockwise` | e4m3, 1×128 | e4m3, 128×128 | e4m3, 1×128 | f32, one per block |
/// | `mxfp8` | e4m3 | e4m3 | e4m3 | E8M0, one for 32 neighbours along the contraction (OCP MX): [`ScaleCalculationMode`] |
/// | `mxfp8_wgrad_with_hp` | e4m3 | e4m3 | e4m3, dgrad only | as `mxfp8`; wgrad in high precision |
///
/// Every copy is cast from the high-precision tensor, never from another copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recipe {
    /// One scale per tensor.
    #[default]
    Tensorwise,
    /// One scale per row.
    Rowwise,
    /// One scale per row, the weight gradient in high precision.
    RowwiseWithGwHp,
    /// One scale per tensor, from a history of amaxes.
    Delayed,
    /// One scale per block.
    Blockwise,
    /// OCP MX: one power of two for each 32 along the contraction.
    Mxfp8,
    /// OCP MX, the weight gradient in high precision.
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

    /// The casts of the six operands.
    pub const fn casts(self) -> Casts {
        use Format::{E4m3, E5m2};
        const fn dynamic(granularity: Granularity, format: Format) -> CastConfig {
            CastConfig::dynamic(granularity, format)
        }
        let row = dynamic(Granularity::Row, E4m3);
        let mx = dynamic(Granularity::Block1x32, E4m3);
        match self {
            Self::Tensorwise => {
                let e4m3 = dynamic(Granularity::Tensor, E4m3);
                Casts::new(e4m3, e4m3, dynamic(Granularity::Tensor, E5m2))
            }
            Self::Rowwise => Casts::new(row, row, row),
            Self::RowwiseWithGwHp => Casts {
                weight_for_grad_input: dynamic(Granularity::Tensor, E4m3),
                input_for_grad_weight: CastConfig::disabled(),
                grad_output_for_grad_weight: CastConfig::disabled(),
                ..Casts::new(row, row, row)
            },
            Self::Delayed => {
                let e4m3 = CastConfig::delayed(E4m3);
                Casts::new(e4m3, e4m3, CastConfig::delayed(E5m2))
            }
            Self::Blockwise => {
                let line = dynamic(Granularity::Block1x128, E4m3);
                Casts::new(line, dynamic(Granularity::Block128x128, E4m3), line)
            }
            Self::Mxfp8 => Casts::new(mx, mx, mx),
            Self::Mxfp8WgradWithHp => Casts {
                input_for_grad_weight: CastConfig::disabled(),
                grad_output_for_grad_weight: CastConfig::disabled(),
                ..Casts::new(mx, mx, mx)
            },
        }
    }

    /// Whether f32 scales are rounded down to powers of two.
    pub const fn round_scales_to_power_of_2(self) -> bool {
        matches!(self, Self::Rowwise | Self::RowwiseWithGwHp)
    }
}

impl core::fmt::Display for Recipe {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Tensorwise => "tensorwise",
            Self::Rowwise => "rowwise",
            Self::RowwiseWithGwHp => "rowwise_with_gw_hp",
            Self::Delayed => "delayed",
            Self::Blockwise => "blockwise",
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp8WgradWithHp => "mxfp8_wgrad_with_hp",
        })
    }
}

/// How delayed scaling turns a history into one amax.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxComputeAlgo {
    /// The largest of the history.
    #[default]
    Max,
    /// That of the last step.
    MostRecent,
}

/// TransformerEngine's delayed scaling: `scale = FMAX / (algo(history) · 2^margin)`.
///
/// The history holds one amax for each past optimizer step, the largest of its micro-batches. Histories of all layers move
/// together, when a linear first meets a parameter that the optimizer has built since the last step began
/// ([`begin_float8_step`](crate::begin_float8_step) says when that needs help). A step whose amax is 0, inf or NaN leaves
/// history and scale as they were. An amax counts once backward has come to its layer, so evaluations leave no trace. A
/// tensor without a history, as in the first step, is scaled by its own amax. A tensor that several linears read belongs to
/// the history of the one that casts it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DelayedScaling {
    /// Steps in the history, 1 to 65536.
    pub amax_history_len: usize,
    /// What is taken from it.
    pub amax_compute_algo: AmaxComputeAlgo,
    /// Powers of two of headroom, -8 to 8.
    pub margin: i32,
}

impl Default for DelayedScaling {
    /// TransformerEngine's defaults: 1024 steps, their maximum, no margin.
    fn default() -> Self {
        Self { amax_history_len: 1024, amax_compute_algo: AmaxComputeAlgo::Max, margin: 0 }
    }
}

/// How one linear runs in FP8.
///
/// ```
/// use burn_float8::{CastConfig, Casts, Float8LinearConfig, Recipe};
///
/// // Rowwise, but the gradient with respect to x in high precision: both operands of a GEMM, or neither.
/// let casts = Casts {
///     grad_output: CastConfig::disabled(),
///     weight_for_grad_input: CastConfig::disabled(),
///     ..Recipe::Rowwise.casts()
/// };
/// let config = Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts)?;
///
/// let half = Casts { grad_output: CastConfig::disabled(), ..Recipe::Rowwise.casts() };
/// assert!(Float8LinearConfig::new(Recipe::Rowwise).with_casts(half).is_err());
/// # Ok::<(), burn_float8::Float8Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawLinearConfig", into = "RawLinearConfig")]
pub struct Float8LinearConfig {
    recipe: Recipe,
    casts: Casts,
    use_fast_accum: [bool; 3],
    round_scales_to_power_of_2: bool,
    scale_calculation_mode: ScaleCalculationMode,
    emulate: bool,
    force_recompute_fp8_weight_in_bwd: bool,
    delayed: DelayedScaling,
}

impl Default for Float8LinearConfig {
    fn default() -> Self {
        Self::new(Recipe::default())
    }
}

impl Float8LinearConfig {
    /// By a recipe.
    pub fn new(recipe: Recipe) -> Self {
        Self {
            recipe,
            casts: recipe.casts(),
            use_fast_accum: [false; 3],
            round_scales_to_power_of_2: recipe.round_scales_to_power_of_2(),
            scale_calculation_mode: ScaleCalculationMode::default(),
            emulate: false,
            force_recompute_fp8_weight_in_bwd: false,
            delayed: DelayedScaling::default(),
        }
    }

    /// The same settings with another recipe's casts and what belongs to their scales.
    pub(crate) fn with_recipe(self, recipe: Recipe) -> Self {
        let Self { casts, round_scales_to_power_of_2, scale_calculation_mode, .. } = Self::new(recipe);
        Self { recipe, casts, round_scales_to_power_of_2, scale_calculation_mode, ..self }
    }

    /// Replaces the recipe's casts.
    ///
    /// # Errors
    ///
    /// [`Float8Error::HalfDisabledGemm`], [`OperandDtypes`](Float8Error::OperandDtypes),
    /// [`DelayedGranularity`](Float8Error::DelayedGranularity), [`AllDisabled`](Float8Error::AllDisabled);
    /// [`ScaleCalculationModeWithoutMx`](Float8Error::ScaleCalculationModeWithoutMx) if a mode
    /// but the default was given and none of these uses it.
    pub fn with_casts(mut self, casts: Casts) -> Result<Self, Float8Error> {
        casts.validate()?;
        self.casts = casts;
        if self.scale_calculation_mode == ScaleCalculationMode::default() { Ok(self) } else { self.with_used_mode() }
    }

    /// Itself if one of the casts uses the mode.
    fn with_used_mode(self) -> Result<Self, Float8Error> {
        if self.casts.any_mx() {
            return Ok(self);
        }
        let Self { recipe, scale_calculation_mode: mode, .. } = self;
        Err(Float8Error::ScaleCalculationModeWithoutMx { recipe, mode })
    }

    /// Whether scales are rounded down to powers of two, so that scaling is exact. Those of `1x32` are powers of two anyway.
    pub fn with_round_scales_to_power_of_2(mut self, round: bool) -> Self {
        self.round_scales_to_power_of_2 = round;
        self
    }

    /// How the scales of casts of `1x32` come from an amax: the smallest that saturates nothing
    /// ([`Rceil`](ScaleCalculationMode::Rceil)) if this is not called. Other casts do not look at it, so give the casts first.
    ///
    /// # Errors
    ///
    /// [`Float8Error::ScaleCalculationModeWithoutMx`] if no cast is of `1x32`.
    pub fn with_scale_calculation_mode(mut self, mode: ScaleCalculationMode) -> Result<Self, Float8Error> {
        self.scale_calculation_mode = mode;
        self.with_used_mode()
    }

    /// Whether a GEMM may keep its sums in the tensor cores' own accumulator, which holds about 14 bits on Hopper, instead
    /// of promoting them to f32 every 128 along the contraction. Without FP8 tensor cores it changes nothing.
    pub fn with_use_fast_accum(mut self, gemm: Gemm, fast: bool) -> Self {
        self.use_fast_accum[gemm as usize] = fast;
        self
    }

    /// Whether GEMMs run emulated where the device has FP8 tensor cores too.
    pub fn with_emulate(mut self, emulate: bool) -> Self {
        self.emulate = emulate;
        self
    }

    /// Whether the weight's FP8 copies are dropped after fprop and made again in backward: less memory, one more cast.
    pub fn with_force_recompute_fp8_weight_in_bwd(mut self, recompute: bool) -> Self {
        self.force_recompute_fp8_weight_in_bwd = recompute;
        self
    }

    /// How casts of [`ScalingType::Delayed`](crate::ScalingType::Delayed) find their scale.
    ///
    /// # Errors
    ///
    /// [`Float8Error::DelayedScaling`] for a length or a margin out of range.
    pub fn with_delayed_scaling(mut self, delayed: DelayedScaling) -> Result<Self, Float8Error> {
        let DelayedScaling { amax_history_len, margin, .. } = delayed;
        if !(1..=1 << 16).contains(&amax_history_len) {
            let value = amax_history_len.to_string();
            return Err(Float8Error::DelayedScaling { field: "amax_history_len", value, range: "1 to 65536" });
        }
        if !(-8..=8).contains(&margin) {
            return Err(Float8Error::DelayedScaling { field: "margin", value: margin.to_string(), range: "-8 to 8" });
        }
        self.delayed = delayed;
        Ok(self)
    }

    /// The recipe that this started from.
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// The casts of the six operands.
    pub fn casts(&self) -> &Casts {
        &self.casts
    }

    /// Accumulation and emulation of a GEMM.
    pub fn gemm_config(&self, gemm: Gemm) -> GemmConfig {
        GemmConfig { use_fast_accum: self.use_fast_accum[gemm as usize], emulate: self.emulate }
    }

    /// Whether the weight's FP8 copies are made again in backward.
    pub fn force_recompute_fp8_weight_in_bwd(&self) -> bool {
        self.force_recompute_fp8_weight_in_bwd
    }

    /// Delayed scaling's parameters.
    pub fn delayed_scaling(&self) -> DelayedScaling {
        self.delayed
    }

    /// How the scales of casts of `1x32` come from an amax.
    pub fn scale_calculation_mode(&self) -> ScaleCalculationMode {
        self.scale_calculation_mode
    }

    /// Which scales a cast of this granularity may use.
    pub fn scale_mode(&self, granularity: Granularity) -> ScaleMode {
        match granularity {
            Granularity::Block1x32 => ScaleMode::E8m0(self.scale_calculation_mode),
            _ if self.round_scales_to_power_of_2 => ScaleMode::PowerOfTwo,
            _ => ScaleMode::F32,
        }
    }

    /// What the kernels are asked for, for the copy of an operand that is contraction-major along this axis.
    pub(crate) fn kernel_cast(&self, role: Role, along: Along) -> Cast {
        let CastConfig { target_dtype, scaling_granularity, .. } = self.casts.of(role, along);
        let scale_mode = self.scale_mode(scaling_granularity);
        Cast { format: target_dtype, granularity: scaling_granularity, scale_mode }
    }

    /// [`kernel_cast`](Self::kernel_cast) of all six copies.
    fn kernel_casts(&self) -> [[Cast; 2]; 3] {
        Role::ALL.map(|role| [Along::Rows, Along::Cols].map(|along| self.kernel_cast(role, along)))
    }
}

/// The recipe's name; `recipe (customized)` if a cast or its scales differ from it.
impl core::fmt::Display for Float8LinearConfig {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let recipe = Self::new(self.recipe);
        let plain = self.casts == recipe.casts && self.kernel_casts() == recipe.kernel_casts();
        write!(f, "{}{}", self.recipe, if plain { "" } else { " (customized)" })
    }
}

/// A GEMM's settings in a file, as torchao's `Float8GemmConfig`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawGemmConfig {
    use_fast_accum: bool,
}

/// [`Float8LinearConfig`] in a file, with torchao's names; what is absent is the recipe's. A cast also stands for the
/// operand's other GEMM unless that is given too or the recipe tells the two apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLinearConfig {
    recipe: Recipe,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_input: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_input_for_grad_weight: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_weight: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_weight_for_grad_input: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_grad_output: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_grad_output_for_grad_weight: Option<CastConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_config_output: Option<RawGemmConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_config_grad_input: Option<RawGemmConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_config_grad_weight: Option<RawGemmConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    round_scales_to_power_of_2: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scale_calculation_mode: Option<ScaleCalculationModeName>,
    #[serde(skip_serializing_if = "core::ops::Not::not")]
    emulate: bool,
    #[serde(skip_serializing_if = "core::ops::Not::not")]
    force_recompute_fp8_weight_in_bwd: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    delayed_scaling: Option<DelayedScaling>,
}

impl TryFrom<RawLinearConfig> for Float8LinearConfig {
    type Error = Float8Error;

    fn try_from(raw: RawLinearConfig) -> Result<Self, Float8Error> {
        let base = raw.recipe.casts();
        // The operand's cast in its first GEMM and in its second.
        let pair = |first: Option<CastConfig>, second: Option<CastConfig>, bases: [CastConfig; 2]| {
            let follows = if bases[0] == bases[1] { first } else { None };
            [first.unwrap_or(bases[0]), second.or(follows).unwrap_or(bases[1])]
        };
        let [input, input_for_grad_weight] = pair(
            raw.cast_config_input,
            raw.cast_config_input_for_grad_weight,
            [base.input, base.input_for_grad_weight],
        );
        let [weight, weight_for_grad_input] = pair(
            raw.cast_config_weight,
            raw.cast_config_weight_for_grad_input,
            [base.weight, base.weight_for_grad_input],
        );
        let [grad_output, grad_output_for_grad_weight] = pair(
            raw.cast_config_grad_output,
            raw.cast_config_grad_output_for_grad_weight,
            [base.grad_output, base.grad_output_for_grad_weight],
        );
        let casts = Casts {
            input,
            input_for_grad_weight,
            weight,
            weight_for_grad_input,
            grad_output,
            grad_output_for_grad_weight,
        };
        let mut config = Self::new(raw.recipe)
            .with_casts(casts)?
            .with_delayed_scaling(raw.delayed_scaling.unwrap_or_default())?
            .with_emulate(raw.emulate)
            .with_force_recompute_fp8_weight_in_bwd(raw.force_recompute_fp8_weight_in_bwd);
        let gemms = [raw.gemm_config_output, raw.gemm_config_grad_input, raw.gemm_config_grad_weight];
        for (gemm, raw) in Gemm::ALL.into_iter().zip(gemms) {
            config = config.with_use_fast_accum(gemm, raw.unwrap_or_default().use_fast_accum);
        }
        if let Some(round) = raw.round_scales_to_power_of_2 {
            config = config.with_round_scales_to_power_of_2(round);
        }
        if let Some(ScaleCalculationModeName(mode)) = raw.scale_calculation_mode {
            config = config.with_scale_calculation_mode(mode)?;
        }
        Ok(config)
    }
}

impl From<Float8LinearConfig> for RawLinearConfig {
    fn from(config: Float8LinearConfig) -> Self {
        let (casts, base) = (config.casts, config.recipe.casts());
        // All six where one differs: nothing then depends on which of them stand for another.
        let cast = |cast: CastConfig| (casts != base).then_some(cast);
        let [output, grad_input, grad_weight] =
            config.use_fast_accum.map(|fast| fast.then_some(RawGemmConfig { use_fast_accum: true }));
        let round = config.round_scales_to_power_of_2;
        let mode = config.scale_calculation_mode;
        Self {
            recipe: config.recipe,
            cast_config_input: cast(casts.input),
            cast_config_input_for_grad_weight: cast(casts.input_for_grad_weight),
            cast_config_weight: cast(casts.weight),
            cast_config_weight_for_grad_input: cast(casts.weight_for_grad_input),
            cast_config_grad_output: cast(casts.grad_output),
            cast_config_grad_output_for_grad_weight: cast(casts.grad_output_for_grad_weight),
            gemm_config_output: output,
            gemm_config_grad_input: grad_input,
            gemm_config_grad_weight: grad_weight,
            round_scales_to_power_of_2: (round != config.recipe.round_scales_to_power_of_2()).then_some(round),
            scale_calculation_mode: (mode != ScaleCalculationMode::default()).then_some(ScaleCalculationModeName(mode)),
            emulate: config.emulate,
            force_recompute_fp8_weight_in_bwd: config.force_recompute_fp8_weight_in_bwd,
            delayed_scaling: (config.delayed != DelayedScaling::default()).then_some(config.delayed),
        }
    }
}
