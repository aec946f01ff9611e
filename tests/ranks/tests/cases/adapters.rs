//! FP8-only weights over ranks, and adapters of linears that ranks divide.
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::lora::{Lora, LoraConfig};
use burn_float8::weights::{fp8_only, read_codes};
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ParallelPlan, TensorParallel, TensorStyle};
use ranks::{B, Inner, Part, bits};

use super::parallel::{One, STYLES, eye, one, part, random, read};
use super::{mesh, world};

/// A linear with a frozen FP8-only weight.
fn frozen(recipe: Recipe, weight: Tensor<B, 2>) -> One<B> {
    fp8_only(one(Float8Config::new(recipe), weight).no_grad()).unwrap().0
}

/// Identity matrices show the decoded weight in both orientations.
pub fn codes_of_fp8_only_parts() {
    let comm = world();
    let meshes = match comm.world_size() {
        2 => [[1, 2, 1], [2, 1, 1], [1, 1, 2]],
        _ => [[1, 4, 1], [1, 2, 2], [1, 1, 4]],
    };
    for recipe in Recipe::ALL {
        let whole = frozen(recipe, random(1));
        let products = read(&whole.linear, eye(), eye());
        let codes = read_codes(&whole).next().unwrap().1;
        for parts in meshes {
            for (style, [of_x, of_y]) in STYLES {
                let plan: ParallelPlan = vec![("linear".into(), style)];
                let own = Part::new(frozen(recipe, random(1)), &comm, mesh(parts), &plan).model;
                let len = read_codes(&own).next().unwrap().1.codes.len();
                assert_eq!(len * parts[1] * parts[2], codes.codes.len(), "{recipe} {parts:?} {style:?}");
                let [x, dy] = [of_x, of_y].map(|axis| part(&eye(), axis, parts[2]));
                let expected = [(&products[0], of_y), (&products[1], of_x)];
                let expected = expected.map(|(whole, axis)| bits(part(whole, axis, parts[2])));
                for _ in 0..2 {
                    let found = read(&own.linear, x.clone(), dy.clone()).into_iter().map(bits);
                    assert!(found.eq(expected.clone()), "{recipe} {parts:?} {style:?}");
                }
            }
        }
        // Ranks have rows of padding, or only those.
        for k in [100, 128, 300] {
            let new = || frozen(recipe, random(1).narrow(0, 0, k));
            let read = |model: &One<B>| -> Vec<_> {
                let products = read(&model.linear, Tensor::eye(k, &Default::default()), eye().narrow(0, 0, k));
                products.into_iter().map(bits).collect()
            };
            let Part { model, sharded, .. } = Part::new(new(), &comm, mesh([1, comm.world_size(), 1]), &vec![]);
            sharded.precompute_scales(&model);
            assert!(read(&model) == read(&new()), "{recipe}: {k} rows");
            sharded.reduce_gradients(&model, &mut GradientsParams::new()).unwrap();
        }
    }
}

#[derive(Module, Debug)]
struct Adapted<B: Backend> {
    base: One<B>,
    lora: Lora<B>,
}

impl Adapted<B> {
    fn new() -> Self {
        let base = frozen(Recipe::Tensorwise, random(1));
        let config = LoraConfig::default().with_rank(4).with_dropout(0.25).with_target_modules(["linear"]);
        let mut lora = config.init(&base, 7).unwrap();
        // It would be zero.
        let b = random(4).narrow(0, 0, 4);
        lora.adapters[0].b = Param::from_tensor(b.detach().require_grad());
        Self { base, lora }
    }

    fn read(&self, x: Tensor<B, 2>, dy: Tensor<B, 2>) -> (Vec<Tensor<Inner, 2>>, GradientsParams) {
        let x = x.detach().require_grad();
        let One { linear } = self.lora.attach(self.base.clone(), Some(3));
        let y = linear.forward(x.clone());
        let mut grads = (y.clone() * dy.detach()).sum().backward();
        let dx = x.grad_remove(&mut grads).unwrap();
        (vec![y.inner(), dx], GradientsParams::from_grads(grads, self))
    }

    fn gradients(&self, grads: &GradientsParams) -> Vec<Tensor<Inner, 2>> {
        let adapter = &self.lora.adapters[0];
        [&adapter.a, &adapter.b].map(|param| grads.get::<Inner, 2>(param.id).unwrap()).into()
    }
}

/// y, dx and the gradients of A and B, with dropout.
pub fn adapters_of_parts_are_those_of_the_whole() {
    let comm = world();
    let ranks = comm.world_size();
    let (x, dy, whole) = (random(2), random(3), Adapted::new());
    let (products, grads) = whole.read(x.clone(), dy.clone());
    for (style, [of_x, of_y]) in STYLES {
        let plan: ParallelPlan = vec![("base.linear".into(), style), ("lora.*".into(), TensorStyle::Sequence)];
        let (own, parallel) = TensorParallel::apply(Adapted::new(), &comm, &plan).unwrap();
        let (mut found, mut own_grads) = own.read(part(&x, of_x, ranks), part(&dy, of_y, ranks));
        parallel.reduce_gradients(&own, &mut own_grads).unwrap();
        found.extend(own.gradients(&own_grads));
        let mut expected = vec![part(&products[0], of_y, ranks), part(&products[1], of_x, ranks)];
        expected.extend(whole.gradients(&grads));
        for (name, (found, expected)) in ["y", "dx", "dA", "dB"].into_iter().zip(found.into_iter().zip(expected)) {
            let norm = |t: Tensor<Inner, 2>| t.powi_scalar(2).sum().sqrt().into_scalar();
            let far = norm(found - expected.clone()) / norm(expected);
            assert!(far < 1e-5, "{style:?}: {name} is off by {far} of its norm");
        }
    }
}
