//! [`ParameterStep`]: AdamW step of one parameter, fused if the backend supports it, else composed
//! of Burn's operations.

use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, SimpleOptimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Tensor};
use burn_float8::optim::{AdamWStep, FusedAdamW, RoundingKeys};

use crate::config::OptimizerSection;
use crate::rounding::Noise;

/// Suffixes of a parameter's path in the names of its moments.
const MOMENTS: [&str; 2] = [".moment_1", ".moment_2"];

/// One AdamW step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    /// Section of the optimizer.
    pub(crate) section: &'a OptimizerSection,
    /// Learning rate.
    pub(crate) lr: f64,
    /// Seed of the run, used for rounding.
    pub(crate) seed: u64,
    /// Steps completed before.
    pub(crate) step: usize,
    /// Elements of a parameter that are rounded at a time in the composed form.
    pub(crate) at_once: usize,
}

/// Step of one parameter.
pub(crate) struct ParameterStep<'a> {
    pub(crate) update: Update<'a>,
    pub(crate) adamw: &'a AdamW,
    /// Decay factor of the parameter, unless AdamW applies it.
    pub(crate) decay: Option<f64>,
    pub(crate) path: String,
    /// Storage dtype of the parameter.
    pub(crate) dtype: DType,
}

/// A parameter and its state.
type Stepped<B, const D: usize> = (Tensor<B, D>, Option<AdamWState<B, D>>);

impl ParameterStep<'_> {
    /// Step of the rows of a parameter from `first_row` on.
    pub(crate) fn step<B: Backend, const D: usize>(
        &self,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamWState<B, D>>,
        first_row: usize,
    ) -> Stepped<B, D> {
        match FusedAdamW::find() {
            Some(fused) => self.in_one_pass(fused, value, grad, state, first_row),
            None => self.by_operations(value, grad, state, first_row),
        }
    }

    /// Fused step, with the same bits as the composed one.
    fn in_one_pass<B: Backend, const D: usize>(
        &self,
        fused: FusedAdamW<B>,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamWState<B, D>>,
        first_row: usize,
    ) -> Stepped<B, D> {
        let Update { section, lr, .. } = self.update;
        let OptimizerSection { betas, eps, weight_decay, weight_decay_all, .. } = *section;
        let (dims, device, kept) = (value.dims(), value.device(), section.state_dtype.dtype());
        let keys = |dtype: DType, what: &str| {
            (dtype == DType::BF16).then(|| RoundingKeys(self.noise(what, |noise| noise.all_keys(dims, first_row))))
        };
        let by_adamw = Some(1.0 - lr * f64::from(weight_decay as f32)).filter(|_| weight_decay_all);
        let (time, moments) = match state {
            Some(AdamWState { momentum }) => {
                (momentum.time + 1, [momentum.moment_1, momentum.moment_2].map(|moment| moment.cast(kept)))
            }
            None => (1, [(); 2].map(|()| Tensor::zeros(dims, (&device, kept)))),
        };
        let step = AdamWStep {
            lr: lr as f32,
            betas: betas.map(|beta| beta as f32),
            epsilon: eps as f32,
            decay: self.decay.or(by_adamw).map(|factor| factor as f32),
            time,
            rounding: [keys(self.dtype, ""), keys(kept, MOMENTS[0]), keys(kept, MOMENTS[1])],
        };
        let (value, [moment_1, moment_2]) = fused.step(&step, value, moments, grad);
        let momentum = AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None };
        (value, Some(AdamWState { momentum }))
    }

    /// Calls `f` with the random bits for rounding a tensor of the parameter.
    fn noise<T>(&self, what: &str, f: impl FnOnce(Noise<'_>) -> T) -> T {
        let Update { seed, step, .. } = self.update;
        f(Noise { seed, step, name: &format!("{}{what}", self.path) })
    }

    /// Step composed of Burn's operations. If it rounds, large parameters are processed in groups
    /// of rows to bound memory.
    fn by_operations<B: Backend, const D: usize>(
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
        // Frees the old tensors before the new ones are concatenated.
        drop((grad, state));
        let mut moments = moments.into_iter().map(|parts| Tensor::cat(parts, 0));
        let state = after.map(|state| map_moments(state, |last| moments.next().unwrap_or(last)));
        (in_place_of(&value, Tensor::cat(values, 0)), state)
    }

    /// Step of adjacent rows of a parameter from `first_row` on.
    fn step_rows<B: Backend, const D: usize>(
        &self,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<AdamWState<B, D>>,
        first_row: usize,
    ) -> Stepped<B, D> {
        let Update { section, lr, .. } = self.update;
        let store = |tensor: Tensor<B, D>, dtype: DType, what: &str| match dtype {
            DType::BF16 => self.noise(what, |noise| noise.round(tensor, first_row)),
            dtype => tensor.cast(dtype),
        };
        let value = value.cast(DType::F32);
        let value = match self.decay {
            Some(factor) => value.mul_scalar(factor),
            None => value,
        };
        let state = state.map(|state| map_moments(state, |moment| moment.cast(DType::F32)));
        let (value, state) = self.adamw.step(lr, value, grad.cast(DType::F32), state);
        let mut names = MOMENTS.into_iter();
        let kept = section.state_dtype.dtype();
        let state =
            state.map(|state| map_moments(state, |moment| store(moment, kept, names.next().unwrap_or_default())));
        (store(value, self.dtype, ""), state)
    }
}

