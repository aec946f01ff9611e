//! The debug Llama with the training example's defaults, and a train step of any model.
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8Config, Float8Stack};
use models::{CausalLmExt, Decoder, DecoderConfig, RunConfig};
use trainer::rng::Rng;

/// Sequences of a batch, and tokens of each.
pub const BATCH: [usize; 2] = [8, 128];

/// Loss of a model on one batch.
type Loss<B, M> = dyn Fn(&M) -> Tensor<B, 1>;

/// Model with its optimizer and its loss on one batch.
pub struct Training<B: AutodiffBackend, M: AutodiffModule<B>> {
    model: Option<M>,
    optimizer: OptimizerAdaptor<AdamW, M, B>,
    loss: Box<Loss<B, M>>,
}

/// The debug Decoder, with equal weights on every backend.
pub fn plain<B: AutodiffBackend>() -> Decoder<B> {
    let config = DecoderConfig::preset("debug").expect("a preset");
    Decoder::new(config, &B::Device::default()).expect("a valid preset").init_weights(0)
}

/// The debug Llama in FP8, except its output layer.
pub fn float8<B: AutodiffBackend + Float8Stack>(config: Float8Config) -> Decoder<B> {
    let model = plain::<B>();
    let mut run = RunConfig::default();
    run.float8.config = config;
    let (model, _) = run.float8(&model.config().clone()).apply::<B, _>(model).expect("the debug Llama has linears");
    model
}

impl<B: AutodiffBackend> Training<B, Decoder<B>> {
    pub fn llama(model: Decoder<B>) -> Self {
        let vocab = model.config().dims.vocab_size;
        let [inputs, targets] = ["inputs", "targets"].map(|name| {
            let mut rng = Rng::named(0, name);
            let tokens: Vec<i32> = (0..BATCH[0] * BATCH[1]).map(|_| rng.below(vocab) as i32).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(tokens, BATCH), &B::Device::default())
        });
        Self::new(model, move |model| model.loss(inputs.clone(), targets.clone()))
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Training<B, M> {
    pub fn new(model: M, loss: impl Fn(&M) -> Tensor<B, 1> + 'static) -> Self {
        Self { model: Some(model), optimizer: AdamWConfig::new().init(), loss: Box::new(loss) }
    }

    /// Forward, backward and AdamW; waits for the device.
    pub fn step(&mut self) {
        let model = self.model.take().expect("put back after every step");
        let grads = GradientsParams::from_grads((self.loss)(&model).backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, grads));
        B::sync(&B::Device::default()).expect("the device runs");
    }
}
