//! Loading a Hugging Face checkpoint into a [`Llama`].

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};

use crate::Error;
use crate::checkpoint::Checkpoint;
use crate::config::LlamaConfig;
use crate::model::Llama;
use crate::names::{self, ModulePath};

impl<B: Backend> Llama<B> {
    /// Loads the model in folder `dir`: `config.json` with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards. F32, F16 and BF16 tensors become f32 parameters.
    ///
    /// # Errors
    /// Those of [`LlamaConfig::from_hf_dir`]; [`Error::NoWeights`], [`Error::Checkpoint`], [`Error::MissingTensor`],
    /// [`Error::UnexpectedTensors`], [`Error::TensorShape`], [`Error::TensorDtype`].
    pub fn load_hf(dir: impl AsRef<Path>, device: &B::Device) -> Result<Self, Error> {
        let config = LlamaConfig::from_hf_dir(&dir)?;
        Self::new(config, device)?.load_hf_weights(dir)
    }

    /// Replaces every parameter by the checkpoint's in folder `dir`, whose `config.json` is not read.
    ///
    /// # Errors
    /// As [`load_hf`](Self::load_hf), without those of the config; [`Error::MoeCheckpoint`].
    pub fn load_hf_weights(self, dir: impl AsRef<Path>) -> Result<Self, Error> {
        if let Some(moe) = self.config().moe {
            return Err(Error::MoeCheckpoint { path: dir.as_ref().into(), num_experts: moe.num_experts });
        }
        let checkpoint = Checkpoint::open(dir.as_ref())?;
        let tied = self.config().tie_word_embeddings;
        let mut loader = Loader { checkpoint, path: ModulePath::default(), used: BTreeSet::new(), failure: None };
        let model = self.map(&mut loader);
        if let Some(failure) = loader.failure {
            return Err(failure);
        }
        let known = |name: &str| {
            let repeated_head = tied && name == names::hf_name("lm_head.weight");
            loader.used.contains(name) || repeated_head || names::is_ignored(name)
        };
        let unexpected: Vec<_> = loader.checkpoint.names().filter(|name| !known(name)).collect();
        if unexpected.is_empty() {
            return Ok(model);
        }
        Err(Error::UnexpectedTensors {
            names: unexpected.into_iter().map(String::from).collect(),
            path: loader.checkpoint.dir().to_path_buf(),
        })
    }
}

/// Fills parameters in the order of the module tree, so that one tensor is on the host at a time.
struct Loader {
    checkpoint: Checkpoint,
    path: ModulePath,
    used: BTreeSet<String>,
    /// A mapper cannot return early: after the first failure the rest of the tree passes unchanged.
    failure: Option<Error>,
}

impl Loader {
    /// The values of the parameter at the current path, in Burn's layout.
    fn read(&mut self, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let path = self.path.dotted();
        let name = names::hf_name(&path);
        let values = match *shape {
            [d_input, d_output] if names::is_linear(&path) => {
                let values = self.checkpoint.read(&name, &[d_output, d_input])?;
                transpose(&values, d_output, d_input)
            }
            _ => self.checkpoint.read(&name, shape)?,
        };
        self.used.insert(name);
        Ok(values)
    }
}

impl<B: Backend> ModuleMapper<B> for Loader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.failure.is_some() {
            return param;
        }
        // The shape and device of a lazy parameter, without drawing it first.
        let (shape, device) = (param.lazy_shape(), param.lazy_device());
        match self.read(shape.as_slice()) {
            Ok(values) => {
                let data = TensorData::new(values, shape);
                let tensor = Tensor::from_data(data, (&device, DType::F32));
                Param::initialized(param.id, tensor.require_grad())
            }
            Err(failure) => {
                self.failure = Some(failure);
                param
            }
        }
    }
}

/// `[rows, cols]` → `[cols, rows]`, in square tiles so that both sides stay in cache.
fn transpose(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    const TILE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for row0 in (0..rows).step_by(TILE) {
        for col0 in (0..cols).step_by(TILE) {
            for row in row0..rows.min(row0 + TILE) {
                for col in col0..cols.min(col0 + TILE) {
                    out[col * rows + row] = values[row * cols + col];
                }
            }
        }
    }
    out
}
