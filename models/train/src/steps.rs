//! Optimizer steps and the state between them.

use burn::module::{AutodiffModule, Module};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::shard_hooks::visit_params;
use burn_float8::weights::check_frozen;
use burn_float8::{Float8Stack, Monitor, begin_float8_step, report::Amaxes, set_float8_enabled};

use crate::TrainError;
use crate::batches::{Batch, TrainBatches};
use crate::checkpoint::SavedRun;
use crate::config::{ConfigError, Float8Section, OptimizerSection, Precision, TrainingSection};
use crate::data::{DataError, Position};
use crate::grads::{Squares, clip_grad_norm};
use crate::model::LanguageModel;
use crate::optimizer::{AT_ONCE, AdamWStates, Update};
use crate::ranks::Ranks;
use crate::recompute::{Plan, gradients, gradients_in_parts};
use crate::rng::Rng;

/// Sections of a configuration that determine a step.
#[derive(Clone, Copy, Debug)]
pub struct StepConfig<'a> {
    /// Micro-batches, clipping, precision.
    pub training: &'a TrainingSection,
    /// AdamW and the learning rate.
    pub optimizer: &'a OptimizerSection,
    /// Precision schedule.
    pub float8: &'a Float8Section,
}

/// A model, its optimizer and its batches.
pub struct Steps<'a, B: AutodiffBackend + Float8Stack, M: AutodiffModule<B>> {
    config: StepConfig<'a>,
    /// Model after the completed steps.
    pub model: M,
    /// AdamW states: moments and master weights.
    pub optimizer: AdamWStates<B::InnerBackend>,
    /// Batches of the next steps.
    pub batches: TrainBatches,
    monitor: Monitor<B>,
    /// Ranks of a sharded model.
    ranks: Option<Ranks>,
    done: usize,
    /// Whether a weight of an FP8 linear is frozen; `None` before the first step, which checks the
    /// model.
    freezes_float8: Option<bool>,
}

/// Results of a step, on the device. Reading a value waits for it.
#[derive(Clone, Debug)]
pub struct Step<B: AutodiffBackend> {
    /// Step, counted from 1.
    pub number: usize,
    /// Mean cross entropy of the batch before the step, `[1]`.
    pub loss: Tensor<B::InnerBackend, 1>,
    /// Global gradient norm before clipping, `[1]`.
    pub grad_norm: Tensor<B::InnerBackend, 1>,
    /// Tokens in the batch, without padding.
    pub tokens: usize,
    /// Whether linears should run in FP8.
    pub is_float8: bool,
    /// The learning rate.
    pub lr: f64,
    /// Amaxes of the operands of FP8 linears, by micro-batch.
    pub amaxes: Vec<Amaxes>,
}

/// Scalar of a step, on the device.
type InnerScalar<B> = Tensor<<B as AutodiffBackend>::InnerBackend, 1>;

impl<'a, B: AutodiffBackend + Float8Stack, M: LanguageModel<B> + AutodiffModule<B>> Steps<'a, B, M> {
    /// New run of `config`. FP8 must already be applied to the model if the run uses it.
    pub fn new(config: StepConfig<'a>, model: M, batches: TrainBatches) -> Self {
        let monitor = Monitor::new(&model);
        Self {
            config,
            model,
            optimizer: AdamWStates::default(),
            batches,
            monitor,
            ranks: None,
            done: 0,
            freezes_float8: None,
        }
    }

    /// Shards the steps over `ranks`; all must call them. A step has `grad_accumulation`
    /// micro-batches per rank.
    pub fn with_ranks(self, ranks: Option<Ranks>) -> Self {
        Self { ranks, ..self }
    }

