//! AdamW over a module, and weight decay of the matrices that a model multiplies with: norms, biases and embeddings do not decay.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use crate::config::OptimizerSection;

/// AdamW over the parameters of a module.
pub type ModuleAdamW<M, B> = OptimizerAdaptor<AdamW, M, B>;

/// The optimizer that `section` describes, before its first step. Where only matrices decay, it decays nothing: [`decay_matrices`] does.
pub(crate) fn adamw<B: AutodiffBackend, M: AutodiffModule<B>>(section: &OptimizerSection) -> ModuleAdamW<M, B> {
    let OptimizerSection { betas, eps, weight_decay, weight_decay_all, .. } = *section;
    let weight_decay = if weight_decay_all { weight_decay } else { 0.0 };
    AdamWConfig::new()
        .with_beta_1(betas[0] as f32)
        .with_beta_2(betas[1] as f32)
        .with_epsilon(eps as f32)
        .with_weight_decay(weight_decay as f32)
        .init::<B, M>()
}

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
