//! Gradients of parameters that every rank keeps whole, added up over the host's memory.
use std::marker::PhantomData;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use float8_comm::{CommError, Communicator};

use super::walk::sharding_of;
use crate::stack::Float8Stack;

/// [`Sharded::reduce_gradients`](super::Sharded::reduce_gradients).
pub(super) fn reduce<B: Float8Stack + AutodiffBackend, M: Module<B>>(
    comm: &Communicator,
    model: &M,
    grads: &mut GradientsParams,
) -> Result<(), CommError> {
    let mut read = ReadGradients::<B> { grads, values: vec![], has_gradient: vec![], backend: PhantomData };
    Module::<B>::visit(model, &mut read);
    let ReadGradients { mut values, has_gradient, .. } = read;
    if has_gradient.is_empty() {
        return Ok(());
    }
    let count = has_gradient.len();
    values.extend(has_gradient.iter().map(|has| if *has { 1.0 } else { 0.0 }));
    let mut values = comm.all_reduce_sum("gradients of replicated parameters", values)?.wait()?;
    let present = values.split_off(values.len() - count);
    let mut write = WriteGradients::<B> { grads, values: &values, present: &present, backend: PhantomData };
    Module::<B>::visit(model, &mut write);
    Ok(())
}

/// The gradients of replicated parameters one after the other, zeros where there is none.
struct ReadGradients<'a, B> {
    grads: &'a GradientsParams,
    values: Vec<f32>,
    has_gradient: Vec<bool>,
    backend: PhantomData<B>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for ReadGradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if sharding_of(&param.val()).is_some() {
            return;
        }
        let gradient = self.grads.get::<B::InnerBackend, D>(param.id);
        self.has_gradient.push(gradient.is_some());
        let elements = param.val().dims().iter().product::<usize>();
        match gradient {
            Some(gradient) => {
                let data = gradient.cast(DType::F32).into_data();
                self.values.extend(data.iter::<f32>());
            }
            None => self.values.resize(self.values.len() + elements, 0.0),
        }
    }
}

struct WriteGradients<'a, B> {
    grads: &'a mut GradientsParams,
    values: &'a [f32],
    present: &'a [f32],
    backend: PhantomData<B>,
}

impl<B: Float8Stack + AutodiffBackend> ModuleVisitor<B> for WriteGradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if sharding_of(&param.val()).is_some() {
            return;
        }
        let value = param.val();
        let (dims, device, dtype) = (value.dims(), value.device(), value.dtype());
        let (own, rest) = self.values.split_at(dims.iter().product());
        let (present, others) = self.present.split_at(1);
        (self.values, self.present) = (rest, others);
        if present[0] > 0.0 {
            self.grads.remove::<B::InnerBackend, D>(param.id);
            let data = TensorData::new(own.to_vec(), dims);
            let gradient = Tensor::<B::InnerBackend, D>::from_data(data, (&device, DType::F32)).cast(dtype);
            self.grads.register(param.id, gradient);
        }
    }
}
