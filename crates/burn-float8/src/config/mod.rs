//! [`Float8Config`]: which linears of a model run in FP8, by which recipe, and what is watched while they do.
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
pub(crate) use filter::{matches_none, shortened};
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

/// What a linear does whose weight carries no layer, since it was in no model that a configuration was applied to, or was
/// rebuilt from data afterwards.
///
/// It is settled for a device by what comes first there. If that is an untagged linear, such linears run by the device's default, in
/// FP8: wrapping the backend is enough. If it is a [`Float8Config::apply`], they do what that configuration says, by default run
/// in high precision, so that a filtered layer that has lost its tag stays there. From then on only
/// [`set_default_config`](crate::set_default_config) changes it, for all models on the device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Untagged {
    /// By the device's default configuration.
    Default,
    /// In high precision.
    HighPrecision,
    /// Not at all: the linear panics, and names the shape of its weight.
    Error,
}

/// Other settings for some of a model's linears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct LayerOverride {
    /// Names or patterns, as in [`filter_fqns`](Float8Config::filter_fqns).
    pub fqns: Vec<String>,
    /// How these linears run.
    pub config: Float8LinearConfig,
}

/// Which linears of a model run in FP8, by which recipe, and what is watched while they do.
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
/// In a file, the keys of [`Float8LinearConfig`] stand beside the others:
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
    /// How linears run that nothing else names.
    #[serde(flatten)]
    pub linear: Float8LinearConfig,
    /// Linears to keep in high precision. A pattern is a linear's exact name; or, with `*`, `?` or `[`, a glob over the
    /// whole name, where `*` also crosses dots; or a substring of the name (torchtitan's `filter_fqns`). The first of the
    /// three that matches counts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub filter_fqns: Vec<String>,
    /// Keeps linears in high precision that are too small to gain, by torchao's rule for the linear's recipe, w being
    /// `[K, N]`. tensorwise and delayed: K ≤ 4096 and N ≤ 1024. Others: N ≤ 2048, or K ≤ 1024, or N ≤ 4096 and K ≤ 2048.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub auto_filter_small_kn: bool,
    /// Keeps the first so many layers in high precision. A layer is all linears with the same first number in their
    /// names, in the list that holds most linears: `layers.0.mlp.up_proj` is in layer 0.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub num_layers_at_start_in_high_precision: usize,
    /// Keeps the last so many layers in high precision.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub num_layers_at_end_in_high_precision: usize,
    /// Other settings for some linears; of several that match one linear, the last counts. Filters still apply.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub overrides: Vec<LayerOverride>,
    /// Layer types of one's own whose weight is tagged as a `Linear`'s is: the name of a module's type, for its rank-2 parameter
    /// `weight`, or `Type.parameter`. Its forward has to call [`linear`](burn::tensor::module::linear) with it.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub module_types: Vec<String>,
    /// What a linear does whose weight is in no model that a configuration was applied to, or was rebuilt from data since. If absent,
    /// it runs in high precision, if this configuration is the first to be applied on the device ([`Untagged`]).
    #[serde(default, skip_serializing_if = "is_default")]
    pub untagged: Option<Untagged>,
    /// Panics, naming the layer, where a GEMM of a converted linear would run in high precision that this configuration does not
    /// ask for: a dtype or size without FP8 kernels; and where a kernel was found to be wrong ([`self_check`](Self::self_check)).
    /// [`Report::verify`](crate::Report::verify) returns the same as an error, without `strict`. For linears that are not in the model
    /// there is [`untagged`](Self::untagged). A pair of granularities that no kernel for the device's FP8 tensor cores takes is an error of
    /// [`apply`](Self::apply).
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub strict: bool,
    /// Whether kernels are compared with the scalar reference the first time that they run on a device that is no CPU, and the device is
    /// tried out when this configuration is applied. Of several configurations the last that was applied on the device counts; the
    /// environment variable `FLOAT8_SELF_CHECK`, `first_use` or `off`, overrides them all.
    #[serde(default, skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schemars", schemars(!skip_serializing_if))]
    pub self_check: SelfCheck,
    /// Sample how well FP8 holds the operands of each linear; the report has the samples. None are taken if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub statistics: Option<StatisticsConfig>,
    /// Move layers out of FP8 whose `statistics` cross these limits. None is moved if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fallback: Option<FallbackConfig>,
}

impl Float8Config {
    /// Every linear, by this recipe.
    pub fn new(recipe: Recipe) -> Self {
        Self::from(Float8LinearConfig::new(recipe))
    }

    /// Every linear, by the recipe [`Recipe::Tensorwise`].
    pub fn tensorwise() -> Self {
        Self::default()
    }

    /// Keeps the linears that these names match in high precision; see [`filter_fqns`](Self::filter_fqns).
    pub fn with_filter_fqns(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.filter_fqns = names.into_iter().map(Into::into).collect();
        self
    }

    /// See [`auto_filter_small_kn`](Self::auto_filter_small_kn).
    pub fn with_auto_filter_small_kn(mut self, filter: bool) -> Self {
        self.auto_filter_small_kn = filter;
        self
    }

    /// Keeps the first and the last so many layers in high precision.
    pub fn with_layers_in_high_precision(mut self, at_start: usize, at_end: usize) -> Self {
        self.num_layers_at_start_in_high_precision = at_start;
        self.num_layers_at_end_in_high_precision = at_end;
        self
    }

    /// Other settings for the linears that these names match, over those of earlier calls.
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

    /// Takes health statistics.
    pub fn with_statistics(mut self, statistics: StatisticsConfig) -> Self {
        self.statistics = Some(statistics);
        self
    }

    /// Moves layers out of FP8 whose statistics cross these limits.
    pub fn with_fallback(mut self, fallback: FallbackConfig) -> Self {
        self.fallback = Some(fallback);
        self
    }

    /// In which precision each of these linears would run, in their order, without a model that has them.
    ///
    /// # Errors
    ///
    /// Those of [`apply`](Self::apply) that need no device.
    pub fn resolve(&self, linears: &[LinearInfo]) -> Result<Vec<Policy>, Float8Error> {
        self.policies(linears, &mut |_| true)
    }

    /// The policy of each linear; `filter` says which the caller keeps in FP8.
    ///
    /// # Errors
    ///
    /// A pattern that is no valid glob or matches no name; no linears at all; layers to count where names have no numbers;
    /// nothing left to convert; settings that [`validate`](Self::validate) refuses.
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
                filter::matches("overrides.fqns", pattern, linears)?.into_iter().for_each(|i| configs[i] = config);
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
            for i in filter::matches("filter_fqns", pattern, linears)? {
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

    /// The first and last layers.
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

    /// Checks the rules between settings that need no model; deserialization and [`apply`](Self::apply) do so too.
    ///
    /// # Errors
    ///
    /// As [`Float8LinearConfig::validate`], for overrides too; statistics or limits that make no sense; a custom layer type
    /// that is no name.
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

/// Serializes a type as its derives for `remote = "Self"` do, and checks what is read.
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
