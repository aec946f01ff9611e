//! [`Float8LinearConfig`]: all settings of one linear's three GEMMs, from a [`Recipe`] or cast by
//! cast.
use float8_kernels::{Cast, GemmConfig, Granularity, ScaleCalculationMode, ScaleMode};
use serde::{Deserialize, Serialize};

use super::cast::{CastConfig, Casts};
use super::delayed::DelayedScaling;
use crate::error::Float8Error;
use crate::terms::{Gemm, Operand, Recipe, Role};

/// FP8 settings of one linear.
///
/// ```
/// use burn_float8::{config::{CastConfig, Operand}, report::Gemm, Float8LinearConfig, Recipe};
///
/// // Rowwise, but the gradient with respect to x in high precision: both operands of a GEMM, or neither.
/// let casts = Recipe::Rowwise.casts().without(Gemm::Dgrad);
/// Float8LinearConfig::new(Recipe::Rowwise).with_casts(casts).validate()?;
///
/// let half = Recipe::Rowwise.casts().with(Operand::GRAD_OUTPUT, CastConfig::disabled());
/// assert!(Float8LinearConfig::new(Recipe::Rowwise).with_casts(half).validate().is_err());
/// # Ok::<(), burn_float8::Float8Error>(())
/// ```
///
/// In a file the keys are torchao's, and the recipe sets absent keys. A cast also applies to the
/// operand's other GEMM, unless that has its own key or the recipe casts the two differently.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(!remote))]
pub struct Float8LinearConfig {
    /// Recipe for the casts of all three GEMMs. The `cast_config_*` keys override it.
    recipe: Recipe,
    // Deserialization sets all six or none. The defaults below therefore apply only in files.
    /// Cast of x in fprop, y = x · w. If absent, the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_input: Option<CastConfig>,
    /// Cast of xᵀ in wgrad, dw = xᵀ · dy. If absent, `cast_config_input` if the recipe casts both
    /// the same way, else the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_input_for_grad_weight: Option<CastConfig>,
    /// Cast of wᵀ in fprop. If absent, the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_weight: Option<CastConfig>,
    /// Cast of w in dgrad, dx = dy · wᵀ. If absent, `cast_config_weight` if the recipe casts both
    /// the same way, else the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_weight_for_grad_input: Option<CastConfig>,
    /// Cast of dy in dgrad. If absent, the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_grad_output: Option<CastConfig>,
    /// Cast of dyᵀ in wgrad. If absent, `cast_config_grad_output` if the recipe casts both the same
    /// way, else the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast_config_grad_output_for_grad_weight: Option<CastConfig>,
    /// Accumulation of fprop.
    #[serde(skip_serializing_if = "is_default")]
    gemm_config_output: Accumulation,
    /// Accumulation of dgrad.
    #[serde(skip_serializing_if = "is_default")]
    gemm_config_grad_input: Accumulation,
    /// Accumulation of wgrad.
    #[serde(skip_serializing_if = "is_default")]
    gemm_config_grad_weight: Accumulation,
    /// Round scales down to powers of two, so that scaling is exact. If absent, true for `rowwise`
    /// and `rowwise_with_gw_hp`, false for other recipes. Scales of `1x32` are always powers of
    /// two.
    #[serde(skip_serializing_if = "Option::is_none")]
    round_scales_to_power_of_2: Option<bool>,
    /// Computation of `1x32` scales from an amax, `rceil` if absent. An error if no cast is `1x32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    scale_calculation_mode: Option<ScaleCalculationMode>,
    /// Scale `1x32` weights in squares of 32 by 32, so that one set of codes serves both GEMMs of a
    /// weight. A frozen FP8-only weight then needs no second copy. On devices this cast takes more
    /// passes. An error if no weight is cast by `1x32`.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    mx_square_weights: bool,
    /// Emulate FP8 GEMMs even if the device has FP8 tensor cores.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    emulate: bool,
    /// Drop the weight's FP8 copies after fprop and recompute them in backward: less memory, one
    /// more cast.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    force_recompute_fp8_weight_in_bwd: bool,
    /// Also run `Tensor::matmul(x, w)` of rank 2 with this layer's weight on the right in FP8,
    /// forward and backward.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    matmul: bool,
    /// Settings of casts with `scaling_type = "delayed"`, which the recipe `delayed` uses.
    #[serde(skip_serializing_if = "is_default")]
    delayed_scaling: DelayedScaling,
}

/// The six optional casts of a configuration, in the order of [`Operand::ALL`].
macro_rules! given {
    ($config:ident) => {
        [
            $config.cast_config_input,
            $config.cast_config_input_for_grad_weight,
            $config.cast_config_weight_for_grad_input,
            $config.cast_config_weight,
            $config.cast_config_grad_output,
            $config.cast_config_grad_output_for_grad_weight,
        ]
    };
}

