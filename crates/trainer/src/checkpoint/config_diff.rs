//! Keys of a run's configuration that may change on resume.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::Serialize;
use toml::Value;

use crate::config::to_table;

/// Keys that may change, and sections (ending with a point) whose keys may all change. Keys before
/// `training.loss_chunk` do not affect the losses.
pub const MAY_CHANGE: [&str; 26] = [
    "checkpoint.",
    "generate.",
    "parallelism.",
    "data.cache",
    // Files may move. Their content identifies them.
    "data.paths",
    // The training data stays; validation losses use other text.
    "data.validation",
    "float8.strict",
    "optimizer.in_backward",
    "training.activation_checkpointing",
    "training.eval_batches",
    "training.eval_every",
    "training.log_every",
    // Changes the order of summation.
    "training.loss_chunk",
    "training.profile_steps",
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
    "training.grad_clip_norm",
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
/// A key changed that must not change; the error names the first, with both values.
pub fn changes(saved: &impl Serialize, now: &impl Serialize) -> Result<Vec<Change>> {
    let (mut both, none) = (BTreeMap::new(), || ["absent".to_string(), "absent".to_string()]);
    flatten("", Value::Table(to_table(saved)?), &mut |key, value| both.entry(key).or_insert_with(none)[0] = value);
    flatten("", Value::Table(to_table(now)?), &mut |key, value| both.entry(key).or_insert_with(none)[1] = value);
    let differ = both.into_iter().filter(|(_, [saved, now])| saved != now);
    let changes: Vec<_> = differ.map(|(key, [saved, now])| Change { key, saved, now }).collect();
    if let Some(Change { key, saved, now }) = changes.iter().find(|change| !may_change(&change.key)) {
        bail!(
            "{key} was {saved} when the checkpoint was made and is {now} now: a run cannot be resumed with another; \
             start a new run, or leave it as it was"
        );
    }
    Ok(changes)
}

fn may_change(key: &str) -> bool {
    MAY_CHANGE.iter().any(|may| {
        let rest = key.strip_prefix(may);
        rest.is_some_and(|rest| may.ends_with('.') || rest.is_empty() || rest.starts_with('.'))
    })
}

/// Calls `add` with the dotted key and the text of each value.
fn flatten(key: &str, value: Value, add: &mut impl FnMut(String, String)) {
    match value {
        Value::Table(table) => {
            let dotted = |name: String| if key.is_empty() { name } else { format!("{key}.{name}") };
            table.into_iter().for_each(|(name, value)| flatten(&dotted(name), value, add));
        }
        value => add(key.into(), value.to_string()),
    }
}
