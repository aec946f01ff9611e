//! Weight decay of the matrices that a model multiplies with: norms, biases and embeddings do not decay.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

/// Multiplies by `factor` each matrix of `module` that has a gradient and is no embedding's, as AdamW does before its step.
pub(crate) fn decay_matrices<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    grads: &GradientsParams,
    factor: f64,
) -> M {
    module.map(&mut DecayMatrices::<B> { grads, factor, containers: vec![], backend: PhantomData })
}

struct DecayMatrices<'a, B> {
    grads: &'a GradientsParams,
    factor: f64,
    /// Kinds of the modules on the way down.
    containers: Vec<String>,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for DecayMatrices<'_, B> {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.containers.push(container_type.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let is_embedding = self.containers.last().is_some_and(|kind| kind.rsplit(':').next() == Some("Embedding"));
        let has_gradient = self.grads.get::<B::InnerBackend, D>(param.id).is_some();
        if D < 2 || is_embedding || !has_gradient {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let requires_grad = tensor.is_require_grad();
        let tensor = Tensor::from_inner(tensor.inner().mul_scalar(self.factor)).set_require_grad(requires_grad);
        Param::from_mapped_value(id, tensor, mapper)
    }
}
