//! AdamW over a module. It computes in f32 for any storage dtype. Weight decay applies to matrices;
//! norms, biases and embeddings do not decay.

use std::collections::HashMap;
use std::ops::Deref;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_float8::Float8Stack;
use burn_float8::shard_hooks::Path;

use crate::Ranks;
use crate::parameter_step::ParameterStep;
pub(crate) use crate::parameter_step::{ParameterState, Update};

/// Elements that [`Update`] rounds at a time when composed of Burn's operations. About ten f32
/// tensors of this size are then in memory.
pub(crate) const AT_ONCE: usize = 1 << 24;

/// Model that changes in place. It is only taken out for changes that cannot fail.
#[derive(Debug)]
pub struct ModelSlot<M>(Option<M>);

impl<M> ModelSlot<M> {
    /// Slot with a model.
    pub fn new(model: M) -> Self {
        Self(Some(model))
    }

    /// The model.
    pub fn into_inner(self) -> M {
        self.0.expect("it is put back")
    }

    /// Changes the model.
    pub(crate) fn map(&mut self, change: impl FnOnce(M) -> M) {
        self.0 = self.0.take().map(change);
    }
}

impl<M> Deref for ModelSlot<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.0.as_ref().expect("it is put back")
    }
}

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

impl Update<'_> {
    /// Updates each parameter of `model` that has a gradient. Tensors kept in bf16 are rounded
    /// stochastically, with bits that depend on the parameter's path.
    pub(crate) fn apply<B: AutodiffBackend + Float8Stack, M: Module<B>>(
        self,
        states: &mut AdamWStates<B::InnerBackend>,
        model: &mut ModelSlot<M>,
        grads: GradientsParams,
        ranks: Option<&Ranks>,
    ) {
        let mut parameters = Parameters::<B> { update: self, ranks, states, grads, path: Path::default() };
        model.map(|model| model.map(&mut parameters));
    }
}

struct Parameters<'a, B: AutodiffBackend> {
    update: Update<'a>,
    ranks: Option<&'a Ranks>,
    states: &'a mut AdamWStates<B::InnerBackend>,
    grads: GradientsParams,
    path: Path,
}

impl<B: AutodiffBackend + Float8Stack> ModuleMapper<B> for Parameters<'_, B> {
    tracks_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let requires_grad = tensor.is_require_grad();
        let place = self.ranks.and_then(|ranks| ranks.parameter(id));
        let step = ParameterStep {
            update: self.update,
            decay: self.update.decay(D >= 2 && self.path.embedding(D).is_none()),
            path: self.path.parameter_name(),
            first_row: place.and_then(|place| place.rows).map_or(0, |[begin, _]| begin),
            first_column: place.and_then(|place| place.cols).map_or(0, |[begin, _]| begin),
        };
        let (value, state) = step.step(tensor.inner(), grad, self.states.remove(id));
        self.states.insert(id, state);
        Param::from_mapped_value(id, Tensor::from_inner(value).set_require_grad(requires_grad), mapper)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{DType, Int};
    use burn_float8::{Float8, Float8Config};

    use super::*;
    use crate::config::OptimizerSection;
    use crate::storage::store_matrices;

    type B = Float8<Autodiff<Flex>>;

    /// The parameter is the rounded master weight, and the master equals a parameter trained in
    /// f32. Both keep their layers.
    #[test]
    fn a_master_takes_the_steps_of_a_parameter_in_f32() {
        let device = Default::default();
        let model = LinearConfig::new(50, 24).with_bias(false).init::<B>(&device);
        // Initializes the weight: clones of a lazy parameter would be initialized separately.
        drop(model.weight.val());
        let section = OptimizerSection { master_weights: true, ..OptimizerSection::default() };
        let after = |dtype| {
            let model: Linear<B> = store_matrices(store_matrices(model.clone(), DType::BF16), dtype);
            let mut slot = ModelSlot::new(Float8Config::tensorwise().apply(model).unwrap().0);
            let (mut states, id) = (AdamWStates::default(), slot.weight.id);
            for step in 0..4 {
                let mut grads = GradientsParams::new();
                // Some gradients are so small that bf16 would lose their updates.
                let grad = Tensor::<Float8<Flex>, 1, Int>::arange(-600..600, &device).float() * 1e-3 * step as f32;
                grads.register(id, grad.reshape([50, 24]).cast(DType::BF16));
                let update = Update { section: &section, lr: 1e-4, seed: 5, step, at_once: AT_ONCE };
                update.apply::<B, _>(&mut states, &mut slot, grads, None);
            }
            let weight = slot.weight.val();
            assert!(B::layer(&weight.clone().into_primitive().tensor()).is_some(), "the weight has lost its layer");
            (states.get::<2>(id).unwrap(), weight)
        };
        let [(of_narrow, narrow), (of_wide, wide)] = [DType::BF16, DType::F32].map(after);
        let data = |tensor: Tensor<Float8<Flex>, 2>| tensor.into_data();
        let master = of_narrow.master.expect("kept in bf16");
        assert!(of_wide.master.is_none());
        assert_eq!(data(master.clone()), data(wide.inner()));
        assert_eq!(narrow.dtype(), DType::BF16);
        assert_eq!(data(narrow.inner()), data(master.cast(DType::BF16)));
        for (a, b) in of_narrow.moments.into_iter().zip(of_wide.moments) {
            assert_eq!(data(a), data(b));
        }
    }
}