/// Accumulation of a GEMM: torchao's `Float8GemmConfig`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
struct Accumulation {
    /// Keep the sums in the accumulator of the FP8 tensor cores, which has about 14 mantissa bits
    /// on Hopper. Otherwise they are promoted to f32 every 128 elements of the contraction. No
    /// effect on emulated GEMMs, and on GEMMs with scales every 128 or 32 elements.
    use_fast_accum: bool,
}

/// Whether a file may omit the value.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

super::checked!(Float8LinearConfig, |config| {
    let casts = config.casts_of_file();
    let config = config.with_casts(casts);
    config.validate().map(|()| config)
});

impl Float8LinearConfig {
    /// Settings of a recipe.
    pub fn new(recipe: Recipe) -> Self {
        Self { recipe, ..Self::default() }
    }

    /// Replaces the recipe, its casts and its scale settings. Keeps the other settings.
    pub(crate) fn with_recipe(self, recipe: Recipe) -> Self {
        let (round_scales_to_power_of_2, scale_calculation_mode) = (None, None);
        let mx_square_weights = false;
        Self { recipe, round_scales_to_power_of_2, scale_calculation_mode, mx_square_weights, ..self }
            .with_casts(recipe.casts())
    }

    /// Replaces the recipe's casts. [`validate`](Self::validate) checks that they fit each other.
    pub fn with_casts(mut self, casts: Casts) -> Self {
        let differ = casts != self.recipe.casts();
        given!(self) = Operand::ALL.map(|operand| differ.then_some(casts[operand]));
        self
    }

    /// The explicit casts. None where the recipe's cast applies.
    fn given(&self) -> Casts<Option<CastConfig>> {
        Casts(given!(self))
    }

    /// Whether scales are rounded down to powers of two, so that scaling is exact. Scales of `1x32`
    /// are always powers of two.
    pub fn with_round_scales_to_power_of_2(mut self, round: bool) -> Self {
        self.round_scales_to_power_of_2 = (round != self.recipe.round_scales_to_power_of_2()).then_some(round);
        self
    }

    /// Computation of `1x32` scales from an amax. The default,
    /// [`Rceil`](ScaleCalculationMode::Rceil), is the smallest scale that saturates nothing. Other
    /// casts ignore it.
    pub fn with_scale_calculation_mode(mut self, mode: ScaleCalculationMode) -> Self {
        self.scale_calculation_mode = Some(mode);
        self
    }

    /// Whether a GEMM may keep its sums in the accumulator of the tensor cores, about 14 bits on
    /// Hopper. Otherwise it promotes them to f32 every 128 elements of the contraction. No effect
    /// without FP8 tensor cores.
    pub fn with_use_fast_accum(mut self, gemm: Gemm, use_fast_accum: bool) -> Self {
        let accumulation = match gemm {
            Gemm::Fprop => &mut self.gemm_config_output,
            Gemm::Dgrad => &mut self.gemm_config_grad_input,
            Gemm::Wgrad => &mut self.gemm_config_grad_weight,
        };
        *accumulation = Accumulation { use_fast_accum };
        self
    }

    /// Whether FP8 GEMMs are emulated even if the device has FP8 tensor cores.
    pub fn with_emulate(mut self, emulate: bool) -> Self {
        self.emulate = emulate;
        self
    }

    /// Whether the weight's FP8 copies are dropped after fprop and recomputed in backward: less
    /// memory, one more cast.
    pub fn with_force_recompute_fp8_weight_in_bwd(mut self, recompute: bool) -> Self {
        self.force_recompute_fp8_weight_in_bwd = recompute;
        self
    }

    /// Whether `Tensor::matmul(x, w)` of rank 2 with this layer's weight on the right also runs in
    /// FP8, forward and backward. burn-nn's `Gru` uses such products. Off by default, since a
    /// program may multiply a weight for another purpose, such as a penalty.
    pub fn with_matmul(mut self, matmul: bool) -> Self {
        self.matmul = matmul;
        self
    }

    /// Whether `1x32` weights are scaled in squares of 32 by 32.
    pub fn with_mx_square_weights(mut self, square: bool) -> Self {
        self.mx_square_weights = square;
        self
    }

    /// Settings of casts with [`ScalingType::Delayed`](crate::config::ScalingType::Delayed).
    pub fn with_delayed_scaling(mut self, delayed: DelayedScaling) -> Self {
        self.delayed_scaling = delayed;
        self
    }

