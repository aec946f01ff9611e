//! A module's parameters and AdamW's moments as named tensors: to a safetensors file and back.
//!
//! Names are paths in the module tree, `layers.0.mlp.up_proj.weight`, and of moments `layers.0.mlp.up_proj.weight.moment_1`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8Stack, Sharded};
use safetensors::Dtype;

use super::CheckpointError;
use crate::ModulePath;
use crate::Ranks;
use crate::progress::Progress;
use crate::tensor_files::{NewTensor, TensorFiles, write_file};

/// AdamW over the parameters of a module.
pub type ModuleAdamW<M, B> = OptimizerAdaptor<AdamW, M, B>;

/// Reads a tensor from its device.
type Read = Box<dyn Fn() -> Result<TensorData, String> + Send>;

/// A tensor that stays on its device until it is written. It is not changed by steps that are made meanwhile.
pub(super) struct Pending {
    name: String,
    shape: Vec<usize>,
    read: Read,
}

impl Pending {
    /// What belongs to a parameter. Of a shard it is read and gathered now, by all ranks, and kept by the first.
    fn new<B: AutodiffBackend + Float8Stack, const D: usize>(
        name: String,
        param: &Tensor<B, D>,
        tensor: Tensor<B::InnerBackend, D>,
        ranks: Option<&Ranks>,
    ) -> Result<Self, CheckpointError> {
        let shape = Sharded::whole_shape(param);
        let Some(ranks) = ranks.filter(|_| Sharded::is_shard(param)) else {
            return Ok(Self::of_tensor(name, tensor));
        };
        let failed = |reason: String| CheckpointError::Device { tensor: name.clone(), reason };
        let own = tensor.cast(DType::F32).try_into_data().map_err(|error| failed(error.to_string()))?;
        let whole = Sharded::gather_values(param, own.iter::<f32>().collect())?;
        let data = ranks.is_first().then(|| TensorData::new(whole, shape.clone()));
        let read = move || data.clone().ok_or_else(|| "another rank has it".into());
        Ok(Self { name, shape, read: Box::new(read) })
    }

    fn of_tensor<B: Backend, const D: usize>(name: String, tensor: Tensor<B, D>) -> Self {
        let shape = tensor.dims().to_vec();
        let read = move || tensor.clone().cast(DType::F32).try_into_data().map_err(|error| error.to_string());
        Self { name, shape, read: Box::new(read) }
    }

    fn bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let data = (self.read)().map_err(|reason| CheckpointError::Device { tensor: self.name.clone(), reason })?;
        Ok(data.bytes.to_vec())
    }
}

/// Writes tensors, one on the host at a time.
pub(super) fn write(path: &Path, tensors: &[Pending]) -> Result<(), CheckpointError> {
    let mut new = Vec::with_capacity(tensors.len());
    for pending in tensors {
        let (name, shape) = (pending.name.clone(), pending.shape.clone());
        new.push(NewTensor { name, dtype: Dtype::F32, shape, bytes: Box::new(|| pending.bytes()) });
    }
    write_file(path, &new, None)
}

/// The parameters of a module.
pub(super) fn parameters<B: AutodiffBackend + Float8Stack, M: Module<B>>(
    module: &M,
    ranks: Option<&Ranks>,
) -> Result<Vec<Pending>, CheckpointError> {
    struct Collect<'a>(ModulePath, Option<&'a Ranks>, Result<Vec<Pending>, CheckpointError>);
    impl<B: AutodiffBackend + Float8Stack> ModuleVisitor<B> for Collect<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Ok(collected) = &mut self.2 else { return };
            let value = param.val();
            match Pending::new(self.0.dotted(), &value, value.clone().inner(), self.1) {
                Ok(pending) => collected.push(pending),
                Err(error) => self.2 = Err(error),
            }
        }
    }
    let mut collect = Collect(ModulePath::default(), ranks, Ok(Vec::new()));
    module.visit(&mut collect);
    collect.2
}

/// The moments of a module's parameters, and how many steps each parameter has taken.
pub(super) fn moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: &ModuleAdamW<M, B>,
    ranks: Option<&Ranks>,
) -> Result<(Vec<Pending>, BTreeMap<String, usize>), CheckpointError> {
    struct Collect<'a, B: AutodiffBackend> {
        path: ModulePath,
        ranks: Option<&'a Ranks>,
        failure: Option<CheckpointError>,
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
            for (name, moment) in [("moment_1", moment_1), ("moment_2", moment_2)] {
                if self.failure.is_none() {
                    match Pending::new(format!("{path}.{name}"), &value, moment, self.ranks) {
                        Ok(pending) => self.moments.push(pending),
                        Err(error) => self.failure = Some(error),
                    }
                }
            }
            self.steps.insert(path, time);
        }
    }
    let records = optimizer.to_record().into_iter().collect();
    let (path, moments, steps) = Default::default();
    let mut collect = Collect { path, ranks, failure: None, records, moments, steps };
    module.visit(&mut collect);
    match collect.failure {
        Some(failure) => Err(failure),
        None => Ok((collect.moments, collect.steps)),
    }
}

fn read(file: &TensorFiles, name: &str, shape: &[usize]) -> Result<TensorData, CheckpointError> {
    let values = file.expect(name, shape)?.to_f32()?;
    Ok(TensorData::new(values, shape.to_vec()))
}

/// Replaces every parameter of `module` by the file's.
pub(super) fn load_parameters<B: AutodiffBackend, M: Module<B>>(
    module: M,
    path: PathBuf,
    progress: &mut dyn FnMut(Progress),
) -> Result<M, CheckpointError> {
    struct Load<'a> {
        file: TensorFiles,
        path: ModulePath,
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
            if self.failure.is_some() {
                return param;
            }
            // The shape and device of a lazy parameter, without drawing it first.
            let (shape, device) = (param.lazy_shape(), param.lazy_device());
            match read(&self.file, &self.path.dotted(), &shape) {
                Ok(data) => {
                    self.done.bytes += data.bytes.len() as u64;
                    (self.progress)(self.done);
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
    let file = TensorFiles::open_file(path)?;
    let done = Progress { bytes: 0, total_bytes: file.num_bytes() };
    let mut load = Load { file, path: ModulePath::default(), done, progress, failure: None };
    let module = module.map(&mut load);
    load.failure.map_or(Ok(module), Err)
}

/// Gives `optimizer` the moments of the file, for the parameters of `module` that have taken steps.
pub(super) fn load_moments<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
    module: &M,
    optimizer: ModuleAdamW<M, B>,
    path: PathBuf,
    steps: &BTreeMap<String, usize>,
) -> Result<ModuleAdamW<M, B>, CheckpointError> {
    struct Load<'a, B: AutodiffBackend> {
        file: TensorFiles,
        path: ModulePath,
        steps: &'a BTreeMap<String, usize>,
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
            let (whole, device) = (Sharded::whole_shape(&value), value.device());
            let moment = |name| {
                let values = self.file.expect(&format!("{path}.{name}"), &whole)?.to_f32()?;
                let data = TensorData::new(Sharded::own_values(&value, values), value.dims());
                Ok(Tensor::<B::InnerBackend, D>::from_data(data, (&device, DType::F32)))
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
    let file = TensorFiles::open_file(path)?;
    let mut load = Load { file, path: ModulePath::default(), steps, records: Vec::new(), failure: None };
    module.visit(&mut load);
    match load.failure {
        Some(failure) => Err(failure),
        None => Ok(optimizer.load_record(load.records.into_iter().collect())),
    }
}
