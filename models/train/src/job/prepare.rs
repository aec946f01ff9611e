//! A run's model: its dimensions, the dtype in which it computes, its weights with FP8 applied, sharded over the ranks.

use std::io::Write;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8Error, Float8Stack, set_default_config};
use device_select::SelectedDevice;
use float8_shard::{Communicator, ShardBackend, ShardError, Sharded};

use super::config::RunConfig;
use super::weights::Weights;
use crate::config::{ComputeDtype, ConfigError, Precision, require};
use crate::model::{CausalLm, ModelConfig, ModelSection, ModelSize, TrainableModel};
use crate::storage::store_matrices;
use crate::{JobError, ProgressLine, Ranks, Tokenizer};

/// The model's dimensions, with rotary tables no longer than what is to be done needs: sequences of `seq_len`, and text after a prompt of
/// so many tokens.
pub(super) fn dimensions<S: ModelSection>(
    config: &RunConfig<S>,
    tokenizer: &Tokenizer,
    seq_len: Option<usize>,
    prompt: Option<usize>,
) -> Result<S::Config, JobError> {
    let dims = config.dimensions()?;
    let needed = tokenizer.vocab_size();
    let ModelSize { vocab_size, max_seq_len, .. } = dims.size();
    if vocab_size < needed {
        return Err(JobError::Vocabulary { vocab_size, needed });
    }
    if let Some(seq_len) = seq_len {
        let reason = format!("the model has {max_seq_len} positions");
        require("training.seq_len", seq_len, seq_len <= max_seq_len, &reason)?;
    }
    let new = config.generate.max_new_tokens;
    let generated = prompt.map_or(0, |prompt| prompt.saturating_add(new));
    if let Some(prompt) = prompt {
        let reason = format!("with a prompt of {prompt} tokens exceeds the model's {max_seq_len} positions");
        require("generate.max_new_tokens", new, generated <= max_seq_len, &reason)?;
    }
    Ok(dims.with_max_seq_len(generated.max(seq_len.unwrap_or(1)).max(1)))
}

pub(super) fn compute_dtype<B: Backend, S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<DType, JobError> {
    let training = &config.training;
    let implied = match (training.precision, selected) {
        (Precision::F32, _) => ComputeDtype::F32,
        (Precision::Bf16, _) | (Precision::Fp8, SelectedDevice::Cuda) => ComputeDtype::Bf16,
        (Precision::Fp8, _) => ComputeDtype::F32,
    };
    let chosen = training.compute_dtype.unwrap_or(implied);
    if training.precision != Precision::Fp8 && chosen != implied {
        let reason = format!("precision {:?} computes in {implied:?}", training.precision).to_lowercase();
        let value = format!("{chosen:?}").to_lowercase();
        return Err(ConfigError::Value { key: "training.compute_dtype", value, reason }.into());
    }
    let dtype = match chosen {
        ComputeDtype::F32 => DType::F32,
        ComputeDtype::Bf16 => DType::BF16,
    };
    if B::supports_dtype(device, dtype) {
        return Ok(dtype);
    }
    Err(JobError::UnsupportedDtype { dtype: format!("{dtype:?}").to_lowercase(), device: selected.to_string() })
}

/// Refuses to keep parameters or moments in a dtype that the device lacks.
pub(super) fn check_storage<B: Backend, S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<(), ConfigError> {
    let kept = [
        ("training.param_dtype", config.training.param_dtype),
        ("optimizer.state_dtype", config.optimizer.state_dtype),
    ];
    kept.into_iter().try_for_each(|(key, kept)| {
        let reason = format!("{selected} does not have it: leave the key out");
        require(key, format!("{kept:?}").to_lowercase(), B::supports_dtype(device, kept.dtype()), &reason)
    })
}

/// A model with these weights, with FP8 applied if `config` asks for it.
///
/// The backend's default FP8 config is switched off for `device`.
///
/// # Errors
/// Weights that do not load, an FP8 config that does not fit the model, a log that cannot be written.
pub fn prepare<A: TrainableModel, B: AutodiffBackend + Float8Stack>(
    config: &RunConfig<A::Section>,
    weights: Weights<'_, A::Config>,
    device: &B::Device,
    progress: &ProgressLine,
    out: &mut dyn Write,
) -> Result<A::Trained<B>, JobError> {
    let model = weights.load::<B, A::Trained<B>>(device, progress, out)?;
    // What only evaluates may be on a device without bf16: f32 has the same values.
    let dtype = config.training.param_dtype.dtype();
    let model = if B::supports_dtype(device, dtype) { store_matrices(model, dtype) } else { model };
    let float8 = config.float8(model.config());
    set_default_config::<B>(device, None)?;
    if config.training.precision != Precision::Fp8 {
        return Ok(model);
    }
    // Strict mode panics in the GEMM; a run reports an error instead.
    let (model, summary) = float8.with_strict(false).apply::<B, _>(model).map_err(Float8Error::from)?;
    writeln!(out, "{summary}")?;
    Ok(model)
}

/// A model of which each rank keeps its rows, where there are several.
pub(super) fn shard<B: AutodiffBackend + Float8Stack<Inner: ShardBackend>, M: AutodiffModule<B>, S>(
    config: &RunConfig<S>,
    model: M,
    comm: &Communicator,
    out: &mut dyn Write,
) -> Result<(M, Option<Ranks>), JobError> {
    if comm.world_size() == 1 {
        return Ok((model, None));
    }
    let (model, sharded) = Sharded::apply::<B, _>(model, comm, config.sharding()).map_err(ShardError::from)?;
    writeln!(out, "{}", sharded.summary())?;
    let ranks = Ranks::new::<B, _>(sharded, &model);
    Ok((model, Some(ranks)))
}