    /// Checks the rules between settings. Deserialization,
    /// [`Float8Config::apply`](crate::Float8Config::apply) and
    /// [`set_default_config`](crate::set_default_config) call it.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] if casts do not fit each other, or a history length or margin is out
    /// of range. Also if no cast uses the given MX scale mode or MX squares.
    pub fn validate(&self) -> Result<(), Float8Error> {
        let casts = self.casts();
        casts.validate()?;
        self.delayed_scaling.validate()?;
        if self.mx_square_weights && ![Operand::WEIGHT, Operand::WEIGHT_T].iter().any(|weight| casts[*weight].is_mx()) {
            let value = format!("true with recipe {}", self.recipe);
            let reason = "no weight is cast by 1x32, so nothing uses it (an override has its own)";
            return Err(Float8Error::config("mx_square_weights", value, reason));
        }
        match self.scale_calculation_mode {
            Some(mode) if !casts.0.iter().any(CastConfig::is_mx) => {
                let value = format!("{mode} with recipe {}", self.recipe);
                let reason = "no cast is of 1x32, so nothing uses it (an override has its own)";
                Err(Float8Error::config("scale_calculation_mode", value, reason))
            }
            _ => Ok(()),
        }
    }

    /// The recipe that the configuration started from.
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// Casts of the six operands.
    pub fn casts(&self) -> Casts {
        let (given, base) = (self.given(), self.recipe.casts());
        Casts::of(|operand| given[operand].unwrap_or(base[operand]))
    }

    /// All six casts of a file that sets some of them.
    fn casts_of_file(&self) -> Casts {
        let (given, base) = (self.given(), self.recipe.casts());
        Casts::of(|operand| {
            // The first cast of an operand also applies to the second if the recipe's two are
            // equal.
            let first = operand.other();
            let is_second = matches!(operand, Operand::INPUT_T | Operand::WEIGHT | Operand::GRAD_OUTPUT_T);
            let alike = given[first].filter(|_| is_second && base[first] == base[operand]);
            given[operand].or(alike).unwrap_or(base[operand])
        })
    }

    /// Accumulation and emulation of a GEMM.
    pub fn gemm_config(&self, gemm: Gemm) -> GemmConfig {
        let Accumulation { use_fast_accum } = match gemm {
            Gemm::Fprop => self.gemm_config_output,
            Gemm::Dgrad => self.gemm_config_grad_input,
            Gemm::Wgrad => self.gemm_config_grad_weight,
        };
        GemmConfig { use_fast_accum, emulate: self.emulate }
    }

    /// Whether the weight's FP8 copies are recomputed in backward.
    pub fn force_recompute_fp8_weight_in_bwd(&self) -> bool {
        self.force_recompute_fp8_weight_in_bwd
    }

    /// Whether `Tensor::matmul` with this layer's weight on the right runs in FP8.
    pub fn matmul(&self) -> bool {
        self.matmul
    }

    /// See [`with_mx_square_weights`](Self::with_mx_square_weights).
    pub fn mx_square_weights(&self) -> bool {
        self.mx_square_weights
    }

    /// Parameters of delayed scaling.
    pub fn delayed_scaling(&self) -> DelayedScaling {
        self.delayed_scaling
    }

    /// Computation of `1x32` scales from an amax.
    pub fn scale_calculation_mode(&self) -> ScaleCalculationMode {
        self.scale_calculation_mode.unwrap_or_default()
    }

    /// Scale mode of casts of this granularity.
    pub fn scale_mode(&self, granularity: Granularity) -> ScaleMode {
        let round = self.round_scales_to_power_of_2.unwrap_or(self.recipe.round_scales_to_power_of_2());
        match granularity {
            Granularity::Block1x32 => ScaleMode::E8m0(self.scale_calculation_mode()),
            _ if round => ScaleMode::PowerOfTwo,
            _ => ScaleMode::F32,
        }
    }

    /// Kernel settings of an operand's cast.
    pub fn kernel_cast(&self, operand: Operand) -> Cast {
        let CastConfig { target_dtype, scaling_granularity, .. } = self.casts()[operand];
        let scale_mode = match self.scale_mode(scaling_granularity) {
            ScaleMode::E8m0(mode) if self.mx_square_weights && operand.role == Role::Weight => {
                ScaleMode::E8m0Square(mode)
            }
            mode => mode,
        };
        Cast { format: target_dtype, granularity: scaling_granularity, scale_mode }
    }
}

/// The recipe's name, or `recipe (customized)` if a cast or its scales differ from it.
impl core::fmt::Display for Float8LinearConfig {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let recipe = Self::new(self.recipe);
        let casts = |config: &Self| Operand::ALL.map(|operand| config.kernel_cast(operand));
        let plain = self.casts() == recipe.casts() && casts(self) == casts(&recipe);
        write!(f, "{}{}", self.recipe, if plain { "" } else { " (customized)" })
    }
}
