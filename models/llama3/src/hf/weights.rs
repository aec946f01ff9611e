//! Import: a Hugging Face checkpoint into a [`Llama`], with at most two tensors in host memory besides the model.

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use train::{ModulePath, Progress, TensorFiles, TrainError};

use crate::Error;
use crate::config::LlamaConfig;
use crate::model::Llama;
use crate::names;

impl<B: Backend> Llama<B> {
    /// Loads the model in folder `dir`: `config.json` with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards. F32, F16 and BF16 tensors become f32 parameters.
    ///
    /// # Errors
    /// Those of [`LlamaConfig::from_hf_dir`]; [`Error::TensorFiles`], [`Error::UnexpectedTensors`], [`TrainError::Execution`].
    pub fn load_hf(dir: impl AsRef<Path>, device: &B::Device) -> Result<Self, Error> {
        let config = LlamaConfig::from_hf_dir(&dir)?;
        Self::new(config, device)?.load_hf_weights(dir)
    }

    /// Replaces every parameter by the checkpoint's in folder `dir`, whose `config.json` is not read.
    ///
    /// # Errors
    /// As [`load_hf`](Self::load_hf), without those of the config; [`Error::MoeCheckpoint`].
    pub fn load_hf_weights(self, dir: impl AsRef<Path>) -> Result<Self, Error> {
        self.load_hf_weights_with(dir, &mut |_| ())
    }

    /// [`load_hf_weights`](Self::load_hf_weights), which says how far it is.
    ///
    /// # Errors
    /// As [`load_hf_weights`](Self::load_hf_weights).
    pub fn load_hf_weights_with(
        self,
        dir: impl AsRef<Path>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, Error> {
        if let Some(moe) = self.config().moe {
            return Err(Error::MoeCheckpoint { path: dir.as_ref().into(), num_experts: moe.num_experts });
        }
        let files = TensorFiles::open_folder(dir)?;
        let tied = self.config().tie_word_embeddings;
        let done = Progress { bytes: 0, total_bytes: files.num_bytes() };
        let path = ModulePath::default();
        let mut loader = Loader { files, path, used: BTreeSet::new(), done, progress, failure: None };
        let model = self.map(&mut loader);
        if let Some(failure) = loader.failure {
            return Err(failure);
        }
        let known = |name: &str| {
            let repeated_head = tied && name == names::hf_name("lm_head.weight");
            loader.used.contains(name) || repeated_head || names::is_ignored(name)
        };
        let unexpected: Vec<_> = loader.files.names().filter(|name| !known(name)).collect();
        if unexpected.is_empty() {
            return Ok(model);
        }
        Err(Error::UnexpectedTensors {
            names: unexpected.into_iter().map(String::from).collect(),
            path: loader.files.path().to_path_buf(),
        })
    }
}

/// Fills parameters in the order of the module tree, one tensor at a time.
struct Loader<'a> {
    files: TensorFiles,
    path: ModulePath,
    used: BTreeSet<String>,
    done: Progress,
    progress: &'a mut dyn FnMut(Progress),
    /// A mapper cannot return early: after the first failure the rest of the tree passes unchanged.
    failure: Option<Error>,
}

impl Loader<'_> {
    /// The parameter at the current path, in Burn's layout.
    ///
    /// Half precision widens on the host: a device may lack the dtype, or flush its subnormal numbers.
    fn load<B: Backend, const D: usize>(&mut self, shape: Shape, device: &B::Device) -> Result<Tensor<B, D>, Error> {
        let path = self.path.dotted();
        let name = names::hf_name(&path);
        let tensor = match *shape {
            [d_input, d_output] if names::is_linear(&path) => {
                let stored = [d_output, d_input];
                let values = self.files.expect(&name, &stored)?.to_f32()?;
                let tensor = Tensor::<B, 2>::from_data(TensorData::new(values, stored), (device, DType::F32));
                // Through one dimension, so that elements move and not only the strides.
                tensor.transpose().reshape([d_input * d_output]).reshape(shape)
            }
            _ => {
                let values = self.files.expect(&name, &shape)?.to_f32()?;
                Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
            }
        };
        // What is still on its way to the device is in host memory.
        B::sync(device)
            .map_err(|error| TrainError::Execution { doing: "loading the weights", reason: error.to_string() })?;
        self.done.bytes += self.files.get(&name).map_or(0, |stored| stored.num_bytes());
        (self.progress)(self.done);
        self.used.insert(name);
        Ok(tensor)
    }
}

impl<B: Backend> ModuleMapper<B> for Loader<'_> {
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
        match self.load(param.lazy_shape(), &param.lazy_device()) {
            Ok(tensor) => Param::initialized(param.id, tensor.require_grad()),
            Err(failure) => {
                self.failure = Some(failure);
                param
            }
        }
    }
}
