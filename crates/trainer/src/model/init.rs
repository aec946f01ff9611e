//! Seeded initial weights: drawn on the host, one stream per parameter name, so a seed gives the
//! same model on every device.
//!
//! ```text
//! linears     N(0, 1/d_in), cut at 3 standard deviations
//!             o_proj, up_proj and down_proj: N(0, 1/d_in · 1/(2 (layer + 1)))
//! embedding   N(0, 1), or N(0, 1/H) if it is the output layer too
//! experts     as linears, each of them
//! norms       1
//! biases      0
//! ```
//! The division by depth is torchtitan's and keeps the residual stream from growing with depth.
//! torchtitan's constant standard deviation of 0.02 is about 1/√d_in for the 8B model and too small
//! for narrow ones.

use burn::tensor::backend::Backend;
use burn::tensor::{Shape, TensorData};
use burn_float8::shard_hooks::{Change, map_params};

use super::{CausalLm, ModelConfig, ModelSize};
use crate::Progress;
use crate::rng::Rng;

/// Replaces every parameter by its initial value under `seed`, with progress reports.
pub(super) fn init_weights<B: Backend, M: CausalLm<B>>(model: M, seed: u64, progress: &mut dyn FnMut(Progress)) -> M {
    let config = model.config().clone();
    let mut done = Progress { bytes: 0, total_bytes: 4 * config.size().num_params as u64 };
    map_params::<B, M>(model, |param| {
        let values = initial_values(&config, seed, &param.name(), &param.shape);
        done.bytes += size_of_val(&values[..]) as u64;
        progress(done);
        Change::Loaded(B::float_from_data(TensorData::new(values, param.shape.clone()), &param.device))
    })
}

/// Initial values of a parameter under `seed`.
pub(crate) fn initial_values(config: &impl ModelConfig, seed: u64, path: &str, shape: &Shape) -> Vec<f32> {
    // d_in is the second-last dimension, for experts too. A norm has one dimension.
    let d_input = if let [.., d_input, _] = shape[..] { d_input } else { 1 };
    match config.initial_deviation(path, d_input) {
        None => vec![1.0; shape.num_elements()],
        Some(std) => {
            let rng = Rng::named(seed, path);
            rng.truncated_normals(3.0, shape.num_elements(), &|value| (std * value) as f32)
        }
    }
}

/// Standard deviation as in the module's table; `None` for norms, which start at 1.
pub(super) fn deviation(size: &ModelSize, path: &str, d_input: usize) -> Option<f64> {
    if path.ends_with(".gamma") {
        return None;
    }
    if path.ends_with(".bias") {
        return Some(0.0);
    }
    if path.starts_with("embed_tokens.") {
        let tied = (size.hidden_size as f64).sqrt().recip();
        return Some(if size.tie_word_embeddings { tied } else { 1.0 });
    }
    let std = (d_input as f64).sqrt().recip();
    let deep = ["o_proj.weight", "up_proj.weight", "down_proj.weight"];
    let layer = path.split('.').nth(1).and_then(|index| index.parse::<usize>().ok());
    Some(match layer {
        Some(layer) if deep.iter().any(|name| path.ends_with(name)) => std / (2.0 * (layer + 1) as f64).sqrt(),
        _ => std,
    })
}
