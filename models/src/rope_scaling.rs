//! Llama 3.1's scaling of the rotary frequencies.
//!
//! ```text
//! f ← f / factor                                                 wavelength 2π/f > L / low
//!   ← f                                                          wavelength < L / high
//!   ← (1 - s) · f / factor + s · f,  s = (L·f/2π - low) / (high - low)   between
//! ```
//! with L = `original_max_position_embeddings`, as in transformers' `modeling_rope_utils` and
//! Meta's `llama3`.

use std::f64::consts::TAU;

use crate::dims::{positive, refused};

/// Llama 3.1's scaling of the rotary frequencies, `rope_type: llama3` in Hugging Face's
/// `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Divisor of slow frequencies.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are slow.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are unchanged.
    pub high_freq_factor: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        positive("rope_scaling.factor", self.factor)?;
        positive("rope_scaling.low_freq_factor", self.low_freq_factor)?;
        positive("rope_scaling.high_freq_factor", self.high_freq_factor)?;
        if self.high_freq_factor <= self.low_freq_factor {
            let reason = format!("must exceed low_freq_factor = {}", self.low_freq_factor);
            let field = "rope_scaling.high_freq_factor";
            return Err(refused(field, self.high_freq_factor, reason));
        }
        if self.original_max_position_embeddings == 0 {
            let field = "rope_scaling.original_max_position_embeddings";
            return Err(refused(field, 0, "must be at least 1"));
        }
        Ok(())
    }

    /// Scales one frequency, in radians per position.
    pub(crate) fn scale(&self, frequency: f64) -> f64 {
        let turns = self.original_max_position_embeddings as f64 * frequency / TAU;
        if turns < self.low_freq_factor {
            return frequency / self.factor;
        }
        if turns > self.high_freq_factor {
            return frequency;
        }
        let smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - smooth) * frequency / self.factor + smooth * frequency
    }
}
