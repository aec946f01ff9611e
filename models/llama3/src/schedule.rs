//! Learning rate by step: linear warm-up, then decay.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// The curve after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
    /// No decay.
    Constant,
}

/// ```text
/// step < warmup:  lr · (step + 1) / warmup
/// else:           lr · (floor + (1 - floor) · d(p)),   p = (step - warmup) / (steps - warmup)
/// d(p) = (1 + cos πp) / 2,   1 - p,   or 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub lr: f64,
    /// Steps of warm-up; never more than `steps`.
    pub warmup_steps: usize,
    /// Steps in all.
    pub steps: usize,
    /// The curve after warm-up.
    pub decay: Decay,
    /// Share of the peak that the decay ends at.
    pub min_lr_ratio: f64,
}

impl Schedule {
    /// Learning rate of `step`, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        let warmup = self.warmup_steps.min(self.steps);
        if step < warmup {
            return self.lr * (step + 1) as f64 / warmup as f64;
        }
        let progress = (step - warmup) as f64 / (self.steps - warmup).max(1) as f64;
        let left = match self.decay {
            Decay::Cosine => (1.0 + (PI * progress.min(1.0)).cos()) / 2.0,
            Decay::Linear => 1.0 - progress.min(1.0),
            Decay::Constant => 1.0,
        };
        self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)
    }
}