/// New value of a parameter with the layer of the old one: `mask_where` keeps it, other operations
/// drop it.
pub(crate) fn in_place_of<B: Backend, const D: usize>(old: &Tensor<B, D>, new: Tensor<B, D>) -> Tensor<B, D> {
    let all = Tensor::<B, D, Bool>::ones(old.dims(), &old.device());
    old.clone().mask_where(all, new)
}

/// Applies `map` to both moments, first to `moment_1`.
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
    use burn::backend::{Flex, NdArray};
    use burn::optim::AdamWConfig;
    use burn::tensor::TensorData;
    use burn_float8::Float8;

    use super::*;
    use crate::config::StorageDtype;
    use crate::rng::Rng;

    /// Values of many magnitudes, including zeros of both signs.
    fn numbers<B: Backend, const D: usize>(name: &str, dims: [usize; D], dtype: DType) -> Tensor<B, D> {
        let mut rng = Rng::named(3, name);
        let mut number = |i: usize| {
            let bits = rng.next_u64();
            let unit = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
            let small = 10_f32.powi(-((bits & 15) as i32));
            [unit * small, unit, 0.0, -0.0][if i % 97 < 2 { 2 + i % 97 } else { i % 2 }]
        };
        let values: Vec<f32> = (0..dims.iter().product()).map(&mut number).collect();
        Tensor::from_data(TensorData::new(values, dims), (&Default::default(), dtype))
    }

    fn bits<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Vec<u32> {
        assert_eq!(tensor.dtype(), dtype);
        tensor.cast(DType::F32).into_data().iter::<f32>().map(f32::to_bits).collect()
    }

    /// A parameter and its moments after three steps: composed with `at_once` elements at a time,
    /// or fused.
    fn after<B: Backend, const D: usize>(
        section: &OptimizerSection,
        (dims, dtype): ([usize; D], DType),
        at_once: Option<usize>,
        first_row: usize,
    ) -> [Vec<u32>; 3] {
        let decayed = if section.weight_decay_all { section.weight_decay } else { 0.0 };
        let adamw = AdamWConfig::new().with_beta_1(section.betas[0] as f32).with_beta_2(section.betas[1] as f32);
        let adamw = adamw.with_epsilon(section.eps as f32).with_weight_decay(decayed as f32).build();
        let decay = (!section.weight_decay_all && D > 1).then_some(1.0 - 0.013 * 0.1);
        let (mut value, mut state) = (numbers::<B, D>("value", dims, dtype), None);
        for step in 0..3 {
            let update = Update { section, lr: 0.013, seed: 5, step, at_once: at_once.unwrap_or_default() };
            let step = ParameterStep { update, adamw: &adamw, decay, path: "layers.0.weight".into(), dtype };
            let grad = numbers(&format!("gradient {}", update.step), dims, dtype);
            (value, state) = match at_once {
                None => {
                    let fused = FusedAdamW::find().expect("a host has it");
                    step.in_one_pass(fused, value, grad, state, first_row)
                }
                Some(_) => step.by_operations(value, grad, state, first_row),
            };
        }
        let AdamWState { momentum } = state.unwrap();
        assert_eq!(momentum.time, 3);
        let kept = section.state_dtype.dtype();
        [bits(value, dtype), bits(momentum.moment_1, kept), bits(momentum.moment_2, kept)]
    }

    #[test]
    fn one_pass_gives_the_bits_of_operations() {
        let pools = [1, 3].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
        for (state_dtype, weight_decay_all, dtype) in [
            (StorageDtype::F32, false, DType::F32),
            (StorageDtype::F32, true, DType::BF16),
            (StorageDtype::Bf16, true, DType::F32),
            (StorageDtype::Bf16, false, DType::BF16),
        ] {
            let section = OptimizerSection { state_dtype, weight_decay_all, ..OptimizerSection::default() };
            let what = format!("{dtype:?} {state_dtype:?}");
            let all = usize::MAX;
            for first_row in [0, 7] {
                let expected = after::<Float8<Flex>, 2>(&section, ([257, 259], dtype), Some(all), first_row);
                for pool in &pools {
                    let got = pool.install(|| after::<Float8<Flex>, 2>(&section, ([257, 259], dtype), None, first_row));
                    assert!(got == expected, "{what}, from row {first_row}");
                }
            }
            let got = after::<Float8<Flex>, 3>(&section, ([3, 5, 41], dtype), None, 2);
            assert!(got == after::<Float8<Flex>, 3>(&section, ([3, 5, 41], dtype), Some(all), 2), "{what}");
            let got = after::<Float8<Flex>, 1>(&section, ([40_001], dtype), None, 0);
            assert!(got == after::<Float8<Flex>, 1>(&section, ([40_001], dtype), Some(all), 0), "{what}");
        }
    }

    #[test]
    fn ndarray_gives_the_same_bits() {
        let section = OptimizerSection::default();
        let dims = ([257, 131], DType::F32);
        let expected = after::<Float8<NdArray>, 2>(&section, dims, Some(usize::MAX), 0);
        assert!(after::<Float8<NdArray>, 2>(&section, dims, None, 0) == expected);
        assert!(after::<Float8<Flex>, 2>(&section, dims, None, 0) == expected);
    }

    #[test]
    fn rows_one_after_another_are_all_rows() {
        let section = OptimizerSection { state_dtype: StorageDtype::Bf16, ..OptimizerSection::default() };
        let run = |at_once| after::<Float8<Flex>, 2>(&section, ([50, 24], DType::BF16), Some(at_once), 0);
        let whole = run(usize::MAX);
        for at_once in [24 * 50 - 1, 24 * 7, 1] {
            assert!(run(at_once) == whole, "{at_once}");
        }
    }
}
