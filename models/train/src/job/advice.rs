//! [`advice`]: the nearest settings with which a training step takes less memory.

use core::fmt;
use std::collections::BTreeMap;
use std::num::NonZero;

use float8_shard::Reshard;

use super::config::RunConfig;
use super::room::size;
use crate::config::{ActivationCheckpointing, LoraBase, Precision, StorageDtype, TrainingSection};

/// What makes a step smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Activation checkpointing of each layer.
    Full,
    /// Logits of 512 tokens at a time.
    Chunk,
    /// Checkpoints that are written before the next step.
    Foreground,
    /// Gathered weights that are let go after forward.
    AfterForward,
    /// Casts of weights that backward makes again.
    Recompute,
    /// Logits of 128 tokens at a time.
    SmallChunk,
    /// Frozen weights beside adapters that are codes alone.
    Codes,
    /// Moments in bf16.
    Moments,
    /// Parameters in bf16 without an f32 master of each.
    Masters,
    /// Parameters in bf16.
    Parameters,
    /// Gradients that are applied in backward.
    InBackward,
    /// A micro-batch in equal parts, by so many of its prime factors, which are accumulated.
    Split(u32),
    /// Gradients that are applied in backward, and accumulated no more.
    InBackwardAlone,
}

/// Settings with which a step fits.
pub(super) struct Advice {
    settings: BTreeMap<&'static str, String>,
    /// Bytes that a step takes with them.
    peak: u64,
    /// Sequences of a step on each rank, before and with them.
    sequences: [usize; 2],
    /// Whether gradients are clipped no more.
    unclipped: bool,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "with")?;
        self.settings.iter().try_for_each(|(key, value)| write!(f, " --set {key}={value}"))?;
        write!(f, " it takes {}", size(self.peak))?;
        let [before, now] = self.sequences;
        let fewer = (now != before).then(|| format!("a step has {now} sequences in place of {before}"));
        let unclipped = self.unclipped.then(|| "gradients are not clipped".to_string());
        let otherwise: Vec<_> = fewer.into_iter().chain(unclipped).collect();
        if otherwise.is_empty() { Ok(()) } else { write!(f, ", but trains otherwise: {}", otherwise.join(", ")) }
    }
}

/// The fewest settings with which `fits` gives the bytes that a step takes: a single change if one will do, else those without each of
/// which it does not fit. None if all that are valid do not.
///
/// Those that change no number are tried first; then those that do; last what changes what a step sees of the data.
pub(super) fn advice<S: Clone>(
    config: &RunConfig<S>,
    ranks: usize,
    is_valid: impl Fn(&RunConfig<S>) -> bool,
    fits: impl Fn(&RunConfig<S>) -> Option<u64>,
) -> Option<Advice> {
    use Change::*;
    let splits = (1..).take_while(|times| split(config.training.batch_size, times - 1) > 1).count() as u32;
    let changes =
        [Full, Chunk, Foreground, AfterForward, Recompute, SmallChunk, Codes, Moments, Masters, Parameters, InBackward];
    let all = changes.into_iter().chain((1..=splits).map(Split)).chain([InBackwardAlone]);
    // Codes are on one rank.
    let all: Vec<_> = all
        .filter(|change| match change {
            AfterForward => ranks > 1,
            Codes => ranks == 1,
            _ => true,
        })
        .collect();
    let told = |changes: &[Change]| {
        let (tried, settings) = with(config, changes);
        let peak = Some(&tried).filter(|tried| is_valid(tried)).and_then(&fits)?;
        let sequences = [config, &tried].map(|config| {
            let TrainingSection { batch_size, grad_accumulation, .. } = config.training;
            batch_size.saturating_mul(grad_accumulation)
        });
        let unclipped = tried.training.max_norm != config.training.max_norm;
        Some(Advice { settings, peak, sequences, unclipped })
    };
    if let Some(single) = all.iter().find_map(|change| told(&[*change])) {
        return Some(single);
    }
    let mut chosen: Vec<Change> = vec![];
    for change in all {
        let mut more = chosen.clone();
        // The last number of factors counts.
        more.retain(|other| !matches!((other, change), (Split(_), Split(_))));
        more.push(change);
        let (tried, settings) = with(config, &more);
        if settings == with(config, &chosen).1 || !is_valid(&tried) {
            continue;
        }
        chosen = more;
        if told(&chosen).is_some() {
            break;
        }
    }
    told(&chosen)?;
    // The least wanted ones first.
    for index in (0..chosen.len()).rev() {
        let fewer = [&chosen[..index], &chosen[index + 1..]].concat();
        if told(&fewer).is_some() {
            chosen = fewer;
        }
    }
    told(&chosen)
}

