//! The section `[optimizer]`, and what its types do not check.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sections::{StorageDtype, TrainingSection};
use super::{ActivationCheckpointing, ConfigError, require};
use crate::schedule::{Decay, Schedule};

/// Peak learning rate of random weights, where none is given.
pub(crate) const RANDOM_LR: f64 = 5e-3;
/// Peak learning rate of a checkpoint's weights, where none is given.
pub(crate) const FINE_TUNING_LR: f64 = 2e-5;
/// Peak learning rate of LoRA's adapters, where none is given.
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
    /// Peak learning rate, reached at the end of the warm-up. If absent, 5e-3 for random weights,
    /// 2e-5 for weights of `model.hf_path`, 2e-4 with `[lora]`.
    pub lr: Option<f64>,
    /// How much of AdamW's first and second moment stays at each step.
    pub betas: [f64; 2],
    /// Added to the root of the second moment, so that nothing is divided by 0.
    pub eps: f64,
    /// Share of each matrix, times the learning rate, that a step takes away (decoupled, as AdamW does).
    pub weight_decay: f64,
    /// Whether norms, biases and embeddings decay too.
    pub weight_decay_all: bool,
    /// What both moments are kept in: `bf16` takes half the memory, with rounding as `training.param_dtype` says.
    pub state_dtype: StorageDtype,
    /// Whether each matrix that `training.param_dtype = "bf16"` keeps in bf16 has a master in f32 beside its moments, 4 bytes an element
    /// more: steps change the master, and the parameter is that rounded to nearest.
    pub master_weights: bool,
    /// Whether each layer's parameters are changed in backward, as soon as their gradients exist, which are then let go: there is never
    /// a whole set of gradients in memory. Losses and parameters are the same bits. It needs `training.activation_checkpointing`,
    /// `training.grad_accumulation = 1` and `training.max_norm = inf`.
    pub in_backward: bool,
    /// Steps in which the learning rate rises linearly to `lr`.
    pub warmup_steps: usize,
    /// The curve after warm-up.
    pub decay: Decay,
    /// Share of `lr` that the decay ends at.
    pub min_lr_ratio: f64,
    /// With `decay = "wsd"`, the share of all steps that the decay takes, at the end.
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
    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`ConfigError::Value`] naming the first key that cannot be.
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

    /// Whether there are parameters in bf16, if they are to have masters.
    ///
    /// # Errors
    /// [`ConfigError::Value`] saying what to set.
    pub fn check_master_weights(&self, training: &TrainingSection) -> Result<(), ConfigError> {
        let fits = !self.master_weights || training.param_dtype == StorageDtype::Bf16;
        let reason = "is for parameters in bf16: set training.param_dtype = \"bf16\", or leave it out";
        require("optimizer.master_weights", self.master_weights, fits, reason)
    }

    /// Whether gradients can be applied in backward, if they are to be.
    ///
    /// # Errors
    /// [`ConfigError::Value`] saying what to set.
    pub fn check_in_backward(&self, training: &TrainingSection) -> Result<(), ConfigError> {
        let TrainingSection { activation_checkpointing, grad_accumulation, max_norm, .. } = *training;
        let checks = [
            (
                activation_checkpointing != ActivationCheckpointing::None,
                "needs a backward in parts: set training.activation_checkpointing = \"full\"".to_string(),
            ),
            (
                grad_accumulation == 1,
                format!(
                    "would apply a part of the gradients: set training.grad_accumulation = 1, which is {grad_accumulation}"
                ),
            ),
            (
                max_norm.is_infinite(),
                format!(
                    "does not know the norm of all gradients in time: set training.max_norm = inf, which is {max_norm}"
                ),
            ),
        ];
        let wrong = checks.into_iter().find(|(holds, _)| self.in_backward && !holds);
        wrong.map_or(Ok(()), |(_, reason)| require("optimizer.in_backward", true, false, &reason))
    }

    /// The learning rate of each of so many steps.
    pub fn schedule(&self, steps: usize) -> Schedule {
        let Self { lr, warmup_steps, decay, min_lr_ratio, decay_ratio, .. } = *self;
        let lr = lr.unwrap_or(RANDOM_LR);
        Schedule { lr, warmup_steps, steps, decay, min_lr_ratio, decay_ratio }
    }
}
