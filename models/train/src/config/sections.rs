//! The sections `[training]`, `[parallelism]`, `[checkpoint]` and `[profile]`, and what their types do not check.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use device_select::DeviceChoice;
use float8_shard::{ReduceDtype, Reshard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::{ActivationCheckpointing, ConfigError, Float8Section, StepCount, require};
use crate::batches::AttnMaskType;

/// In which precision a run computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

impl ValueEnum for Precision {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::F32, Self::Bf16, Self::Fp8]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::F32 => ("f32", "everything in f32"),
            Self::Bf16 => ("bf16", "hidden states and GEMMs in bf16"),
            Self::Fp8 => ("fp8", "GEMMs of linears in FP8"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The dtype of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 32-bit.
    F32,
    /// bfloat16.
    Bf16,
}

/// The dtype that parameters or moments are kept in between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StorageDtype {
    /// 32-bit.
    #[default]
    F32,
    /// bfloat16, rounded stochastically after each step.
    Bf16,
}

impl StorageDtype {
    /// Burn's.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// How long to train, on which device, in which precision, and what is said about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSection {
    /// Where to compute.
    pub device: DeviceChoice,
    /// In which precision to compute. What parameters are kept in is `param_dtype`, the optimizer's state `optimizer.state_dtype`.
    pub precision: Precision,
    /// Dtype of hidden states with `precision = "fp8"`. If absent, bf16 on CUDA and f32 elsewhere.
    pub compute_dtype: Option<ComputeDtype>,
    /// What matrices are kept in, and so are their gradients: `bf16` takes half the memory. A step is computed in f32 and rounded
    /// stochastically, by bits that follow from the seed, the step, the parameter's name and the element's place. Vectors stay in f32.
    pub param_dtype: StorageDtype,
    /// Optimizer steps in all, or passes over the data, as in `"3 epochs"`; 0 only evaluates.
    pub steps: StepCount,
    /// Sequences in a micro-batch, which is what the device computes at once.
    pub batch_size: usize,
    /// Micro-batches per optimizer step and rank, so `batch_size · grad_accumulation · seq_len` tokens on each. The loss is the mean over
    /// all targets of the step.
    pub grad_accumulation: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// What a token may look at.
    pub attn_mask_type: AttnMaskType,
    /// Which activations wait for backward in memory: `"none"` keeps all of them; `"full"` the input of each layer, and makes the rest
    /// again in backward; a number n the input of every n-th layer, and has n layers' activations at a time. Losses and gradients are
    /// the same bits.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Tokens whose logits, and their gradients, are in memory at once. If absent, all of a micro-batch, or as many as make 256 MiB of
    /// logits in f32 if all would be more than 512 MiB. Losses and gradients of a step differ in their last bits, and by more where the
    /// output layer is in FP8: each chunk is then cast with scales of its own.
    pub loss_chunk: Option<usize>,
    /// Decides the initial weights of a preset, the order of the sequences and the sampled text at the end.
    pub seed: u64,
    /// The norm of all gradients together is clipped to this; `inf` does not clip.
    pub max_norm: f64,
    /// Parameters that stay as they are, by name: a parameter's, `norm.gamma`, or that of what has some, `layers.0`; with `*`, `?` or
    /// `[`, a glob over whole names. Checkpoints do not hold them: a run is resumed with the model that it began with.
    pub freeze: Vec<String>,
    /// Parameters that are trained, by such names; all others stay as they are. If empty, all are trained but those of `freeze`.
    pub train_only: Vec<String>,
    /// Steps between step lines; the first of a run and the last always have one.
    pub log_every: usize,
    /// Steps between held-out losses; 0 leaves them to checkpoints and the end, which always have one.
    pub eval_every: usize,
    /// Batches for the held-out loss, always the same ones.
    pub eval_batches: usize,
    /// The device's peak in TFLOP/s, of which step lines then give the share that is used, `mfu`. If absent, the FP8 and the bf16 peak
    /// of a device that is known by name, and no `mfu` for others.
    pub peak_tflops: Option<f64>,
    /// File to write losses, throughput and FP8 statistics to, a JSON object a line. If absent, `metrics.jsonl` in
    /// `checkpoint.folder`, and none without that.
    pub metrics: Option<PathBuf>,
    /// File to write what each linear did, GEMM by GEMM, as JSON. If absent, none is written.
    pub report: Option<PathBuf>,
    /// Whether to print what each linear did as a table at the end.
    pub print_report: bool,
}

