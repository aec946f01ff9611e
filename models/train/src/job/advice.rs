//! [`advice`]: the nearest settings with which a training step takes less memory.

use std::collections::BTreeMap;
use std::num::NonZero;

use float8_shard::Reshard;

use super::config::RunConfig;
use crate::config::{ActivationCheckpointing, LoraBase, Precision, StorageDtype};

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
    /// Parameters in bf16.
    Parameters,
    /// Gradients that are applied in backward.
    InBackward,
    /// A micro-batch that is halved so many times, and accumulated.
    Halved(u32),
    /// Gradients that are applied in backward, and accumulated no more.
    InBackwardAlone,
}

/// The fewest settings, of the form `--set key=value`, with which `fits` gives the bytes that a step takes, and those bytes: a single
/// change if one will do, else those without each of which it does not fit. None if all do not.
///
/// Those that change no number are tried first; then those that do; last what changes what a step sees of the data.
pub(super) fn advice<S: Clone>(
    config: &RunConfig<S>,
    ranks: usize,
    fits: impl Fn(&RunConfig<S>) -> Option<u64>,
) -> Option<(Vec<String>, u64)> {
    use Change::*;
    let halves = usize::BITS - config.training.batch_size.saturating_sub(1).leading_zeros();
    let changes =
        [Full, Chunk, Foreground, AfterForward, Recompute, SmallChunk, Codes, Moments, Parameters, InBackward];
    let all = changes.into_iter().chain((1..=halves).map(Halved)).chain([InBackwardAlone]);
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
        let peak = fits(&tried)?;
        Some((settings.into_iter().map(|(key, value)| format!("--set {key}={value}")).collect(), peak))
    };
    if let Some(single) = all.iter().find_map(|change| told(&[*change])) {
        return Some(single);
    }
    let is_possible = |changes: &[Change]| {
        let (tried, _) = with(config, changes);
        tried.optimizer.check_in_backward(&tried.training, ranks).is_ok()
    };
    let mut chosen: Vec<Change> = vec![];
    for change in all {
        let mut more = chosen.clone();
        // The last number of halves counts.
        more.retain(|other| !matches!((other, change), (Halved(_), Halved(_))));
        more.push(change);
        if with(config, &more).1 == with(config, &chosen).1 || !is_possible(&more) {
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
        Change::Halved(times) => {
            for _ in 0..times {
                if training.batch_size == 1 {
                    break;
                }
                training.batch_size = training.batch_size.div_ceil(2);
                settings.push(("training.batch_size", training.batch_size.to_string()));
                if !optimizer.in_backward {
                    training.grad_accumulation = training.grad_accumulation.saturating_mul(2);
                    settings.push(("training.grad_accumulation", training.grad_accumulation.to_string()));
                }
            }
        }
        _ => {}
    }
    settings
}
