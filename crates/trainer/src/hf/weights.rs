//! Imports a Hugging Face checkpoint into a model, with at most two tensors in host memory in
//! addition to the model.

use std::collections::{HashMap, HashSet};

use anyhow::{Error, Result, anyhow};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Shape, TensorData};
use burn_float8::backend::{Cast, HostCodes};
use burn_float8::config::LinearInfo;
use burn_float8::shard_hooks::{Change, map_params};
use burn_float8::weights::{linear_infos, load_codes};
use burn_float8::{Float8Config, Float8Stack};

use super::checkpoint::Checkpoint;
use super::float8::quantize;
use super::names;
use super::parameters::transposed;
use crate::Progress;

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
        let codes =
            |linear: &LinearInfo| casts.get(&linear.name).map(|cast| self.linear_codes(linear, *cast)).transpose();
        let (model, loaded) =
            load_codes::<B, _>(model, float8, values, |linear| Ok(codes(linear)?)).map_err(Error::from_boxed)?;
        self.fill(model, loaded.layers.into_iter().collect(), progress)
    }

    /// Codes of a linear's weight: as stored, if they have the format and granularity of its cast.
    ///
    /// # Errors
    /// Invalid FP8 weights; a file that cannot be read; a weight that is not finite.
    pub(crate) fn linear_codes(&self, linear: &LinearInfo, cast: Cast) -> Result<HostCodes> {
        let (name, dims) = (names::weight_name(&linear.name), [linear.n, linear.k]);
        let is_cast = self.scheme(&linear.name).is_some_and(|scheme| scheme.is_cast_by(cast));
        match is_cast.then(|| self.codes(&name)).transpose()?.flatten() {
            Some(codes) => Ok(codes),
            None => quantize(&name, &self.linear_f32(&name, dims)?, dims, cast, None),
        }
    }

    /// Replaces every parameter except the weights of the linears `loaded`.
    fn fill<B: Backend, M: Module<B>>(
        self,
        model: M,
        loaded: HashSet<String>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<M> {
        let mut done = Progress { bytes: 0, total_bytes: self.files.num_bytes() };
        // A walk cannot stop early. After the first failure it changes nothing.
        let mut failure = None;
        let model = map_params::<B, M>(model, |param| {
            let path = param.name();
            if failure.is_some() || names::linear(&path).is_some_and(|linear| loaded.contains(linear)) {
                return Change::None;
            }
            match self.tensor::<B>(&path, param.shape.clone(), &param.device) {
                Ok(tensor) => {
                    done.bytes += self.num_bytes(&names::hf_name(&path));
                    progress(done);
                    Change::Loaded(tensor)
                }
                Err(error) => {
                    failure = Some(error);
                    Change::None
                }
            }
        });
        failure.map_or(Ok(model), Err)
    }

    /// Reads a parameter in Burn's layout.
    ///
    /// Half precision widens and FP8 is decoded on the host, since a device may lack the dtype or
    /// flush its subnormal numbers.
    pub(crate) fn tensor<B: Backend>(&self, path: &str, shape: Shape, device: &B::Device) -> Result<FloatTensor<B>> {
        let name = names::hf_name(path);
        let tensor = match *shape {
            [d_input, d_output] if names::is_linear(path) => {
                let stored = [d_output, d_input];
                transposed::<B>(self.linear_f32(&name, stored)?, stored, device).into_primitive().tensor()
            }
            _ => {
                let values = self.files.expect(&name, &shape)?.to_f32()?;
                B::float_from_data(TensorData::new(values, shape), device)
            }
        };
        // Values not yet copied to the device are still in host memory.
        B::sync(device).map_err(|error| anyhow!("the device failed while loading the weights: {error}"))?;
        Ok(tensor)
    }
}
