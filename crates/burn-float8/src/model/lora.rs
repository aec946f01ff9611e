//! LoRA for any Burn model: trains adapters of linears with frozen weights.
//!
//! ```text
//! y = linear(x, w) + α/r · (drop(x) · A) · B        A [K, r], B [r, N]
//! ```
//!
//! Source: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models* (2021). Names and
//! initial values follow Hugging Face's PEFT.
use std::collections::BTreeMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_backend::Backend;
use float8_kernels::check::split_mix;
use serde::{Deserialize, Serialize};

use super::walk::{Change, FoundLinear, draw, linears, map_params, parameter};
use crate::config::matches_none;
use crate::error::Float8Error;
use crate::ops::functions::{Functions, find};
use crate::stack::Float8Stack;
use crate::tensor::{Adapter, Dropout};

/// Configuration of adapters. Fields and defaults follow [PEFT](https://github.com/huggingface/peft):
/// rank 8, α 8, no dropout, all linears except `lm_head`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schemars", schemars(default))]
pub struct LoraConfig {
    /// Rank r of A and B.
    pub rank: usize,
    /// α. The product A·B is scaled by α/r.
    pub alpha: f64,
    /// Dropout probability of the adapters' input x in training.
    pub dropout: f64,
    /// Linears that get adapters, by the end of their names: `q_proj` matches
    /// `layers.3.self_attn.q_proj`. `all-linear` matches all linears except `lm_head`.
    pub target_modules: Vec<String>,
    /// Ranks of some linears instead of `rank`, by the end of their names. The longest match wins.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Values of α of some linears instead of `alpha`, by the end of their names. The longest match
    /// wins.
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        let (target_modules, rank_pattern, alpha_pattern) = (vec![ALL_LINEAR.into()], BTreeMap::new(), BTreeMap::new());
        Self { rank: 8, alpha: 8.0, dropout: 0.0, target_modules, rank_pattern, alpha_pattern }
    }
}

/// PEFT's name for all linears except the output.
const ALL_LINEAR: &str = "all-linear";

/// Output layer of a language model.
const OUTPUT: &str = "lm_head";

impl LoraConfig {
    /// Sets [`rank`](Self::rank).
    pub fn with_rank(self, rank: usize) -> Self {
        Self { rank, ..self }
    }

    /// Sets [`alpha`](Self::alpha).
    pub fn with_alpha(self, alpha: f64) -> Self {
        Self { alpha, ..self }
    }