/// What is left of a micro-batch without so many of its prime factors, the smallest first; one beyond 2^16 counts as all that is left.
fn split(batch_size: usize, times: u32) -> usize {
    (0..times).fold(batch_size, |left, _| left / (2..1 << 16).find(|factor| left % factor == 0).unwrap_or(left))
}

/// The configuration with these changes, and the keys that they set with their values.
fn with<S: Clone>(config: &RunConfig<S>, changes: &[Change]) -> (RunConfig<S>, BTreeMap<&'static str, String>) {
    let (mut config, mut settings) = (config.clone(), BTreeMap::new());
    for change in changes {
        settings.extend(apply(*change, &mut config));
    }
    (config, settings)
}

/// Makes a change, and gives the keys that make it with their values: none where it is made already.
fn apply<S>(change: Change, config: &mut RunConfig<S>) -> Vec<(&'static str, String)> {
    let (training, optimizer) = (&mut config.training, &mut config.optimizer);
    let full = ActivationCheckpointing::Every(NonZero::<usize>::MIN);
    let mut settings = vec![];
    match change {
        Change::Full if training.activation_checkpointing != full => {
            training.activation_checkpointing = full;
            settings.push(("training.activation_checkpointing", "full".into()));
        }
        Change::Chunk | Change::SmallChunk => {
            let chunk = if change == Change::Chunk { 512 } else { 128 };
            let tokens = training.batch_size.saturating_mul(training.seq_len);
            if training.loss_chunk.is_none_or(|now| now > chunk) && tokens > chunk {
                training.loss_chunk = Some(chunk);
                settings.push(("training.loss_chunk", chunk.to_string()));
            }
        }
        Change::Recompute
            if training.precision == Precision::Fp8
                && !config.float8.config.linear.force_recompute_fp8_weight_in_bwd() =>
        {
            let linear = &mut config.float8.config.linear;
            *linear = linear.clone().with_force_recompute_fp8_weight_in_bwd(true);
            settings.push(("float8.force_recompute_fp8_weight_in_bwd", "true".into()));
        }
        Change::Foreground if config.checkpoint.folder.is_some() && config.checkpoint.background => {
            config.checkpoint.background = false;
            settings.push(("checkpoint.background", "false".into()));
        }
        Change::AfterForward if config.parallelism.reshard != Reshard::AfterForward => {
            config.parallelism.reshard = Reshard::AfterForward;
            settings.push(("parallelism.reshard", "after_forward".into()));
        }
        Change::Codes if training.precision == Precision::Fp8 => {
            if let Some(lora) = config.lora.as_mut().filter(|lora| lora.base == LoraBase::Values) {
                lora.base = LoraBase::Fp8;
                settings.push(("lora.base", "fp8".into()));
            }
        }
        Change::Moments if optimizer.state_dtype == StorageDtype::F32 => {
            optimizer.state_dtype = StorageDtype::Bf16;
            settings.push(("optimizer.state_dtype", "bf16".into()));
        }
        Change::Masters if optimizer.master_weights => {
            optimizer.master_weights = false;
            settings.push(("optimizer.master_weights", "false".into()));
        }
        Change::Parameters if training.param_dtype == StorageDtype::F32 => {
            training.param_dtype = StorageDtype::Bf16;
            settings.push(("training.param_dtype", "bf16".into()));
        }
        Change::InBackward | Change::InBackwardAlone if !optimizer.in_backward => {
            optimizer.in_backward = true;
            settings.push(("optimizer.in_backward", "true".into()));
            if training.max_norm.is_finite() {
                training.max_norm = f64::INFINITY;
                settings.push(("training.max_norm", "inf".into()));
            }
            if change == Change::InBackwardAlone && training.grad_accumulation > 1 {
                training.grad_accumulation = 1;
                settings.push(("training.grad_accumulation", "1".into()));
            }
        }
        Change::Split(times) if training.batch_size > 1 => {
            let before = training.batch_size;
            training.batch_size = split(before, times);
            settings.push(("training.batch_size", training.batch_size.to_string()));
            if !optimizer.in_backward {
                let parts = before / training.batch_size;
                training.grad_accumulation = training.grad_accumulation.saturating_mul(parts);
                settings.push(("training.grad_accumulation", training.grad_accumulation.to_string()));
            }
        }
        _ => {}
    }
    settings
}
