//! Import: a Hugging Face checkpoint into a [`Llama`], with at most two tensors in host memory besides the model.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use train::{ModulePath, Progress, TensorFiles, TrainError};

use super::check::{Checkpoint, RepeatedHead};
use crate::Error;
use crate::config::LlamaConfig;
use crate::model::Llama;
use crate::names;

impl<B: Backend> Llama<B> {
    /// Loads the model in folder `dir`: `config.json` with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards. F32, F16 and BF16 tensors become f32 parameters.
    ///
    /// # Errors
    /// The errors of [`LlamaConfig::from_hf_dir`] and [`load_hf_weights`](Self::load_hf_weights).
    pub fn load_hf(dir: impl AsRef<Path>, device: &B::Device) -> Result<Self, Error> {
        let config = LlamaConfig::from_hf_dir(&dir)?;
        let checkpoint = Checkpoint::open(dir.as_ref(), &config, RepeatedHead::default())?;
        checkpoint.load(Self::new(config, device)?, &mut |_| ())
    }

    /// Replaces every parameter by the checkpoint's in folder `dir`, whose `config.json` is not read.
    ///
    /// # Errors
    /// [`Error::MoeCheckpoint`], [`Error::TensorFiles`], [`Error::UnexpectedTensors`], [`Error::TiedHead`], [`TrainError::Execution`].
    pub fn load_hf_weights(self, dir: impl AsRef<Path>) -> Result<Self, Error> {
        Checkpoint::open(dir.as_ref(), self.config(), RepeatedHead::default())?.load(self, &mut |_| ())
    }
}

impl Checkpoint {
    /// Replaces every parameter of `model`, which has the dimensions that the files were compared with.
    ///
    /// # Errors
    /// [`Error::TensorFiles`], [`TrainError::Execution`].
    pub(crate) fn load<B: Backend>(
        self,
        model: Llama<B>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Llama<B>, Error> {
        let done = self.progress();
        let mut loader = Loader { files: self.files, path: ModulePath::default(), done, progress, failure: None };
        let model = model.map(&mut loader);
        loader.failure.map_or(Ok(model), Err)
    }
}

/// Fills parameters in the order of the module tree, one tensor at a time.
struct Loader<'a> {
    files: TensorFiles,
    path: ModulePath,
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
