//! A module's parameters, AdamW's moments and master weights as named tensors in safetensors files.
//!
//! A parameter's name is its path in the module tree, `layers.0.mlp.up_proj.weight`. Moments append
//! `.moment_1` and `.moment_2`, master weights `.master`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::Float8Stack;
use burn_float8::shard_hooks::Path as ModulePath;
use float8_shard::Place;
use half::bf16;
use safetensors::Dtype;

use super::sharded_tensors::{Indexed, Parts, SavedTensors};
use crate::Ranks;
use crate::config::OptimizerSection;
use crate::optimizer::{AdamWStates, ParameterState};
use crate::progress::Progress;
use crate::tensor_files::{NewTensor, write_file};

/// Endings of moment names.
const MOMENTS: [&str; 2] = ["moment_1", "moment_2"];
/// Ending of master weight names.
const MASTER: &str = "master";

/// A tensor that is not finite after the last step.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "training diverged: {tensor} is not finite after step {step}, which is not saved. Earlier checkpoints are whole: `float8 resume` \
     continues from the newest, and may lower optimizer.lr"
)]
pub struct NotFinite {
    /// The parameter, moment or master.
    pub tensor: String,
    /// The step.
    pub step: usize,
}

/// Tensor that stays on its device until it is written; for a shard, this rank's rows. Later steps
/// do not change it.
pub(super) struct Pending {
    place: Place,
    dtype: Dtype,
    /// Reads the elements from the device, in the format of the file.
    read: Box<dyn Fn() -> Result<Vec<u8>> + Send>,
}

impl Pending {
    /// Tensor that belongs to a parameter.
    fn new<B: Backend, const D: usize>(place: Place, tensor: Tensor<B, D>) -> Self {
        let own = place.own_rows().len();
        let (dtype, stored) = match tensor.dtype() {
            DType::BF16 => (DType::BF16, Dtype::BF16),
            _ => (DType::F32, Dtype::F32),
        };
        let of = place.name.clone();
        let read = move || {
            let tensor = tensor.clone().cast(dtype);
            // Removes the padding of a shard.
            let padded = tensor.dims()[0];
            let tensor = if own < padded { tensor.narrow(0, 0, own) } else { tensor };
            match tensor.try_into_data() {
                Ok(data) => Ok(data.bytes.to_vec()),
                Err(error) => bail!("the device failed while {of} was read: {error}"),
            }
        };
        Self { place, dtype: stored, read: Box::new(read) }
    }

    /// Elements in the format of the file. If `finite_at` has a step, a value that is not finite is
    /// an error.
    fn bytes(&self, finite_at: Option<usize>) -> Result<Vec<u8>> {
        let bytes = (self.read)()?;
        let is_finite = match self.dtype {
            Dtype::BF16 => bytes.as_chunks().0.iter().all(|bytes| bf16::from_le_bytes(*bytes).is_finite()),
            _ => bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite()),
        };
        match finite_at {
            Some(step) if !is_finite => bail!(NotFinite { tensor: self.place.name.clone(), step }),
            _ => Ok(bytes),
        }
    }
}

/// Writes tensors with rows on this rank to `folder/file`, one at a time on the host. If
/// `finite_at` has a step, all values must be finite.
pub(super) fn write(folder: &Path, file: &str, tensors: &[Pending], finite_at: Option<usize>) -> Result<Parts> {
    let (mut new, mut written) = (vec![], Parts::new());
    for pending in tensors.iter().filter(|pending| !pending.place.own_rows().is_empty()) {
        let place = &pending.place;
        written.insert(place.name.clone(), Indexed::new(place, file));
        new.push(NewTensor::new(place.name.clone(), pending.dtype, place.own_shape(), move || {
            pending.bytes(finite_at)
        }));
    }
    let path = folder.join(file);
    write_file(&path, &new, None)?;
    Ok(written)
}

/// Place of a parameter that has these dimensions here.
fn place_of(parameter: ParamId, path: &str, dims: &[usize], ranks: Option<&Ranks>) -> Place {
    let known = ranks.and_then(|ranks| ranks.parameter(parameter)).cloned();
    known.unwrap_or_else(|| Place::whole(path, dims))
}

