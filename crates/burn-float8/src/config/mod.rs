//! [`Float8Config`]: the linears that run in FP8, their recipes, and the monitoring of their casts.
mod cast;
mod delayed;
mod filter;
mod linear;
mod policy;
mod recipe;
mod self_check;
mod statistics;

use std::collections::BTreeSet;

pub use cast::{CastConfig, Casts, ScalingType};
pub use delayed::{AmaxComputeAlgo, DelayedScaling};
pub use filter::LinearInfo;
pub(crate) use filter::{matches, matches_none, shortened};
pub use float8_kernels::{Format, Granularity, ScaleCalculationMode, ScaleMode};
pub use linear::Float8LinearConfig;
pub use policy::Policy;
pub use self_check::SelfCheck;
use serde::{Deserialize, Serialize};
pub use statistics::{FallbackConfig, FallbackTo, StatisticsConfig};

use crate::error::Float8Error;
pub use crate::terms::Operand;
use crate::terms::{Reason, Recipe};
use linear::is_default;

/// Behavior of untagged linears: no configuration was applied to their model, or their weights were
/// rebuilt from data afterwards.
///
/// The first event on a device settles it. If an untagged linear runs first, such linears use the
/// device's default configuration, in FP8: wrapping the backend is enough. If
/// [`Float8Config::apply`] comes first, its setting applies. The default setting is high precision,
/// so that a filtered layer that lost its tag stays there. After that only
/// [`set_default_config`](crate::set_default_config) changes it, for all models on the device at
/// once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Untagged {
    /// Run with the device's default configuration.
    Default,
    /// Run in high precision.
    HighPrecision,
    /// Panic, naming the shape of the weight.
    Error,
}

/// Other settings for some linears of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct LayerOverride {
    /// Names or patterns, as in [`filter_fqns`](Float8Config::filter_fqns).
    pub fqns: Vec<String>,
    /// FP8 settings of these linears.
    pub config: Float8LinearConfig,
}

/// Configuration of a model: the linears that run in FP8, their recipes, and the monitoring of
/// their casts.
///
/// ```
/// use burn_float8::{Float8Config, Float8LinearConfig, Recipe};
///
/// let config = Float8Config::new(Recipe::Rowwise)
///     .with_filter_fqns(["lm_head"])
///     .with_override(["*.down_proj"], Float8LinearConfig::new(Recipe::RowwiseWithGwHp))
///     .with_strict(true);
/// ```
///
/// In a file, the keys of [`Float8LinearConfig`] are at the same level as the others:
///
/// ```
/// let config: burn_float8::Float8Config = serde_json::from_str(r#"{
///     "recipe": "rowwise",
///     "cast_config_grad_output": { "scaling_granularity": "rowwise", "target_dtype": "e5m2" },
///     "gemm_config_output": { "use_fast_accum": true },
///     "filter_fqns": ["lm_head"],
///     "overrides": [{ "fqns": ["*.down_proj"], "config": { "recipe": "rowwise_with_gw_hp" } }]
/// }"#)?;
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(!remote))]
pub struct Float8Config {
    /// Settings of all linears without an override.
    #[serde(flatten)]
    pub linear: Float8LinearConfig,
    /// Linears to keep in high precision. A pattern is an exact name. If no linear has this name, a
    /// pattern with `*`, `?` or `[` is a glob over the whole name, where `*` also matches dots.
    /// Other patterns are substrings of the name (torchtitan's `filter_fqns`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub filter_fqns: Vec<String>,
    /// Keep linears in high precision that are too small to gain, by torchao's rule for their
    /// recipe. For w `[K, N]`, tensorwise and delayed skip K ≤ 4096 and N ≤ 1024. Other recipes
    /// skip N ≤ 2048, K ≤ 1024, or N ≤ 4096 and K ≤ 2048.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub auto_filter_small_kn: bool,
    /// Number of layers at the start to keep in high precision. A layer is all linears with the
    /// same first number in their names, in the list with the most linears: `layers.0.mlp.up_proj`
    /// is in layer 0.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub num_layers_at_start_in_high_precision: usize,
    /// Number of layers at the end to keep in high precision.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub num_layers_at_end_in_high_precision: usize,
    /// Other settings for some linears. If several match a linear, the last one wins. Filters still
    /// apply.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub overrides: Vec<LayerOverride>,
    /// Custom layer types whose weight is tagged like the weight of a `Linear`. An entry is a
    /// module's type name, for its rank-2 parameter `weight`, or `Type.parameter`. Its forward must
    /// call [`linear`](burn::tensor::module::linear) with this parameter.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub module_types: Vec<String>,
    /// Behavior of untagged linears: no configuration was applied to their model, or their weights
    /// were rebuilt from data. If absent, high precision, if this is the first configuration
    /// applied on the device ([`Untagged`]).
    #[serde(default, skip_serializing_if = "is_default")]
    pub untagged: Option<Untagged>,
    /// Panic, naming the layer, if a GEMM of a converted linear would run in high precision
    /// unrequested. Causes are a dtype or size without FP8 kernels. Also panic if a kernel was
    /// wrong ([`self_check`](Self::self_check)).
    ///
    /// [`apply`](Self::apply) returns an error for a pair of granularities without a kernel for the
    /// device's FP8 tensor cores. [`Report::verify`](crate::Report::verify) returns unrequested
    /// high precision and wrong kernels as errors, also without `strict`. For linears outside of
    /// the model see [`untagged`](Self::untagged).
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub strict: bool,
    /// Compare kernels with the scalar reference on their first use on a device other than a CPU,
    /// and check the device when this configuration is applied. The last configuration applied on
    /// the device wins. The environment variable `FLOAT8_SELF_CHECK`, `first_use` or `off`,
    /// overrides it.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub self_check: SelfCheck,
    /// Sample the quantization error of each linear's operands for the report. If absent, no
    /// samples are taken.
    #[serde(default, skip_serializing_if = "is_default")]
    pub statistics: Option<StatisticsConfig>,
    /// Move layers out of FP8 if their `statistics` cross these limits. If absent, no layer is
    /// moved.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fallback: Option<FallbackConfig>,
}

