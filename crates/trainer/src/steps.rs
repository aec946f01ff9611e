//! Optimizer steps and the state between them.

use anyhow::Result;
use burn::module::{AutodiffModule, Module};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::shard_hooks::visit_params;
use burn_float8::weights::check_frozen;
use burn_float8::{Float8Error, Float8Stack, Monitor, begin_float8_step, report::Amaxes, set_float8_enabled};

use crate::activation_checkpoint::{CheckpointingPlan, gradients};
use crate::batches::{Batch, TrainBatches};
use crate::checkpoint::SavedRun;
use crate::config::{Float8Section, OptimizerSection, Precision, TrainingSection, require};
use crate::data::Position;
use crate::grads::{Squares, clip_grad_norm};
use crate::model::LanguageModel;
use crate::optimizer::{AT_ONCE, AdamWStates, ModelSlot, Update};
use crate::ranks::Ranks;
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
    pub model: ModelSlot<M>,
    /// AdamW states: moments and master weights.
    pub optimizer: AdamWStates<B::InnerBackend>,
    /// Batches of the next steps.
    pub batches: TrainBatches,
    monitor: Monitor<B>,
    /// Ranks of a sharded model.
    ranks: Option<Ranks>,
    done: usize,
    /// Whether a weight of an FP8 linear is frozen.
    freezes_float8: bool,
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
    /// New run of `config`, which is [valid](crate::job::RunConfig::validate). FP8 must already be
    /// applied to the model if the run uses it. With `ranks`, the model is sharded over them, all
    /// must call the steps, and a step has `grad_accumulation` micro-batches per rank, or per ranks of tensor
    /// parallelism.
    ///
    /// # Errors
    /// [`Float8Error`] naming a trained linear whose weight is FP8 only.
    pub fn new(
        config: StepConfig<'a>,
        model: M,
        batches: TrainBatches,
        ranks: Option<Ranks>,
    ) -> Result<Self, Float8Error> {
        check_frozen::<B, M>(&model)?;
        Ok(Self {
            config,
            monitor: Monitor::new(&model),
            freezes_float8: freezes_float8::<B, M>(&model),
            model: ModelSlot::new(model),
            optimizer: AdamWStates::default(),
            batches,
            ranks,
            done: 0,
        })
    }

    /// Ranks of the run, if there are several.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.ranks.as_ref()
    }

    /// Resumes from `saved`. Its parameters must have been loaded into the model before FP8 was
    /// applied.
    ///
    /// # Errors
    /// A checkpoint that cannot be read, and data that has changed.
    pub fn resume(mut self, saved: &SavedRun) -> Result<Self> {
        saved.restore_float8::<B, M>(&self.model)?;
        self.optimizer = saved.load_moments::<B, M>(&self.model, self.config.optimizer, self.ranks.as_ref())?;
        self.after(saved.step(), saved.position())
    }

    /// Continues after `done` steps with the sequence at `position`. The caller loads parameters
    /// and moments.
    ///
    /// # Errors
    /// The errors of [`TrainBatches::seek`].
    pub fn after(mut self, done: usize, position: &Position) -> anyhow::Result<Self> {
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

    /// Runs one step. After an error, the model is the one before the step, or one that a part of
    /// its gradients has changed with `optimizer.in_backward`.
    ///
    /// The loss is the mean over all counted targets of the step: micro-batches are weighted by
    /// their number of targets.
    ///
    /// # Errors
    /// Errors of the data, of the ranks and of the device, and
    /// [`ConfigError`](crate::config::ConfigError) for activation checkpointing of a model without
    /// segments.
    pub fn step(&mut self, device: &B::Device) -> Result<Step<B>> {
        let StepConfig { training, float8, optimizer } = self.config;
        let is_float8 = training.precision == Precision::Fp8 && float8.is_float8(self.done, training.steps.get());
        if training.precision == Precision::Fp8 {
            set_float8_enabled(&*self.model, is_float8);
        }
        let count = training.grad_accumulation * self.ranks.as_ref().map_or(1, Ranks::readers);
        let batches = (0..count).map(|_| self.batches.next_batch()).collect::<Result<Vec<_>, _>>()?;
        let lr = optimizer.schedule(training.steps.get()).at(self.done);
        let update = Update { section: optimizer, lr, seed: training.seed, step: self.done, at_once: AT_ONCE };
        let mut amaxes = vec![];
        let updated = self.update(&batches, update, is_float8.then_some(&mut amaxes), device);
        self.model.map(|model| model.with_dropout_seed(None));
        let (loss, grad_norm) = updated?;
        // An FP8 step begins when the first updated weight is read. With frozen linears that is too
        // late, or never happens. Thus evaluation uses the scales of the next step, here and in a
        // process that loads this step's checkpoint.
        if is_float8 && self.freezes_float8 {
            begin_float8_step::<B, M>(&self.model);
        }
        self.done += 1;
        let tokens = batches.iter().map(Batch::num_tokens).sum();
        Ok(Step { number: self.done, loss, grad_norm, tokens, is_float8, lr, amaxes })
    }

    /// Updates the model by the gradients of `batches`. Returns their loss and gradient norm.
    fn update(
        &mut self,
        batches: &[Batch],
        update: Update<'_>,
        mut amaxes: Option<&mut Vec<Amaxes>>,
        device: &B::Device,
    ) -> Result<(InnerScalar<B>, InnerScalar<B>)> {
        let Self { config, model, optimizer: states, monitor, ranks, .. } = self;
        let (training, in_backward, ranks) = (config.training, config.optimizer.in_backward, ranks.as_ref());
        let plan = CheckpointingPlan::new(training, model.vocab_size());
        let targets: usize = batches.iter().map(Batch::num_targets).sum();
        let own = match ranks {
            Some(ranks) => {
                ranks.begin_step::<B, M>(model);
                ranks.share(batches)
            }
            None => {
                (0..batches.len()).filter(|index| batches[*index].num_targets() > 0).map(|index| (index, 1.0)).collect()
            }
        };
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], (device, DType::F32));
        let (mut accumulator, mut squares) = (GradientsAccumulator::new(), Squares::default());
        for (index, factor) in own {
            let batch = &batches[index];
            model.map(|model| model.with_dropout_seed(Some(dropout_seed(update.seed, update.step, index))));
            let share = targets as f64 / batch.num_targets() as f64;
            let scale = |loss: Tensor<B, 1>| match loss.div_scalar(share) {
                part if factor == 1.0 => part,
                part => part.mul_scalar(factor),
            };
            let mut finish = |model: &mut ModelSlot<M>, mut grads: GradientsParams| -> Result<()> {
                if !in_backward {
                    ranks.map_or(Ok(()), |ranks| ranks.wait_for_gradients::<B, M>(model, &mut grads))?;
                    accumulator.accumulate(&**model, grads);
                    return Ok(());
                }
                ranks.map_or(Ok(()), |ranks| ranks.reduce_gradients::<B, M>(model, &mut grads))?;
                if let Some(path) = squares.add(&**model, &grads) {
                    let reason =
                        format!("{path} is read by several segments, and was changed before its gradient was whole");
                    require("optimizer.in_backward", true, false, &reason)?;
                }
                update.apply::<B, M>(states, model, grads, ranks);
                Ok(())
            };
            // Reduce-scatters of a segment run while backward computes the segment before it.
            let mut in_flight = None;
            let part = gradients(model, batch, plan, ranks, scale, device, |model, grads| match ranks {
                Some(ranks) if ranks.readers() > 1 => {
                    in_flight.replace(grads).map_or(Ok(()), |grads| finish(model, grads))
                }
                _ => finish(model, grads),
            })?;
            in_flight.map_or(Ok(()), |grads| finish(model, grads))?;
            loss = loss + part;
            if let Some(amaxes) = &mut amaxes {
                amaxes.push(monitor.amaxes());
            }
        }
        if let Some(ranks) = ranks {
            let all = ranks.sum("loss", loss.into_data().iter::<f32>().collect())?;
            loss = Tensor::from_data(TensorData::new(all, [1]), (device, DType::F32));
        }
        if in_backward {
            return Ok((loss, squares.norm(ranks, device)?));
        }
        let mut grads = accumulator.grads();
        ranks.map_or(Ok(()), |ranks| ranks.reduce_gradients::<B, M>(model, &mut grads))?;
        let grad_norm = clip_grad_norm(&**model, &mut grads, training.grad_clip_norm, ranks, device)?;
        update.apply::<B, M>(states, model, grads, ranks);
        Ok((loss, grad_norm))
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
