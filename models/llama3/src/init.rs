//! Seeded weights: drawn on the host, one stream per parameter name, so that a seed means the same model on every
//! device.
//!
//! Linears are truncated normal with the standard deviations of torchtitan's `llama3`: 0.02, and
//! `0.02 / √(2 (layer + 1))` for `o_proj`, `up_proj` and `down_proj`, which keeps the residual stream from growing
//! with depth; the output layer `1/√H`. Embeddings are `N(0, 1)`, or `N(0, 1/H)` if they are the output layer too.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};

use crate::config::LlamaConfig;
use crate::model::Llama;
use crate::names::ModulePath;
use crate::rng::Rng;

impl<B: Backend> Llama<B> {
    /// Replaces every parameter by its initial value under `seed`.
    pub fn init_weights(self, seed: u64) -> Self {
        let config = self.config().clone();
        self.map(&mut Initialize { config, seed, path: ModulePath::default() })
    }
}

struct Initialize {
    config: LlamaConfig,
    seed: u64,
    path: ModulePath,
}

impl<B: Backend> ModuleMapper<B> for Initialize {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let path = self.path.dotted();
        // The shape and device of a lazy parameter, without drawing it first.
        let (shape, device) = (param.lazy_shape(), param.lazy_device());
        let values = match distribution(&self.config, &path) {
            None => vec![1.0; shape.num_elements()],
            Some((std, limit)) => {
                let mut rng = Rng::named(self.seed, &path);
                let draw = |_| (std * rng.truncated_normal(limit)) as f32;
                (0..shape.num_elements()).map(draw).collect()
            }
        };
        let tensor = Tensor::from_data(TensorData::new(values, shape), (&device, DType::F32));
        Param::initialized(param.id, tensor.require_grad())
    }
}

/// Standard deviation, and the number of them at which the normal is cut; none for norms, which start at 1.
fn distribution(config: &LlamaConfig, path: &str) -> Option<(f64, f64)> {
    const STD: f64 = 0.02;
    let width = (config.hidden_size as f64).sqrt();
    if path.ends_with(".gamma") {
        return None;
    }
    if path.starts_with("lm_head.") {
        return Some((width.recip(), 3.0));
    }
    if path.starts_with("embed_tokens.") {
        let std = if config.tie_word_embeddings { width.recip() } else { 1.0 };
        return Some((std, f64::INFINITY));
    }
    let deep = ["o_proj.weight", "up_proj.weight", "down_proj.weight"];
    let layer = path.split('.').nth(1).and_then(|index| index.parse::<usize>().ok());
    Some(match layer {
        Some(layer) if deep.iter().any(|name| path.ends_with(name)) => {
            // PyTorch's trunc_normal_ cuts at ±2 absolute, far beyond any draw.
            (STD / (2.0 * (layer + 1) as f64).sqrt(), f64::INFINITY)
        }
        _ => (STD, f64::INFINITY),
    })
}