impl Float8Config {
    /// All linears with this recipe.
    pub fn new(recipe: Recipe) -> Self {
        Self::from(Float8LinearConfig::new(recipe))
    }

    /// All linears with [`Recipe::Tensorwise`].
    pub fn tensorwise() -> Self {
        Self::default()
    }

    /// Keeps linears with matching names in high precision; see [`filter_fqns`](Self::filter_fqns).
    pub fn with_filter_fqns(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.filter_fqns = names.into_iter().map(Into::into).collect();
        self
    }

    /// See [`auto_filter_small_kn`](Self::auto_filter_small_kn).
    pub fn with_auto_filter_small_kn(mut self, filter: bool) -> Self {
        self.auto_filter_small_kn = filter;
        self
    }

    /// Keeps the first `at_start` and the last `at_end` layers in high precision.
    pub fn with_layers_in_high_precision(mut self, at_start: usize, at_end: usize) -> Self {
        self.num_layers_at_start_in_high_precision = at_start;
        self.num_layers_at_end_in_high_precision = at_end;
        self
    }

    /// Adds other settings for linears with matching names. They take precedence over earlier
    /// calls.
    pub fn with_override(
        mut self,
        fqns: impl IntoIterator<Item = impl Into<String>>,
        config: Float8LinearConfig,
    ) -> Self {
        self.overrides.push(LayerOverride { fqns: fqns.into_iter().map(Into::into).collect(), config });
        self
    }

    /// See [`module_types`](Self::module_types).
    pub fn with_module_types(mut self, types: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.module_types = types.into_iter().map(Into::into).collect();
        self
    }

    /// See [`untagged`](Self::untagged).
    pub fn with_untagged(mut self, untagged: Untagged) -> Self {
        self.untagged = Some(untagged);
        self
    }

    /// See [`strict`](Self::strict).
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// See [`self_check`](Self::self_check).
    pub fn with_self_check(mut self, self_check: SelfCheck) -> Self {
        self.self_check = self_check;
        self
    }

    /// Samples statistics.
    pub fn with_statistics(mut self, statistics: StatisticsConfig) -> Self {
        self.statistics = Some(statistics);
        self
    }

    /// Moves layers out of FP8 if their statistics cross these limits.
    pub fn with_fallback(mut self, fallback: FallbackConfig) -> Self {
        self.fallback = Some(fallback);
        self
    }

    /// Precision of each of these linears, in their order, without a model.
    ///
    /// # Errors
    ///
    /// The errors of [`apply`](Self::apply) that need no device.
    pub fn resolve(&self, linears: &[LinearInfo]) -> Result<Vec<Policy>, Float8Error> {
        self.policies(linears, &mut |_| true)
    }

