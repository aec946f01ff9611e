//! Gradients of parameters that every rank keeps whole, added up over all ranks.
use std::marker::PhantomData;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType};
use burn_float8::backend::{Float8Backend, in_dtype};
use burn_float8::seam::read_f32;
use burn_float8::{Float8Stack, Float8Tensor};
use burn_std::Shape;
use float8_comm::{CommError, Communicator};

use crate::all_reduce::{Reduction, all_reduce, flat};
use crate::collectives::DeviceCollectives;
use crate::sharding::Sharding;
use crate::world::World;

/// [`Sharded::reduce_gradients`](crate::Sharded::reduce_gradients).
pub(crate) fn reduce<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    world: &World<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
) -> Result<(), CommError> {
    let mut read = Read::<B> { grads, values: vec![], has_gradient: vec![] };
    Module::<B>::visit(model, &mut read);
    let Read { values, has_gradient, .. } = read;
    if values.is_empty() {
        return Ok(());
    }
    let collectives = world.of_model(&Module::<B>::devices(model));
    let (values, has_gradient) = sum::<B::Inner>(&world.comm, collectives.as_deref(), values, has_gradient)?;
    let of_parameters = values.into_iter().zip(has_gradient);
    let mut write = Write::<B, _> { grads, of_parameters, backend: PhantomData };
    Module::<B>::visit(model, &mut write);
    Ok(())
}

/// The sums of gradients, and which any rank has: over the host in the same all-reduce; else on the host alone, so that it need not wait
/// for the device.
fn sum<B: Float8Backend>(
    comm: &Communicator,
    collectives: Option<&dyn DeviceCollectives<B>>,
    mut values: Vec<FloatTensor<B>>,
    has_gradient: Vec<bool>,
) -> Result<(Vec<FloatTensor<B>>, Vec<bool>), CommError> {
    const LABEL: &str = "gradients of replicated parameters";
    if collectives.is_some() {
        let bits = has_gradient.into_iter().map(u32::from).collect();
        let bits = comm.all_reduce_max_bits("which replicated parameters have gradients", bits)?.wait()?;
        let values = all_reduce(comm, collectives, LABEL, Reduction::Sum, values)?;
        return Ok((values, bits.into_iter().map(|bit| bit > 0).collect()));
    }
    let counts: Vec<f32> = has_gradient.into_iter().map(|has| if has { 1.0 } else { 0.0 }).collect();
    let device = values.last().map(B::float_device).unwrap_or_default();
    values.push(B::float_from_data(TensorData::from(&counts[..]), &device));
    let mut values = all_reduce::<B>(comm, None, LABEL, Reduction::Sum, values)?;
    let counts = values.pop().map(read_f32::<B>).unwrap_or_default();
    Ok((values, counts.into_iter().map(|count| count > 0.0).collect()))
}

/// Whether every rank keeps all of a parameter, which has something to keep.
fn is_replicated<B: Float8Stack, const D: usize>(value: &Tensor<B, D>) -> bool {
    Sharding::of_parameter(value).is_none() && value.shape().num_elements() > 0
}

/// The gradients of replicated parameters in f32, flat, zeros where there is none.
struct Read<'a, B: Float8Stack> {
    grads: &'a GradientsParams,
    values: Vec<FloatTensor<B::Inner>>,
    has_gradient: Vec<bool>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for Read<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if !is_replicated(&value) {
            return;
        }
        let gradient = self.grads.get::<B::InnerBackend, D>(param.id);
        self.has_gradient.push(gradient.is_some());
        let gradient = gradient.and_then(|gradient| full::<B, D>(Tensor::from_inner(gradient)));
        self.values.push(match gradient {
            Some(gradient) => in_dtype::<B::Inner>(flat::<B::Inner>(gradient), DType::F32),
            None => {
                let device: Device<B::Inner> = value.device();
                <B::Inner>::float_zeros(Shape::from(vec![value.shape().num_elements()]), &device, FloatDType::F32)
            }
        });
    }
}

struct Write<'a, B: Float8Stack, I> {
    grads: &'a mut GradientsParams,
    /// The sum of each, and whether it is one.
    of_parameters: I,
    backend: PhantomData<B>,
}

impl<B, I> ModuleVisitor<B> for Write<'_, B, I>
where
    B: Float8Stack + AutodiffBackend,
    I: Iterator<Item = (FloatTensor<B::Inner>, bool)>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if !is_replicated(&value) {
            return;
        }
        let Some((sum, true)) = self.of_parameters.next() else { return };
        let (dims, dtype) = (value.dims(), value.dtype());
        let TensorPrimitive::Float(like) = value.into_primitive() else { return };
        let sum = in_dtype::<B::Inner>(<B::Inner>::float_reshape(sum, Shape::from(dims.to_vec())), dtype);
        let gradient =
            Tensor::<B, D>::from_primitive(TensorPrimitive::Float(B::map_float8(like, |_| Float8Tensor::new(sum))));
        self.grads.remove::<B::InnerBackend, D>(param.id);
        self.grads.register(param.id, gradient.inner());
    }
}

fn full<B: Float8Stack, const D: usize>(tensor: Tensor<B, D>) -> Option<FloatTensor<B::Inner>> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(tensor) => Some(B::float8_tensor(&tensor).full().clone()),
        TensorPrimitive::QFloat(_) => None,
    }
}
