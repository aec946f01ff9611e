//! FP8-only weights over ranks, and adapters of linears that ranks divide.
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::lora::{Lora, LoraConfig};
use burn_float8::weights::{fp8_only, read_codes};
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ParallelPlan, Sharded, TensorParallel, TensorStyle};
use ranks::{B, Inner, bits};

use super::parallel::{Divided, One, SIZE, mesh, one, random};
use super::world;

/// A linear with a frozen FP8-only weight.
fn frozen(recipe: Recipe, weight: Tensor<B, 2>) -> One<B> {
    fp8_only(one(Float8Config::new(recipe), weight).no_grad()).unwrap().0
}

fn read(One { linear }: &One<B>, x: Tensor<B, 2>, dy: Tensor<B, 2>) -> [Tensor<Inner, 2>; 2] {
    let x = x.detach().require_grad();
    let y = linear.forward(x.clone());
    let grads = (y.clone() * dy.detach()).sum().backward();
    [y.inner(), x.grad(&grads).unwrap()]
}

/// Identity matrices show the decoded weight in both orientations.
pub fn codes_of_fp8_only_parts() {
    let (device, comm) = (Default::default(), world());
    let eye = || Tensor::<B, 2>::eye(SIZE, &device);
    let meshes = match comm.world_size() {
        2 => [[1, 2, 1], [2, 1, 1], [1, 1, 2]],
        _ => [[1, 4, 1], [1, 2, 2], [1, 1, 4]],
    };
    for recipe in Recipe::ALL {
        let whole = frozen(recipe, random(1));
        let [y, dx] = read(&whole, eye(), eye());
        let codes = read_codes(&whole).next().unwrap().1;
        for parts in meshes {
            let along = |axis| Divided { axis, ranks: parts[2], rank: comm.rank() % parts[2] };
            let tensor_ranks = mesh(parts).tensor_ranks(&comm).unwrap();
            for (style, of_x, of_y) in
                [(TensorStyle::Colwise, along(0), along(1)), (TensorStyle::Rowwise, along(1), along(0))]
            {
                let plan: ParallelPlan = vec![("linear".into(), style)];
                let part = TensorParallel::apply(frozen(recipe, random(1)), &tensor_ranks, &plan).unwrap().0;
                let part = Sharded::apply(part, &comm, mesh(parts)).unwrap().0;
                let own = read_codes(&part).next().unwrap().1;
                assert_eq!(own.codes.len() * parts[1] * parts[2], codes.codes.len(), "{recipe} {parts:?} {style:?}");
                for _ in 0..2 {
                    let found = read(&part, of_x.part(eye()), of_y.part(eye())).map(bits);
                    let expected = [of_y.part(y.clone()), of_x.part(dx.clone())].map(bits);
                    assert!(found == expected, "{recipe} {parts:?} {style:?}");
                }
            }
        }
        // Ranks have rows of padding, or only those.
        for k in [100, 128, 300] {
            let rows = || random(1).narrow(0, 0, k);
            let read = |model: &One<B>| read(model, Tensor::eye(k, &device), eye().narrow(0, 0, k)).map(bits);
            let config = mesh([1, comm.world_size(), 1]);
            let (part, sharded) = Sharded::apply(frozen(recipe, rows()), &comm, config).unwrap();
            sharded.precompute_scales(&part);
            assert!(read(&part) == read(&frozen(recipe, rows())), "{recipe}: {k} rows");
            sharded.reduce_gradients(&part, &mut GradientsParams::new()).unwrap();
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
    let along = |axis| Divided { axis, ranks: comm.world_size(), rank: comm.rank() };
    let (x, dy, whole) = (random(2), random(3), Adapted::new());
    let (products, grads) = whole.read(x.clone(), dy.clone());
    for (style, of_x, of_y) in [(TensorStyle::Colwise, along(0), along(1)), (TensorStyle::Rowwise, along(1), along(0))]
    {
        let plan: ParallelPlan = vec![("base.linear".into(), style), ("lora.*".into(), TensorStyle::Sequence)];
        let (part, parallel) = TensorParallel::apply(Adapted::new(), &comm, &plan).unwrap();
        let (mut found, mut own) = part.read(of_x.part(x.clone()), of_y.part(dy.clone()));
        parallel.reduce_gradients(&part, &mut own).unwrap();
        found.extend(part.gradients(&own));
        let mut expected = vec![of_y.part(products[0].clone()), of_x.part(products[1].clone())];
        expected.extend(whole.gradients(&grads));
        for (name, (found, expected)) in ["y", "dx", "dA", "dB"].into_iter().zip(found.into_iter().zip(expected)) {
            let norm = |t: Tensor<Inner, 2>| t.powi_scalar(2).sum().sqrt().into_scalar();
            let far = norm(found - expected.clone()) / norm(expected);
            assert!(far < 1e-5, "{style:?}: {name} is off by {far} of its norm");
        }
    }
}
