//! Checks that a model can be sharded and is the same on all ranks.
use burn::module::Module;
use burn::tensor::DType;
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_float8::Float8Stack;
use burn_float8::config::{Granularity, LinearInfo, Policy};
use burn_float8::shard_hooks::{self, FoundLinear, linears, read_f32, visit_params};
use burn_std::Slice;

use crate::all_reduce::flat;
use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::sharding::{BLOCK, Sharding, chunk};
use crate::world::World;

/// Linears of a model, after checks that it can be sharded and agrees between ranks.
pub(crate) fn check<B: Float8Stack, M: Module<B>>(
    model: &M,
    world: &World<B::Inner>,
    config: ShardConfig,
) -> Result<Vec<FoundLinear<B>>, ShardError> {
    let comm = &world.all.comm;
    let found = linears::<B, M>(model, None);
    let tensor = config.mesh(comm.world_size())?.tensor;
    let own = check_own::<B, M>(model, &found, tensor)
        .and_then(|()| check_experts::<B>(&found, world, config))
        .and_then(|()| check_device::<B, M>(model, world));
    comm.all_ok("the model to shard", own)?;
    // Name, dtype, shape and gradient flag of each parameter, and its first values: parameters that
    // each rank initializes differently differ in these.
    let (mut texts, mut first_values) = (vec![], vec![]);
    visit_params::<B, M>(model, |param| {
        const FIRST: usize = 4;
        let Some(value) = param.float() else { return };
        let (name, dtype, dims) = (param.name(), value.dtype(), param.shape.to_vec());
        texts.push(format!("{name}: {dtype:?} {dims:?}, gradient: {}", B::float_is_require_grad(&value)));
        let tensor = B::float8_tensor(&value);
        if let Some(codes) = shard_hooks::describe_codes(&tensor) {
            first_values.push(format!("{name}: {codes}"));
        } else if param.shape.num_elements() > 0 {
            let mut first = vec![Slice::from(0..1); param.shape.num_dims()];
            first.splice(param.shape.num_dims() - 1.., param.shape.last().map(|len| Slice::from(0..FIRST.min(*len))));
            let first = <B::Inner>::float_slice(tensor.full().clone(), &first);
            first_values.push(format!("{name}: {:?}", read_f32::<B::Inner>(flat::<B::Inner>(first))));
        }
    });
    for linear in &found {
        let Some(layer) = linear.layer() else { continue };
        let (policy, config) = (shard_hooks::configured(layer), shard_hooks::config(layer));
        // All of it, including statistics and fallbacks, which ranks decide together.
        texts.push(format!("{}: {policy:?} {config:?}", linear.info.name));
    }
    texts.push(format!("{config:?}"));
    comm.agree("float8-shard's version", env!("CARGO_PKG_VERSION"))?;
    comm.agree("what is to be sharded", &texts.join("\n"))?;
    // Other ranks have other parts.
    world.data.comm.agree("the first values of parameters", &first_values.join("\n"))?;
    Ok(found)
}

/// Checks that NCCL connects the model's device.
fn check_device<B: Float8Stack, M: Module<B>>(model: &M, world: &World<B::Inner>) -> Result<(), ShardError> {
    if !world.all.comm.has_nccl() || world.all.of_model(&Module::<B>::devices(model)).is_some() {
        return Ok(());
    }
    let devices: Vec<_> = Module::<B>::devices(model).iter().map(|device| format!("{device:?}")).collect();
    let reason = format!(
        " on {} is not on the CUDA device that NCCL connects: give Communicator::with_nccl that device, or train over MPI without it",
        devices.join(", ")
    );
    Err(ShardError::model("the model", reason))
}

