//! Which keys of a run's configuration may change when it is resumed.

use serde::Serialize;
use toml::{Table, Value};

use super::CheckpointError;
use crate::config::{ConfigError, to_table};

/// Keys that may change, and sections (they end with a point) all of whose keys may. Those before `training.loss_chunk` change no loss.
pub const MAY_CHANGE: [&str; 30] = [
    "checkpoint.",
    "generate.",
    "parallelism.",
    "profile.",
    "data.cache",
    // Files that lie elsewhere; that they are the same is seen from their content.
    "data.paths",
    // What is trained on stays; held-out losses are of other text.
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
    // Sums in another order.
    "training.loss_chunk",
    "optimizer.decay",
    "optimizer.decay_ratio",
    "optimizer.lr",
    "optimizer.min_lr_ratio",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.weight_decay_all",
    "training.device",
    // Another number of ranks takes another number of micro-batches for the same step.
    "training.grad_accumulation",
    "training.max_norm",
    "training.steps",
    "float8.schedule",
];

/// A key whose value has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The dotted key.
    pub key: String,
    /// Its value in the checkpoint, as TOML.
    pub saved: String,
    /// Its value now.
    pub now: String,
}

/// What differs between two configurations.
///
/// # Errors
/// [`CheckpointError::ConfigChanged`] for the first key that must not, [`CheckpointError::Config`].
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
