//! Optimizer steps one after another: what a run carries from each to the next.

use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_float8::{Float8Stack, set_float8_enabled};

use crate::batches::TrainBatches;
use crate::grads::clip_grad_norm;
use crate::model::Llama;
use crate::run_config::{OptimizerSection, Precision, RunConfig};

/// AdamW over a Llama's parameters.
pub type LlamaAdamW<B> = OptimizerAdaptor<AdamW, Llama<B>, B>;

/// A model, its optimizer and the batches to come.
pub struct Steps<'a, B: AutodiffBackend> {
    config: &'a RunConfig,
    /// As the steps so far have left it.
    pub model: Llama<B>,
    /// Its record holds the moments.
    pub optimizer: LlamaAdamW<B>,
    batches: TrainBatches<'a>,
    done: usize,
}

/// One step, on the device: reading a value waits for it.
#[derive(Clone, Debug)]
pub struct Step<B: AutodiffBackend> {
    /// From 1.
    pub number: usize,
    /// Mean cross entropy of the batch before the step, `[1]`.
    pub loss: Tensor<B::InnerBackend, 1>,
    /// Global gradient norm before clipping, `[1]`.
    pub grad_norm: Tensor<B::InnerBackend, 1>,
    /// Targets in the batch.
    pub tokens: usize,
    /// Whether linears were to run in FP8.
    pub is_float8: bool,
}

impl<'a, B: AutodiffBackend + Float8Stack> Steps<'a, B> {
    /// A run of `config` from its beginning, on a model that FP8 has been applied to if the run asks for it.
    pub fn new(config: &'a RunConfig, model: Llama<B>, batches: TrainBatches<'a>) -> Self {
        let OptimizerSection { betas, eps, weight_decay, .. } = config.optimizer;
        let optimizer = AdamWConfig::new()
            .with_beta_1(betas[0] as f32)
            .with_beta_2(betas[1] as f32)
            .with_epsilon(eps as f32)
            .with_weight_decay(weight_decay as f32)
            .init::<B, Llama<B>>();
        Self { config, model, optimizer, batches, done: 0 }
    }

    /// Goes on after `done` steps that another run has made: their batches are passed over, and schedules continue.
    /// Parameters and moments are the caller's to load.
    pub fn after(mut self, done: usize) -> Self {
        self.batches
            .by_ref()
            .take(done.saturating_sub(self.done) * self.config.training.grad_accumulation)
            .for_each(drop);
        self.done = done;
        self
    }

    /// Steps made.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Makes one step.
    pub fn step(mut self, device: &B::Device) -> (Self, Step<B>) {
        let RunConfig { training, float8, .. } = self.config;
        let fp8 = training.precision == Precision::Fp8;
        let is_float8 = fp8 && float8.is_float8(self.done, training.steps);
        if fp8 {
            set_float8_enabled(&self.model, is_float8);
        }
        let micro_batches = training.grad_accumulation;
        let mut tokens = 0;
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], (device, DType::F32));
        let mut accumulator = GradientsAccumulator::new();
        for batch in self.batches.by_ref().take(micro_batches) {
            tokens += batch.num_tokens();
            let [inputs, targets] = batch.tensors::<B>(device);
            let part = self.model.loss(inputs, targets).div_scalar(micro_batches as f64);
            loss = loss + part.clone().inner();
            let grads = GradientsParams::from_grads(part.backward(), &self.model);
            accumulator.accumulate(&self.model, grads);
        }
        let mut grads = accumulator.grads();
        let grad_norm = clip_grad_norm(&self.model, &mut grads, training.max_norm, device);
        let lr = self.config.schedule().at(self.done);
        self.model = self.optimizer.step(lr, self.model, grads);
        self.done += 1;
        let number = self.done;
        (self, Step { number, loss, grad_norm, tokens, is_float8 })
    }
}
