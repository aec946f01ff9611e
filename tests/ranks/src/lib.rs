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
use float8_shard::{Communicator, ParallelPlan, ShardConfig, Sharded, TensorParallel, full_tensor};
use models::{CausalLmExt, Decoder, DecoderConfig, Dimensions, MoeConfig, tensor_plan};

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
    /// Embedding of the vocabulary.
    pub embedding: Embedding<B>,
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

/// The debug Llama with fewer layers and a recipe, or in high precision.
pub fn llama(recipe: Option<Recipe>) -> Decoder<B> {
    let sizes = |dims: &mut Dimensions| (dims.num_layers, dims.max_seq_len) = (2, 32);
    configured(decoder("llama3-debug", sizes), recipe, &["lm_head"])
}

/// The debug mixture with six experts: the last of four ranks has none. Only experts have the recipe,
/// because other linears cast only a rank's own tokens.
pub fn mixture(recipe: Option<Recipe>) -> Decoder<B> {
    let sizes = |dims: &mut Dimensions| {
        (dims.vocab_size, dims.intermediate_size, dims.num_layers, dims.max_seq_len) = (128, 128, 2, 32);
        dims.moe = Some(MoeConfig { num_experts: 6, num_experts_per_tok: 2 });
    };
    configured(decoder("llama3-debug-moe", sizes), recipe, &["self_attn", "lm_head", "router"])
}

/// A preset with eight heads and four key heads. Parts of widths, and of tokens of eight sequences, are whole
/// blocks of the recipe on four ranks.
pub fn divisible(preset: &str, recipe: Option<Recipe>) -> Decoder<B> {
    let has_blocks = matches!(recipe, Some(Recipe::Blockwise | Recipe::Mxfp8 | Recipe::Mxfp8WgradWithHp));
    let sizes = |dims: &mut Dimensions| {
        (dims.vocab_size, dims.hidden_size, dims.intermediate_size, dims.num_layers) = (512, 256, 512, 1);
        (dims.num_heads, dims.num_kv_heads, dims.head_dim) = (8, 4, 128);
        dims.max_seq_len = if has_blocks { 64 } else { 16 };
    };
    configured(decoder(preset, sizes), recipe, &[])
}

/// Decoder of a preset with other sizes, and equal parameters on every rank.
pub fn decoder(preset: &str, sizes: impl Fn(&mut Dimensions)) -> Decoder<B> {
    let mut config = DecoderConfig::preset(preset).unwrap();
    sizes(&mut config.dims);
    Decoder::new(config, &Default::default()).unwrap().init_weights(0)
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

    /// Mean cross entropy of some sequences, which are equal on all ranks. A small net's sequence is a
    /// whole micro-batch.
    fn loss_of(&self, sequences: &[usize]) -> Tensor<B, 1>;

    /// Division of its linears over ranks.
    fn plan(&self) -> ParallelPlan {
        vec![]
    }
}

impl Model for Net<B> {
    const LR: f64 = 1e-2;

    fn loss_of(&self, sequences: &[usize]) -> Tensor<B, 1> {
        let batches = sequences.iter().map(|number| batch(*number, &Default::default()));
        self.loss(Tensor::cat(batches.collect(), 0))
    }
}

impl Model for Decoder<B> {
    const LR: f64 = 1e-3;

    fn loss_of(&self, sequences: &[usize]) -> Tensor<B, 1> {
        let Dimensions { vocab_size, max_seq_len: len, .. } = self.config().dims;
        let token = |number: usize, i: usize| ((i * i * 31 + 17 * i + number * 13 + i * number) % vocab_size) as i32;
        let [inputs, targets] = [0, 1].map(|shift| {
            let of = |number: &usize| (shift..len + shift).map(|i| token(*number, i)).collect::<Vec<_>>();
            let tokens: Vec<i32> = sequences.iter().flat_map(of).collect();
            Tensor::from_data(TensorData::new(tokens, [sequences.len(), len]), &Default::default())
        });
        self.loss(inputs, targets)
    }

    fn plan(&self) -> ParallelPlan {
        tensor_plan(&self.config().dims)
    }
}

/// This rank's part of a model, with its handles to other ranks.
pub struct Part<M> {
    /// Parts of its parameters.
    pub model: M,
    /// None if no ranks divide linears.
    pub parallel: Option<TensorParallel>,
    /// Ranks of the shards and replicas.
    pub sharded: Sharded,
}

impl<M: Module<B>> Part<M> {
    /// Part of a model, whose linears ranks divide by this plan.
    pub fn new(mut model: M, comm: &Communicator, config: ShardConfig, plan: &ParallelPlan) -> Self {
        let mut parallel = None;
        if config.tensor > 1 {
            let applied = TensorParallel::apply(model, &config.tensor_ranks(comm).unwrap(), plan).unwrap();
            (model, parallel) = (applied.0, Some(applied.1));
        }
        let (model, sharded) = Sharded::apply(model, comm, config).unwrap();
        Self { model, parallel, sharded }
    }
}

/// Training of a model.
pub struct Training<M: Model = Net<B>> {
    /// Current model.
    pub model: M,
    /// Handle to the ranks, if the model is sharded.
    pub sharded: Option<Sharded>,
    parallel: Option<TensorParallel>,
    optimizer: OptimizerAdaptor<AdamW, M, B>,
    step: usize,
    /// Sequences of a step.
    pub batches: Batches,
}

