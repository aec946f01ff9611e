//! Import: a Hugging Face checkpoint into a model, with at most two tensors in host memory besides the model.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData};

use super::check::Checkpoint;
use super::names;
use crate::{JobError, ModulePath, Progress, TrainError};

impl Checkpoint {
    /// Replaces every parameter of `model`, which has the dimensions that the files were compared with.
    ///
    /// # Errors
    /// [`JobError::TensorFiles`], [`JobError::Float8Files`], [`TrainError::Execution`].
    pub(crate) fn load<B: Backend, M: Module<B>>(
        self,
        model: M,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M, JobError> {
        let done = self.progress();
        let mut loader = Loader { checkpoint: &self, path: ModulePath::default(), done, progress, failure: None };
        let model = model.map(&mut loader);
        loader.failure.map_or(Ok(model), Err)
    }
}

/// Fills parameters in the order of the module tree, one tensor at a time.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    path: ModulePath,
    done: Progress,
    progress: &'a mut dyn FnMut(Progress),
    /// A mapper cannot return early: after the first failure the rest of the tree passes unchanged.
    failure: Option<JobError>,
}

impl Loader<'_> {
    /// The parameter at the current path, in Burn's layout.
    ///
    /// Half precision widens on the host, and FP8 is decoded there: a device may lack the dtype, or flush its subnormal numbers.
    fn load<B: Backend, const D: usize>(&mut self, shape: Shape, device: &B::Device) -> Result<Tensor<B, D>, JobError> {
        let path = self.path.dotted();
        let name = names::hf_name(&path);
        let tensor = match *shape {
            [d_input, d_output] if names::is_linear(&path) => {
                let stored = [d_output, d_input];
                let values = self.checkpoint.linear_f32(&name, stored)?;
                let tensor = Tensor::<B, 2>::from_data(TensorData::new(values, stored), (device, DType::F32));
                // Through one dimension, so that elements move and not only the strides.
                tensor.transpose().reshape([d_input * d_output]).reshape(shape)
            }
            _ => {
                let values = self.checkpoint.files.expect(&name, &shape)?.to_f32()?;
                Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
            }
        };
        // What is still on its way to the device is in host memory.
        B::sync(device)
            .map_err(|error| TrainError::Execution { doing: "loading the weights", reason: error.to_string() })?;
        self.done.bytes += self.checkpoint.num_bytes(&name);
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
