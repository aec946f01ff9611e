//! A module's parameters and AdamW's moments as named tensors: to a safetensors file and back.
//!
//! Names are paths in the module tree, `layers.0.mlp.up_proj.weight`, and of moments `layers.0.mlp.up_proj.weight.moment_1`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};

use super::CheckpointError;

/// AdamW over the parameters of a module.
pub type ModuleAdamW<M, B> = OptimizerAdaptor<AdamW, M, B>;

/// Reads a tensor from its device.
type Read = Box<dyn FnOnce() -> Result<TensorData, String> + Send>;

/// A tensor that stays on its device until it is written. It is not changed by steps that are made meanwhile.
pub(super) struct Pending {
    name: String,
    shape: Vec<usize>,
    read: Mutex<Option<Read>>,
    failure: Mutex<Option<String>>,
}

impl Pending {
    fn new<B: Backend, const D: usize>(name: String, tensor: Tensor<B, D>) -> Self {
        let shape = tensor.dims().to_vec();
        let read = move || tensor.cast(DType::F32).try_into_data().map_err(|error| error.to_string());
        Self { name, shape, read: Mutex::new(Some(Box::new(read))), failure: Mutex::new(None) }
    }
}

impl View for &Pending {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let read = self.read.lock().expect("no panic while reading").take();
        match read.map_or_else(|| Err("it has been written already".into()), |read| read()) {
            Ok(data) => Cow::Owned(data.bytes.to_vec()),
            // The format has no way to say so: whoever wrote looks afterwards.
            Err(failure) => {
                *self.failure.lock().expect("no panic while reading") = Some(failure);
                Cow::Owned(vec![0; self.data_len()])
            }
        }
    }

    fn data_len(&self) -> usize {
        size_of::<f32>() * self.shape.iter().product::<usize>()
    }
}

/// Writes tensors, one on the host at a time.
pub(super) fn write(path: &Path, tensors: &[Pending]) -> Result<(), CheckpointError> {
    let views = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor));
    safetensors::serialize_to_file(views, None, path).map_err(|error| match error {
        SafeTensorError::IoError(source) => CheckpointError::Io { doing: "write", path: path.into(), source },
        error => CheckpointError::Tensors { path: path.into(), reason: error.to_string() },
    })?;
    for tensor in tensors {
        if let Some(reason) = tensor.failure.lock().expect("no panic while reading").take() {
            return Err(CheckpointError::Device { tensor: tensor.name.clone(), reason });
        }
    }
    Ok(())
}

/// The names on the way down a module tree.
#[derive(Default)]
struct ModulePath(Vec<String>);

impl ModulePath {
    fn dotted(&self) -> String {
        self.0.join(".")
    }
}

/// The parameters of a module.
pub(super) fn parameters<B: AutodiffBackend, M: Module<B>>(module: &M) -> Vec<Pending> {
    struct Collect(ModulePath, Vec<Pending>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.1.push(Pending::new(self.0.dotted(), param.val().inner()));
        }
    }
    let mut collect = Collect(ModulePath::default(), Vec::new());
    module.visit(&mut collect);
    collect.1
}

/// The moments of a module's parameters, and how many steps each parameter has taken.
pub(super) fn moments<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    optimizer: &ModuleAdamW<M, B>,
) -> (Vec<Pending>, BTreeMap<String, usize>) {
    struct Collect<B: AutodiffBackend> {
        path: ModulePath,
        records: HashMap<ParamId, AdaptorRecord<AdamW, B>>,
        moments: Vec<Pending>,
        steps: BTreeMap<String, usize>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<B> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(record) = self.records.remove(&param.id) else { return };
            let state: AdamWState<B::InnerBackend, D> = record.into_state();
            let AdaptiveMomentumState { time, moment_1, moment_2, .. } = state.momentum;
            let path = self.path.dotted();
            self.moments.push(Pending::new(format!("{path}.moment_1"), moment_1));
            self.moments.push(Pending::new(format!("{path}.moment_2"), moment_2));
            self.steps.insert(path, time);
        }
    }
    let records = optimizer.to_record().into_iter().collect();
    let mut collect = Collect { path: ModulePath::default(), records, moments: Vec::new(), steps: BTreeMap::new() };
    module.visit(&mut collect);
    (collect.moments, collect.steps)
}

