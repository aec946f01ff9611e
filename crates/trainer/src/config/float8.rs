//! `[float8]`: the keys of [`Float8Config`] and the precision schedule.

use burn_float8::{Float8Config, PrecisionSchedule};
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use toml::Table;

use super::schema;

/// FP8, used with `training.precision = "fp8"`.
///
/// ```toml
/// [float8]
/// recipe = "rowwise"
/// gemm_config_output = { use_fast_accum = true }
/// filter_fqns = ["lm_head", "*.k_proj"]
/// schedule = { warmup = 100, cooldown = 0.1 }
/// ```
///
/// `strict` panics in a program. In a run it is checked after the first FP8 step and at the end,
/// and fails with an error.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(try_from = "Table")]
#[schemars(!try_from, deny_unknown_fields, transform = without_keys_of_programs)]
pub struct Float8Section {
    /// Everything except the filter, which is empty here.
    #[schemars(flatten)]
    pub config: Float8Config,
    /// Linears to keep in high precision. A pattern is an exact name; a glob over the whole name,
    /// if it has `*`, `?` or `[`; or a part of the name. The first of the three that matches a
    /// linear counts. If absent, the model's sensitive linears: for Llama, `lm_head`, unless it is
    /// tied, and the routers of mixtures. An empty list keeps none.
    pub filter_fqns: Option<Vec<String>>,
    /// Steps that run in FP8. If absent, all of them.
    pub schedule: Option<PrecisionSchedule>,
}

/// Keys for models with layers of their own, which a run does not have.
const OF_PROGRAMS: [&str; 2] = ["module_types", "untagged"];

fn without_keys_of_programs(schema: &mut Schema) {
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.retain(|key, _| !OF_PROGRAMS.contains(&key.as_str()));
    }
}

impl Float8Section {
    /// Configuration with the filter. If the file has no filter, the `sensitive` linears stay in
    /// high precision.
    pub fn with_default_filter(&self, sensitive: impl IntoIterator<Item = String>) -> Float8Config {
        let names = self.filter_fqns.clone().unwrap_or_else(|| sensitive.into_iter().collect());
        self.config.clone().with_filter_fqns(names)
    }

    /// Whether step `step`, counted from 0, of `steps` runs in FP8.
    pub fn is_float8(&self, step: usize, steps: usize) -> bool {
        self.schedule.is_none_or(|schedule| schedule.is_float8(step as u64, steps as u64))
    }
}

impl TryFrom<Table> for Float8Section {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        // Serde's error does not list the keys of a flattened table.
        let schema = schema::<Self>();
        let known: Vec<_> = schema["properties"].as_object().into_iter().flat_map(|keys| keys.keys()).collect();
        if let Some(key) = table.keys().find(|key| !known.contains(key)) {
            let known = known.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            return Err(format!("unknown field `{key}`, expected one of {known}"));
        }
        let schedule = take(&mut table, "schedule")?;
        let filter_fqns = take(&mut table, "filter_fqns")?;
        Ok(Self { config: parse(table)?, filter_fqns, schedule })
    }
}

impl Serialize for Float8Section {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut table = Table::try_from(&self.config).map_err(S::Error::custom)?;
        table.retain(|key, _| !OF_PROGRAMS.contains(&key));
        if let Some(names) = &self.filter_fqns {
            table.insert("filter_fqns".into(), names.clone().into());
        }
        if let Some(schedule) = &self.schedule {
            table.insert("schedule".into(), toml::Value::try_from(schedule).map_err(S::Error::custom)?);
        }
        table.serialize(serializer)
    }
}

fn take<T: DeserializeOwned>(table: &mut Table, key: &str) -> Result<Option<T>, String> {
    let parsed = table.remove(key).map(toml::Value::try_into::<T>).transpose();
    parsed.map_err(|error| format!("{key}: {}", error.message()))
}

/// Names the key in an error that does not: the key whose removal makes the table valid.
fn parse(table: Table) -> Result<Float8Config, String> {
    let error = match table.clone().try_into() {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    let message = error.message();
    let is_to_blame = |key: &&String| {
        let mut rest = table.clone();
        rest.remove(key.as_str());
        rest.try_into::<Float8Config>().is_ok()
    };
    Err(match table.keys().find(is_to_blame) {
        Some(key) if !message.contains(key.as_str()) => format!("{key}: {message}"),
        _ => message.into(),
    })
}
