//! Gradients of replicated parameters, summed over all ranks.
use std::marker::PhantomData;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_float8::backend::in_dtype;
use burn_float8::{Float8Stack, Float8Tensor};
use burn_std::Shape;
use float8_comm::CommError;

use crate::all_reduce::{Reduction, all_reduce, flat};
use crate::sharding::Sharding;
use crate::world::World;

/// Maximum number of gradient elements in one all-reduce, unless a single gradient has more. The
/// all-reduce copies them.
pub const JOINED_ELEMENTS: usize = 1 << 24;

/// Implements [`Sharded::reduce_gradients`](crate::Sharded::reduce_gradients).
pub(crate) fn reduce<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    world: &World<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
) -> Result<(), CommError> {
    let mut read = Read::<B> { grads, gradients: vec![] };
    Module::<B>::visit(model, &mut read);
    let gradients = read.gradients;
    if gradients.is_empty() {
        return Ok(());
    }
    // An expert without tokens on this rank has no gradient here. Exchanging these flags needs only
    // the host, so it does not wait for the device.
    let bits = gradients.iter().map(|(gradient, ..)| u32::from(gradient.is_some())).collect();
    let bits = world.comm.all_reduce_max_bits("which replicated parameters have gradients", bits)?.wait()?;
    let has_gradient: Vec<_> = bits.into_iter().map(|bit| bit > 0).collect();
    let of_some = gradients.into_iter().zip(&has_gradient).filter(|(_, has)| **has);
    let values = of_some.map(|((gradient, elements, device), _)| match gradient {
        Some(gradient) => in_dtype::<B::Inner>(flat::<B::Inner>(gradient), DType::F32),
        None => <B::Inner>::float_zeros(Shape::from(vec![elements]), &device, FloatDType::F32),
    });
    let collectives = world.of_model(&Module::<B>::devices(model));
    let (mut values, mut sums) = (values.peekable(), vec![]);
    while let Some(first) = values.next() {
        let mut elements = first.shape().num_elements();
        let mut joined = vec![first];
        while let Some(next) = values.next_if(|next| elements + next.shape().num_elements() <= JOINED_ELEMENTS) {
            elements += next.shape().num_elements();
            joined.push(next);
        }
        let label = "gradients of replicated parameters";
        sums.extend(all_reduce(&world.comm, collectives.as_deref(), label, Reduction::Sum, joined)?);
    }
    let mut sums = sums.into_iter();
    let of_parameters = has_gradient.into_iter().map(|has| if has { sums.next() } else { None });
    let mut write = Write::<B, _> { grads, of_parameters, backend: PhantomData };
    Module::<B>::visit(model, &mut write);
    Ok(())
}

/// Whether every rank keeps the whole parameter, and it is not empty.
fn is_replicated<B: Float8Stack, const D: usize>(value: &Tensor<B, D>) -> bool {
    Sharding::of_parameter(value).is_none() && value.shape().num_elements() > 0
}

/// Gradient of a replicated parameter, if any, with its number of elements and its device.
type Replicated<B> = (Option<FloatTensor<B>>, usize, Device<B>);

/// Takes the gradients of replicated parameters, so that each is freed once it is summed.
struct Read<'a, B: Float8Stack> {
    grads: &'a mut GradientsParams,
    gradients: Vec<Replicated<B::Inner>>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for Read<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if is_replicated(&value) {
            let gradient = self.grads.remove::<B::InnerBackend, D>(param.id);
            let gradient = gradient.and_then(|gradient| full::<B, D>(Tensor::from_inner(gradient)));
            self.gradients.push((gradient, value.shape().num_elements(), value.device()));
        }
    }
}

struct Write<'a, B: Float8Stack, I> {
    grads: &'a mut GradientsParams,
    /// Sum of each parameter's gradients, if any rank has one.
    of_parameters: I,
    backend: PhantomData<B>,
}

impl<B, I> ModuleVisitor<B> for Write<'_, B, I>
where
    B: Float8Stack + AutodiffBackend,
    I: Iterator<Item = Option<FloatTensor<B::Inner>>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if !is_replicated(&value) {
            return;
        }
        let Some(Some(sum)) = self.of_parameters.next() else { return };
        let (dims, dtype) = (value.dims(), value.dtype());
        let TensorPrimitive::Float(like) = value.into_primitive() else { return };
        let sum = in_dtype::<B::Inner>(<B::Inner>::float_reshape(sum, Shape::from(dims.to_vec())), dtype);
        let gradient =
            Tensor::<B, D>::from_primitive(TensorPrimitive::Float(B::map_float8(like, |_| Float8Tensor::new(sum))));
        self.grads.register(param.id, gradient.inner());
    }
}

fn full<B: Float8Stack, const D: usize>(tensor: Tensor<B, D>) -> Option<FloatTensor<B::Inner>> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(tensor) => Some(B::float8_tensor(&tensor).full().clone()),
        TensorPrimitive::QFloat(_) => None,
    }
}
