//! Checks that a model can be sharded and is the same on all ranks.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_float8::Float8Stack;
use burn_float8::shard_hooks::{self, FoundLinear, Path, linears, read_f32};
use burn_std::Slice;
use float8_comm::{CommError, Engine};
use serde::Serialize;

use crate::all_reduce::flat;
use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::sharding::Sharding;
use crate::world::World;

/// Parameter of a sharded model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShardedParameter {
    /// Path in the module tree.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Begin and end of this rank's rows; None if the parameter is replicated.
    pub rows: Option<[usize; 2]>,
}

/// Implements [`Sharded::parameters`](crate::Sharded::parameters).
pub(crate) fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedParameter> {
    struct Walk(Path, Vec<ShardedParameter>);
    impl<B: Float8Stack> ModuleVisitor<B> for Walk {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let tensor = param.val();
            let (name, own) = (self.0.parameter_name(), tensor.dims().to_vec());
            let (shape, rows) = match Sharding::of_parameter(&tensor) {
                Some(sharding) => (sharding.logical.to_vec(), Some(sharding.rows())),
                None => (own, None),
            };
            self.1.push(ShardedParameter { name, shape, rows: rows.map(|rows| [rows.start, rows.end]) });
        }
    }
    let mut walk = Walk(Path::default(), vec![]);
    Module::<B>::visit(model, &mut walk);
    walk.1
}

/// Linears of a model, after checks that it can be sharded and agrees between ranks.
pub(crate) fn check<B: Float8Stack, M: Module<B>>(
    model: &M,
    world: &World<B::Inner>,
    config: ShardConfig,
) -> Result<Vec<FoundLinear<B>>, ShardError> {
    let comm = &world.comm;
    if !comm.has_host_collectives() {
        return Err(ShardError::NeedsMpi);
    }
    let found = linears::<B, M>(model, None);
    let failed = |error: CommError| ShardError::Collective(error.to_string());
    let own = check_own::<B, M>(model, &found).and_then(|()| check_device::<B, M>(model, world));
    comm.all_ok("the model to shard", own).map_err(failed)?;
    let linears = found.iter().filter_map(|linear| {
        let layer = linear.layer()?;
        // All of it, including statistics and fallbacks, which ranks decide together.
        Some(format!("{}: {:?} {:?}", linear.info.name, shard_hooks::configured(layer), shard_hooks::config(layer)))
    });
    let mut described = Describe::default();
    Module::<B>::visit(model, &mut described);
    let Describe { kinds, first_values, .. } = described;
    let texts: Vec<_> = kinds.into_iter().chain(linears).chain([format!("{config:?}")]).collect();
    comm.agree("float8-shard's version", env!("CARGO_PKG_VERSION")).map_err(failed)?;
    comm.agree("what is to be sharded", &texts.join("\n")).map_err(failed)?;
    comm.agree("the first values of parameters", &first_values.join("\n")).map_err(failed)?;
    Ok(found)
}

/// Collects each parameter's properties and first values. Parameters that each rank initializes
/// differently differ in these.
#[derive(Default)]
struct Describe {
    path: Path,
    /// Name, dtype, shape and gradient flag of each parameter.
    kinds: Vec<String>,
    first_values: Vec<String>,
}

impl<B: Float8Stack> ModuleVisitor<B> for Describe {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        const FIRST: usize = 4;
        let (name, tensor) = (self.path.parameter_name(), param.val());
        let (dtype, dims, has_gradient) = (tensor.dtype(), tensor.dims(), tensor.is_require_grad());
        self.kinds.push(format!("{name}: {dtype:?} {dims:?}, gradient: {has_gradient}"));
        let elements = dims.iter().product::<usize>();
        let (TensorPrimitive::Float(tensor), 1..) = (tensor.into_primitive(), elements) else { return };
        let flat = flat::<B::Inner>(B::float8_tensor(&tensor).full().clone());
        let first = <B::Inner>::float_slice(flat, &[Slice::from(0..elements.min(FIRST))]);
        self.first_values.push(format!("{name}: {:?}", read_f32::<B::Inner>(first)));
    }
}

/// Checks that NCCL connects the model's device.
fn check_device<B: Float8Stack, M: Module<B>>(model: &M, world: &World<B::Inner>) -> Result<(), ShardError> {
    if world.comm.engine() != Engine::Nccl || world.of_model(&Module::<B>::devices(model)).is_some() {
        return Ok(());
    }
    let devices: Vec<_> = Module::<B>::devices(model).iter().map(|device| format!("{device:?}")).collect();
    Err(ShardError::OtherDevice { devices: devices.join(", ") })
}

fn check_own<B: Float8Stack, M: Module<B>>(model: &M, found: &[FoundLinear<B>]) -> Result<(), ShardError> {
    for linear in found {
        let name = || linear.info.name.clone();
        let Some(weight) = &linear.weight else { return Err(ShardError::Quantized { name: name() }) };
        if linear.layer().is_some_and(|layer| shard_hooks::source::<B::Inner>(layer).is_some()) {
            return Err(ShardError::Sharded { name: name() });
        }
        if linear.layer().is_some_and(|layer| shard_hooks::has_matmul(layer)) {
            return Err(ShardError::Matmul { name: name() });
        }
        if B::float8_tensor(weight).is_fp8_only() {
            return Err(ShardError::Fp8Only { name: name() });
        }
        let dtype = weight.dtype();
        if !is_exchanged(dtype) {
            return Err(ShardError::Dtype { name: name(), dtype });
        }
    }
    struct Embeddings(Path, Vec<(String, DType)>);
    impl<B: Backend> ModuleVisitor<B> for Embeddings {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.1.extend(self.0.embedding(D).map(|name| (name, param.val().dtype())));
        }
    }
    let mut embeddings = Embeddings(Path::default(), vec![]);
    Module::<B>::visit(model, &mut embeddings);
    let embeddings = embeddings.1;
    if let Some((name, dtype)) = embeddings.iter().find(|(_, dtype)| !is_exchanged(*dtype)) {
        return Err(ShardError::Dtype { name: name.clone(), dtype: *dtype });
    }
    if found.is_empty() && embeddings.is_empty() { Err(ShardError::NothingToShard) } else { Ok(()) }
}

fn is_exchanged(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}
