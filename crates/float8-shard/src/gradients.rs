//! Gradients of replicated parameters, and of weights that no ranks divide, summed over
//! ranks with other batches.
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_float8::backend::in_dtype;
use burn_float8::shard_hooks::visit_params;
use burn_float8::{Float8Stack, Float8Tensor};
use burn_std::Shape;

use crate::all_reduce::{all_reduce, flat};
use crate::comm::Operation;
use crate::error::ShardError;
use crate::sharding::Sharding;
use crate::world::{Group, World};

/// Maximum number of gradient elements in one all-reduce, unless a single gradient has more. The
/// all-reduce copies them.
pub const JOINED_ELEMENTS: usize = 1 << 24;

/// A replicated parameter and its gradient, if this rank has one.
struct Replicated<B: Float8Stack> {
    id: ParamId,
    value: FloatTensor<B>,
    gradient: Option<FloatTensor<B::Inner>>,
}

/// Waits, and sums the gradients of the parameters that `is_summed` names over the ranks with other batches.
pub(crate) fn reduce<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    world: &World<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
    is_summed: impl Fn(ParamId, &FloatTensor<B>) -> bool,
) -> Result<(), ShardError> {
    wait::<B, M>(world, model, grads)?;
    sum::<B, M>(&world.data, model, grads, is_summed)
}

/// Sums the gradients of the parameters that `is_summed` names over a group of ranks.
pub(crate) fn sum<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    group: &Group<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
    is_summed: impl Fn(ParamId, &FloatTensor<B>) -> bool,
) -> Result<(), ShardError> {
    if group.size() == 1 {
        return Ok(());
    }
    let mut replicated: Vec<Replicated<B>> = vec![];
    visit_params::<B, M>(model, |param| {
        let Some(value) = param.float().filter(|_| param.shape.num_elements() > 0) else { return };
        if !is_summed(param.id, &value) {
            return;
        }
        // Taken, so that each is freed once it is summed. The rank of a tensor is only a type.
        let gradient = grads.remove::<B::InnerBackend, 1>(param.id).and_then(full::<B>);
        replicated.push(Replicated { id: param.id, value, gradient });
    });
    if replicated.is_empty() {
        return Ok(());
    }
    // An expert without tokens on this rank has no gradient here. Exchanging these flags needs only
    // the host, so it does not wait for the device.
    let bits = replicated.iter().map(|param| u32::from(param.gradient.is_some())).collect();
    let bits = group.comm.all_reduce_max_bits("which replicated parameters have gradients", bits)?.wait()?;
    let mut bits = bits.into_iter();
    replicated.retain(|_| bits.next() != Some(0));
    let values = replicated.iter_mut().map(|param| match param.gradient.take() {
        Some(gradient) => in_dtype::<B::Inner>(flat::<B::Inner>(gradient), DType::F32),
        None => {
            let device = B::float_device(&param.value);
            let elements = param.value.shape().num_elements();
            <B::Inner>::float_zeros(Shape::from(vec![elements]), &device, FloatDType::F32)
        }
    });
    let collectives = group.of_model(&Module::<B>::devices(model));
    let (mut values, mut sums) = (values.peekable(), vec![]);
    while let Some(first) = values.next() {
        let mut elements = first.shape().num_elements();
        let mut joined = vec![first];
        while let Some(next) = values.next_if(|next| elements + next.shape().num_elements() <= JOINED_ELEMENTS) {
            elements += next.shape().num_elements();
            joined.push(next);
        }
        let label = "gradients of replicated parameters";
        sums.extend(all_reduce(&group.comm, collectives.as_deref(), label, Operation::AllReduceSum, joined)?);
    }
    drop(values);
    for (Replicated { id, value, .. }, sum) in replicated.into_iter().zip(sums) {
        let sum = in_dtype::<B::Inner>(<B::Inner>::float_reshape(sum, value.shape()), value.dtype());
        grads.register(id, gradient::<B, 1>(value, sum));
    }
    Ok(())
}

/// Implements [`Sharded::wait_for_gradients`](crate::Sharded::wait_for_gradients).
pub(crate) fn wait<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    world: &World<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
) -> Result<(), ShardError> {
    if !world.reduces.has_begun() {
        return Ok(());
    }
    let mut waited = Ok(());
    visit_params::<B, M>(model, |param| {
        let Some(value) = param.float().filter(|_| param.shape.num_dims() == 2 && waited.is_ok()) else { return };
        let Some(sharding) = Sharding::of_value::<B>(&value) else { return };
        // Gradients that the caller does not have yet are of another part of the model.
        let Some(zeros) = grads.get::<B::InnerBackend, 2>(param.id) else { return };
        match world.reduces.take(&sharding.name) {
            // A sum keeps the mark of a shard's gradient.
            Ok(Some(sum)) => grads.register(param.id, zeros + gradient::<B, 2>(value, sum)),
            Ok(None) => {}
            Err(error) => waited = Err(error),
        }
    });
    waited
}

/// A gradient of a parameter with this value.
fn gradient<B: Float8Stack + AutodiffBackend, const D: usize>(
    value: FloatTensor<B>,
    gradient: FloatTensor<B::Inner>,
) -> Tensor<B::InnerBackend, D> {
    let gradient = TensorPrimitive::Float(B::map_float8(value, |_| Float8Tensor::new(gradient)));
    Tensor::<B, D>::from_primitive(gradient).inner()
}

fn full<B: Float8Stack + AutodiffBackend>(gradient: Tensor<B::InnerBackend, 1>) -> Option<FloatTensor<B::Inner>> {
    match Tensor::<B, 1>::from_inner(gradient).into_primitive() {
        TensorPrimitive::Float(tensor) => Some(B::float8_tensor(&tensor).full().clone()),
        TensorPrimitive::QFloat(_) => None,
    }
}
