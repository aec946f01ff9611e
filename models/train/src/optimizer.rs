//! AdamW over a module, in f32 whatever parameters and moments are kept in, and weight decay of the matrices that a model multiplies
//! with: norms, biases and embeddings do not decay.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{AdamW, AdamWConfig, AdamWState, GradientsParams, Optimizer, SimpleOptimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Tensor};
use burn_float8::Float8Stack;
use float8_shard::Sharded;

use crate::ModulePath;
use crate::config::OptimizerSection;
use crate::rounding::Noise;

/// Elements that [`Update`] rounds at once: some ten tensors of so many, in f32, are in memory then.
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
    /// Elements of a parameter that are rounded at once.
    pub(crate) at_once: usize,
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
        let (id, tensor, mapper) = param.consume();
        let (requires_grad, first_row) = (tensor.is_require_grad(), Sharded::rows(&tensor).start);
        let is_embedding = self.containers.last().is_some_and(|kind| kind.rsplit(':').next() == Some("Embedding"));
        let step = ParameterStep {
            update: self.update,
            adamw: &self.adamw,
            decay: self.update.decay().filter(|_| D >= 2 && !is_embedding),
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

/// The step of one parameter.
struct ParameterStep<'a> {
    update: Update<'a>,
    adamw: &'a AdamW,
    decay: Option<f64>,
    path: String,
    /// What the parameter is kept in.
    dtype: DType,
}

/// A parameter and its moments.
type Stepped<B, const D: usize> = (Tensor<B, D>, Option<AdamWState<B, D>>);

impl ParameterStep<'_> {
    /// The step, made for some rows after others where something is rounded and all would take much.
    fn step<B: Backend, const D: usize>(
        &self,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamWState<B, D>>,
        first_row: usize,
    ) -> Stepped<B, D> {
        let (rows, elements) = (value.dims()[0], value.shape().num_elements());
        let at_once = (self.update.at_once / (elements / rows.max(1)).max(1)).max(1);
        let is_rounded = [self.dtype, self.update.section.state_dtype.dtype()].contains(&DType::BF16);
        if !is_rounded || at_once >= rows {
            return self.step_rows(value, grad, state, first_row);
        }
        let (mut values, mut moments) = (vec![], [vec![], vec![]]);
        let mut after = None;
        for start in (0..rows).step_by(at_once) {
            let part = |tensor: Tensor<B, D>| tensor.narrow(0, start, at_once.min(rows - start));
            let own = state.clone().map(|state| map_moments(state, part));
            let (value, own) = self.step_rows(part(value.clone()), part(grad.clone()), own, first_row + start);
            values.push(value);
            if let Some(AdamWState { momentum }) = own {
                moments[0].push(momentum.moment_1.clone());
                moments[1].push(momentum.moment_2.clone());
                after = Some(AdamWState { momentum });
            }
        }
        // Let go before the new ones are put together.
        drop((grad, state));
        let mut moments = moments.into_iter().map(|parts| Tensor::cat(parts, 0));
        let state = after.map(|state| map_moments(state, |last| moments.next().unwrap_or(last)));
        // What is put together from rows is no weight of a layer, what is chosen in place of one is.
        let all = Tensor::<B, D, Bool>::ones(value.dims(), &value.device());
        (value.mask_where(all, Tensor::cat(values, 0)), state)
    }

    /// The step of neighbouring rows of a parameter, of which `first_row` is the first.
    fn step_rows<B: Backend, const D: usize>(
        &self,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamWState<B, D>>,
        first_row: usize,
    ) -> Stepped<B, D> {
        let Update { section, lr, seed, step, .. } = self.update;
        let store = |tensor: Tensor<B, D>, dtype: DType, what: &str| match dtype {
            DType::BF16 => Noise { seed, step, name: &format!("{}{what}", self.path) }.round(tensor, first_row),
            dtype => tensor.cast(dtype),
        };
        let value = value.cast(DType::F32);
        let value = match self.decay {
            Some(factor) => value.mul_scalar(factor),
            None => value,
        };
        let state = state.map(|state| map_moments(state, |moment| moment.cast(DType::F32)));
        let (value, state) = self.adamw.step(lr, value, grad.cast(DType::F32), state);
        let mut names = [".moment_1", ".moment_2"].into_iter();
        let kept = section.state_dtype.dtype();
        let state =
            state.map(|state| map_moments(state, |moment| store(moment, kept, names.next().unwrap_or_default())));
        (store(value, self.dtype, ""), state)
    }
}

/// The state with other moments: the first, then the second, as `map` makes them.
fn map_moments<B: Backend, const D: usize>(
    state: AdamWState<B, D>,
    mut map: impl FnMut(Tensor<B, D>) -> Tensor<B, D>,
) -> AdamWState<B, D> {
    let AdamWState { mut momentum } = state;
    momentum.moment_1 = map(momentum.moment_1);
    momentum.moment_2 = map(momentum.moment_2);
    AdamWState { momentum }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Distribution;
    use burn_float8::{Float8, Float8Config};

    use super::*;
    use crate::config::StorageDtype;
    use crate::storage::store_matrices;

    type B = Float8<Autodiff<Flex>>;

    /// The weight and its moments after three steps, each made for so many elements at once.
    fn trained(model: &Linear<B>, grads: &[Tensor<Float8<Flex>, 2>], at_once: usize) -> [Vec<u32>; 3] {
        let section = OptimizerSection { state_dtype: StorageDtype::Bf16, ..OptimizerSection::default() };
        let (mut model, mut optimizer) = (model.clone(), adamw::<B, _>(&section));
        for (step, grad) in grads.iter().enumerate() {
            let mut of_step = GradientsParams::new();
            of_step.register(model.weight.id, grad.clone());
            let update = Update { section: &section, lr: 0.01, seed: 5, step, at_once };
            (optimizer, model) = update.apply(optimizer, model, of_step);
        }
        let (_, record) = optimizer.to_record().into_iter().next().unwrap();
        let AdamWState { momentum } = record.into_state::<2>();
        let weight = model.weight.val();
        assert!(B::layer(&weight.clone().into_primitive().tensor()).is_some(), "the weight has lost its layer");
        [weight.inner(), momentum.moment_1, momentum.moment_2].map(|tensor| {
            assert_eq!(tensor.dtype(), DType::BF16);
            tensor.cast(DType::F32).into_data().iter::<f32>().map(f32::to_bits).collect()
        })
    }

    #[test]
    fn rows_one_after_another_are_all_rows() {
        let device = Default::default();
        let model = LinearConfig::new(50, 24).with_bias(false).init::<B>(&device);
        let model = Float8Config::tensorwise().apply(store_matrices(model, DType::BF16)).unwrap().0;
        let normal = Distribution::Normal(0.0, 1.0);
        let grad = |_| Tensor::<Float8<Flex>, 2>::random([50, 24], normal, &device).cast(DType::BF16);
        let grads: Vec<_> = (0..3).map(grad).collect();
        let whole = trained(&model, &grads, usize::MAX);
        for at_once in [24 * 50 - 1, 24 * 7, 1] {
            assert!(trained(&model, &grads, at_once) == whole, "{at_once}");
        }
    }
}
