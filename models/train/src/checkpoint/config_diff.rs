//! Keys of a run's configuration that may change on resume.

use serde::Serialize;
use toml::{Table, Value};

use super::CheckpointError;
use crate::config::{ConfigError, to_table};

/// Keys that may change, and sections (ending with a point) whose keys may all change. Keys before
/// `training.loss_chunk` do not affect the losses.
pub const MAY_CHANGE: [&str; 30] = [
    "checkpoint.",
    "generate.",
    "parallelism.",
    "profile.",
    "data.cache",
    // Files may move. Their content identifies them.
    "data.paths",
    // The training data stays; held-out losses use other text.
    "data.validation",
    "float8.strict",
    "optimizer.in_backward",
    "training.activation_checkpointing",
    "training.eval_batches",
    "training.eval_every",
    "training.log_every",
    "training.metrics",
    "training.peak_tflops",
    "training.print_report",
    "training.report",
    // Changes the order of summation.
    "training.loss_chunk",
    "optimizer.decay",
    "optimizer.decay_ratio",
    "optimizer.lr",
    "optimizer.min_lr_ratio",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.weight_decay_all",
    "training.device",
    // Another number of ranks needs another number of micro-batches for the same step.
    "training.grad_accumulation",
    "training.max_norm",
    "training.steps",
    "float8.schedule",
];

/// Key with a changed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The dotted key.
    pub key: String,
    /// Its value in the checkpoint, as TOML.
    pub saved: String,
    /// Its value now.
    pub now: String,
}

/// Differences between two configurations.
///
/// # Errors
/// [`CheckpointError::ConfigChanged`] for the first key that must not change,
/// [`CheckpointError::Config`].
pub fn changes(saved: &impl Serialize, now: &impl Serialize) -> Result<Vec<Change>, CheckpointError> {
    let flat = |config: Result<Table, ConfigError>| -> Result<Table, ConfigError> {
        let mut flat = Table::new();
        flatten("", Value::Table(config?), &mut flat);
        Ok(flat)
    };
    let (saved, now) = (flat(to_table(saved))?, flat(to_table(now))?);
    let keys: std::collections::BTreeSet<_> = saved.keys().chain(now.keys()).collect();
    let text = |value: Option<&Value>| value.map_or_else(|| "absent".into(), Value::to_string);
    let differ = keys.into_iter().filter(|key| saved.get(*key) != now.get(*key));
    let changes: Vec<_> =
        differ.map(|key| Change { key: key.clone(), saved: text(saved.get(key)), now: text(now.get(key)) }).collect();
    let may_change = |key: &str| {
        MAY_CHANGE.iter().any(|may| {
            if may.ends_with('.') {
                key.starts_with(may)
            } else {
                key == *may || key.strip_prefix(may).is_some_and(|rest| rest.starts_with('.'))
            }
        })
    };
    match changes.iter().find(|change| !may_change(&change.key)) {
        None => Ok(changes),
        Some(Change { key, saved, now }) => {
            Err(CheckpointError::ConfigChanged { key: key.clone(), saved: saved.clone(), now: now.clone() })
        }
    }
}

fn flatten(prefix: &str, value: Value, flat: &mut Table) {
    match value {
        Value::Table(table) => {
            for (key, value) in table {
                let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
                flatten(&key, value, flat);
            }
        }
        value => drop(flat.insert(prefix.into(), value)),
    }
}