/// What is saved of a run, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Folder of the run's checkpoints. If absent, none are saved.
    pub folder: Option<PathBuf>,
    /// Steps between checkpoints; one is also saved after the last step and when the run is told to stop. 0 saves only then.
    pub every: usize,
    /// How many of the newest checkpoints stay. The one with the smallest held-out loss stays besides.
    pub keep: usize,
    /// Whether training goes on while a checkpoint is written; its parameters and moments stay in memory until then.
    pub background: bool,
}

/// How a run over several ranks, which a launcher starts, is shared among them. Without a launcher it is of no consequence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelismSection {
    /// How long a weight lives that was gathered from all ranks: `after_step` gathers each twice in an optimizer step, `after_forward`
    /// twice in a micro-batch, and keeps none.
    pub reshard: Reshard,
    /// What ranks exchange of gradients: `f32`, or `bf16`, half the bytes: MPI adds these in f32, NCCL in bf16.
    pub reduce_dtype: ReduceDtype,
}

/// Steps of which a table says where their time went: by kernel on a GPU, by operation on a CPU. Without this section there are none.
/// On a GPU it makes all steps of the run slower, those outside of the window too, as each kernel is waited for and timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileSection {
    /// The first step that is profiled, counted from 1. On a GPU the first steps of a run also compile kernels.
    pub start: usize,
    /// How many steps are profiled. The last of them must not come after `training.steps`.
    pub steps: usize,
    /// Where to write the table, as JSON; it is printed in any case. If absent, nowhere.
    pub file: Option<PathBuf>,
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
            max_norm: 1.0,
            freeze: vec![],
            train_only: vec![],
            log_every: 20,
            eval_every: 0,
            eval_batches: 16,
            peak_tflops: None,
            metrics: None,
            report: None,
            print_report: false,
        }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { folder: None, every: 100, keep: 2, background: true }
    }
}

impl Default for ProfileSection {
    fn default() -> Self {
        Self { start: 4, steps: 2, file: None }
    }
}

impl TrainingSection {
    /// Whether some parameters stay as they are.
    pub fn freezes(&self) -> bool {
        !self.freeze.is_empty() || !self.train_only.is_empty()
    }

    /// Checks what the types do not, `float8.schedule` against the steps included.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
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
        let max_norm = self.max_norm;
        require("training.max_norm", max_norm, max_norm > 0.0, "must be positive; inf does not clip")?;
        if let Some(peak) = self.peak_tflops {
            let fits = peak > 0.0 && peak.is_finite();
            require("training.peak_tflops", peak, fits, "must be positive and finite")?;
        }
        let steps = self.steps.get();
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
    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        require("checkpoint.keep", self.keep, self.keep >= 1, "must be at least 1")
    }
}

impl ProfileSection {
    /// Checks what the types do not, against the steps of the run.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
    pub fn validate(&self, steps: usize) -> Result<(), ConfigError> {
        let last = self.start.saturating_add(self.steps).saturating_sub(1);
        require("profile.start", self.start, self.start >= 1, "must be at least 1")?;
        require("profile.steps", self.steps, self.steps >= 1, "must be at least 1")?;
        let reason = format!("from step {} on goes to step {last}, and the run has {steps}", self.start);
        require("profile.steps", self.steps, last <= steps, &reason)
    }

    /// The last step that is profiled.
    pub fn last(&self) -> usize {
        self.start + self.steps - 1
    }
}
