//! Small language models, and their training on one rank or sharded.
use std::collections::BTreeMap;

use burn::backend::Autodiff;
#[cfg(not(feature = "staged"))]
use burn::backend::Flex as Device;
#[cfg(feature = "staged")]
use burn::backend::Wgpu as Device;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::shard_hooks::visit_params;
use burn_float8::{Float8, Float8Config, Recipe};
use float8_shard::{Communicator, ShardConfig, Sharded, full_tensor};
use models::{CausalLmExt, Decoder, DecoderConfig};

/// Backend of the tests.
pub type B = Float8<Autodiff<Device>>;

/// Backend of values without gradients.
pub type Inner = <B as AutodiffBackend>::InnerBackend;

/// Bits of f32 values.
pub fn bits<const D: usize>(tensor: Tensor<Inner, D>) -> Vec<u32> {
    tensor.into_data().to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Vocabulary size, chosen not to be aligned.
pub const VOCABULARY: usize = 50;

/// Tokens per sequence.
pub const LEN: usize = 12;

/// Sequences per micro-batch.
pub const BATCH: usize = 3;

/// Embedding, norm, two linears with bias, and an output layer without bias.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    embedding: Embedding<B>,
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    /// None if the output layer is tied to the embedding.
    head: Option<Linear<B>>,
}

impl<B: Backend> Net<B> {
    /// Model with equal parameters on every rank.
    pub fn new(device: &B::Device) -> Self {
        Self::with_output(device, true)
    }

    /// Model with a separate output layer, or with one tied to the embedding.
    fn with_output(device: &B::Device, has_head: bool) -> Self {
        B::seed(device, 7);
        let new = Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 40).init(device),
            norm: LayerNormConfig::new(40).init(device),
            up: LinearConfig::new(40, 144).init(device),
            down: LinearConfig::new(144, 40).init(device),
            head: has_head.then(|| LinearConfig::new(40, VOCABULARY).with_bias(false).init(device)),
        };
        // Parameters are initialized when first read; read them here.
        new.visit(&mut Draw);
        new
    }

    fn logits(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let x = self.embedding.forward(tokens);
        let h = burn::tensor::activation::silu(self.up.forward(self.norm.forward(x.clone())));
        let y = x + self.down.forward(h);
        match &self.head {
            Some(head) => head.forward(y),
            None => {
                let table = full_tensor(self.embedding.weight.val());
                y.matmul(table.transpose().unsqueeze())
            }
        }
    }

    /// Mean cross entropy of a micro-batch.
    pub fn loss(&self, batch: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [rows, len] = batch.dims();
        let logits = self.logits(batch.clone().slice([0..rows, 0..len - 1]));
        let targets = batch.slice([0..rows, 1..len]).reshape([-1]);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.reshape([-1, VOCABULARY as i32]), targets)
    }
}

struct Draw;

impl<B: Backend> ModuleVisitor<B> for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        param.val();
    }
}

/// Micro-batch `number`, equal on all ranks.
pub fn batch<B: Backend>(number: usize, device: &B::Device) -> Tensor<B, 2, Int> {
    let token = |i: usize| ((i * i * 31 + 17 * i + number * 13 + i * number) % VOCABULARY) as i32;
    let tokens: Vec<i32> = (0..BATCH * (LEN + 1)).map(token).collect();
    Tensor::from_data(TensorData::new(tokens, [BATCH, LEN + 1]), device)
}

/// Model with a recipe.
pub fn model(recipe: Recipe) -> Net<B> {
    net(Some(recipe))
}

/// Model with a recipe, or in high precision.
pub fn net(recipe: Option<Recipe>) -> Net<B> {
    configured(Net::new(&Default::default()), recipe, &[])
}

/// Model with a recipe and a tied output layer.
pub fn tied_model(recipe: Recipe) -> Net<B> {
    configured(Net::with_output(&Default::default(), false), Some(recipe), &[])
}

/// The debug Llama with a recipe, or in high precision.
pub fn llama(recipe: Option<Recipe>) -> Decoder<B> {
    configured(decoder("llama3-debug"), recipe, &["lm_head"])
}

/// The debug mixture of experts with a recipe, or in high precision.
pub fn mixture(recipe: Option<Recipe>) -> Decoder<B> {
    configured(decoder("llama3-debug-moe"), recipe, &["lm_head", "moe.router"])
}

/// Decoder with equal parameters on every rank.
fn decoder(preset: &str) -> Decoder<B> {
    Decoder::new(DecoderConfig::preset(preset).unwrap(), &Default::default()).unwrap().init_weights(0)
}

/// Applies a recipe to all linears but these.
fn configured<M: Module<B>>(model: M, recipe: Option<Recipe>, left_out: &[&str]) -> M {
    match recipe {
        Some(recipe) => Float8Config::new(recipe).with_filter_fqns(left_out.iter().copied()).apply(model).unwrap().0,
        None => {
            burn_float8::set_default_config::<B>(&Default::default(), None).unwrap();
            model
        }
    }
}

/// Model that the tests train.
pub trait Model: AutodiffModule<B> {
    /// Learning rate of AdamW.
    const LR: f64;

