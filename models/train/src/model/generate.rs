//! Text generation: greedy or by temperature, with a cache of keys and values.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use super::{CausalLm, ModelConfig};
use crate::config::ConfigError;
use crate::rng::Rng;
use crate::{JobError, TrainError};

/// How to choose the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The likeliest token; the first of several.
    Greedy,
    /// A token drawn from `softmax(logits / temperature)`.
    Temperature {
        /// Above 0; 1 is the model's own distribution.
        temperature: f64,
        /// Decides what is drawn.
        seed: u64,
    },
}

/// Gives `take` the tokens that follow `prompt`, as [`CausalLmExt::generate_each`](super::CausalLmExt::generate_each) says.
pub(super) fn generate_each<B: Backend, M: CausalLm<B>>(
    model: &M,
    prompt: &[u32],
    max_new_tokens: usize,
    num_choices: usize,
    stop: &[u32],
    sampling: Sampling,
    mut take: impl FnMut(u32) -> Result<(), JobError>,
) -> Result<(), JobError> {
    let vocab_size = model.config().size().vocab_size;
    if prompt.is_empty() || num_choices == 0 {
        let key = if prompt.is_empty() { "prompt" } else { "num_choices" };
        let (value, reason) = ("empty".into(), "there is nothing to go by".into());
        return Err(ConfigError::Value { key, value, reason }.into());
    }
    let needed = prompt.iter().map(|&token| token as usize + 1).fold(num_choices, usize::max);
    if needed > vocab_size {
        return Err(JobError::Vocabulary { vocab_size, needed });
    }

    let device = model.devices().remove(0);
    let mut rng = match sampling {
        Sampling::Greedy => Rng::new(0),
        Sampling::Temperature { seed, .. } => Rng::named(seed, "generate"),
    };
    let mut cache = model.new_cache();
    let mut input = prompt.to_vec();
    for _ in 0..max_new_tokens {
        let len = input.len();
        let values: Vec<i32> = input.iter().map(|&token| token as i32).collect();
        let input_ids = Tensor::<B, 2, Int>::from_data(TensorData::new(values, [1, len]), &device);
        let logits = model.forward_cached(input_ids, &mut cache);
        let data = logits
            .try_into_data()
            .map_err(|error| TrainError::Execution { doing: "generating", reason: error.to_string() })?;
        let logits: Vec<f32> = data.iter().take(num_choices).collect();
        let token = match sampling {
            Sampling::Greedy => argmax(&logits),
            Sampling::Temperature { temperature, .. } => draw(&logits, temperature, &mut rng),
        };
        let token = token as u32;
        if stop.contains(&token) {
            break;
        }
        take(token)?;
        input = vec![token];
    }
    Ok(())
}

fn argmax(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn draw(logits: &[f32], temperature: f64, rng: &mut Rng) -> usize {
    let max = f64::from(logits[argmax(logits)]);
    let weights: Vec<f64> = logits.iter().map(|&logit| ((f64::from(logit) - max) / temperature).exp()).collect();
    let mut left = rng.uniform() * weights.iter().sum::<f64>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Rounding left a crumb, or the logits are NaN.
    argmax(logits)
}

#[cfg(test)]
mod tests {
    use super::argmax;

    #[test]
    fn the_first_of_equal_logits_is_taken() {
        assert_eq!(argmax(&[1.0, 3.0, -2.0, 3.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), 0);
    }
}
