//! A decoder with a mixture of experts, which ranks divide.
use burn::module::Module;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_float8::shard_hooks::visit_params;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{ShardConfig, Sharded};
use models::{CausalLmExt, Decoder, DecoderConfig, MoeConfig};
use ranks::{B, gradients};

use super::experts::config;
use super::world;

/// Variable that selects all recipes.
const ALL: &str = "FLOAT8_ALL_RECIPES";
const STEPS: usize = 6;

/// Sequences of all ranks, and tokens in each.
const BATCH: [usize; 2] = [4, 32];

/// Six experts: of four ranks the last has none.
fn decoder(recipe: Option<Recipe>) -> Decoder<B> {
    let device = Default::default();
    // Linears without a recipe are in high precision.
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let mut config = DecoderConfig::preset("llama3-debug-moe").unwrap();
    let dims = &mut config.dims;
    (dims.vocab_size, dims.intermediate_size, dims.num_layers, dims.max_seq_len) = (128, 128, 2, 32);
    dims.moe = Some(MoeConfig { num_experts: 6, num_experts_per_tok: 2 });
    let model = Decoder::<B>::new(config, &device).unwrap().init_weights(0);
    match recipe {
        // Other linears cast each rank's tokens by themselves.
        Some(recipe) => {
            let experts = Float8Config::new(recipe).with_filter_fqns(["self_attn", "lm_head", "router"]);
            experts.apply(model).unwrap().0
        }
        None => model,
    }
}

/// Inputs and targets of sequences `own` of a step.
fn batch(step: usize, own: impl Iterator<Item = usize>) -> [Tensor<B, 2, Int>; 2] {
    let [_, len] = BATCH;
    let token = |i: usize| ((i * i * 31 + 17 * i + step * 13 + i * step) % 128) as i32;
    let own: Vec<usize> = own.collect();
    [0, 1].map(|shift| {
        let tokens: Vec<_> =
            own.iter().flat_map(|sequence| (0..len).map(move |i| token(sequence * len + i + shift))).collect();
        Tensor::from_data(TensorData::new(tokens, [own.len(), len]), &Default::default())
    })
}

/// Training of a decoder by one rank or several.
struct Training {
    model: Decoder<B>,
    sharded: Option<Sharded>,
    optimizer: OptimizerAdaptor<AdamW, Decoder<B>, B>,
    step: usize,
    /// Order of the sequences on one rank.
    order: [usize; BATCH[0]],
}

impl Training {
    fn new(model: Decoder<B>, sharded: Option<Sharded>) -> Self {
        Self { model, sharded, optimizer: AdamWConfig::new().init(), step: 0, order: [0, 1, 2, 3] }
    }

    fn sharded(model: Decoder<B>, config: ShardConfig) -> Self {
        let (model, sharded) = Sharded::apply(model, &world(), config).unwrap();
        Self::new(model, Some(sharded))
    }

    /// Mean loss over all ranks, and the gradients.
    fn gradients(&self) -> (f32, GradientsParams) {
        let Some(sharded) = &self.sharded else {
            let [inputs, targets] = batch(self.step, self.order.into_iter());
            let loss = self.model.loss(inputs, targets);
            return (loss.clone().into_scalar(), GradientsParams::from_grads(loss.backward(), &self.model));
        };
        let comm = sharded.communicator();
        let own = BATCH[0] / comm.world_size();
        sharded.precompute_scales(&self.model);
        let [inputs, targets] = batch(self.step, comm.rank() * own..(comm.rank() + 1) * own);
        let loss = self.model.loss(inputs, targets).div_scalar(comm.world_size() as f64);
        let mut grads = GradientsParams::from_grads(loss.clone().backward(), &self.model);
        sharded.reduce_gradients(&self.model, &mut grads).unwrap();
        (comm.all_reduce_sum("loss", vec![loss.into_scalar()]).unwrap().wait().unwrap()[0], grads)
    }

    fn step(&mut self) -> f32 {
        let (loss, grads) = self.gradients();
        self.model = self.optimizer.step(1e-2, self.model.clone(), grads);
        self.step += 1;
        loss
    }
}