    /// Policy of each linear. `filter` selects the linears that the caller keeps in FP8.
    ///
    /// # Errors
    ///
    /// If a pattern is an invalid glob or matches no name, or there are no linears. Also if layers
    /// are to be counted but names have no numbers, no linear is left in FP8, or
    /// [`validate`](Self::validate) fails.
    pub(crate) fn policies(
        &self,
        linears: &[LinearInfo],
        filter: &mut dyn FnMut(&LinearInfo) -> bool,
    ) -> Result<Vec<Policy>, Float8Error> {
        if linears.is_empty() {
            return Err(Float8Error::NothingConverted { linears: 0, reasons: String::new() });
        }
        self.validate()?;
        let mut configs = vec![&self.linear; linears.len()];
        for LayerOverride { fqns, config } in &self.overrides {
            if fqns.is_empty() {
                return Err(Float8Error::config("overrides.fqns", "[]", "the override is for no linear"));
            }
            for pattern in fqns {
                matches("overrides.fqns", pattern, linears)?.into_iter().for_each(|i| configs[i] = config);
            }
        }
        let mut policies: Vec<_> = configs.iter().map(|config| Policy::Float8((*config).clone())).collect();
        if self.auto_filter_small_kn {
            for (LinearInfo { k, n, .. }, policy) in linears.iter().zip(&mut policies) {
                if let Policy::Float8(config) = policy
                    && filter::is_small(config.recipe(), *k, *n)
                {
                    *policy = Policy::HighPrecision(Reason::SmallKn { k: *k, n: *n });
                }
            }
        }
        self.filter_layers(linears, &mut policies)?;
        for pattern in &self.filter_fqns {
            for i in matches("filter_fqns", pattern, linears)? {
                policies[i] = Policy::HighPrecision(Reason::Filter(pattern.clone()));
            }
        }
        for (linear, policy) in linears.iter().zip(&mut policies) {
            if matches!(policy, Policy::Float8(_)) && !filter(linear) {
                *policy = Policy::HighPrecision(Reason::FilterFn);
            }
        }
        if policies.iter().all(|p| matches!(p, Policy::HighPrecision(_))) {
            let reason = |p: &Policy| if let Policy::HighPrecision(r) = p { Some(r.kind()) } else { None };
            let reasons: BTreeSet<_> = policies.iter().filter_map(reason).collect();
            let reasons = Vec::from_iter(reasons).join(", ");
            return Err(Float8Error::NothingConverted { linears: linears.len(), reasons });
        }
        Ok(policies)
    }

    /// Applies the filters for first and last layers.
    fn filter_layers(&self, linears: &[LinearInfo], policies: &mut [Policy]) -> Result<(), Float8Error> {
        let (start, end) = (self.num_layers_at_start_in_high_precision, self.num_layers_at_end_in_high_precision);
        if (start, end) == (0, 0) {
            return Ok(());
        }
        let (numbers, layers) = filter::layer_numbers(linears);
        if layers < start.saturating_add(end) {
            return Err(Float8Error::config(
                "num_layers_at_start_in_high_precision + num_layers_at_end_in_high_precision",
                format!("{start} + {end}"),
                format!("the names of the model's linears count {layers} layers"),
            ));
        }
        for (number, policy) in numbers.into_iter().zip(policies) {
            if let Some(number) = number
                && (number < start || number >= layers - end)
            {
                *policy = Policy::HighPrecision(Reason::EdgeLayer { number, layers });
            }
        }
        Ok(())
    }

    /// Checks the rules between settings that need no model. Deserialization and
    /// [`apply`](Self::apply) call it.
    ///
    /// # Errors
    ///
    /// As [`Float8LinearConfig::validate`], also for overrides. Also if statistics or limits are
    /// invalid, or a custom layer type is not a name.
    pub fn validate(&self) -> Result<(), Float8Error> {
        self.linear.validate()?;
        self.overrides.iter().try_for_each(|o| o.config.validate())?;
        self.parsed_module_types().map(|_| ())?;
        if self.statistics.as_ref().is_some_and(|s| s.every_n_steps == 0) {
            return Err(Float8Error::config("statistics.every_n_steps", 0, "must be at least 1"));
        }
        if self.statistics.as_ref().is_some_and(|s| s.compare.contains(&Recipe::Delayed)) {
            let reason = "cannot be compared with: its scales depend on a history";
            return Err(Float8Error::config("statistics.compare", Recipe::Delayed, reason));
        }
        match (&self.fallback, &self.statistics) {
            (Some(_), None) => {
                let reason = "missing: fallback needs statistics";
                Err(Float8Error::config("statistics.every_n_steps", "", reason))
            }
            (Some(fallback), Some(_)) => fallback.validate(),
            (None, _) => Ok(()),
        }
    }

    /// Type and parameter of each custom layer type.
    pub(crate) fn parsed_module_types(&self) -> Result<Vec<(&str, &str)>, Float8Error> {
        fn parts(name: &str) -> Result<(&str, &str), Float8Error> {
            let parts = name.split_once('.').unwrap_or((name, "weight"));
            let is_name = |s: &str| !s.is_empty() && s.chars().all(|c| c.is_alphanumeric() || c == '_');
            let named = is_name(parts.0) && is_name(parts.1);
            let reason = "neither the name of a module's type nor Type.parameter";
            named.then_some(parts).ok_or_else(|| Float8Error::config("module_types", format!("{name:?}"), reason))
        }
        self.module_types.iter().map(|name| parts(name)).collect()
    }
}

impl From<Float8LinearConfig> for Float8Config {
    fn from(linear: Float8LinearConfig) -> Self {
        Self { linear, ..Self::default() }
    }
}

/// Implements serde for a type derived with `remote = "Self"`, and checks deserialized values.
macro_rules! checked {
    ($type:ty, $check:expr) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                Self::serialize(self, s)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let check: fn(Self) -> Result<Self, crate::error::Float8Error> = $check;
                check(Self::deserialize(d)?).map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use checked;

checked!(Float8Config, |config| config.validate().map(|()| config));