    /// Ranks of the run, if there are several.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.ranks.as_ref()
    }

    /// Resumes from `saved`. Its parameters must have been loaded into the model before FP8 was
    /// applied.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]; [`TrainError::Data`] if the data has changed.
    pub fn resume(mut self, saved: &SavedRun) -> Result<Self, TrainError> {
        saved.restore_float8::<B, M>(&self.model)?;
        self.optimizer = saved.load_moments::<B, M>(&self.model, self.config.optimizer)?;
        Ok(self.after(saved.step(), saved.position())?)
    }

    /// Continues after `done` steps with the sequence at `position`. The caller loads parameters
    /// and moments.
    ///
    /// # Errors
    /// The errors of [`TrainBatches::seek`].
    pub fn after(mut self, done: usize, position: &Position) -> Result<Self, DataError> {
        self.batches.seek(position)?;
        self.done = done;
        Ok(self)
    }

    /// Completed steps.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Monitor of the model's linears.
    pub fn monitor(&self) -> &Monitor<B> {
        &self.monitor
    }

    /// Runs one step.
    ///
    /// The loss is the mean over all counted targets of the step: micro-batches are weighted by
    /// their number of targets.
    ///
    /// # Errors
    /// Any [`TrainError::Data`], [`TrainError::Ranks`], [`TrainError::Config`] for activation
    /// checkpointing of a model without segments and for [settings that
    /// exclude](OptimizerSection::check_in_backward) `optimizer.in_backward`;
    /// [`TrainError::Float8`] naming a trained linear whose weight is FP8 only.
    pub fn step(mut self, device: &B::Device) -> Result<(Self, Step<B>), TrainError> {
        let StepConfig { training, float8, optimizer } = self.config;
        let freezes_float8 = match self.freezes_float8 {
            Some(known) => known,
            None => {
                check_frozen::<B, M>(&self.model)?;
                *self.freezes_float8.insert(freezes_float8::<B, M>(&self.model))
            }
        };
        let fp8 = training.precision == Precision::Fp8;
        let is_float8 = fp8 && float8.is_float8(self.done, training.steps.get());
        if fp8 {
            set_float8_enabled(&self.model, is_float8);
        }
        let ranks = self.ranks.as_ref().map_or(1, Ranks::count);
        optimizer.check_in_backward(training)?;
        optimizer.check_master_weights(training)?;
        let batches = (0..training.grad_accumulation * ranks).map(|_| self.batches.next_batch());
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        let tokens = batches.iter().map(Batch::num_tokens).sum();
        let targets: usize = batches.iter().map(Batch::num_targets).sum();
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], (device, DType::F32));
        let mut accumulator = GradientsAccumulator::new();
        let mut amaxes = Vec::new();
        let plan = Plan::new(training, self.model.vocab_size());
        let lr = optimizer.schedule(training.steps.get()).at(self.done);
        let update = Update { section: optimizer, lr, seed: training.seed, step: self.done, at_once: AT_ONCE };
        let own = match &self.ranks {
            Some(ranks) => {
                ranks.begin_step::<B, M>(&self.model);
                ranks.share(&batches)
            }
            None => batches.iter().filter(|batch| batch.num_targets() > 0).map(|batch| (batch, 1.0)).collect(),
        };
        let mut norm = None;
        for (batch, factor) in own {
            // Index among the micro-batches of all ranks.
            let number = batches.iter().position(|other| std::ptr::eq(other, batch)).unwrap_or_default();
            self.model = self.model.with_dropout_seed(Some(dropout_seed(training.seed, self.done, number)));
            let share = targets as f64 / batch.num_targets() as f64;
            let scale = |loss: Tensor<B, 1>| match loss.div_scalar(share) {
                part if factor == 1.0 => part,
                part => part.mul_scalar(factor),
            };
            let part;
            if optimizer.in_backward {
                let of_all;
                (self, part, of_all) = self.step_in_backward(batch, plan, scale, update, device)?;
                norm = Some(of_all);
            } else {
                let grads;
                (part, grads) = gradients(&self.model, batch, plan, self.ranks.as_ref(), scale, device)?;
                accumulator.accumulate(&self.model, grads);
            }
            loss = loss + part;
            if is_float8 {
                amaxes.push(self.monitor.amaxes());
            }
        }
        self.model = self.model.with_dropout_seed(None);
        if let Some(ranks) = &self.ranks {
            let all = ranks.sum("loss", loss.into_data().iter::<f32>().collect())?;
            loss = Tensor::from_data(TensorData::new(all, [1]), (device, DType::F32));
        }
        let grad_norm = match norm {
            Some(norm) => norm,
            None => {
                let mut grads = accumulator.grads();
                if let Some(ranks) = &self.ranks {
                    ranks.reduce_gradients::<B, M>(&self.model, &mut grads)?;
                }
                let norm = clip_grad_norm(&self.model, &mut grads, training.max_norm, self.ranks.as_ref(), device)?;
                (self.optimizer, self.model) = update.apply::<B, M>(self.optimizer, self.model, grads);
                norm
            }
        };
        let number = self.end(is_float8 && freezes_float8);
        Ok((self, Step { number, loss, grad_norm, tokens, is_float8, lr, amaxes }))
    }

    /// Counts a step. With frozen linears it also begins the next FP8 step. Otherwise an FP8 step
    /// begins when the first updated weight is read, which is too late for frozen linears before
    /// it, or never happens. Thus evaluation uses the scales of the next step, here and in a
    /// process that loads this step's checkpoint.
    fn end(&mut self, begins_next: bool) -> usize {
        if begins_next {
            begin_float8_step::<B, M>(&self.model);
        }
        self.done += 1;
        self.done
    }

    /// Update of a step whose gradients are applied per group of segments, as soon as they exist.
    /// Returns its loss and gradient norm.
    fn step_in_backward(
        mut self,
        batch: &Batch,
        plan: Plan,
        scale: impl Fn(Tensor<B, 1>) -> Tensor<B, 1>,
        update: Update<'_>,
        device: &B::Device,
    ) -> Result<(Self, InnerScalar<B>, InnerScalar<B>), TrainError> {
        let mut squares = Squares::default();
        let (mut optimizer, ranks) = (Some(self.optimizer), self.ranks.as_ref());
        let mut apply = |model: M, mut grads: GradientsParams| {
            if let Some(ranks) = ranks {
                ranks.reduce_gradients::<B, M>(&model, &mut grads)?;
            }
            if let Some(path) = squares.add(&model, &grads) {
                let reason =
                    format!("{path} is read by several segments, and was changed before its gradient was whole");
                return Err(ConfigError::Value { key: "optimizer.in_backward", value: "true".into(), reason }.into());
            }
            let before = optimizer.take().expect("it is put back");
            let (after, model) = update.apply::<B, M>(before, model, grads);
            optimizer = Some(after);
            Ok::<_, TrainError>(model)
        };
        let (model, loss, last) = gradients_in_parts(self.model, batch, plan, ranks, scale, device, &mut apply)?;
        self.model = apply(model, last)?;
        let grad_norm = squares.norm(&self.model, ranks, device)?;
        self.optimizer = optimizer.expect("it is put back");
        Ok((self, loss, grad_norm))
    }
}

/// Whether a weight of an FP8 linear is frozen.
fn freezes_float8<B: AutodiffBackend + Float8Stack, M: Module<B>>(model: &M) -> bool {
    let mut is_found = false;
    visit_params::<B, _>(model, |param| {
        let frozen = param.float().filter(|value| !B::float_is_require_grad(value));
        is_found |= frozen.is_some_and(|weight| B::layer(&weight).is_some());
    });
    is_found
}

/// Dropout seed of a micro-batch. A resumed run draws the masks of an uninterrupted one.
fn dropout_seed(seed: u64, step: usize, micro_batch: usize) -> u64 {
    Rng::named(seed, &format!("dropout of micro-batch {micro_batch} in step {step}")).next_u64()
}
