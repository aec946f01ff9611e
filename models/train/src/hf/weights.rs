//! Imports a Hugging Face checkpoint into a model, with at most two tensors in host memory in
//! addition to the model.

use std::collections::{HashMap, HashSet};

use anyhow::{Error, Result, anyhow};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use burn_float8::backend::HostCodes;
use burn_float8::config::LinearInfo;
use burn_float8::weights::{linear_infos, load_codes};
use burn_float8::{Float8Config, Float8Stack};

use super::checkpoint::Checkpoint;
use super::float8::quantize;
use super::names;
use crate::{ModulePath, Progress};

impl Checkpoint {
    /// Replaces every parameter of `model`, whose dimensions were compared with the files.
    ///
    /// # Errors
    /// Invalid FP8 weights; a file that cannot be read; a device that fails.
    pub(crate) fn load<B: Backend, M: Module<B>>(self, model: M, progress: &mut dyn FnMut(Progress)) -> Result<M> {
        self.fill(model, HashSet::new(), progress)
    }

    /// Loads as [`load`](Self::load) does, with FP8-only weights for the linears that `float8` has
    /// in FP8. They are made one after another. Weights stored with the format and granularity of
    /// their cast keep their codes; others are quantized. Weights decoded later have the dtype
    /// `values`.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load); a configuration that does not fit the model; a weight
    /// that is not finite.
    pub(crate) fn load_codes<B: Float8Stack, M: Module<B>>(
        self,
        model: M,
        float8: &Float8Config,
        values: DType,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M> {
        let linears = linear_infos::<B, _>(&model, float8);
        let policies = float8.resolve(&linears)?;
        let casts: HashMap<_, _> =
            linears.into_iter().zip(policies).filter_map(|(linear, p)| Some((linear.name, p.weight_cast()?))).collect();
        let codes = |linear: &LinearInfo| -> Result<Option<HostCodes>> {
            let Some(cast) = casts.get(&linear.name) else { return Ok(None) };
            let (name, dims) = (names::weight_name(&linear.name), [linear.n, linear.k]);
            if self.scheme(&linear.name).is_some_and(|scheme| scheme.is_cast_by(*cast)) {
                return self.codes(&name);
            }
            Ok(Some(quantize(&name, &self.linear_f32(&name, dims)?, dims, *cast, None)?))
        };
        let (model, loaded) =
            load_codes::<B, _>(model, float8, values, |linear| Ok(codes(linear)?)).map_err(Error::from_boxed)?;
        self.fill(model, loaded.layers.into_iter().collect(), progress)
    }

    /// Replaces every parameter except the weights of the linears `loaded`.
    fn fill<B: Backend, M: Module<B>>(
        self,
        model: M,
        loaded: HashSet<String>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M> {
        let done = self.progress();
        let path = ModulePath::default();
        let mut loader = Loader { checkpoint: &self, loaded, path, done, progress, failure: None };
        let model = model.map(&mut loader);
        loader.failure.map_or(Ok(model), Err)
    }
}

/// Fills parameters in the order of the module tree, one tensor at a time.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    /// Linears whose weights are loaded already.
    loaded: HashSet<String>,
    path: ModulePath,
    done: Progress,
    progress: &'a mut dyn FnMut(Progress),
    /// A mapper cannot return early. After the first failure the rest of the tree passes unchanged.
    failure: Option<Error>,
}

impl Loader<'_> {
    /// Reads the parameter at the current path, in Burn's layout.
    ///
    /// Half precision widens and FP8 is decoded on the host, since a device may lack the dtype or
    /// flush its subnormal numbers.
    fn load<B: Backend, const D: usize>(&mut self, shape: Shape, device: &B::Device) -> Result<Tensor<B, D>> {
        let path = self.path.dotted();
        let name = names::hf_name(&path);
        let tensor = match *shape {
            [d_input, d_output] if names::is_linear(&path) => {
                let stored = [d_output, d_input];
                let values = self.checkpoint.linear_f32(&name, stored)?;
                let tensor = Tensor::<B, 2>::from_data(TensorData::new(values, stored), (device, DType::F32));
                // Through one dimension, so that the elements move and not only the strides.
                tensor.transpose().reshape([d_input * d_output]).reshape(shape)
            }
            _ => {
                let values = self.checkpoint.files.expect(&name, &shape)?.to_f32()?;
                Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
            }
        };
        // Values not yet copied to the device are still in host memory.
        B::sync(device).map_err(|error| anyhow!("the device failed while loading the weights: {error}"))?;
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
        let path = self.path.dotted();
        if self.failure.is_some() || names::linear(&path).is_some_and(|linear| self.loaded.contains(linear)) {
            return param;
        }
        // Shape and device of a lazy parameter, without initializing it first.
        match self.load(param.lazy_shape(), &param.lazy_device()) {
            Ok(tensor) => Param::initialized(param.id, tensor.require_grad()),
            Err(failure) => {
                self.failure = Some(failure);
                param
            }
        }
    }
}