/// Checks that the experts of a rank end where squares of scales end.
fn check_experts<B: Float8Stack>(
    found: &[FoundLinear<B>],
    world: &World<B::Inner>,
    config: ShardConfig,
) -> Result<(), ShardError> {
    if !config.experts {
        return Ok(());
    }
    if config.tensor > 1 {
        return Err(ShardError::model(
            "the model",
            " cannot have its experts and its linears divided: `experts` needs `tensor` = 1",
        ));
    }
    let has_experts =
        |linear: &FoundLinear<B>| linear.weight.as_ref().is_some_and(|weight| weight.shape().num_dims() == 3);
    if !found.iter().any(has_experts) {
        return Err(ShardError::model("the model", " has no experts, which `experts` would divide"));
    }
    for FoundLinear { info, weight, .. } in found {
        let layer = weight.as_ref().and_then(|weight| Some((B::layer(weight)?, weight.shape())));
        let Some((layer, shape)) = layer.filter(|(_, shape)| shape.num_dims() == 3) else { continue };
        check_expert_blocks(info, &shard_hooks::configured(&layer), shape[0], world.shard.size())?;
    }
    Ok(())
}

/// Checks that each rank's experts, of the weight of a grouped linear, end where squares of scales end.
pub(crate) fn check_expert_blocks(
    LinearInfo { name, k, n }: &LinearInfo,
    policy: &Policy,
    experts: usize,
    ranks: usize,
) -> Result<(), ShardError> {
    let has_squares = shard_hooks::weight_granularities(policy).contains(&Some(Granularity::Block128x128));
    let chunk = chunk(experts, ranks, 1);
    if has_squares && chunk < experts && [k, n].into_iter().any(|len| !(chunk * len).is_multiple_of(BLOCK)) {
        let reason =
            format!(" has experts of {k} x {n}: {chunk} of them on a rank do not end where a block of {BLOCK} ends");
        return Err(ShardError::model(name, reason));
    }
    Ok(())
}

/// Checks that `Tensor::matmul` does not read the weight in FP8.
pub(crate) fn check_matmul(name: &str, policy: &Policy) -> Result<(), ShardError> {
    match policy {
        Policy::Float8(config) if config.matmul() => {
            Err(ShardError::model(name, " is configured with `matmul`, and Tensor::matmul reads no sharded weight"))
        }
        _ => Ok(()),
    }
}

fn check_own<B: Float8Stack, M: Module<B>>(
    model: &M,
    found: &[FoundLinear<B>],
    tensor: usize,
) -> Result<(), ShardError> {
    let mut is_divided = tensor == 1;
    for linear in found {
        let refused = |reason: &str| Err(ShardError::model(&linear.info.name, reason));
        let Some(weight) = &linear.weight else {
            return refused(" is quantized: only float parameters are sharded");
        };
        if linear.layer().is_some_and(|layer| Sharding::<B::Inner>::of(layer).is_some()) {
            return refused(" is sharded already");
        }
        if let Some(part) = linear.layer().and_then(|layer| shard_hooks::parallel::<B::Inner>(layer)) {
            let ranks = part.part().ranks;
            if ranks != tensor {
                let reason = format!(" is divided by TensorParallel over {ranks} ranks, where `tensor` is {tensor}");
                return refused(&reason);
            }
            is_divided = true;
        }
        linear.layer().map_or(Ok(()), |layer| check_matmul(&linear.info.name, &shard_hooks::configured(layer)))?;
        check_dtype(&linear.info.name, weight.dtype())?;
    }
    if !is_divided {
        let reason = format!(" has no linear that TensorParallel divides, where `tensor` is {tensor}");
        return Err(ShardError::model("the model", reason));
    }
    let mut embeddings = vec![];
    visit_params::<B, M>(model, |param| {
        let name = param.path.embedding(param.shape.num_dims());
        embeddings.extend(name.zip(param.float()).map(|(name, table)| check_dtype(&name, table.dtype())));
    });
    if found.is_empty() && embeddings.is_empty() {
        return Err(ShardError::model("the model", " has no linear and no embedding, so there is nothing to shard"));
    }
    embeddings.into_iter().collect()
}

fn check_dtype(name: &str, dtype: DType) -> Result<(), ShardError> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(ShardError::model(name, format!(" is of {dtype:?}: parameters of f32, f16 and bf16 are sharded"))),
    }
}
