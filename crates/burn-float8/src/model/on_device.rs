//! What the ranks of a sharded model exchange for all of it at once, on the memory of their devices.
use std::marker::PhantomData;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::{Shape, Slice};
use float8_comm::{CommError, Communicator};

use super::walk::sharding_of;
use crate::backend::{DeviceCollectives, Float8Backend};
use crate::shard::Amax;
use crate::stack::Float8Stack;
use crate::tensor::Float8Tensor;

/// The collectives of a model that lies on one device.
pub(super) fn collectives<B: Float8Stack, M: Module<B>>(
    model: &M,
    comm: &Communicator,
) -> Option<Box<dyn DeviceCollectives<B::Inner>>> {
    match &Module::<B>::devices(model)[..] {
        [device] => B::Inner::fp8_collectives(&B::inner_device(device), comm),
        _ => None,
    }
}

/// The amaxes of all ranks from this rank's, by one all-reduce.
pub(super) fn reduce_amaxes<B: Float8Backend>(
    collectives: &dyn DeviceCollectives<B>,
    own: Vec<Amax<B>>,
) -> Result<Vec<Amax<B>>, CommError> {
    let lens: Vec<usize> = own.iter().map(|amax| amax.0.shape()[0]).collect();
    let all = B::float_cat(own.into_iter().map(|amax| amax.0).collect(), 0);
    let all = collectives.all_reduce_max("amaxes of all weights", all)?;
    let mut parts = Parts::<B> { all, at: 0 };
    Ok(lens.into_iter().map(|len| Amax(parts.next(len))).collect())
}

/// [`Sharded::reduce_gradients`](super::Sharded::reduce_gradients). Which parameters have one is told on the host, so that it need not wait for the device.
pub(super) fn reduce_gradients<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    comm: &Communicator,
    collectives: &dyn DeviceCollectives<B::Inner>,
    model: &M,
    grads: &mut GradientsParams,
) -> Result<(), CommError> {
    let mut read = Read::<B> { grads, values: vec![], has_gradient: vec![] };
    Module::<B>::visit(model, &mut read);
    let Read { values, has_gradient, .. } = read;
    if values.is_empty() {
        return Ok(());
    }
    let present = comm.all_reduce_max_bits("which replicated parameters have gradients", has_gradient)?.wait()?;
    let all = <B::Inner as FloatTensorOps<B::Inner>>::float_cat(values, 0);
    let all = collectives.all_reduce_sum("gradients of replicated parameters", all)?;
    let mut present = present.into_iter();
    let mut write = Write::<B> { grads, parts: Parts { all, at: 0 }, present: &mut present, backend: PhantomData };
    Module::<B>::visit(model, &mut write);
    Ok(())
}

/// Tensors that lie one after another in one, `[n]`.
struct Parts<B: Float8Backend> {
    all: FloatTensor<B>,
    at: usize,
}

impl<B: Float8Backend> Parts<B> {
    fn next(&mut self, len: usize) -> FloatTensor<B> {
        let begin = self.at;
        self.at += len;
        B::float_slice(self.all.clone(), &[Slice::from(begin..self.at)])
    }
}

/// The gradients of replicated parameters in f32, flat, zeros where there is none.
struct Read<'a, B: Float8Stack> {
    grads: &'a GradientsParams,
    values: Vec<FloatTensor<B::Inner>>,
    has_gradient: Vec<u32>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for Read<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if sharding_of(&value).is_some() {
            return;
        }
        let gradient = self.grads.get::<B::InnerBackend, D>(param.id);
        self.has_gradient.push(u32::from(gradient.is_some()));
        let flat = Shape::from(vec![value.dims().iter().product::<usize>()]);
        let gradient = gradient.and_then(|gradient| full::<B, D>(Tensor::from_inner(gradient)));
        self.values.push(match gradient {
            Some(gradient) => in_dtype::<B::Inner>(<B::Inner>::float_reshape(gradient, flat), DType::F32),
            None => {
                let device: Device<B::Inner> = B::inner_device(&value.device());
                <B::Inner>::float_zeros(flat, &device, FloatDType::F32)
            }
        });
    }
}

struct Write<'a, B: Float8Stack> {
    grads: &'a mut GradientsParams,
    parts: Parts<B::Inner>,
    present: &'a mut dyn Iterator<Item = u32>,
    backend: PhantomData<B>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for Write<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        if sharding_of(&value).is_some() {
            return;
        }
        let (dims, dtype) = (value.dims(), value.dtype());
        let own = self.parts.next(dims.iter().product());
        if self.present.next().is_none_or(|present| present == 0) {
            return;
        }
        let TensorPrimitive::Float(like) = value.into_primitive() else { return };
        let own = in_dtype::<B::Inner>(<B::Inner>::float_reshape(own, Shape::from(dims.to_vec())), dtype);
        let gradient =
            Tensor::<B, D>::from_primitive(TensorPrimitive::Float(B::map_float8(like, |_| Float8Tensor::new(own))));
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

fn in_dtype<B: Float8Backend>(t: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if t.dtype() == dtype { t } else { B::float_cast(t, FloatDType::from(dtype)) }
}
