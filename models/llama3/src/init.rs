//! Seeded weights: drawn on the host, one stream per parameter name, so that a seed means the same model on every
//! device.
//!
//! ```text
//! linears     N(0, 1/d_in), cut at 3 standard deviations; o_proj, up_proj and down_proj N(0, 1/d_in · 1/(2 (layer + 1)))
//! embedding   N(0, 1), or N(0, 1/H) if it is the output layer too
//! experts     as linears, each of them
//! norms       1
//! ```
//! The division by depth is torchtitan's: the residual stream then does not grow with it. torchtitan's constant
//! standard deviation of 0.02 is about 1/√d_in for the 8B model and too small for narrow ones.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use train::rng::Rng;
use train::{ModulePath, Progress};

use crate::config::LlamaConfig;
use crate::model::Llama;

impl<B: Backend> Llama<B> {
    /// Replaces every parameter by its initial value under `seed`.
    pub fn init_weights(self, seed: u64) -> Self {
        self.init_weights_with(seed, &mut |_| ())
    }

    /// [`init_weights`](Self::init_weights), which says how far it is.
    pub fn init_weights_with(self, seed: u64, progress: &mut dyn FnMut(Progress)) -> Self {
        let config = self.config().clone();
        let done = Progress { bytes: 0, total_bytes: 4 * config.num_params() as u64 };
        self.map(&mut Initialize { config, seed, path: ModulePath::default(), done, progress })
    }
}

struct Initialize<'a> {
    config: LlamaConfig,
    seed: u64,
    path: ModulePath,
    done: Progress,
    progress: &'a mut dyn FnMut(Progress),
}

impl<B: Backend> ModuleMapper<B> for Initialize<'_> {
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
        // d_in is last but one, of experts too; a norm has one dimension.
        let d_input = if D >= 2 { shape[D - 2] } else { 1 };
        let values = match deviation(&self.config, &path, d_input) {
            None => vec![1.0; shape.num_elements()],
            Some(std) => {
                let rng = Rng::named(self.seed, &path);
                rng.truncated_normals(3.0, shape.num_elements(), |value| (std * value) as f32)
            }
        };
        self.done.bytes += size_of_val(&values[..]) as u64;
        (self.progress)(self.done);
        let tensor = Tensor::from_data(TensorData::new(values, shape), (&device, DType::F32));
        Param::initialized(param.id, tensor.require_grad())
    }
}

/// Standard deviation; none for norms, which start at 1.
fn deviation(config: &LlamaConfig, path: &str, d_input: usize) -> Option<f64> {
    if path.ends_with(".gamma") {
        return None;
    }
    if path.starts_with("embed_tokens.") {
        let tied = (config.hidden_size as f64).sqrt().recip();
        return Some(if config.tie_word_embeddings { tied } else { 1.0 });
    }
    let std = (d_input as f64).sqrt().recip();
    let deep = ["o_proj.weight", "up_proj.weight", "down_proj.weight"];
    let layer = path.split('.').nth(1).and_then(|index| index.parse::<usize>().ok());
    Some(match layer {
        Some(layer) if deep.iter().any(|name| path.ends_with(name)) => std / (2.0 * (layer + 1) as f64).sqrt(),
        _ => std,
    })
}
