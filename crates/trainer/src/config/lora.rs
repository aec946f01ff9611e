//! `[lora]`: adapters trained on top of a frozen model.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn_float8::lora::LoraConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

use super::{ConfigError, require};
use crate::hf::peft;

/// LoRA: low-rank adapters on the linears of a frozen model,
/// `y = x · w + alpha / rank · (x · A) · B`. Names are PEFT's. If the section is absent, the model
/// itself is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSection {
    /// Inner dimension of A · B.
    pub rank: usize,
    /// Scale of the adapters' product, divided by `rank`.
    pub alpha: f64,
    /// Dropout probability of an adapter's input in training. Each micro-batch drops other
    /// elements.
    pub dropout: f64,
    /// Linears that get adapters, by the end of their names: `q_proj` selects it in every layer.
    /// `all-linear` selects all except `lm_head`. A single name needs no list.
    #[serde(deserialize_with = "one_or_more")]
    #[schemars(with = "OneOrMore")]
    pub target_modules: Vec<String>,
    /// Overrides of `rank`, by the end of a linear's name. The longest match counts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Overrides of `alpha`, by the end of a linear's name. The longest match counts.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Storage of the frozen weights of linears. `"high_precision"` stores them in
    /// `training.param_dtype`.
    /// `"fp8"` stores only FP8 codes, one byte per parameter, and needs
    /// `training.precision = "fp8"`.
    pub base: LoraBase,
    /// Folder of a PEFT adapter to start from. Its rank, alpha, targets and patterns apply where
    /// this section does not set them. If absent, new adapters that initially change nothing.
    pub adapter: Option<PathBuf>,
}

/// A list of names, or one.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a list of names, or one")]
enum OneOrMore {
    /// One name.
    One(String),
    /// Several names.
    More(Vec<String>),
}

fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrMore::deserialize(deserializer)? {
        OneOrMore::One(name) => vec![name],
        OneOrMore::More(names) => names,
    })
}

/// Storage of frozen weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraBase {
    /// In `training.param_dtype`.
    #[default]
    HighPrecision,
    /// Only FP8 codes.
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

/// Fills in missing keys of `[lora]` from the adapter in `lora.adapter`. Returns whether it did.
pub(super) fn of_adapter(table: &mut Table) -> Result<bool, String> {
    let Some(Value::Table(lora)) = table.get_mut("lora") else { return Ok(false) };
    let Some(Value::String(folder)) = lora.get("adapter") else { return Ok(false) };
    // A resumed run has all keys, and its adapter may no longer exist.
    if ["rank", "alpha", "target_modules"].iter().all(|key| lora.contains_key(*key)) {
        return Ok(false);
    }
    let config = peft::read_config(Path::new(folder)).map_err(|error| error.to_string())?;
    let mut said = Table::try_from(config).map_err(|error| error.to_string())?;
    // Dropout is a training setting, not a property of the adapter.
    said.remove("dropout");
    for (key, value) in said {
        lora.entry(key).or_insert(value);
    }
    Ok(true)
}

/// Value of a key and values of its pattern, each with its key and its text for an error.
fn with_pattern<T: Copy + Display>(
    [key, key_of_pattern]: [&'static str; 2],
    value: T,
    pattern: &BTreeMap<String, T>,
) -> Vec<(&'static str, String, T)> {
    let of_pattern = pattern.iter().map(|(name, own)| (key_of_pattern, format!("{{{name} = {own}}}"), *own));
    [(key, value.to_string(), value)].into_iter().chain(of_pattern).collect()
}

impl LoraSection {
    /// Configuration of the adapters.
    pub fn to_config(&self) -> LoraConfig {
        let Self { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern, .. } = self.clone();
        LoraConfig { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern }
    }

    /// Keys that set a rank, their texts, and the ranks.
    pub(crate) fn ranks(&self) -> Vec<(&'static str, String, usize)> {
        with_pattern(["lora.rank", "lora.rank_pattern"], self.rank, &self.rank_pattern)
    }

    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
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
        require("lora.base", "fp8", is_fp8 || *base == LoraBase::HighPrecision, reason)
    }
}
