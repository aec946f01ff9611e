//! A module's parameters and AdamW's moments as named tensors: to a safetensors file and back.
//!
//! Names are paths in the module tree, `layers.0.mlp.up_proj.weight`, and of moments `layers.0.mlp.up_proj.weight.moment_1`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::Float8Stack;
use float8_shard::Sharded;
use safetensors::Dtype;

use super::CheckpointError;
use super::parts::{Rows, SavedTensors};
use crate::ModulePath;
use crate::Ranks;
use crate::optimizer::ModuleAdamW;
use crate::progress::Progress;
use crate::tensor_files::{NewTensor, write_file};

/// Reads a tensor from its device.
type Read = Box<dyn Fn() -> Result<TensorData, String> + Send>;

/// A tensor that stays on its device until it is written, of a shard this rank's rows. It is not changed by steps that are made
/// meanwhile.
pub(super) struct Pending {
    name: String,
    /// The shape of the whole tensor.
    shape: Vec<usize>,
    rows: Range<usize>,
    dtype: Dtype,
    read: Read,
}

impl Pending {
    /// What belongs to a parameter.
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
            // Without the padding of a shard.
            let padded = tensor.dims()[0];
            let tensor = if own < padded { tensor.narrow(0, 0, own) } else { tensor };
            tensor.try_into_data().map_err(|error| error.to_string())
        };
        Self { name, shape, rows, dtype: stored, read: Box::new(read) }
    }

    fn bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let data = (self.read)().map_err(|reason| CheckpointError::Device { tensor: self.name.clone(), reason })?;
        Ok(data.bytes.to_vec())
    }
}

/// Writes tensors to `folder/file`, one on the host at a time; those that have rows here.
pub(super) fn write(folder: &Path, file: &str, tensors: &[Pending]) -> Result<Vec<Rows>, CheckpointError> {
    let (mut new, mut written) = (vec![], vec![]);
    for pending in tensors.iter().filter(|pending| !pending.rows.is_empty()) {
        let (name, whole, rows) = (pending.name.clone(), pending.shape.clone(), pending.rows.clone());
        let shape = [&[rows.len()], &whole[1..]].concat();
        written.push(Rows { name: name.clone(), shape: whole, rows, file: file.into() });
        new.push(NewTensor { name, dtype: pending.dtype, shape, bytes: Box::new(|| pending.bytes()) });
    }
    write_file(&folder.join(file), &new, None)?;
    Ok(written)
}

/// Whether this process saves what belongs to a parameter: what every rank has whole, the first does.
fn is_own<B: Float8Stack, const D: usize>(param: &Tensor<B, D>, ranks: Option<&Ranks>) -> bool {
    ranks.is_none_or(Ranks::is_first) || Sharded::is_shard(param)
}

/// The parameters of a module that this process saves: those that are trained.
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
            // What is not trained is where it came from.
            if value.is_require_grad() && is_own(&value, self.1) {
                self.2.push(Pending::new(self.0.dotted(), &value, value.clone().inner()));
            }
        }
    }
    let mut collect = Collect(ModulePath::default(), ranks, Vec::new());
    module.visit(&mut collect);
    collect.2
}

/// The moments of a module's parameters that this process saves, and how many steps each parameter has taken.
pub(super) fn moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: &ModuleAdamW<M, B>,
    ranks: Option<&Ranks>,
) -> (Vec<Pending>, BTreeMap<String, usize>) {
    struct Collect<'a, B: AutodiffBackend> {
        path: ModulePath,
        ranks: Option<&'a Ranks>,
        records: HashMap<ParamId, AdaptorRecord<AdamW, B>>,
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
            let Some(record) = self.records.remove(&param.id) else { return };
            let state: AdamWState<B::InnerBackend, D> = record.into_state();
            let AdaptiveMomentumState { time, moment_1, moment_2, .. } = state.momentum;
            let path = self.path.dotted();
            let value = param.val();
            let moments = [("moment_1", moment_1), ("moment_2", moment_2)];
            for (name, moment) in moments.into_iter().filter(|_| is_own(&value, self.ranks)) {
                self.moments.push(Pending::new(format!("{path}.{name}"), &value, moment));
            }
            self.steps.insert(path, time);
        }
    }
    let records = optimizer.to_record().into_iter().collect();
    let (path, moments, steps) = Default::default();
    let mut collect = Collect { path, ranks, records, moments, steps };
    module.visit(&mut collect);
    (collect.moments, collect.steps)
}

/// Replaces every trained parameter of `module` by the saved one; frozen ones are not in a checkpoint and stay as they are. All that is
/// saved must be one of its parameters, so that a run is not taken for one of another kind of model.
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
        /// A mapper cannot return early: after the first failure the rest of the tree passes unchanged.
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
            // The shape and device of a lazy parameter, without drawing it first.
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

/// Gives `optimizer` the saved moments in `dtype`, of shards this rank's rows, for the parameters of `module` that have taken steps.
pub(super) fn load_moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: ModuleAdamW<M, B>,
    saved: SavedTensors,
    steps: &BTreeMap<String, usize>,
    dtype: DType,
) -> Result<ModuleAdamW<M, B>, CheckpointError> {
    struct Load<'a, B: AutodiffBackend> {
        saved: SavedTensors,
        path: ModulePath,
        steps: &'a BTreeMap<String, usize>,
        dtype: DType,
        records: Vec<(ParamId, AdaptorRecord<AdamW, B>)>,
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
            let moment = |name| {
                let mut values = self.saved.rows(&format!("{path}.{name}"), &whole, rows.clone())?;
                // The padding of a shard.
                values.resize(dims.iter().product(), 0.0);
                let data = TensorData::new(values, dims);
                Ok(Tensor::<B::InnerBackend, D>::from_data(data, (&device, self.dtype)))
            };
            match moment("moment_1").and_then(|first| Ok((first, moment("moment_2")?))) {
                Ok((moment_1, moment_2)) => {
                    let momentum = AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None };
                    let record = AdaptorRecord::from_state(AdamWState { momentum });
                    self.records.push((param.id, record));
                }
                Err(failure) => self.failure = Some(failure),
            }
        }
    }
    let mut load = Load { saved, path: ModulePath::default(), steps, dtype, records: Vec::new(), failure: None };
    module.visit(&mut load);
    match load.failure {
        Some(failure) => Err(failure),
        None => Ok(optimizer.load_record(load.records.into_iter().collect())),
    }
}
