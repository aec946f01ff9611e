//! The section `[optimizer]` and its checks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sections::{StorageDtype, TrainingSection};
use super::{ActivationCheckpointing, ConfigError, require};
use crate::schedule::{Decay, Schedule};

/// Default peak learning rate for random weights.
pub(crate) const RANDOM_LR: f64 = 5e-3;
/// Default peak learning rate for a checkpoint's weights.
pub(crate) const FINE_TUNING_LR: f64 = 2e-5;
/// Default peak learning rate for LoRA adapters.
pub(crate) const LORA_LR: f64 = 2e-4;

/// AdamW and the learning rate.
///
/// ```text
/// step < warmup_steps:  lr · (step + 1) / warmup_steps
/// else:                 lr · (min_lr_ratio + (1 - min_lr_ratio) · d(p)),   p = (step - start) / (steps - start)
/// d(p) = (1 + cos πp) / 2 with cosine,   1 - p with linear,   1 with constant,   1 - √p with wsd
/// start = warmup_steps,   with wsd max(warmup_steps, steps - decay_ratio · steps), before which d = 1
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSection {
    /// Peak learning rate, reached at the end of warm-up. If absent, 5e-3 for random weights, 2e-5
    /// for weights of `model.hf_path`, 2e-4 with `[lora]`.
    pub lr: Option<f64>,
    /// Decay rates of AdamW's first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment to avoid division by 0.
    pub eps: f64,
    /// Weight decay of matrices, decoupled as in AdamW: a step subtracts this fraction times the
    /// learning rate.
    pub weight_decay: f64,
    /// Whether norms, biases and embeddings decay too.
    pub weight_decay_all: bool,
    /// Dtype of both moments. `bf16` takes half the memory and is rounded as in
    /// `training.param_dtype`.
    pub state_dtype: StorageDtype,
    /// Whether matrices kept in bf16 (`training.param_dtype = "bf16"`) have f32 master weights, 4
    /// more bytes per element. Steps update the master weight, and the parameter is the master
    /// rounded to nearest.
    pub master_weights: bool,
    /// Whether each layer's parameters are updated in backward, as soon as their gradients exist.
    /// The gradients are then freed, so the full set is never in memory. Losses and parameters are
    /// bitwise the same. Requires `training.activation_checkpointing`,
    /// `training.grad_accumulation = 1` and `training.grad_clip_norm = inf`.
    pub in_backward: bool,
    /// Steps of linear warm-up to `lr`.
    pub warmup_steps: usize,
    /// Decay curve after warm-up.
    pub decay: Decay,
    /// Final learning rate as a fraction of `lr`.
    pub min_lr_ratio: f64,
    /// With `decay = "wsd"`, the fraction of all steps used for the decay at the end.
    pub decay_ratio: f64,
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self {
            lr: None,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            weight_decay_all: false,
            state_dtype: StorageDtype::F32,
            master_weights: false,
            in_backward: false,
            warmup_steps: 20,
            decay: Decay::Cosine,
            min_lr_ratio: 0.1,
            decay_ratio: 0.2,
        }
    }
}

impl OptimizerSection {
    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let [beta1, beta2] = self.betas;
        let range = "must be in [0, 1)";
        require("optimizer.betas[0]", beta1, (0.0..1.0).contains(&beta1), range)?;
        require("optimizer.betas[1]", beta2, (0.0..1.0).contains(&beta2), range)?;
        let Self { lr, eps, weight_decay, min_lr_ratio, decay_ratio, .. } = *self;
        if let Some(lr) = lr {
            require("optimizer.lr", lr, lr > 0.0 && lr.is_finite(), "must be positive and finite")?;
        }
        require("optimizer.eps", eps, eps > 0.0 && eps.is_finite(), "must be positive and finite")?;
        let fits = weight_decay >= 0.0 && weight_decay.is_finite();
        require("optimizer.weight_decay", weight_decay, fits, "must be finite and not negative")?;
        let fits = (0.0..=1.0).contains(&min_lr_ratio);
        require("optimizer.min_lr_ratio", min_lr_ratio, fits, "must be in [0, 1]")?;
        let fits = decay_ratio > 0.0 && decay_ratio <= 1.0;
        require("optimizer.decay_ratio", decay_ratio, fits, "must be in (0, 1]")
    }

    /// Checks that `master_weights` is only used with bf16 parameters.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with the setting to change.
    pub fn check_master_weights(&self, training: &TrainingSection) -> Result<(), ConfigError> {
        let fits = !self.master_weights || training.param_dtype == StorageDtype::Bf16;
        let reason = "is for parameters in bf16: set training.param_dtype = \"bf16\", or leave it out";
        require("optimizer.master_weights", self.master_weights, fits, reason)
    }

    /// Checks that gradients can be applied in backward if `in_backward` is set.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with the setting to change.
    pub fn check_in_backward(&self, training: &TrainingSection) -> Result<(), ConfigError> {
        if !self.in_backward {
            return Ok(());
        }
        let TrainingSection { activation_checkpointing, grad_accumulation, grad_clip_norm: norm, .. } = *training;
        let needs = |fits: bool, reason: &str| require("optimizer.in_backward", true, fits, reason);
        let in_parts = activation_checkpointing != ActivationCheckpointing::None;
        needs(in_parts, "needs a backward in parts: set training.activation_checkpointing = \"full\"")?;
        let whole = "would apply a part of the gradients: set training.grad_accumulation = 1, which is";
        needs(grad_accumulation == 1, &format!("{whole} {grad_accumulation}"))?;
        let known = "does not know the norm of all gradients in time: set training.grad_clip_norm = inf, which is";
        needs(norm.is_infinite(), &format!("{known} {norm}"))
    }

    /// Learning rate schedule over `steps` steps.
    pub fn schedule(&self, steps: usize) -> Schedule {
        let Self { lr, warmup_steps, decay, min_lr_ratio, decay_ratio, .. } = *self;
        let lr = lr.unwrap_or(RANDOM_LR);
        Schedule { lr, warmup_steps, steps, decay, min_lr_ratio, decay_ratio }
    }
}