/// Sequences of a step.
#[derive(Clone, Copy)]
pub struct Batches {
    /// Number of passes of all ranks. A rank takes each one whose number modulo the ranks is its own;
    /// of a single pass it takes its sequences.
    pub passes: usize,
    /// Sequences of a pass.
    pub sequences: usize,
    /// Whether passes are summed as MPI sums over four ranks: (0 + 1) + (2 + 3).
    pub in_pairs: bool,
}

impl Batches {
    /// Passes of one sequence.
    pub const fn of_one(passes: usize) -> Self {
        Self { passes, sequences: 1, in_pairs: false }
    }

    /// Sequences of each pass of a rank in a step.
    fn own(self, step: usize, [rank, ranks]: [usize; 2]) -> Vec<Vec<usize>> {
        let Self { passes, sequences, .. } = self;
        let pass =
            |number: usize| -> Vec<_> { (0..sequences).map(|i| (step * passes + number) * sequences + i).collect() };
        match passes {
            1 => vec![pass(0).chunks(sequences.div_ceil(ranks)).nth(rank).unwrap_or_default().to_vec()],
            _ => (rank..passes).step_by(ranks).map(pass).collect(),
        }
    }
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
    /// Training of a model on one rank.
    pub fn new(model: M, batches: Batches) -> Self {
        let optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
        Self { model, sharded: None, parallel: None, optimizer, step: 0, batches }
    }

    /// Training of a model that these ranks divide.
    pub fn sharded(model: M, comm: &Communicator, config: ShardConfig, batches: Batches) -> Self {
        let plan = model.plan();
        let Part { model, parallel, sharded } = Part::new(model, comm, config, &plan);
        Self { sharded: Some(sharded), parallel, ..Self::new(model, batches) }
    }

    /// Mean loss of a step over all ranks, and this rank's gradients.
    pub fn gradients(&self) -> (f32, GradientsParams) {
        let Batches { passes, sequences, in_pairs, .. } = self.batches;
        let reader = self.sharded.as_ref().map_or([0, 1], |sharded| {
            sharded.precompute_scales(&self.model);
            let data = sharded.data_communicator();
            [data.rank(), data.world_size()]
        });
        let (mut losses, mut parts) = (vec![], vec![]);
        for own in self.batches.own(self.step, reader) {
            let share = (passes * sequences / own.len()) as f64;
            let loss = self.model.loss_of(&own).div_scalar(share);
            losses.push(loss.clone().into_scalar());
            parts.push(GradientsParams::from_grads(loss.backward(), &self.model));
        }
        let mut loss = sum(losses, in_pairs, |a, b| a + b).unwrap_or_default();
        let grads = sum(parts, in_pairs, |a, b| {
            let mut both = GradientsAccumulator::new();
            both.accumulate(&self.model, a);
            both.accumulate(&self.model, b);
            both.grads()
        });
        let mut grads = grads.unwrap_or_default();
        if let Some(sharded) = &self.sharded {
            sharded.reduce_gradients(&self.model, &mut grads).unwrap();
            loss = sharded.data_communicator().all_reduce_sum("loss", vec![loss]).unwrap().wait().unwrap()[0];
        }
        if let Some(parallel) = &self.parallel {
            parallel.reduce_gradients(&self.model, &mut grads).unwrap();
        }
        (loss, grads)
    }

    /// Trains one step. Returns its mean loss over all ranks.
    pub fn step(&mut self) -> f32 {
        let (loss, grads) = self.gradients();
        self.model = self.optimizer.step(M::LR, self.model.clone(), grads);
        self.step += 1;
        loss
    }

    /// Losses of the next steps.
    pub fn losses(&mut self, steps: usize) -> Vec<f32> {
        (0..steps).map(|_| self.step()).collect()
    }
}

/// All values of the whole parameters.
pub fn parameters<M: Model>(model: &M) -> Vec<f32> {
    struct Read(Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().to_vec::<f32>().unwrap());
        }
    }
    let mut read = Read(vec![]);
    Sharded::gather(model.clone()).valid().visit(&mut read);
    read.0
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

/// Checks gradients of this rank's part of a model against their places in the whole model's, in the
/// order of names. `bound` is relative to a parameter's norm.
pub fn check_gradients<M: Module<B>>(part: &M, grads: GradientsParams, whole: &[f32], bound: f64, what: &str) {
    let (mut own, mut rest) = (gradients(part, grads), whole);
    let mut parameters = Sharded::parameters::<B, _>(part);
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    for parameter in parameters {
        let width: usize = parameter.shape[1..].iter().product();
        let all = rest.split_off(..parameter.shape[0] * width).expect("the gradient of a whole parameter");
        let [top, bottom] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
        let [left, right] = parameter.cols.unwrap_or([0, width]);
        let expected = (top..bottom).flat_map(|row| &all[row * width + left..row * width + right]);
        let mut own = own.remove(&parameter.name).unwrap();
        if parameter.is_shard {
            // Its padding.
            own.truncate((bottom - top) * (right - left));
        }
        assert_eq!(own.len(), (bottom - top) * (right - left), "{what} {}", parameter.name);
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let far = squares(&mut own.iter().zip(expected.clone()).map(|(a, b)| a - b)).sqrt();
        let norm = squares(&mut expected.copied()).sqrt();
        assert!(far <= bound * norm, "{what}: {} is off by {far} of {norm}", parameter.name);
    }
    assert!(rest.is_empty());
}
