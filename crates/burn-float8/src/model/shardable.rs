//! What of a model can be sharded, and what cannot, the same on all ranks.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_backend::TensorMetadata;
use float8_comm::{CommError, Communicator, Engine};
use serde::Serialize;

use super::all_reduce::collectives;
use super::walk::{FoundLinear, Path, linears, sharding_of};
use crate::shard::{ShardConfig, ShardError};
use crate::stack::Float8Stack;

/// A parameter of a model that may be sharded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShardedParameter {
    /// Its path in the module tree.
    pub name: String,
    /// Of the whole.
    pub shape: Vec<usize>,
    /// The first row that this rank keeps, and the first that it does not; none if it keeps all.
    pub rows: Option<[usize; 2]>,
}

/// [`Sharded::parameters`](super::Sharded::parameters).
pub(super) fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedParameter> {
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
            let (shape, rows) = match sharding_of(&tensor) {
                Some(sharding) => (sharding.logical().to_vec(), Some(sharding.rows())),
                None => (own, None),
            };
            self.1.push(ShardedParameter { name, shape, rows: rows.map(|rows| [rows.start, rows.end]) });
        }
    }
    let mut walk = Walk(Path::default(), vec![]);
    Module::<B>::visit(model, &mut walk);
    walk.1
}

/// The linears of a model that can be sharded, the same on all ranks.
pub(super) fn check<B: Float8Stack, M: Module<B>>(
    model: &M,
    comm: &Communicator,
    config: ShardConfig,
) -> Result<Vec<FoundLinear<B>>, ShardError> {
    if !comm.has_host_collectives() {
        return Err(ShardError::NeedsMpi);
    }
    let found = linears::<B, M>(model, None);
    let failed = |error: CommError| ShardError::Collective(error.to_string());
    let own = check_own::<B, M>(model, &found).and_then(|()| check_device::<B, M>(model, comm));
    comm.all_ok("the model to shard", own).map_err(failed)?;
    let parameters = parameters::<B, M>(model);
    let parameters = parameters.iter().map(|p| format!("{} {:?}", p.name, p.shape));
    let linears = found.iter().map(|FoundLinear { info, tag, weight, .. }| {
        let policy = tag.as_ref().map(|tag| tag.layer.configured().to_string());
        format!("{} {:?} {}", info.name, weight.as_ref().map(|w| w.dtype()), policy.unwrap_or_default())
    });
    let texts: Vec<_> = parameters.chain(linears).chain([format!("{config:?}")]).collect();
    comm.agree("burn-float8's version", env!("CARGO_PKG_VERSION")).map_err(failed)?;
    comm.agree("what is to be sharded", &texts.join("\n")).map_err(failed)?;
    Ok(found)
}

/// NCCL's ranks are those of the model's device.
fn check_device<B: Float8Stack, M: Module<B>>(model: &M, comm: &Communicator) -> Result<(), ShardError> {
    if comm.engine() != Engine::Nccl || collectives::<B, M>(model, comm).is_some() {
        return Ok(());
    }
    let devices: Vec<_> = Module::<B>::devices(model).iter().map(|device| format!("{device:?}")).collect();
    Err(ShardError::OtherDevice { devices: devices.join(", ") })
}

fn check_own<B: Float8Stack, M: Module<B>>(model: &M, found: &[FoundLinear<B>]) -> Result<(), ShardError> {
    for FoundLinear { info, tag, weight, .. } in found {
        let name = || info.name.clone();
        let Some(weight) = weight else { return Err(ShardError::Quantized { name: name() }) };
        if tag.as_ref().is_some_and(|tag| tag.layer.sharding().is_some()) {
            return Err(ShardError::Sharded { name: name() });
        }
        if tag.as_ref().is_some_and(|tag| tag.layer.has_matmul()) {
            return Err(ShardError::Matmul { name: name() });
        }
        let dtype = weight.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(ShardError::Dtype { name: name(), dtype });
        }
    }
    struct HasEmbedding(Path, bool);
    impl<B: Backend> ModuleVisitor<B> for HasEmbedding {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<B, D>>) {
            self.1 |= self.0.embedding(D).is_some();
        }
    }
    let mut embedding = HasEmbedding(Path::default(), false);
    Module::<B>::visit(model, &mut embedding);
    if found.is_empty() && !embedding.1 { Err(ShardError::NothingToShard) } else { Ok(()) }
}
