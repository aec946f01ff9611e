//! Imports a Hugging Face checkpoint into a model, with at most two tensors in host memory in
//! addition to the model.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use burn_float8::backend::{Cast, HostCodes};
use burn_float8::config::{Format, LinearInfo};
use burn_float8::weights::{linear_infos, load_codes};
use burn_float8::{Float8Config, Float8Stack, Recipe};

use super::check::Checkpoint;
use super::float8::{Float8Weight, Scheme, quantize};
use super::float8_export::linear_info;
use super::names;
use crate::error::device_failed;
use crate::model::ModelConfig;
use crate::{JobError, ModulePath, Progress};

impl Checkpoint {
    /// Replaces every parameter of `model`, whose dimensions were compared with the files.
    ///
    /// # Errors
    /// [`JobError::TensorFiles`], [`JobError::Float8Files`], [`TrainError::Execution`].
    pub(crate) fn load<B: Backend, M: Module<B>>(
        self,
        model: M,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M, JobError> {
        self.fill(model, HashSet::new(), progress)
    }

    /// Loads as [`load`](Self::load) does, with FP8-only weights for the linears that `float8` has
    /// in FP8. They are made one after another. Weights stored with the format and granularity of
    /// their cast keep their codes; others are quantized. Weights decoded later have the dtype
    /// `values`.
    ///
    /// # Errors
    /// Same as [`load`](Self::load); [`JobError::Float8`] for a configuration that does not fit the
    /// model; [`Float8FilesError::NotFinite`](super::float8::Float8FilesError).
    pub(crate) fn load_codes<B: Float8Stack, M: Module<B>>(
        self,
        model: M,
        float8: &Float8Config,
        values: DType,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M, JobError> {
        let linears = linear_infos::<B, _>(&model, float8);
        let policies = float8.resolve(&linears)?;
        let casts: HashMap<_, _> =
            linears.into_iter().zip(policies).filter_map(|(linear, p)| Some((linear.name, p.weight_cast()?))).collect();
        let codes = |linear: &LinearInfo| -> Result<Option<HostCodes>, JobError> {
            let Some(cast) = casts.get(&linear.name) else { return Ok(None) };
            let (name, dims) = (names::weight_name(&linear.name), [linear.n, linear.k]);
            match self.float8_weight(&name)? {
                Some(Float8Weight { codes, .. })
                    if (codes.format, codes.granularity) == (cast.format, cast.granularity) =>
                {
                    Ok(Some(codes))
                }
                _ => Ok(Some(quantize(&name, &self.linear_f32(&name, dims)?, dims, *cast, None)?)),
            }
        };
        let (model, loaded) =
            load_codes::<B, _>(model, float8, values, |linear| Ok(codes(linear)?)).map_err(JobError::from_boxed)?;
        self.fill(model, loaded.layers.into_iter().collect(), progress)
    }

    /// Names of the linears with FP8 weights, and of the ones to requantize. `float8` casts the
    /// latter with another format or granularity than the files have, so their codes cannot be
    /// kept.
    ///
    /// # Errors
    /// [`JobError::Float8`] for a configuration that does not fit the model; the errors of
    /// [`ModelConfig::hf_tensors`].
    pub(crate) fn cast_anew<C: ModelConfig>(
        &self,
        config: &C,
        folder: &Path,
        float8: &Float8Config,
    ) -> Result<[Vec<String>; 2], JobError> {
        let tensors = config.hf_tensors(folder)?;
        let linears: Vec<_> = tensors.iter().filter_map(|(path, shape)| linear_info(path, shape)).collect();
        let policies = float8.resolve(&linears)?;
        let (mut found, mut anew) = (vec![], vec![]);
        for (LinearInfo { name, .. }, policy) in linears.into_iter().zip(policies) {
            let Some(scheme) = self.float8.scheme(&names::weight_name(&name)) else { continue };
            let reads = |cast: Cast| (cast.format, cast.granularity) == (Format::E4m3, scheme.granularity);
            if policy.weight_cast().is_some_and(|cast| !reads(cast)) {
                anew.push(name.clone());
            }
            found.push(name);
        }
        Ok([found, anew])
    }

    /// Recipe of the FP8 weights. `None` if no weight is in FP8, or if they have different recipes.
    pub(crate) fn recipe(&self) -> Option<Recipe> {
        self.float8.recipe()
    }

    /// First weight whose inputs are not cast as in [`recipe`](Self::recipe), with its scheme.
    pub(crate) fn other_inputs(&self) -> Option<(&str, Scheme)> {
        self.float8.other_inputs()
    }

    /// Input scales of linears in the files, by the linears' paths.
    ///
    /// # Errors
    /// [`JobError::Float8Files`], [`JobError::TensorFiles`].
    pub(crate) fn input_scales<C: ModelConfig>(
        &self,
        config: &C,
        folder: &Path,
    ) -> Result<Vec<(String, f32)>, JobError> {
        let tensors = config.hf_tensors(folder)?;
        let linears = tensors.iter().filter_map(|(path, _)| names::linear(path));
        let scale = |linear: &str| -> Result<Option<(String, f32)>, JobError> {
            let scale = self.float8.input_scale(&self.files, &names::weight_name(linear))?;
            Ok(scale.map(|scale| (linear.to_string(), scale)))
        };
        linears.filter_map(|linear| scale(linear).transpose()).collect()
    }

    /// Replaces every parameter except the weights of the linears `loaded`.
    fn fill<B: Backend, M: Module<B>>(
        self,
        model: M,
        loaded: HashSet<String>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M, JobError> {
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
    failure: Option<JobError>,
}

impl Loader<'_> {
    /// Reads the parameter at the current path, in Burn's layout.
    ///
    /// Half precision widens and FP8 is decoded on the host, since a device may lack the dtype or
    /// flush its subnormal numbers.
    fn load<B: Backend, const D: usize>(&mut self, shape: Shape, device: &B::Device) -> Result<Tensor<B, D>, JobError> {
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
        B::sync(device).map_err(|error| device_failed("loading the weights", &error))?;
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
