//! Learning rate schedule: linear warm-up, then decay.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Decay curve after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine, starting at the peak.
    #[default]
    Cosine,
    /// A straight line, starting at the peak.
    Linear,
    /// No decay.
    Constant,
    /// Warm-up, stable, decay: constant until the last [`decay_ratio`](Schedule::decay_ratio) of
    /// the steps, then the peak times one minus a square root (Hägele et al., 2024).
    Wsd,
}

/// Learning rate of each step. [`OptimizerSection`](crate::config::OptimizerSection) has the
/// equation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub lr: f64,
    /// Steps of warm-up, limited to `steps`.
    pub warmup_steps: usize,
    /// Total steps.
    pub steps: usize,
    /// Decay curve after warm-up.
    pub decay: Decay,
    /// Final learning rate as a fraction of the peak.
    pub min_lr_ratio: f64,
    /// Fraction of the steps in which [`Decay::Wsd`] decays.
    pub decay_ratio: f64,
}

impl Schedule {
    /// Learning rate of `step`, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        let warmup = self.warmup_steps.min(self.steps);
        if step < warmup {
            return self.lr * (step + 1) as f64 / warmup as f64;
        }
        let start = match self.decay {
            Decay::Wsd => warmup.max(self.steps - (self.decay_ratio * self.steps as f64).round() as usize),
            Decay::Cosine | Decay::Linear | Decay::Constant => warmup,
        };
        let progress = step.saturating_sub(start) as f64 / (self.steps - start).max(1) as f64;
        let left = match self.decay {
            Decay::Cosine => (1.0 + (PI * progress.min(1.0)).cos()) / 2.0,
            Decay::Linear => 1.0 - progress.min(1.0),
            Decay::Constant => 1.0,
            Decay::Wsd => 1.0 - progress.min(1.0).sqrt(),
        };
        self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)
    }
}
