//! AdamW over a module. It computes in f32 for any storage dtype. Weight decay applies to matrices;
//! norms, biases and embeddings do not decay.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, GradientsParams};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_float8::Float8Stack;
use float8_shard::Sharded;

use crate::ModulePath;
use crate::config::OptimizerSection;
use crate::module_path::module_type;
pub(crate) use crate::parameter_step::Update;
use crate::parameter_step::{ParameterStep, in_place_of};

/// Elements that [`Update`] rounds at a time when composed of Burn's operations. About ten f32
/// tensors of this size are then in memory.
pub(crate) const AT_ONCE: usize = 1 << 24;

/// AdamW states of the parameters that have taken steps, on the backend below autodiff.
#[derive(Clone, Debug, Default)]
pub struct AdamWStates<B: Backend>(HashMap<ParamId, Erased<B>>);

/// [`ParameterState`] without its number of dimensions.
#[derive(Clone, Debug)]
struct Erased<B: Backend> {
    time: usize,
    moments: [TensorPrimitive<B>; 2],
    master: Option<TensorPrimitive<B>>,
}

/// AdamW state of a parameter.
pub(crate) struct ParameterState<B: Backend, const D: usize> {
    /// Steps taken.
    pub(crate) time: usize,
    /// Both moments.
    pub(crate) moments: [Tensor<B, D>; 2],
    /// Master weight in f32, if the parameter is kept in a narrower dtype.
    pub(crate) master: Option<Tensor<B, D>>,
}

impl<B: Backend> AdamWStates<B> {
    /// State of a parameter, if it has taken steps.
    pub(crate) fn get<const D: usize>(&self, id: ParamId) -> Option<ParameterState<B, D>> {
        self.0.get(&id).cloned().map(Erased::state)
    }

    pub(crate) fn insert<const D: usize>(&mut self, id: ParamId, state: ParameterState<B, D>) {
        let ParameterState { time, moments, master } = state;
        let moments = moments.map(Tensor::into_primitive);
        self.0.insert(id, Erased { time, moments, master: master.map(Tensor::into_primitive) });
    }

    /// Removes the state, so that its tensors are not shared.
    fn remove<const D: usize>(&mut self, id: ParamId) -> Option<ParameterState<B, D>> {
        self.0.remove(&id).map(Erased::state)
    }
}

impl<B: Backend> Erased<B> {
    fn state<const D: usize>(self) -> ParameterState<B, D> {
        let Self { time, moments, master } = self;
        ParameterState { time, moments: moments.map(Tensor::new), master: master.map(Tensor::new) }
    }
}

/// AdamW for `section`. If only matrices decay, its weight decay is 0 and [`Update`] applies the
/// decay.
fn adamw(section: &OptimizerSection) -> AdamW {
    let OptimizerSection { betas, eps, weight_decay, weight_decay_all, .. } = *section;
    let weight_decay = if weight_decay_all { weight_decay } else { 0.0 };
    AdamWConfig::new()
        .with_beta_1(betas[0] as f32)
        .with_beta_2(betas[1] as f32)
        .with_epsilon(eps as f32)
        .with_weight_decay(weight_decay as f32)
        .build()
}

impl Update<'_> {
    /// Updates each parameter of `module` that has a gradient. Tensors kept in bf16 are rounded
    /// stochastically, with bits that depend on the parameter's path.
    pub(crate) fn apply<B: AutodiffBackend + Float8Stack, M: Module<B>>(
        self,
        states: AdamWStates<B::InnerBackend>,
        module: M,
        grads: GradientsParams,
    ) -> (AdamWStates<B::InnerBackend>, M) {
        let (adamw, path, containers) = (adamw(self.section), ModulePath::default(), vec![]);
        let mut parameters = Parameters::<B> { update: self, adamw, states, grads, path, containers };
        let module = module.map(&mut parameters);
        (parameters.states, module)
    }

    /// Decay factor of a matrix, rounded as AdamW does; `None` if there is nothing to do.
    fn decay(&self) -> Option<f64> {
        let OptimizerSection { weight_decay, weight_decay_all, .. } = *self.section;
        let decay = self.lr * f64::from(weight_decay as f32);
        (!weight_decay_all && decay != 0.0).then_some(1.0 - decay)
    }
}

