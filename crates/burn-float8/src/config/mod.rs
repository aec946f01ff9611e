//! [`Float8Config`]: which linears of a model run in FP8, by which recipe, and what is watched while they do.
mod cast;
mod filter;
mod health;
mod linear;

use std::collections::{BTreeMap, BTreeSet};

pub use cast::{CastConfig, Casts, ScalingType};
pub(crate) use filter::LinearInfo;
pub use health::{FallbackConfig, FallbackTo, StatisticsConfig};
pub use linear::{AmaxComputeAlgo, DelayedScaling, Float8LinearConfig, Recipe};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::layer::{Policy, Reason};
use linear::RawLinearConfig;

/// Other settings for some of a model's linears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerOverride {
    /// Patterns, as in [`Float8Config::filter_fqns`].
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
#[serde(try_from = "RawConfig", into = "RawConfig")]
pub struct Float8Config {
    /// How linears run that nothing else names.
    pub linear: Float8LinearConfig,
    /// Linears to keep in high precision. A pattern is a linear's exact name; or, with `*`, `?` or `[`, a glob over the
    /// whole name, where `*` also crosses dots; or a substring of the name (torchtitan's `filter_fqns`). The first of the
    /// three that matches counts.
    pub filter_fqns: Vec<String>,
    /// Keeps linears in high precision that are too small to gain, by torchao's rule for the linear's recipe, w being
    /// `[K, N]`. tensorwise and delayed: K ≤ 4096 and N ≤ 1024. Others: N ≤ 2048, or K ≤ 1024, or N ≤ 4096 and K ≤ 2048.
    pub auto_filter_small_kn: bool,
    /// Keeps the first so many layers in high precision. A layer is all linears with the same first number in their
    /// names, in the list that holds most linears: `layers.0.mlp.up_proj` is in layer 0.
    pub num_layers_at_start_in_high_precision: usize,
    /// Keeps the last so many layers in high precision.
    pub num_layers_at_end_in_high_precision: usize,
    /// Other settings for some linears; of several that match one linear, the last counts. Filters still apply.
    pub overrides: Vec<LayerOverride>,
    /// Panics, naming the layer, where a GEMM would run in high precision that this configuration does not ask for: a dtype
    /// or size without FP8 kernels, an untagged weight, `Tensor::matmul` on a weight. [`Report::verify`](crate::Report::verify)
    /// returns the same as an error, without `strict`.
    pub strict: bool,
    /// Health statistics.
    pub statistics: Option<StatisticsConfig>,
    /// When statistics move a layer out of FP8.
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

    /// See [`strict`](Self::strict).
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.strict = strict;
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

    /// The policy of each linear.
    ///
    /// # Errors
    ///
    /// A pattern that is no valid glob or matches no name; no linears at all; layers to count where names have no numbers;
    /// nothing left to convert; statistics or limits that make no sense.
    pub(crate) fn policies(&self, linears: &[LinearInfo]) -> Result<Vec<Policy>, Float8Error> {
        if linears.is_empty() {
            return Err(Float8Error::NoLinears);
        }
        self.validate_health()?;
        let mut configs = vec![&self.linear; linears.len()];
        for LayerOverride { fqns, config } in &self.overrides {
            if fqns.is_empty() {
                return Err(Float8Error::EmptyOverride);
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
            return Err(Float8Error::TooFewLayers { start, end, layers });
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

    fn validate_health(&self) -> Result<(), Float8Error> {
        if self.statistics.as_ref().is_some_and(|s| s.every_n_steps == 0) {
            return Err(Float8Error::StatisticsEveryZero);
        }
        if self.statistics.as_ref().is_some_and(|s| s.compare.contains(&Recipe::Delayed)) {
            return Err(Float8Error::CompareDelayed);
        }
        match (&self.fallback, &self.statistics) {
            (Some(_), None) => Err(Float8Error::FallbackWithoutStatistics),
            (Some(fallback), Some(_)) => fallback.validate(),
            (None, _) => Ok(()),
        }
    }
}

impl From<Float8LinearConfig> for Float8Config {
    fn from(linear: Float8LinearConfig) -> Self {
        Self { linear, ..Self::default() }
    }
}

/// [`Float8Config`] in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RawConfig {
    #[serde(flatten)]
    linear: RawLinearConfig,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    filter_fqns: Vec<String>,
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    auto_filter_small_kn: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    num_layers_at_start_in_high_precision: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    num_layers_at_end_in_high_precision: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    overrides: Vec<LayerOverride>,
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    strict: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    statistics: Option<StatisticsConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fallback: Option<FallbackConfig>,
    // What no field took: serde cannot deny it beside a flattened struct.
    #[serde(flatten, skip_serializing)]
    unknown: BTreeMap<String, IgnoredAny>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl TryFrom<RawConfig> for Float8Config {
    type Error = Float8Error;

    fn try_from(raw: RawConfig) -> Result<Self, Float8Error> {
        if let Some(key) = raw.unknown.into_keys().next() {
            return Err(Float8Error::UnknownKey { key });
        }
        let config = Self {
            linear: raw.linear.try_into()?,
            filter_fqns: raw.filter_fqns,
            auto_filter_small_kn: raw.auto_filter_small_kn,
            num_layers_at_start_in_high_precision: raw.num_layers_at_start_in_high_precision,
            num_layers_at_end_in_high_precision: raw.num_layers_at_end_in_high_precision,
            overrides: raw.overrides,
            strict: raw.strict,
            statistics: raw.statistics,
            fallback: raw.fallback,
        };
        config.validate_health()?;
        Ok(config)
    }
}

impl From<Float8Config> for RawConfig {
    fn from(config: Float8Config) -> Self {
        Self {
            linear: config.linear.into(),
            filter_fqns: config.filter_fqns,
            auto_filter_small_kn: config.auto_filter_small_kn,
            num_layers_at_start_in_high_precision: config.num_layers_at_start_in_high_precision,
            num_layers_at_end_in_high_precision: config.num_layers_at_end_in_high_precision,
            overrides: config.overrides,
            strict: config.strict,
            statistics: config.statistics,
            fallback: config.fallback,
            unknown: BTreeMap::new(),
        }
    }
}
