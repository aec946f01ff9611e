//! The debug Llama and its train step, as the training example runs them by default.
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8Config, Float8Stack};
use llama3::{Llama, LlamaConfig, RunConfig};
use train::rng::Rng;

/// A model, its optimizer and one batch of 8 sequences of 128 tokens.
pub struct Training<B: AutodiffBackend> {
    model: Option<Llama<B>>,
    optimizer: OptimizerAdaptor<AdamW, Llama<B>, B>,
    batch: [Tensor<B, 2, Int>; 2],
    device: B::Device,
}

/// The debug Llama, the same weights on every backend.
pub fn plain<B: AutodiffBackend>() -> Llama<B> {
    let config = LlamaConfig::preset("debug").expect("a preset");
    Llama::new(config, &B::Device::default()).expect("a valid preset").init_weights(0)
}

/// The debug Llama in FP8, but for its output layer.
pub fn float8<B: AutodiffBackend + Float8Stack>(config: Float8Config) -> Llama<B> {
    let model = plain::<B>();
    let mut run = RunConfig::default();
    run.float8.config = config;
    let (model, _) = run.float8(&model.config().clone()).convert::<B, _>(model).expect("the debug Llama has linears");
    model
}

impl<B: AutodiffBackend> Training<B> {
    pub fn new(model: Llama<B>) -> Self {
        let (shape, device) = ([8, 128], B::Device::default());
        let vocab = model.config().vocab_size;
        let batch = ["inputs", "targets"].map(|name| {
            let mut rng = Rng::named(0, name);
            let tokens: Vec<i32> = (0..shape[0] * shape[1]).map(|_| rng.below(vocab) as i32).collect();
            Tensor::from_data(TensorData::new(tokens, shape), &device)
        });
        Self { model: Some(model), optimizer: AdamWConfig::new().init(), batch, device }
    }

    /// Forward, backward and AdamW; waits for the device.
    pub fn step(&mut self) {
        let model = self.model.take().expect("put back after every step");
        let [inputs, targets] = self.batch.clone();
        let grads = GradientsParams::from_grads(model.loss(inputs, targets).backward(), &model);
        self.model = Some(self.optimizer.step(1e-3, model, grads));
        B::sync(&self.device).expect("the device runs");
    }
}
