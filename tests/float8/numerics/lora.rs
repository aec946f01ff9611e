//! Adapters on frozen linears: outputs and gradients against the formula, for every form of the
//! base.
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_float8::backend::Float8Backend;
use burn_float8::lora::{Lora, LoraConfig};
use burn_float8::{Float8, Float8Config, Recipe, report, weights, without_float8};

use crate::on_cpu_and_wgpu;
use crate::support::linear::A;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{assert_near, spread};

const K: usize = 48;
const N: usize = 33;
const RANK: usize = 4;

#[derive(Module, Debug)]
struct Pair<B: Backend> {
    q_proj: Linear<B>,
    lm_head: Linear<B>,
}

impl<B: Backend> Pair<B> {
    fn new() -> Self {
        let linear = |k, n, seed| Linear {
            weight: Param::from_tensor(tensor(spread(k, n, seed), [k, n])),
            bias: Some(Param::from_tensor(tensor(spread(1, n, seed + 9), [n]))),
        };
        Self { q_proj: linear(K, N, 1), lm_head: linear(N, 20, 2) }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.lm_head.forward(self.q_proj.forward(x))
    }
}

fn x<B: Backend>() -> Tensor<B, 2> {
    tensor(spread(10, K, 3), [10, K])
}

fn config() -> LoraConfig {
    LoraConfig { rank: RANK, alpha: 8.0, ..Default::default() }
}

/// Adapters with a nonzero B, which change the output.
fn lora<B: Float8Backend, M: Module<A<B>>>(model: &M) -> Lora<A<B>> {
    let mut lora = config().init(model, 11).unwrap();
    assert_eq!(lora.adapters.len(), 1, "no output");
    lora.adapters[0].b = Param::from_tensor(tensor(spread(RANK, N, 4), [RANK, N]));
    lora
}

/// x·A·B times its scale.
fn update<B: Backend>(lora: &Lora<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    x.matmul(lora.adapters[0].a.val()).matmul(lora.adapters[0].b.val()) * 2.0
}

/// y and the gradients of A and B.
fn run<B: Float8Backend>(lora: &Lora<A<B>>, forward: impl Fn(Tensor<A<B>, 2>) -> Tensor<A<B>, 2>) -> [Vec<f32>; 3] {
    let y = forward(x());
    let grads = (y.clone() * tensor(spread(10, 20, 6), [10, 20])).sum().backward();
    let adapter = &lora.adapters[0];
    let grad = |t: &Param<Tensor<A<B>, 2>>| values(t.grad(&grads).expect("an adapter is trained"));
    [values(y.inner()), grad(&adapter.a), grad(&adapter.b)]
}

fn formula_on<B: Float8Backend>(runtime: &str) {
    let recipes = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8].map(Some);
    let all = recipes.into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)]);
    for (recipe, is_fp8_only) in all.chain([(None, false)]) {
        let what = format!("{recipe:?} {is_fp8_only} on {runtime}");
        let config = Float8Config::new(recipe.unwrap_or_default());
        let (mut model, _) = config.apply::<A<B>, _>(Pair::new().no_grad()).unwrap();
        if recipe.is_none() {
            model = without_float8(model);
        } else if is_fp8_only {
            model = weights::fp8_only(model).unwrap().0;
        }
        let lora = lora::<B, _>(&model);
        let adapted = lora.attach(model.clone(), None);
        let got = run(&lora, |x| adapted.forward(x));
        let want = run(&lora, |x| model.lm_head.forward(model.q_proj.forward(x.clone()) + update(&lora, x)));
        // A difference in the last bit may change a code in the next linear.
        let tolerance = if recipe.is_some() { 0.02 } else { 2e-6 };
        got.iter().zip(&want).for_each(|(got, want)| assert_near(&what, got, want, tolerance));
        assert_eq!(values(adapted.valid().forward(x())), got[0], "{what}");
    }
}

#[test]
fn outputs_and_gradients_follow_the_formula() {
    on_cpu_and_wgpu!(formula_on);
}

type T = A<Flex>;

#[test]
fn new_adapters_change_nothing() {
    let (model, _) = Float8Config::tensorwise().apply::<T, _>(Pair::new()).unwrap();
    let lora = config().init(&model, 11).unwrap();
    let adapted = lora.attach(model.clone(), None);
    assert_eq!(values(adapted.forward(x()).inner()), values(model.forward(x()).inner()));
}