    /// Sets [`dropout`](Self::dropout).
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    /// Sets [`target_modules`](Self::target_modules).
    pub fn with_target_modules<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        Self { target_modules: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// [`Float8Error::Config`] if the rank is 0, α is 0 or not finite, the dropout is outside 0..1,
    /// or there are no targets.
    pub fn validate(&self) -> Result<(), Float8Error> {
        let Self { rank, alpha, dropout, target_modules, rank_pattern, alpha_pattern } = self;
        let wrong = |key, value: String, reason: &'static str| Err(Float8Error::config(key, value, reason));
        if *rank == 0 {
            return wrong("lora.rank", "0".into(), "must be at least 1");
        }
        if let Some((name, _)) = rank_pattern.iter().find(|(_, rank)| **rank == 0) {
            return wrong("lora.rank_pattern", format!("{{{name} = 0}}"), "must be at least 1");
        }
        let is_wrong = |alpha: f64| !alpha.is_finite() || alpha == 0.0;
        if is_wrong(*alpha) {
            return wrong("lora.alpha", alpha.to_string(), "must be finite, and not 0");
        }
        if let Some((name, alpha)) = alpha_pattern.iter().find(|(_, alpha)| is_wrong(**alpha)) {
            return wrong("lora.alpha_pattern", format!("{{{name} = {alpha}}}"), "must be finite, and not 0");
        }
        if !(0.0..1.0).contains(dropout) {
            return wrong("lora.dropout", dropout.to_string(), "must be from 0 to below 1");
        }
        if target_modules.is_empty() {
            return wrong("lora.target_modules", "[]".into(), "must be at least one name");
        }
        Ok(())
    }

    /// Whether the linear with this name gets an adapter.
    pub fn targets(&self, name: &str) -> bool {
        self.target_modules.iter().any(|target| target_matches(target, name))
    }

    /// Rank of the linear with this name.
    pub fn rank_of(&self, name: &str) -> usize {
        of_pattern(&self.rank_pattern, name).unwrap_or(self.rank)
    }

    /// α of the linear with this name.
    pub fn alpha_of(&self, name: &str) -> f64 {
        of_pattern(&self.alpha_pattern, name).unwrap_or(self.alpha)
    }

    /// α/r of the linear with this name.
    pub fn scale_of(&self, name: &str) -> f64 {
        self.alpha_of(name) / self.rank_of(name) as f64
    }

    /// Creates f32 adapters for a model's linears. A is drawn uniformly from ±1/√K, seeded by
    /// `seed` and the linear's name. B is zero, so the outputs of the model do not change. Lazy
    /// parameters of the model are initialized.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate). [`Float8Error::Config`] if no linear's name ends with a
    /// target, or no target linear's name ends with the key of a pattern. [`Float8Error::Sharded`] if ranks
    /// divide a target.
    pub fn init<B: Float8Stack, M: Module<B>>(&self, model: &M, seed: u64) -> Result<Lora<B>, Float8Error> {
        self.validate()?;
        // Draws lazy parameters once. Otherwise each clone of the model would draw its own.
        draw::<B, M>(model);
        // Experts have weights of rank 3, which have no adapters.
        let is_matrix = |weight: &burn_backend::tensor::FloatTensor<B>| {
            use burn_backend::TensorMetadata;
            weight.shape().num_dims() == 2
        };
        let mut found: Vec<_> = linears::<B, M>(model, None)
            .into_iter()
            .filter(|linear| linear.weight.as_ref().is_none_or(is_matrix))
            .collect();
        each_matches("lora.target_modules", &self.target_modules, &found)?;
        found.retain(|linear| self.targets(&linear.info.name));
        if found.iter().any(|linear| linear.layer().is_some_and(|layer| layer.is_divided())) {
            return Err(Float8Error::Sharded);
        }
        each_matches("lora.rank_pattern", self.rank_pattern.keys(), &found)?;
        each_matches("lora.alpha_pattern", self.alpha_pattern.keys(), &found)?;
        let adapters = found.iter().map(|linear| {
            let (name, k, n) = (linear.info.name.clone(), linear.info.k, linear.info.n);
            let rank = self.rank_of(&name);
            let a = TensorData::new(uniform(named(seed, &name), k * rank, (k as f64).powf(-0.5)), [k, rank]);
            let [a, b] = [Tensor::from_data(a, &linear.device), Tensor::zeros([rank, n], &linear.device)]
                .map(|t| parameter(ParamId::new(), t.require_grad(), true));
            LoraAdapter { name, a, b }
        });
        Ok(Lora { adapters: adapters.collect(), config: self.clone() })
    }
}

fn target_matches(target: &str, name: &str) -> bool {
    match target {
        ALL_LINEAR => name != OUTPUT && !name.ends_with(".lm_head"),
        _ => name == target || name.strip_suffix(target).is_some_and(|parents| parents.ends_with('.')),
    }
}

/// Refuses a suffix that matches no name of these linears.
fn each_matches<'a, B: Float8Stack>(
    field: &'static str,
    ends: impl IntoIterator<Item = &'a String>,
    found: &[FoundLinear<B>],
) -> Result<(), Float8Error> {
    match ends.into_iter().find(|end| !found.iter().any(|linear| target_matches(end, &linear.info.name))) {
        Some(end) => Err(matches_none(field, end, found.iter().map(|linear| &*linear.info.name))),
        None => Ok(()),
    }
}