struct Parameters<'a, B: AutodiffBackend> {
    update: Update<'a>,
    adamw: AdamW,
    states: AdamWStates<B::InnerBackend>,
    grads: GradientsParams,
    path: ModulePath,
    /// Types of the enclosing modules.
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
        let (dtype, has_master) = match tensor.dtype() {
            DType::BF16 if self.update.section.master_weights => (DType::F32, true),
            dtype => (dtype, false),
        };
        let step = ParameterStep {
            update: self.update,
            adamw: &self.adamw,
            decay: self
                .update
                .decay()
                .filter(|_| D >= 2 && self.containers.last().is_none_or(|module| module != "Embedding")),
            path: self.path.dotted(),
            dtype,
        };
        let (state, master) = match self.states.remove(id) {
            Some(ParameterState { time, moments: [moment_1, moment_2], master }) => {
                let momentum = AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None };
                (Some(AdamWState { momentum }), master)
            }
            None => (None, None),
        };
        let value = tensor.inner();
        let (value, state, master) = if has_master {
            let master = master.unwrap_or_else(|| value.clone().cast(dtype));
            let (master, state) = step.step(master, grad, state, first_row);
            (in_place_of(&value, master.clone().cast(value.dtype())), state, Some(master))
        } else {
            let (value, state) = step.step(value, grad, state, first_row);
            (value, state, None)
        };
        if let Some(AdamWState { momentum: AdaptiveMomentumState { time, moment_1, moment_2, .. } }) = state {
            self.states.insert(id, ParameterState { time, moments: [moment_1, moment_2], master });
        }
        Param::from_mapped_value(id, Tensor::from_inner(value).set_require_grad(requires_grad), mapper)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::LinearConfig;
    use burn::tensor::{DType, Int};
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
            let (_, model) = update.apply::<B, _>(AdamWStates::default(), model, grads);
            let weight = model.weight.val();
            assert_eq!(weight.dtype(), dtype);
            assert!(B::layer(&weight.into_primitive().tensor()).is_some(), "the weight has lost its layer");
        }
    }

    /// The parameter is the rounded master weight, and the master equals a parameter trained in
    /// f32.
    #[test]
    fn a_master_takes_the_steps_of_a_parameter_in_f32() {
        let device = Default::default();
        let model = LinearConfig::new(50, 24).with_bias(false).init::<B>(&device);
        // Initializes the weight: clones of a lazy parameter would be initialized separately.
        drop(model.weight.val());
        let [narrow, wide] =
            [DType::BF16, DType::F32].map(|dtype| store_matrices(store_matrices(model.clone(), DType::BF16), dtype));
        let after = |mut model: burn::nn::Linear<B>, section: &OptimizerSection| {
            model = Float8Config::tensorwise().apply(model).unwrap().0;
            let mut states = AdamWStates::default();
            for step in 0..4 {
                let mut grads = GradientsParams::new();
                // Some gradients are so small that bf16 would lose their updates.
                let grad = Tensor::<Float8<Flex>, 1, Int>::arange(-600..600, &device).float() * 1e-3 * step as f32;
                grads.register(model.weight.id, grad.reshape([50, 24]).cast(DType::BF16));
                let update = Update { section, lr: 1e-4, seed: 5, step, at_once: AT_ONCE };
                (states, model) = update.apply::<B, _>(states, model, grads);
            }
            (states.get::<2>(model.weight.id).unwrap(), model.weight.val())
        };
        let section = OptimizerSection { master_weights: true, ..OptimizerSection::default() };
        let (of_narrow, narrow) = after(narrow, &section);
        let (of_wide, wide) = after(wide, &section);
        let data = |tensor: Tensor<Float8<Flex>, 2>| tensor.into_data();
        let master = of_narrow.master.expect("kept in bf16");
        assert!(of_wide.master.is_none());
        assert_eq!(data(master.clone()), data(wide.inner()));
        assert_eq!(narrow.dtype(), DType::BF16);
        assert_eq!(data(narrow.clone().inner()), data(master.cast(DType::BF16)));
        for (a, b) in of_narrow.moments.into_iter().zip(of_wide.moments) {
            assert_eq!(data(a), data(b));
        }
        assert!(B::layer(&narrow.into_primitive().tensor()).is_some(), "the weight has lost its layer");
    }
}
