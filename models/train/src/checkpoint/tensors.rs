//! A module's parameters, AdamW's moments and master weights as named tensors in safetensors files.
//!
//! A parameter's name is its path in the module tree, `layers.0.mlp.up_proj.weight`. Moments append
//! `.moment_1` and `.moment_2`, master weights `.master`.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::Float8Stack;
use float8_shard::Sharded;
use half::bf16;
use safetensors::Dtype;

use super::CheckpointError;
use super::sharded_tensors::{Rows, SavedTensors};
use crate::ModulePath;
use crate::Ranks;
use crate::config::OptimizerSection;
use crate::optimizer::{AdamWStates, ParameterState};
use crate::progress::Progress;
use crate::tensor_files::{NewTensor, write_file};

/// Endings of moment names.
const MOMENTS: [&str; 2] = ["moment_1", "moment_2"];
/// Ending of master weight names.
const MASTER: &str = "master";

/// Reads a tensor from its device.
type Read = Box<dyn Fn() -> Result<TensorData, String> + Send>;

/// Tensor that stays on its device until it is written; for a shard, this rank's rows. Later steps
/// do not change it.
pub(super) struct Pending {
    name: String,
    /// Shape of the whole tensor.
    shape: Vec<usize>,
    rows: Range<usize>,
    dtype: Dtype,
    read: Read,
}

impl Pending {
    /// Tensor that belongs to a parameter.
    fn new<B: AutodiffBackend + Float8Stack, const D: usize>(
        name: String,
        param: &Tensor<B, D>,
        tensor: Tensor<B::InnerBackend, D>,
    ) -> Self {
        let (shape, rows) = (Sharded::whole_shape(param), Sharded::rows(param));
        let own = rows.len();
        let (dtype, stored) = match tensor.dtype() {
            DType::BF16 => (DType::BF16, Dtype::BF16),
            _ => (DType::F32, Dtype::F32),
        };
        let read = move || {
            let tensor = tensor.clone().cast(dtype);
            // Removes the padding of a shard.
            let padded = tensor.dims()[0];
            let tensor = if own < padded { tensor.narrow(0, 0, own) } else { tensor };
            tensor.try_into_data().map_err(|error| error.to_string())
        };
        Self { name, shape, rows, dtype: stored, read: Box::new(read) }
    }

    /// Elements in the format of the file. If `finite_at` has a step, a value that is not finite is
    /// an error.
    fn bytes(&self, finite_at: Option<usize>) -> Result<Vec<u8>, CheckpointError> {
        let tensor = || self.name.clone();
        let data = (self.read)().map_err(|reason| CheckpointError::Device { tensor: tensor(), reason })?;
        let bytes = data.bytes.to_vec();
        let is_finite = match self.dtype {
            Dtype::BF16 => bytes.as_chunks().0.iter().all(|bytes| bf16::from_le_bytes(*bytes).is_finite()),
            _ => bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite()),
        };
        match finite_at {
            Some(step) if !is_finite => Err(CheckpointError::NotFinite { tensor: tensor(), step }),
            _ => Ok(bytes),
        }
    }
}

/// Writes tensors with rows on this rank to `folder/file`, one at a time on the host. If
/// `finite_at` has a step, all values must be finite.
pub(super) fn write(
    folder: &Path,
    file: &str,
    tensors: &[Pending],
    finite_at: Option<usize>,
) -> Result<Vec<Rows>, CheckpointError> {
    let (mut new, mut written) = (vec![], vec![]);
    for pending in tensors.iter().filter(|pending| !pending.rows.is_empty()) {
        let (name, whole, rows) = (pending.name.clone(), pending.shape.clone(), pending.rows.clone());
        let shape = [&[rows.len()], &whole[1..]].concat();
        written.push(Rows { name: name.clone(), shape: whole, rows, file: file.into() });
        new.push(NewTensor { name, dtype: pending.dtype, shape, bytes: Box::new(move || pending.bytes(finite_at)) });
    }
    write_file(&folder.join(file), &new, None)?;
    Ok(written)
}

/// Whether this process saves a parameter's tensors. The first rank saves replicated ones.
fn is_own<B: Float8Stack, const D: usize>(param: &Tensor<B, D>, ranks: Option<&Ranks>) -> bool {
    ranks.is_none_or(Ranks::is_first) || Sharded::is_shard(param)
}

/// Trained parameters of a module that this process saves.
pub(super) fn parameters<B: AutodiffBackend + Float8Stack, M: Module<B>>(
    module: &M,
    ranks: Option<&Ranks>,
) -> Vec<Pending> {
    struct Collect<'a>(ModulePath, Option<&'a Ranks>, Vec<Pending>);
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Collect<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            // Frozen parameters stay in their source.
            if value.is_require_grad() && is_own(&value, self.1) {
                self.2.push(Pending::new(self.0.dotted(), &value, value.clone().inner()));
            }
        }
    }
    let mut collect = Collect(ModulePath::default(), ranks, Vec::new());
    module.visit(&mut collect);
    collect.2
}