/// Value of the longest matching suffix of `name`.
fn of_pattern<T: Copy>(pattern: &BTreeMap<String, T>, name: &str) -> Option<T> {
    let ends = pattern.iter().filter(|(end, _)| target_matches(end, name));
    ends.max_by_key(|(end, _)| end.len()).map(|(_, value)| *value)
}

/// A distinct seed for each name.
fn named(seed: u64, name: &str) -> u64 {
    name.bytes().fold(split_mix(seed, 0), |seed, byte| split_mix(seed, u64::from(byte)))
}

/// Uniform numbers from -bound to bound.
fn uniform(seed: u64, len: usize, bound: f64) -> Vec<f32> {
    // 53 bits, so that every number is exact in f64.
    let number = |i| (split_mix(seed, i) >> 11) as f64 / 2f64.powi(52) - 1.0;
    (0..len as u64).map(|i| (number(i) * bound) as f32).collect()
}

/// Adapters of a model. They are a separate module, so that an optimizer trains them and a record
/// saves them, while the model stays frozen.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_float8::lora::LoraConfig;
/// use burn_float8::{Float8, Float8Config, weights};
///
/// type B = Float8<Autodiff<Flex>>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(64, 32).init(&device);
/// let (model, _) = Float8Config::tensorwise().apply(model).unwrap();
/// let (model, _) = weights::fp8_only(model.no_grad()).unwrap(); // a byte a parameter
/// let lora = LoraConfig::default().with_rank(4).init(&model, 7).unwrap();
/// let loss = lora.attach(model.clone(), None).forward(Tensor::<B, 2>::ones([8, 64], &device)).mean();
/// let grads = loss.backward();
/// assert!(lora.adapters[0].b.grad(&grads).is_some());
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Lora<B: Backend> {
    /// One adapter per target linear, in the order of the model.
    pub adapters: Vec<LoraAdapter<B>>,
    /// Configuration of the adapters.
    #[module(skip)]
    pub config: LoraConfig,
}

/// Adapter of one linear.
#[derive(Module, Debug)]
pub struct LoraAdapter<B: Backend> {
    /// The linear's name.
    #[module(skip)]
    pub name: String,
    /// `[K, r]`: PEFT's `lora_A.weight`, transposed.
    pub a: Param<Tensor<B, 2>>,
    /// `[r, N]`: PEFT's `lora_B.weight`, transposed.
    pub b: Param<Tensor<B, 2>>,
}

impl<B: Backend> Lora<B> {
    /// Returns the model with the adapters attached to its linears, for the forwards of one step.
    /// Attach them again after an optimizer step. Gradients belong to the parameters of this
    /// [`Lora`]. With a dropout, `seed` selects the dropped elements of x, the same in each
    /// forward. Pass `None` in evaluations to drop nothing.
    ///
    /// Several adapters add up: `two.attach(one.attach(model, None), None)` runs with both, and
    /// both get gradients. An adapter replaces an attached one with the same parameter id, such as
    /// its value before an optimizer step.
    ///
    /// All other operations read the weight of such a linear as `w + α/r · A·B`.
    ///
    /// # Panics
    ///
    /// On a backend that Float8 does not wrap.
    pub fn attach<M: Module<B>>(&self, model: M, seed: Option<u64>) -> M {
        map_params::<B, M>(model, |param| {
            let adapter = (param.shape.num_dims() == 2).then(|| self.of(&param.path.linear_name())).flatten();
            let Some(adapter) = adapter else { return Change::None };
            let weight = param.float().expect("an adapter is for floats");
            Change::Value((functions::<B>().with_adapter)(weight, self.beside(adapter, seed)))
        })
    }

    /// Returns the model with weights `w + α/r · A·B`, in their own dtype. FP8-only weights are
    /// decoded first. Apply a configuration to the result to run it in FP8.
    ///
    /// These weights are new parameters with the `require_grad` of the old ones. No gradient
    /// reaches the adapters.
    pub fn merge<M: Module<B>>(&self, model: M) -> M {
        map_params::<B, M>(self.attach(model, None), |param| {
            let merged = param.float().and_then(|weight| (functions::<B>().merge_adapters)(weight));
            merged.map_or(Change::None, Change::Replaced)
        })
    }

