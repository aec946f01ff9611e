//! AdamW over a module, in f32 whatever parameters and moments are kept in, and weight decay of the matrices that a model multiplies
//! with: norms, biases and embeddings do not decay.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWConfig, AdamWState, GradientsParams, Optimizer, SimpleOptimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_float8::Float8Stack;
use float8_shard::Sharded;

use crate::ModulePath;
use crate::config::OptimizerSection;
use crate::rounding::Noise;

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

/// One step of AdamW.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    /// The optimizer's section.
    pub(crate) section: &'a OptimizerSection,
    /// The learning rate.
    pub(crate) lr: f64,
    /// The run's seed, which what is rounded depends on.
    pub(crate) seed: u64,
    /// Steps made before.
    pub(crate) step: usize,
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
    /// Kinds of the modules on the way down.
    containers: Vec<String>,
}

impl<B: AutodiffBackend + Float8Stack> ModuleMapper<B> for Parameters<'_, B> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name);
        self.containers.push(container_type.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return param };
        let Update { section, lr, seed, step } = self.update;
        let (id, tensor, mapper) = param.consume();
        let (requires_grad, dtype, first_row) =
            (tensor.is_require_grad(), tensor.dtype(), Sharded::rows(&tensor).start);
        let is_embedding = self.containers.last().is_some_and(|kind| kind.rsplit(':').next() == Some("Embedding"));
        let decay = self.update.decay().filter(|_| D >= 2 && !is_embedding);
        let state = self.records.remove(&id).map(|record| in_f32(record.into_state()));
        let value = tensor.inner().cast(DType::F32);
        let value = match decay {
            Some(factor) => value.mul_scalar(factor),
            None => value,
        };
        let (value, state) = self.adamw.step(lr, value, grad.cast(DType::F32), state);
        let path = self.path.dotted();
        let store = |tensor: Tensor<B::InnerBackend, D>, dtype: DType, what: &str| match dtype {
            DType::BF16 => Noise { seed, step, name: &format!("{path}{what}") }.round(tensor, first_row),
            dtype => tensor.cast(dtype),
        };
        if let Some(AdamWState { mut momentum }) = state {
            momentum.moment_1 = store(momentum.moment_1, section.state_dtype.dtype(), ".moment_1");
            momentum.moment_2 = store(momentum.moment_2, section.state_dtype.dtype(), ".moment_2");
            self.records.insert(id, AdaptorRecord::from_state(AdamWState { momentum }));
        }
        let tensor = Tensor::from_inner(store(value, dtype, "")).set_require_grad(requires_grad);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Moments in the dtype that AdamW computes in.
fn in_f32<B: burn::tensor::backend::Backend, const D: usize>(state: AdamWState<B, D>) -> AdamWState<B, D> {
    let AdamWState { mut momentum } = state;
    momentum.moment_1 = momentum.moment_1.cast(DType::F32);
    momentum.moment_2 = momentum.moment_2.cast(DType::F32);
    AdamWState { momentum }
}
