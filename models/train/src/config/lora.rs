//! `[lora]`: adapters that are trained beside a model that stays as it is.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn_float8::lora::LoraConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

use super::{ConfigError, require};
use crate::hf::peft;

/// LoRA: adapters of low rank beside the linears of a frozen model, `y = x · w + alpha / rank · (x · A) · B`; names are PEFT's. If the
/// section is absent, the model itself is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSection {
    /// The length between A and B.
    pub rank: usize,
    /// What the adapters' product is multiplied by, divided by `rank`.
    pub alpha: f64,
    /// Which share of its input an adapter does not see in training, other elements in each micro-batch.
    pub dropout: f64,
    /// Linears that get adapters, by the end of their names: `q_proj` is that of every layer. `all-linear` is all but `lm_head`. One
    /// name may stand without a list.
    #[serde(deserialize_with = "one_or_more")]
    #[schemars(with = "Names")]
    pub target_modules: Vec<String>,
    /// Ranks of some linears, which replace `rank`, by the end of their names. The longest end counts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of some linears, which replace `alpha`, by the end of their names. The longest end counts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// What the frozen weights of linears are: `"values"` in `training.param_dtype`, or `"fp8"`, codes alone, one byte a parameter, with
    /// `training.precision = "fp8"`.
    pub base: LoraBase,
    /// Folder of an adapter of PEFT's to start from. Its rank, alpha, targets and patterns are taken where this section does not say them.
    /// If absent, adapters that change nothing yet.
    pub adapter: Option<PathBuf>,
}

/// A list of names, or one.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a list of names, or one")]
enum Names {
    /// One name.
    One(String),
    /// Several names.
    More(Vec<String>),
}

fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match Names::deserialize(deserializer)? {
        Names::One(name) => vec![name],
        Names::More(names) => names,
    })
}

/// What frozen weights are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraBase {
    /// Their values.
    #[default]
    Values,
    /// FP8 codes alone.
    Fp8,
}

impl Default for LoraSection {
    fn default() -> Self {
        Self::from(LoraConfig::default())
    }
}

impl From<LoraConfig> for LoraSection {
    fn from(config: LoraConfig) -> Self {
        let LoraConfig { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern } = config;
        let (base, adapter) = (LoraBase::default(), None);
        Self { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern, base, adapter }
    }
}

/// Fills in the keys of `[lora]` that are missing from the adapter in `lora.adapter`. Returns whether it did.
pub(super) fn of_adapter(table: &mut Table) -> Result<bool, String> {
    let Some(Value::Table(lora)) = table.get_mut("lora") else { return Ok(false) };
    let Some(Value::String(folder)) = lora.get("adapter") else { return Ok(false) };
    // A run that is resumed has said all, and its adapter may be gone.
    if ["rank", "alpha", "target_modules"].iter().all(|key| lora.contains_key(*key)) {
        return Ok(false);
    }
    let config = peft::read_config(Path::new(folder)).map_err(|error| error.to_string())?;
    let mut said = Table::try_from(config).map_err(|error| error.to_string())?;
    // How it was trained is not what it is.
    said.remove("dropout");
    for (key, value) in said {
        lora.entry(key).or_insert(value);
    }
    Ok(true)
}

/// The value of a key and the values of its pattern, each with its key and as an error shows it.
fn with_pattern<T: Copy + Display>(
    [key, key_of_pattern]: [&'static str; 2],
    value: T,
    pattern: &BTreeMap<String, T>,
) -> Vec<(&'static str, String, T)> {
    let of_pattern = pattern.iter().map(|(name, own)| (key_of_pattern, format!("{{{name} = {own}}}"), *own));
    [(key, value.to_string(), value)].into_iter().chain(of_pattern).collect()
}

impl LoraSection {
    /// How adapters are made.
    pub fn to_config(&self) -> LoraConfig {
        let Self { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern, .. } = self.clone();
        LoraConfig { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern }
    }

    /// Keys that have a rank, what they say, and the rank.
    pub(crate) fn ranks(&self) -> Vec<(&'static str, String, usize)> {
        with_pattern(["lora.rank", "lora.rank_pattern"], self.rank, &self.rank_pattern)
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
    pub fn validate(&self, is_fp8: bool) -> Result<(), ConfigError> {
        let Self { alpha, dropout, target_modules, alpha_pattern, base, .. } = self;
        for (key, said, rank) in self.ranks() {
            require(key, said, rank > 0, "must be at least 1")?;
        }
        for (key, said, alpha) in with_pattern(["lora.alpha", "lora.alpha_pattern"], *alpha, alpha_pattern) {
            require(key, said, alpha.is_finite() && alpha != 0.0, "must be finite, and not 0")?;
        }
        require("lora.dropout", dropout, (0.0..1.0).contains(dropout), "must be from 0 to below 1")?;
        let targets = format!("{target_modules:?}");
        require("lora.target_modules", targets, !target_modules.is_empty(), "must name at least one linear")?;
        let reason = "needs training.precision = \"fp8\": its GEMMs read the codes";
        require("lora.base", "fp8", is_fp8 || *base == LoraBase::Values, reason)
    }
}