    fn of(&self, name: &str) -> Option<&LoraAdapter<B>> {
        self.adapters.iter().find(|adapter| adapter.name == name)
    }

    fn beside(&self, adapter: &LoraAdapter<B>, seed: Option<u64>) -> Adapter<B> {
        let [a, b] = [&adapter.a, &adapter.b].map(|t| match t.val().into_primitive() {
            TensorPrimitive::Float(t) => t,
            TensorPrimitive::QFloat(_) => unreachable!("an adapter is float"),
        });
        let (scale, probability) = (self.config.scale_of(&adapter.name), self.config.dropout);
        let seed = seed.filter(|_| probability > 0.0);
        let dropout = seed.map(|seed| Dropout { probability, seed: named(seed, &adapter.name) });
        Adapter { id: adapter.a.id, a, b, scale, dropout }
    }
}

fn functions<B: Backend>() -> &'static Functions<B> {
    find::<B>()
        .expect("adapters are attached to models on a Float8 backend alone: `Float8<Autodiff<B>>`, or `Float8<B>`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_ends_of_names() {
        let name = "layers.3.self_attn.q_proj";
        for target in ["q_proj", "self_attn.q_proj", name, "all-linear"] {
            assert!(target_matches(target, name), "{target}");
        }
        for target in ["proj", "k_proj", "self_attn", "layers.3", ""] {
            assert!(!target_matches(target, name), "{target}");
        }
        assert!(!target_matches("all-linear", "lm_head") && target_matches("lm_head", "lm_head"));
    }

    #[test]
    fn of_several_ends_the_longest_counts() {
        let rank_pattern = [("q_proj".into(), 2), ("layers.1.q_proj".into(), 4), ("1.q_proj".into(), 3)].into();
        let config = LoraConfig { rank_pattern, alpha_pattern: [("q_proj".into(), 6.0)].into(), ..Default::default() };
        let of = |name| (config.rank_of(name), config.scale_of(name));
        assert_eq!([of("layers.1.q_proj"), of("layers.0.q_proj"), of("v_proj")], [(4, 1.5), (2, 3.0), (8, 1.0)]);
    }

    #[test]
    fn initial_values_fill_their_range() {
        let numbers = uniform(named(1, "q_proj"), 10_000, 0.5);
        assert!(numbers.iter().all(|x| x.abs() <= 0.5));
        let (mean, square) = numbers.iter().fold((0.0, 0.0), |(m, s), x| (m + x, s + x * x));
        assert!((mean / 1e4).abs() < 0.02 && (square / 1e4 - 0.25 / 3.0).abs() < 0.005);
        assert_ne!(numbers, uniform(named(1, "k_proj"), 10_000, 0.5));
        assert_ne!(numbers, uniform(named(2, "q_proj"), 10_000, 0.5));
    }

    #[test]
    fn bad_settings_are_refused() {
        let good = LoraConfig::default();
        good.validate().unwrap();
        for bad in [
            LoraConfig { rank: 0, ..good.clone() },
            LoraConfig { rank_pattern: [("q_proj".into(), 0)].into(), ..good.clone() },
            LoraConfig { alpha: 0.0, ..good.clone() },
            LoraConfig { alpha: f64::NAN, ..good.clone() },
            LoraConfig { alpha_pattern: [("q_proj".into(), 0.0)].into(), ..good.clone() },
            LoraConfig { dropout: 1.0, ..good.clone() },
            LoraConfig { dropout: -0.1, ..good.clone() },
            LoraConfig { target_modules: vec![], ..good },
        ] {
            assert!(matches!(bad.validate(), Err(Float8Error::Config { .. })), "{bad:?}");
        }
    }
}
