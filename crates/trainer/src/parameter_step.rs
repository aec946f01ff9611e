//! [`ParameterStep`]: AdamW step of one parameter, fused if the backend supports it, else composed
//! of Burn's operations.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Tensor};
use burn_float8::optim::{AdamWDtypes, AdamWStep, FusedAdamW, RoundingKeys};

use crate::config::OptimizerSection;
use crate::rounding::Noise;

/// Suffixes of a parameter's path in the names of the tensors that are rounded: the parameter and
/// its moments.
const ROUNDED: [&str; 3] = ["", ".moment_1", ".moment_2"];

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

impl Update<'_> {
    /// Decay factor of a parameter, rounded as AdamW does; `None` if there is nothing to do.
    pub(crate) fn decay(&self, is_matrix: bool) -> Option<f64> {
        let OptimizerSection { weight_decay, weight_decay_all, .. } = *self.section;
        let decay = self.lr * f64::from(weight_decay as f32);
        ((weight_decay_all || is_matrix) && decay != 0.0).then_some(1.0 - decay)
    }
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

/// Step of one parameter.
pub(crate) struct ParameterStep<'a> {
    pub(crate) update: Update<'a>,
    /// Decay factor of the parameter.
    pub(crate) decay: Option<f64>,
    pub(crate) path: String,
    /// First row of the parameter in the whole tensor.
    pub(crate) first_row: usize,
    /// First column.
    pub(crate) first_column: usize,
}

/// A parameter and its moments, which do not exist before the first step.
type Values<T> = (T, Option<[T; 2]>);

impl ParameterStep<'_> {
    /// Parameter and state after the step.
    pub(crate) fn step<B: Backend, const D: usize>(
        &self,
        value: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<ParameterState<B, D>>,
    ) -> (Tensor<B, D>, ParameterState<B, D>) {
        let (time, moments, master) = match state {
            Some(ParameterState { time, moments, master }) => (time + 1, Some(moments), master),
            None => (1, None, None),
        };
        if !self.update.section.master_weights || value.dtype() == DType::F32 {
            let (value, moments) = self.step_value((value, moments), grad, time);
            return (value, ParameterState { time, moments, master: None });
        }
        let master = master.unwrap_or_else(|| value.clone().cast(DType::F32));
        let (master, moments) = self.step_value((master, moments), grad, time);
        let rounded = master.clone().cast(value.dtype());
        (in_place_of(&value, rounded), ParameterState { time, moments, master: Some(master) })
    }

    fn step_value<B: Backend, const D: usize>(
        &self,
        values: Values<Tensor<B, D>>,
        grad: Tensor<B, D>,
        time: usize,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let moments = self.update.section.state_dtype.dtype();
        let dtypes = AdamWDtypes { param: values.0.dtype(), moments, grad: grad.dtype() };
        match FusedAdamW::find(&values.0.device(), dtypes) {
            Some(fused) => self.in_one_pass(&fused, values, grad, time),
            None => self.by_operations(values, grad, time),
        }
    }

    /// Fused step. On a CPU it has the same bits as the composed one.
    fn in_one_pass<B: Backend, const D: usize>(
        &self,
        fused: &FusedAdamW<B>,
        (value, moments): Values<Tensor<B, D>>,
        grad: Tensor<B, D>,
        time: usize,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let Update { section, lr, .. } = self.update;
        let (dims, device, kept) = (value.dims(), value.device(), section.state_dtype.dtype());
        let keys = |dtype: DType, what: usize| {
            (dtype == DType::BF16).then(|| RoundingKeys(self.noise(what, |noise| noise.all_keys(dims, self.first_row))))
        };
        let moments = match moments {
            Some(moments) => moments.map(|moment| moment.cast(kept)),
            None => [(); 2].map(|()| Tensor::zeros(dims, (&device, kept))),
        };
        let step = AdamWStep {
            lr: lr as f32,
            betas: section.betas.map(|beta| beta as f32),
            epsilon: section.eps as f32,
            decay: self.decay.map(|factor| factor as f32),
            time,
            rounding: [keys(value.dtype(), 0), keys(kept, 1), keys(kept, 2)],
        };
        fused.step(step, value, moments, grad)
    }

    /// Calls `f` with the random bits for rounding one of the [`ROUNDED`].
    fn noise<T>(&self, what: usize, f: impl FnOnce(Noise<'_>) -> T) -> T {
        let Update { seed, step, .. } = self.update;
        f(Noise { seed, step, name: &format!("{}{}", self.path, ROUNDED[what]), first_column: self.first_column })
    }

    /// Step composed of Burn's operations. If it rounds, large parameters are processed in groups
    /// of rows to bound memory.
    fn by_operations<B: Backend, const D: usize>(
        &self,
        (value, moments): Values<Tensor<B, D>>,
        grad: Tensor<B, D>,
        time: usize,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let (rows, elements) = (value.dims()[0], value.shape().num_elements());
        let at_once = (self.update.at_once / (elements / rows.max(1)).max(1)).max(1);
        let is_rounded = [value.dtype(), self.update.section.state_dtype.dtype()].contains(&DType::BF16);
        if !is_rounded || at_once >= rows {
            return self.step_rows((value, moments), grad, time, self.first_row);
        }
        let mut parts = [vec![], vec![], vec![]];
        for start in (0..rows).step_by(at_once) {
            let part = |tensor: Tensor<B, D>| tensor.narrow(0, start, at_once.min(rows - start));
            let own = (part(value.clone()), moments.clone().map(|moments| moments.map(part)));
            let (value, [moment_1, moment_2]) = self.step_rows(own, part(grad.clone()), time, self.first_row + start);
            parts.iter_mut().zip([value, moment_1, moment_2]).for_each(|(parts, part)| parts.push(part));
        }
        // Frees the old tensors before the new ones are concatenated.
        drop((grad, moments));
        let [new, moment_1, moment_2] = parts.map(|parts| Tensor::cat(parts, 0));
        (in_place_of(&value, new), [moment_1, moment_2])
    }

    /// Step of adjacent rows of a parameter, starting at `first_row`.
    fn step_rows<B: Backend, const D: usize>(
        &self,
        (value, moments): Values<Tensor<B, D>>,
        grad: Tensor<B, D>,
        time: usize,
        first_row: usize,
    ) -> (Tensor<B, D>, [Tensor<B, D>; 2]) {
        let Update { section, lr, .. } = self.update;
        let [beta_1, beta_2] = section.betas.map(|beta| beta as f32);
        let (dtype, grad) = (value.dtype(), grad.cast(DType::F32));
        let store = |tensor: Tensor<B, D>, dtype: DType, what: usize| match dtype {
            DType::BF16 => self.noise(what, |noise| noise.round(tensor, first_row)),
            dtype => tensor.cast(dtype),
        };
        let new = [grad.clone().mul_scalar(1.0 - beta_1), grad.square().mul_scalar(1.0 - beta_2)];
        let [moment_1, moment_2] = match moments.map(|moments| moments.map(|moment| moment.cast(DType::F32))) {
            Some([moment_1, moment_2]) => {
                let [new_1, new_2] = new;
                [moment_1.mul_scalar(beta_1).add(new_1), moment_2.mul_scalar(beta_2).add(new_2)]
            }
            None => new,
        };
        let corrected = |moment: &Tensor<B, D>, beta: f32| moment.clone().div_scalar(1.0 - beta.powi(time as i32));
        let root = corrected(&moment_2, beta_2).sqrt().add_scalar(section.eps as f32);
        let delta = corrected(&moment_1, beta_1).div(root);
        let value = value.cast(DType::F32);
        let value = match self.decay {
            Some(factor) => value.mul_scalar(factor),
            None => value,
        };
        let kept = section.state_dtype.dtype();
        let value = store(value - delta.mul_scalar(lr), dtype, 0);
        (value, [store(moment_1, kept, 1), store(moment_2, kept, 2)])
    }
}