/// A safetensors file in memory.
struct Tensors {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Tensors {
    fn open(path: PathBuf) -> Result<Self, CheckpointError> {
        let bytes =
            std::fs::read(&path).map_err(|source| CheckpointError::Io { doing: "read", path: path.clone(), source })?;
        Ok(Self { path, bytes })
    }

    fn read(&self, name: &str, shape: &[usize]) -> Result<TensorData, CheckpointError> {
        let wrong = |reason: String| CheckpointError::Tensors { path: self.path.clone(), reason };
        let file = SafeTensors::deserialize(&self.bytes).map_err(|error| wrong(error.to_string()))?;
        let view = file.tensor(name).map_err(|error| wrong(error.to_string()))?;
        if view.shape() != shape || view.dtype() != Dtype::F32 {
            let found = (view.dtype(), view.shape());
            return Err(wrong(format!("{name} is {found:?}, the model needs {:?}", (Dtype::F32, shape))));
        }
        let (values, _) = view.data().as_chunks::<4>();
        Ok(TensorData::new(values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(), shape.to_vec()))
    }
}

/// Replaces every parameter of `module` by the file's.
pub(super) fn load_parameters<B: AutodiffBackend, M: Module<B>>(
    module: M,
    path: PathBuf,
) -> Result<M, CheckpointError> {
    struct Load {
        file: Tensors,
        path: ModulePath,
        /// A mapper cannot return early: after the first failure the rest of the tree passes unchanged.
        failure: Option<CheckpointError>,
    }
    impl<B: AutodiffBackend> ModuleMapper<B> for Load {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.0.pop();
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if self.failure.is_some() {
                return param;
            }
            // The shape and device of a lazy parameter, without drawing it first.
            let (shape, device) = (param.lazy_shape(), param.lazy_device());
            match self.file.read(&self.path.dotted(), &shape) {
                Ok(data) => {
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
    let mut load = Load { file: Tensors::open(path)?, path: ModulePath::default(), failure: None };
    let module = module.map(&mut load);
    load.failure.map_or(Ok(module), Err)
}

/// Gives `optimizer` the moments of the file, for the parameters of `module` that have taken steps.
pub(super) fn load_moments<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    optimizer: ModuleAdamW<M, B>,
    path: PathBuf,
    steps: &BTreeMap<String, usize>,
) -> Result<ModuleAdamW<M, B>, CheckpointError> {
    struct Load<'a, B: AutodiffBackend> {
        file: Tensors,
        path: ModulePath,
        steps: &'a BTreeMap<String, usize>,
        records: Vec<(ParamId, AdaptorRecord<AdamW, B>)>,
        failure: Option<CheckpointError>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Load<'_, B> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let path = self.path.dotted();
            let (None, Some(&time)) = (&self.failure, self.steps.get(&path)) else { return };
            let inner = param.val().inner();
            let (shape, device) = (inner.shape(), inner.device());
            let read = |name| {
                let data = self.file.read(&format!("{path}.{name}"), &shape)?;
                Ok(Tensor::<B::InnerBackend, D>::from_data(data, (&device, DType::F32)))
            };
            match read("moment_1").and_then(|first| Ok((first, read("moment_2")?))) {
                Ok((moment_1, moment_2)) => {
                    let momentum = AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None };
                    let record = AdaptorRecord::from_state(AdamWState { momentum });
                    self.records.push((param.id, record));
                }
                Err(failure) => self.failure = Some(failure),
            }
        }
    }
    let file = Tensors::open(path)?;
    let mut load = Load { file, path: ModulePath::default(), steps, records: Vec::new(), failure: None };
    module.visit(&mut load);
    match load.failure {
        Some(failure) => Err(failure),
        None => Ok(optimizer.load_record(load.records.into_iter().collect())),
    }
}