    /// Mean cross entropy of micro-batch `number`, which is equal on all ranks.
    fn loss_of(&self, number: usize) -> Tensor<B, 1>;
}

impl Model for Net<B> {
    const LR: f64 = 1e-2;

    fn loss_of(&self, number: usize) -> Tensor<B, 1> {
        self.loss(batch(number, &Default::default()))
    }
}

impl Model for Decoder<B> {
    const LR: f64 = 1e-3;

    fn loss_of(&self, number: usize) -> Tensor<B, 1> {
        let token = |i: usize| ((i * i * 31 + 17 * i + number * 13 + i * number) % 256) as i32;
        let [inputs, targets] = [0, 1].map(|shift| {
            let tokens: Vec<_> = (shift..32 + shift).map(token).collect();
            Tensor::from_data(TensorData::new(tokens, [1, 32]), &Default::default())
        });
        self.loss(inputs, targets)
    }
}

/// Training of a model.
pub struct Training<M: Model = Net<B>> {
    /// Current model.
    pub model: M,
    /// Handle to the ranks, if the model is sharded.
    pub sharded: Option<Sharded>,
    optimizer: OptimizerAdaptor<AdamW, M, B>,
    step: usize,
    /// Whether micro-batches are summed as MPI sums over four ranks: (0 + 1) + (2 + 3).
    in_pairs: bool,
}

/// Sums in order, or in pairs and then pairs of these.
fn sum<T>(mut parts: Vec<T>, in_pairs: bool, add: impl Fn(T, T) -> T) -> Option<T> {
    while in_pairs && parts.len() > 1 {
        let mut rest = parts.into_iter();
        parts = vec![];
        while let Some(a) = rest.next() {
            parts.push(match rest.next() {
                Some(b) => add(a, b),
                None => a,
            });
        }
    }
    parts.into_iter().reduce(add)
}

impl<M: Model> Training<M> {
    /// Training before the first step.
    pub fn new(model: M, sharded: Option<Sharded>) -> Self {
        Self { model, sharded, optimizer: AdamWConfig::new().with_weight_decay(0.1).init(), step: 0, in_pairs: false }
    }

    /// Training of a model that these ranks divide.
    pub fn sharded(model: M, comm: &Communicator, config: ShardConfig) -> Self {
        let (model, sharded) = Sharded::apply(model, comm, config).unwrap();
        Self::new(model, Some(sharded))
    }

    /// This training, with sums over micro-batches in pairs.
    pub fn in_pairs(self) -> Self {
        Self { in_pairs: true, ..self }
    }

    /// Trains one step on `micro_batches` micro-batches. A rank takes each one whose number modulo
    /// the ranks is its own. Returns the mean loss over all ranks.
    pub fn step(&mut self, micro_batches: usize) -> f32 {
        let (rank, ranks) = self.sharded.as_ref().map_or((0, 1), |sharded| {
            let comm = sharded.communicator();
            (comm.rank(), comm.world_size())
        });
        if let Some(sharded) = &self.sharded {
            sharded.precompute_scales(&self.model);
        }
        let (mut losses, mut parts) = (vec![], vec![]);
        for number in (0..micro_batches).filter(|number| number % ranks == rank) {
            let loss = self.model.loss_of(self.step * micro_batches + number).div_scalar(micro_batches as f64);
            losses.push(loss.clone().into_scalar());
            parts.push(GradientsParams::from_grads(loss.backward(), &self.model));
        }
        let mut loss = sum(losses, self.in_pairs, |a, b| a + b).unwrap_or_default();
        let grads = sum(parts, self.in_pairs, |a, b| {
            let mut both = GradientsAccumulator::new();
            both.accumulate(&self.model, a);
            both.accumulate(&self.model, b);
            both.grads()
        });
        let mut grads = grads.unwrap_or_default();
        if let Some(sharded) = &self.sharded {
            sharded.reduce_gradients(&self.model, &mut grads).unwrap();
            let sums = sharded.communicator().all_reduce_sum("loss", vec![loss]).unwrap().wait().unwrap();
            loss = sums[0];
        }
        self.model = self.optimizer.step(M::LR, self.model.clone(), grads);
        self.step += 1;
        loss
    }

    /// Bits of all whole parameters.
    pub fn parameters(&self) -> Vec<(String, Vec<u32>)> {
        struct Read(Vec<(String, Vec<u32>)>);
        impl<B: Backend> ModuleVisitor<B> for Read {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let values: Vec<f32> = param.val().into_data().to_vec().unwrap();
                self.0.push((format!("{:?}", param.val().dims()), values.iter().map(|x| x.to_bits()).collect()));
            }
        }
        let mut read = Read(vec![]);
        Sharded::gather(self.model.clone()).valid().visit(&mut read);
        read.0
    }
}

/// Gradients of all parameters by name.
pub fn gradients<M: Module<B>>(model: &M, mut grads: GradientsParams) -> BTreeMap<String, Vec<f32>> {
    let mut found = BTreeMap::new();
    visit_params::<B, _>(model, |param| {
        let gradient = grads.remove::<Inner, 1>(param.id);
        let gradient = gradient.unwrap_or_else(|| panic!("{} has no gradient", param.name()));
        found.insert(param.name(), gradient.into_data().to_vec().unwrap());
    });
    found
}