/// Moments and master weights that this process saves, and the steps of each parameter.
pub(super) fn moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: &AdamWStates<B::InnerBackend>,
    ranks: Option<&Ranks>,
) -> (Vec<Pending>, BTreeMap<String, usize>) {
    struct Collect<'a, B: AutodiffBackend> {
        path: ModulePath,
        ranks: Option<&'a Ranks>,
        states: &'a AdamWStates<B::InnerBackend>,
        moments: Vec<Pending>,
        steps: BTreeMap<String, usize>,
    }
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Collect<'_, B> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(ParameterState { time, moments, master }) = self.states.get::<D>(param.id) else { return };
            let path = self.path.dotted();
            let value = param.val();
            let tensors = MOMENTS.into_iter().zip(moments).chain(master.map(|master| (MASTER, master)));
            for (name, moment) in tensors.filter(|_| is_own(&value, self.ranks)) {
                self.moments.push(Pending::new(format!("{path}.{name}"), &value, moment));
            }
            self.steps.insert(path, time);
        }
    }
    let (path, moments, steps) = Default::default();
    let mut collect = Collect::<B> { path, ranks, states: optimizer, moments, steps };
    module.visit(&mut collect);
    (collect.moments, collect.steps)
}

/// Replaces every trained parameter of `module` by the saved one. Frozen parameters are not in a
/// checkpoint and stay unchanged. Every saved tensor must belong to a parameter, which detects a
/// checkpoint of another model.
pub(super) fn load_parameters<B: AutodiffBackend, M: Module<B>>(
    module: M,
    saved: SavedTensors,
    progress: &mut dyn FnMut(Progress),
) -> Result<M, CheckpointError> {
    struct Load<'a> {
        saved: SavedTensors,
        path: ModulePath,
        loaded: HashSet<String>,
        done: Progress,
        progress: &'a mut dyn FnMut(Progress),
        /// First failure. A mapper cannot return early, so the rest of the tree is returned
        /// unchanged.
        failure: Option<CheckpointError>,
    }
    impl<B: AutodiffBackend> ModuleMapper<B> for Load<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if self.failure.is_some() || param.is_initialized() && !param.is_require_grad() {
                return param;
            }
            // Shape and device of a lazy parameter, read without initializing it.
            let (shape, device) = (param.lazy_shape(), param.lazy_device());
            let path = self.path.dotted();
            match self.saved.rows(&path, &shape, 0..shape[0]) {
                Ok(values) => {
                    self.loaded.insert(path);
                    self.done.bytes += size_of_val(&values[..]) as u64;
                    (self.progress)(self.done);
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
    let done = Progress { bytes: 0, total_bytes: saved.num_bytes() };
    let (path, loaded) = (ModulePath::default(), HashSet::new());
    let mut load = Load { saved, path, loaded, done, progress, failure: None };
    let module = module.map(&mut load);
    load.failure.map_or(Ok(()), Err)?;
    load.saved.only(&load.loaded)?;
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
) -> Result<AdamWStates<B::InnerBackend>, CheckpointError> {
    struct Load<'a, B: AutodiffBackend> {
        saved: SavedTensors,
        path: ModulePath,
        steps: &'a BTreeMap<String, usize>,
        section: &'a OptimizerSection,
        loaded: HashSet<String>,
        states: AdamWStates<B::InnerBackend>,
        failure: Option<CheckpointError>,
    }
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Load<'_, B> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let path = self.path.dotted();
            let (None, Some(&time)) = (&self.failure, self.steps.get(&path)) else { return };
            let value = param.val();
            let (whole, rows, dims, device) =
                (Sharded::whole_shape(&value), Sharded::rows(&value), value.dims(), value.device());
            let mut tensor = |name, dtype| {
                let name = format!("{path}.{name}");
                let mut values = self.saved.rows(&name, &whole, rows.clone())?;
                self.loaded.insert(name);
                // Padding of a shard.
                values.resize(dims.iter().product(), 0.0);
                let data = TensorData::new(values, dims);
                Ok::<_, CheckpointError>(Tensor::<B::InnerBackend, D>::from_data(data, (&device, dtype)))
            };
            let has_master = self.section.master_weights && value.dtype() == DType::BF16;
            let mut state = || {
                let kept = self.section.state_dtype.dtype();
                let moments = [tensor(MOMENTS[0], kept)?, tensor(MOMENTS[1], kept)?];
                let master = has_master.then(|| tensor(MASTER, DType::F32)).transpose()?;
                Ok(ParameterState { time, moments, master })
            };
            match state() {
                Ok(state) => self.states.insert(param.id, state),
                Err(failure) => self.failure = Some(failure),
            }
        }
    }
    let (path, loaded, states) = Default::default();
    let mut load = Load::<B> { saved, path, steps, section, loaded, states, failure: None };
    module.visit(&mut load);
    load.failure.map_or(Ok(()), Err)?;
    load.saved.only(&load.loaded)?;
    Ok(load.states)
}
