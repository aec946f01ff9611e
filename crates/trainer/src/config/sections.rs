//! The sections `[training]` and `[checkpoint]`, and their checks.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::ValueEnum;
use device_select::DeviceChoice;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::{ActivationCheckpointing, ConfigError, Float8Section, StepCount, require};
use crate::batches::AttnMaskType;

/// Compute precision of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// Hidden states and the GEMMs of linears in bf16.
    Bf16,
    /// GEMMs of linears in FP8, hidden states in `training.compute_dtype`.
    #[default]
    Fp8,
}

/// Dtype of hidden states, or of parameters or moments between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StorageDtype {
    /// 32-bit.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl StorageDtype {
    /// Burn's dtype.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Length, device, precision and logging of the training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSection {
    /// Compute device.
    pub device: DeviceChoice,
    /// Compute precision. `param_dtype` sets the dtype of parameters, `optimizer.state_dtype` the
    /// dtype of the optimizer's state.
    pub precision: Precision,
    /// Dtype of hidden states with `precision = "fp8"`. If absent, bf16 on CUDA and f32 elsewhere.
    pub compute_dtype: Option<StorageDtype>,
    /// Dtype of matrices and their gradients; `bf16` takes half the memory. A step is computed in
    /// f32 and rounded stochastically. The random bits follow from the seed, the step, the
    /// parameter's name and the element's position. Vectors stay in f32.
    pub param_dtype: StorageDtype,
    /// Number of optimizer steps, or of passes over the data, as in `"3 epochs"`. 0 only evaluates.
    pub steps: StepCount,
    /// Sequences per micro-batch, which the device computes at once.
    pub batch_size: usize,
    /// Micro-batches per optimizer step and rank, where ranks of `parallelism.tensor` count as one:
    /// each processes `batch_size · grad_accumulation · seq_len` tokens. The loss is the mean over
    /// all targets of the step.
    pub grad_accumulation: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Attention mask.
    pub attn_mask_type: AttnMaskType,
    /// Which activations stay in memory until backward. `"none"` keeps all of them. `"full"` keeps
    /// the input of each layer and recomputes the rest in backward. A number n keeps the input of
    /// every n-th layer and recomputes the activations of n layers at a time. Losses and gradients
    /// are bitwise the same.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Tokens whose logits and logit gradients are in memory at once. If absent, all tokens of a
    /// micro-batch; if their logits in f32 exceed 512 MiB, chunks of 256 MiB. Losses and gradients
    /// of a step differ in the last bits. They differ more if the output layer is in FP8, since
    /// each chunk is cast with its own scales.
    pub loss_chunk: Option<usize>,
    /// Seed of a preset's initial weights, the order of sequences and the text sampled at the end.
    pub seed: u64,
    /// Maximum norm of all gradients together, for clipping. `inf` disables clipping.
    pub grad_clip_norm: f64,
    /// Parameters to freeze, by name: a parameter, `norm.gamma`, or a module, `layers.0`. Names
    /// with `*`, `?` or `[` are globs over whole names. `!` before a name trains it: of several
    /// names of a parameter the last counts, and `["*", "!lm_head"]` trains only `lm_head`.
    /// Checkpoints do not contain frozen parameters: resuming needs the model that the run started
    /// from.
    pub freeze: Vec<String>,
    /// Steps between step lines. The first and the last step of a run always have one.
    pub log_every: usize,
    /// Steps between validation losses. They are always computed at checkpoints and at the end; 0
    /// computes them only then.
    pub eval_every: usize,
    /// Batches for the validation loss, always the same.
    pub eval_batches: usize,
    /// First and last step to profile: after the last one, a table of time by kernel is printed, and
    /// written to `profile.json` in the run's folder. The first steps also compile kernels. On a GPU
    /// all steps are slower. If absent, nothing is profiled.
    pub profile_steps: Option<[usize; 2]>,
}

/// Checkpoints of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Folder of the checkpoints, and of `metrics.jsonl`: losses, throughput and FP8 statistics, one
    /// JSON object per line. If absent, neither is written.
    pub output_dir: Option<PathBuf>,
    /// Steps between checkpoints. One is also saved after the last step and when the run is
    /// stopped; 0 saves only then.
    pub save_steps: usize,
    /// Number of newest checkpoints to keep. The one with the smallest validation loss is also kept.
    pub save_total_limit: usize,
    /// Whether training continues while a checkpoint is written. Its parameters and moments stay in
    /// memory until then.
    pub background: bool,
}

impl Default for TrainingSection {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            precision: Precision::Fp8,
            compute_dtype: None,
            param_dtype: StorageDtype::F32,
            steps: 600.into(),
            batch_size: 8,
            grad_accumulation: 1,
            seq_len: 128,
            attn_mask_type: AttnMaskType::Causal,
            activation_checkpointing: ActivationCheckpointing::None,
            loss_chunk: None,
            seed: 0,
            grad_clip_norm: 1.0,
            freeze: vec![],
            log_every: 20,
            eval_every: 0,
            eval_batches: 16,
            profile_steps: None,
        }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { output_dir: None, save_steps: 100, save_total_limit: 2, background: true }
    }
}

impl TrainingSection {
    /// Checks beyond the types, including `float8.schedule` against the steps.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
    pub fn validate(&self, float8: &Float8Section) -> Result<(), ConfigError> {
        for (key, value) in [
            ("training.batch_size", self.batch_size),
            ("training.grad_accumulation", self.grad_accumulation),
            ("training.seq_len", self.seq_len),
            ("training.log_every", self.log_every),
            ("training.eval_batches", self.eval_batches),
        ] {
            require(key, value, value >= 1, "must be at least 1")?;
        }
        if let Some(chunk) = self.loss_chunk {
            require("training.loss_chunk", chunk, chunk >= 1, "must be at least 1")?;
        }
        let (norm, reason) = (self.grad_clip_norm, "must be positive; inf does not clip");
        require("training.grad_clip_norm", norm, norm > 0.0, reason)?;
        let steps = self.steps.get();
        if let Some([first, last]) = self.profile_steps {
            let fits = 1 <= first && first <= last && (last <= steps || self.steps.epochs().is_some());
            let reason = format!("must be the first and the last of some of the steps 1 to {}", self.steps);
            require("training.profile_steps", format!("[{first}, {last}]"), fits, &reason)?;
        }
        if let Some(schedule) = &float8.schedule
            && self.precision == Precision::Fp8
            && self.steps.epochs().is_none()
        {
            let fits = steps == 0 || (0..steps).any(|step| float8.is_float8(step, steps));
            let value = Value::try_from(schedule).map_or_else(|_| format!("{schedule:?}"), |value| value.to_string());
            require("float8.schedule", value, fits, &format!("none of {steps} steps runs in FP8"))?;
        }
        Ok(())
    }
}

impl CheckpointSection {
    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        require("checkpoint.save_total_limit", self.save_total_limit, self.save_total_limit >= 1, "must be at least 1")
    }
}
