//! AdamW over a module, in f32 whatever parameters and moments are kept in, and weight decay of the matrices that a model multiplies
//! with: norms, biases and embeddings do not decay.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::Float8Stack;
use float8_shard::Sharded;

use crate::ModulePath;
use crate::config::OptimizerSection;
use crate::module_path::module_type;
use crate::parameter_step::ParameterStep;
pub(crate) use crate::parameter_step::Update;

/// Elements that [`Update`] rounds at once where it is made by operations: some ten tensors of so many, in f32, are in memory then.
pub(crate) const AT_ONCE: usize = 1 << 24;

/// AdamW over the parameters of a module.
pub type ModuleAdamW<M, B> = OptimizerAdaptor<AdamW, M, B>;

/// The optimizer that `section` describes, before its first step. Where only matrices decay, it decays nothing: [`Update`] does.
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

impl Update<'_> {
    /// Makes the step for each parameter of `module` that has a gradient. What is kept in bf16 is rounded stochastically, by the path of
    /// the parameter.
    pub(crate) fn apply<B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>>(
        self,
        optimizer: ModuleAdamW<M, B>,
        module: M,
        grads: GradientsParams,
    ) -> (ModuleAdamW<M, B>, M) {
        let (adamw, records) = (optimizer.optim().clone(), optimizer.to_record().into_iter().collect());
        // The moments of each parameter are let go when it has new ones.
        drop(optimizer);
        let (path, containers) = (ModulePath::default(), vec![]);
        let mut parameters = Parameters { update: self, adamw, records, grads, path, containers };
        let module = module.map(&mut parameters);
        let optimizer = self::adamw(self.section).load_record(parameters.records.into_iter().collect());
        (optimizer, module)
    }

    /// The factor of a decaying matrix, none if nothing is left to decay; as AdamW rounds it.
    fn decay(&self) -> Option<f64> {
        let OptimizerSection { weight_decay, weight_decay_all, .. } = *self.section;
        let decay = self.lr * f64::from(weight_decay as f32);
        (!weight_decay_all && decay != 0.0).then_some(1.0 - decay)
    }
}

struct Parameters<'a, B: AutodiffBackend> {
    update: Update<'a>,
    adamw: AdamW,
    records: HashMap<ParamId, AdaptorRecord<AdamW, B>>,
    grads: GradientsParams,
    path: ModulePath,
    /// Types of the modules on the way down.
    containers: Vec<String>,
}

impl<B: AutodiffBackend + Float8Stack> ModuleMapper<B> for Parameters<'_, B> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name);
        self.containers.push(module_type(container_type).into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let (requires_grad, first_row) = (tensor.is_require_grad(), Sharded::rows(&tensor).start);
        let step = ParameterStep {
            update: self.update,
            adamw: &self.adamw,
            decay: self
                .update
                .decay()
                .filter(|_| D >= 2 && self.containers.last().is_none_or(|module| module != "Embedding")),
            path: self.path.dotted(),
            dtype: tensor.dtype(),
        };
        let state = self.records.remove(&id).map(AdaptorRecord::into_state);
        let (value, state) = step.step(tensor.inner(), grad, state, first_row);
        if let Some(state) = state {
            self.records.insert(id, AdaptorRecord::from_state(state));
        }
        Param::from_mapped_value(id, Tensor::from_inner(value).set_require_grad(requires_grad), mapper)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::LinearConfig;
    use burn::tensor::DType;
    use burn_float8::{Float8, Float8Config};

    use super::*;
    use crate::storage::store_matrices;

    type B = Float8<Autodiff<Flex>>;

    #[test]
    fn a_weight_keeps_its_layer() {
        let device = Default::default();
        let model = LinearConfig::new(50, 24).with_bias(false).init::<B>(&device);
        for dtype in [DType::F32, DType::BF16] {
            let model = Float8Config::tensorwise().apply(store_matrices(model.clone(), dtype)).unwrap().0;
            let section = OptimizerSection::default();
            let mut grads = GradientsParams::new();
            grads.register(model.weight.id, Tensor::<Float8<Flex>, 2>::ones([50, 24], &device).cast(dtype));
            let update = Update { section: &section, lr: 0.01, seed: 5, step: 0, at_once: AT_ONCE };
            let (_, model) = update.apply(adamw::<B, _>(&section), model, grads);
            let weight = model.weight.val();
            assert_eq!(weight.dtype(), dtype);
            assert!(B::layer(&weight.into_primitive().tensor()).is_some(), "the weight has lost its layer");
        }
    }
}