/// Trained parameters, moments and master weights that this process saves, and the steps of each
/// parameter.
pub(super) fn collect<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: &AdamWStates<B::InnerBackend>,
    ranks: Option<&Ranks>,
) -> (Vec<Pending>, Vec<Pending>, BTreeMap<String, usize>) {
    struct Collect<'a, B: AutodiffBackend> {
        path: ModulePath,
        ranks: Option<&'a Ranks>,
        states: &'a AdamWStates<B::InnerBackend>,
        parameters: Vec<Pending>,
        moments: Vec<Pending>,
        steps: BTreeMap<String, usize>,
    }
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Collect<'_, B> {
        tracks_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let (path, value) = (self.path.parameter_name(), param.val());
            let is_own = self.ranks.is_none_or(|ranks| ranks.saves(param.id));
            let place = place_of(param.id, &path, &value.dims(), self.ranks);
            // Frozen parameters stay in their source.
            if is_own && value.is_require_grad() {
                self.parameters.push(Pending::new(place.clone(), value.inner()));
            }
            let Some(ParameterState { time, moments, master }) = self.states.get::<D>(param.id) else { return };
            let tensors = MOMENTS.into_iter().zip(moments).chain(master.map(|master| (MASTER, master)));
            for (name, tensor) in tensors.filter(|_| is_own) {
                let place = Place { name: format!("{path}.{name}"), ..place.clone() };
                self.moments.push(Pending::new(place, tensor));
            }
            self.steps.insert(path, time);
        }
    }
    let (path, parameters, moments, steps) = Default::default();
    let mut collect = Collect::<B> { path, ranks, states: optimizer, parameters, moments, steps };
    module.visit(&mut collect);
    (collect.parameters, collect.moments, collect.steps)
}

/// Replaces every trained parameter of `module` by the saved one. Frozen parameters are not in a
/// checkpoint and stay unchanged. Every saved tensor must belong to a parameter, which detects a
/// checkpoint of another model.
pub(super) fn load_parameters<B: AutodiffBackend, M: Module<B>>(
    module: M,
    saved: SavedTensors,
    progress: &mut dyn FnMut(Progress),
) -> Result<M> {
    struct Load<'a> {
        saved: SavedTensors,
        path: ModulePath,
        done: Progress,
        progress: &'a mut dyn FnMut(Progress),
        /// First failure. A mapper cannot return early, so the rest of the tree is returned
        /// unchanged.
        failure: Result<()>,
    }
    impl<B: AutodiffBackend> ModuleMapper<B> for Load<'_> {
        tracks_path!();
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if self.failure.is_err() || param.is_initialized() && !param.is_require_grad() {
                return param;
            }
            // Shape and device of a lazy parameter, read without initializing it.
            let (shape, device) = (param.lazy_shape(), param.lazy_device());
            match self.saved.values(&Place::whole(self.path.parameter_name(), shape.to_vec())) {
                Ok(values) => {
                    self.done.bytes += size_of_val(&values[..]) as u64;
                    (self.progress)(self.done);
                    let tensor = Tensor::from_data(TensorData::new(values, shape), (&device, DType::F32));
                    Param::initialized(param.id, tensor.require_grad())
                }
                Err(failure) => {
                    self.failure = Err(failure);
                    param
                }
            }
        }
    }
    let done = Progress { bytes: 0, total_bytes: saved.num_bytes() };
    let mut load = Load { saved, path: ModulePath::default(), done, progress, failure: Ok(()) };
    let module = module.map(&mut load);
    load.failure.and_then(|()| load.saved.all_read())?;
    Ok(module)
}

/// Loads the moments and master weights that `section` needs, for the parameters of `module` that
/// have taken steps.
///
/// Of a shard, this rank's rows are loaded. A saved moment of another parameter is an error.
pub(super) fn load_moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    section: &OptimizerSection,
    saved: SavedTensors,
    steps: &BTreeMap<String, usize>,
    ranks: Option<&Ranks>,
) -> Result<AdamWStates<B::InnerBackend>> {
    struct Load<'a, B: AutodiffBackend> {
        saved: SavedTensors,
        path: ModulePath,
        steps: &'a BTreeMap<String, usize>,
        ranks: Option<&'a Ranks>,
        section: &'a OptimizerSection,
        states: AdamWStates<B::InnerBackend>,
        failure: Result<()>,
    }
    impl<B: AutodiffBackend + Float8Stack> Load<'_, B> {
        fn load<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) -> Result<()> {
            let path = self.path.parameter_name();
            let Some(&time) = self.steps.get(&path) else { return Ok(()) };
            let value = param.val();
            let (dims, device) = (value.dims(), value.device());
            let place = place_of(param.id, &path, &dims, self.ranks);
            let mut tensor = |name, dtype| -> Result<Tensor<B::InnerBackend, D>> {
                let mut values = self.saved.values(&Place { name: format!("{path}.{name}"), ..place.clone() })?;
                // Padding of a shard.
                values.resize(dims.iter().product(), 0.0);
                Ok(Tensor::from_data(TensorData::new(values, dims), (&device, dtype)))
            };
            let kept = self.section.state_dtype.dtype();
            let moments = [tensor(MOMENTS[0], kept)?, tensor(MOMENTS[1], kept)?];
            let has_master = self.section.master_weights && value.dtype() == DType::BF16;
            let master = has_master.then(|| tensor(MASTER, DType::F32)).transpose()?;
            self.states.insert(param.id, ParameterState { time, moments, master });
            Ok(())
        }
    }
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Load<'_, B> {
        tracks_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.failure.is_ok() {
                self.failure = self.load(param);
            }
        }
    }
    let (path, states) = Default::default();
    let mut load = Load::<B> { saved, path, steps, ranks, section, states, failure: Ok(()) };
    module.visit(&mut load);
    load.failure.and_then(|()| load.saved.all_read())?;
    Ok(load.states)
}
