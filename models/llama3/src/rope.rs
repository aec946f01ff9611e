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

use crate::config::{LlamaConfig, RopeScaling};

/// Scaled rotary frequencies of `config`: `head_dim / 2` values, fastest first, in radians per
/// position.
pub fn rotary_frequencies(config: &LlamaConfig) -> Vec<f32> {
    let scale = |frequency| config.rope_scaling.map_or(frequency, |scaling| scaling.scale(frequency));
    decoder::rope::frequencies(config.dims.rope_theta, config.dims.head_dim, scale)
}

impl RopeScaling {
    /// Scales one frequency, in radians per position.
    fn scale(&self, frequency: f64) -> f64 {
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