/// Loss, and gradients by name. With replicas, experts of each have the tokens of its ranks.
pub fn have_the_gradients_of_one_rank() {
    let comm = world();
    let runs = [None].into_iter().chain(Recipe::ALL.map(Some)).map(|recipe| (recipe, config()));
    let replicas = (comm.world_size() == 4).then(|| (None, ShardConfig { replicate: 2, ..config() }));
    for (recipe, config) in runs.chain(replicas) {
        let one = Training::new(decoder(recipe), None);
        let (expected, of_whole) = one.gradients();
        let of_whole = gradients(&one.model, of_whole);
        let several = Training::sharded(decoder(recipe), config);
        let (found, grads) = several.gradients();
        assert!((found - expected).abs() <= 1e-5 * expected, "{recipe:?}: {found}, not {expected}");
        let parameters = Sharded::parameters::<B, _>(&several.model);
        let divided = parameters.iter().filter(|parameter| parameter.shape.len() == 3 && parameter.rows.is_some());
        assert_eq!(divided.count(), 6);
        let own = gradients(&several.model, grads);
        for parameter in &parameters {
            let (found, expected) = (&own[&parameter.name], &of_whole[&parameter.name]);
            let width: usize = parameter.shape[1..].iter().product();
            let [begin, end] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
            let largest = expected.iter().fold(0_f32, |max, x| max.max(x.abs()));
            let expected = &expected[begin * width..end * width];
            let far = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far <= 1e-5 * largest, "{recipe:?} {config:?}: {} is off by {far} of {largest}", parameter.name);
        }
    }
}

/// Losses are about as far from one rank's as with its sequences in other orders.
pub fn train_as_on_one_rank() {
    let some = [Recipe::Tensorwise, Recipe::Delayed, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
    let recipes = if std::env::var_os(ALL).is_some() { &Recipe::ALL[..] } else { &some };
    for recipe in [None].into_iter().chain(recipes.iter().map(|recipe| Some(*recipe))) {
        let train = |mut training: Training| -> Vec<f32> { (0..STEPS).map(|_| training.step()).collect() };
        let one = train(Training::new(decoder(recipe), None));
        let others = [[3, 2, 1, 0], [1, 2, 3, 0], [2, 3, 0, 1]];
        let others = others.map(|order| train(Training { order, ..Training::new(decoder(recipe), None) }));
        let losses = train(Training::sharded(decoder(recipe), config()));
        let distance = |losses: &[f32]| -> f32 {
            losses.iter().zip(&one).map(|(loss, one)| (loss - one).abs() / one).fold(0.0, f32::max)
        };
        // Distances differ by chance from one order to the next; the rounding is of losses in f32.
        let (found, by_chance, rounding) = (distance(&losses), 3.0, 1e-6);
        let limit = others.iter().map(|losses| distance(losses)).fold(rounding, f32::max);
        if world().rank() == 0 {
            println!("{recipe:?}: {found:.2e}, in other orders {limit:.2e}");
        }
        assert!((losses[0] - one[0]).abs() <= 1e-5 * one[0], "{recipe:?}: {losses:?} and {one:?}");
        assert!(found <= by_chance * limit, "{recipe:?}: {found} of {limit}");
    }
}

/// Whole experts load into parts, and parts are gathered.
pub fn load_and_gather() {
    let mut trained = Training::new(decoder(None), None);
    trained.step();
    let read = |model: &Decoder<B>| {
        let mut values = vec![];
        visit_params::<B, _>(model, |param| {
            let value = Tensor::<B, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(param.float().unwrap()));
            values.push((param.shape.to_vec(), value.into_data().to_vec::<f32>().unwrap()));
        });
        values
    };
    let new = Training::sharded(decoder(Some(Recipe::Tensorwise)), config()).model;
    let loaded = Sharded::gather(new.load_record(trained.model.clone().into_record()));
    assert!(read(&loaded) == read(&trained.model));
}

/// Experts that end inside a square of scales, and a second division.
pub fn that_are_refused() {
    let refused = |model, words: &str| {
        let error = Sharded::apply(model, &world(), config()).unwrap_err().error.to_string();
        assert!(error.contains(words), "{error}");
    };
    let narrow = || {
        let mut config = DecoderConfig::preset("llama3-debug-moe").unwrap();
        (config.dims.intermediate_size, config.dims.num_layers) = (96, 1);
        Decoder::<B>::new(config, &Default::default()).unwrap().init_weights(0)
    };
    let squares = Float8Config::new(Recipe::Blockwise).apply(narrow()).unwrap().0;
    refused(squares, "has experts of 128 x 96: 2 of them on a rank do not end where a block of 128 ends");
    refused(Training::sharded(decoder(None), config()).model, "is sharded already");
}