/// New value of a parameter with the layer of the old one: `mask_where` keeps it, other operations
/// drop it.
fn in_place_of<B: Backend, const D: usize>(old: &Tensor<B, D>, new: Tensor<B, D>) -> Tensor<B, D> {
    let all = Tensor::<B, D, Bool>::ones(old.dims(), &old.device());
    old.clone().mask_where(all, new)
}

#[cfg(test)]
mod tests {
    use burn::backend::{Flex, NdArray};
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
        let (mut value, mut moments) = (numbers::<B, D>("value", dims, dtype), None);
        for step in 0..3 {
            let update = Update { section, lr: 0.013, seed: 5, step, at_once: at_once.unwrap_or_default() };
            let step = ParameterStep {
                update,
                decay: update.decay(D > 1),
                path: "layers.0.weight".into(),
                first_row,
                first_column: 0,
            };
            let grad = numbers(&format!("gradient {}", update.step), dims, dtype);
            let (new, after) = match at_once {
                None => {
                    let dtypes = AdamWDtypes { param: dtype, moments: section.state_dtype.dtype(), grad: dtype };
                    let fused = FusedAdamW::find(&Default::default(), dtypes).expect("a host has it");
                    step.in_one_pass(&fused, (value, moments), grad, update.step + 1)
                }
                Some(_) => step.by_operations((value, moments), grad, update.step + 1),
            };
            (value, moments) = (new, Some(after));
        }
        let kept = section.state_dtype.dtype();
        let [moment_1, moment_2] = moments.unwrap();
        [bits(value, dtype), bits(moment_1, kept), bits(moment_2, kept)]
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