/// Both adapters change the output, and both learn. Attaching one again replaces its values.
#[test]
fn adapters_add_up() {
    let (base, _) = Float8Config::tensorwise().apply::<T, _>(Pair::new().no_grad()).unwrap();
    let [one, mut two] = [(); 2].map(|()| lora::<Flex, _>(&base));
    two.adapters[0].b = Param::from_tensor(tensor(spread(RANK, N, 5), [RANK, N]));
    let both = two.attach(one.attach(base.clone(), None), None);
    let want = |x: Tensor<T, 2>| {
        base.lm_head.forward(base.q_proj.forward(x.clone()) + update(&one, x.clone()) + update(&two, x))
    };
    for lora in [&one, &two] {
        let (got, want) = (run(lora, |x| both.forward(x)), run(lora, want));
        got.iter().zip(&want).for_each(|(got, want)| assert_near("both", got, want, 0.02));
    }
    let merged = two.merge(one.attach(base.clone(), None));
    assert!(report(&merged).layers.iter().any(|layer| layer.name == "q_proj"), "it keeps its layer");
    let y = |model: &Pair<T>| values(model.forward(x()).inner());
    assert_near("merged", &y(&without_float8(merged)), &y(&without_float8(both.clone())), 1e-5);
    assert_near("attached again", &y(&one.attach(two.attach(both.clone(), None), None)), &y(&both), 0.02);
}

/// A merged weight is a parameter of its own: it trains if its base does, and no gradient reaches
/// the adapters.
#[test]
fn a_merged_model_trains() {
    for is_trained in [true, false] {
        let (mut base, _) = Float8Config::tensorwise().apply::<T, _>(Pair::new()).unwrap();
        if !is_trained {
            base.q_proj = base.q_proj.no_grad();
        }
        let lora = lora::<Flex, _>(&base);
        let (merged, _) = Float8Config::tensorwise().apply(lora.merge(base.clone())).unwrap();
        let grads = merged.forward(x()).powf_scalar(2.0).mean().backward();
        assert_eq!(merged.q_proj.weight.grad(&grads).is_some(), is_trained);
        assert!(lora.adapters[0].a.grad(&grads).is_none() && base.q_proj.weight.grad(&grads).is_none());
    }
}

/// Adapters created, attached and merged without autodiff can train later, and so can the model.
#[test]
fn adapters_made_below_autodiff_train() {
    type Below = Float8<Flex>;
    let linear = |k, n| LinearConfig::new(k, n).init::<Below>(&Default::default());
    let new = || Pair { q_proj: linear(K, N), lm_head: linear(N, 20) };
    let model = new();
    let lora = config().init(&model, 1).unwrap();
    for model in [lora.attach(new(), None), lora.merge(model)] {
        let model = model.train::<T>();
        assert!(model.q_proj.weight.is_require_grad() && model.lm_head.weight.is_require_grad());
    }
    let lora = lora.train::<T>();
    assert!(lora.adapters[0].a.is_require_grad() && lora.adapters[0].b.is_require_grad());
}

#[test]
fn dropout_follows_its_seed() {
    let model = without_float8(Float8Config::tensorwise().apply::<T, _>(Pair::new().no_grad()).unwrap().0);
    let mut lora = lora::<Flex, _>(&model);
    lora.config.dropout = 0.5;
    let y = |seed| values(lora.attach(model.clone(), seed).forward(x()).inner());
    assert_eq!(y(Some(1)), y(Some(1)));
    assert_ne!(y(Some(1)), y(Some(2)));
    assert_ne!(y(Some(1)), y(None));
    // The mean over many seeds is the output without dropout.
    const SEEDS: u64 = 400;
    let mut sums = vec![0.0; y(None).len()];
    for seed in 0..SEEDS {
        sums.iter_mut().zip(y(Some(seed))).for_each(|(sum, y)| *sum += f64::from(y) / SEEDS as f64);
    }
    assert_near("the mean", &sums.into_iter().map(|sum| sum as f32).collect::<Vec<_>>(), &y(None), 0.1);
}
