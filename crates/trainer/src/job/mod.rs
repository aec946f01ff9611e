//! [`Job`]: a task on a model, independent of the backend.

mod build_model;
mod config;
mod device_memory;
mod evaluate;
mod export;
mod finish;
mod generate_section;
mod generation;
mod log_header;
mod memory;
mod memory_plan;
mod open_text;
mod text;
mod train;
mod weights;

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::report::independent_rows;
use burn_float8::{Float8Stack, set_float8_enabled};
use device_select::{AdapterInfo, DeviceChoice, SelectedDevice, select};
use float8_shard::ShardBackend;

pub use build_model::{adapt, prepare};
pub use config::RunConfig;
pub use evaluate::EvalPrecision;
pub use finish::{Outcome, finish};
pub use generate_section::GenerateSection;
pub use memory::{MemoryEstimate, MemoryPart};
pub use text::Text;
pub use train::{Start, train};
pub use weights::Weights;

use crate::ProgressLine;
use crate::checkpoint::SavedRun;
use crate::config::Precision;
use crate::hf::ExportOptions;
use crate::model::{CausalLm, TrainableModel};
use build_model::{check_cache, check_storage, compute_dtype, dimensions, notes_on_files};
use device_memory::{check_parameters, parameter_bytes};
use generation::{Generation, Printer};

/// Name of the output layer, which processes rows one by one if each must be independent of the
/// batch.
const OUTPUT: &str = "lm_head";

/// Task on a model.
#[derive(Debug)]
pub struct Job<A: TrainableModel> {
    /// Configuration of the run.
    pub config: RunConfig<A::Section>,
    /// Starting parameters: a checkpoint's or initial ones.
    pub start: Start,
    /// Task.
    pub task: Task,
}

/// Task of a [`Job`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Runs the remaining steps.
    Train,
    /// Prints the validation loss.
    Evaluate {
        /// Files and folders to evaluate; if empty, the run's validation data.
        data: Vec<PathBuf>,
        /// Precisions to compare; if empty, only the configured one.
        precisions: Vec<EvalPrecision>,
    },
    /// Continues prompts and streams the text.
    Generate {
        /// Prompts; if empty, `generate.prompt`.
        prompts: Vec<String>,
        /// Whether the prompt is a user's message; then only the answer is printed.
        is_chat: bool,
    },
    /// Prints the memory of a training step.
    Memory {
        /// Number of processes that share the model.
        ranks: usize,
        /// Bytes of the device, if given.
        available: Option<u64>,
    },
    /// Writes the parameters in Hugging Face's format. A run with adapters writes these in PEFT's
    /// format.
    Export {
        /// A folder that does not exist.
        to: PathBuf,
        /// Whether to merge the adapters into the parameters and write the result.
        merge: bool,
        /// Options of the files.
        options: ExportOptions,
    },
}

impl<A: TrainableModel> Job<A> {
    /// Device to run on.
    pub fn device(&self) -> DeviceChoice {
        match self.task {
            // The estimate computes nothing, so its device need not exist.
            Task::Memory { .. } if self.is_absent() => DeviceChoice::Cpu,
            _ => self.config.training.device,
        }
    }

    /// Whether the configured device is unavailable here.
    fn is_absent(&self) -> bool {
        let choice = self.config.training.device;
        choice != DeviceChoice::Auto && select(choice).is_err()
    }

    /// Runs the task on `device`, which is `selected`, and writes the log to `out`.
    ///
    /// # Errors
    /// The errors of the configuration, of files and of the device, and any [`RunError`](crate::RunError).
    pub fn run<B: AutodiffBackend + Float8Stack<Inner: ShardBackend>>(
        &self,
        selected: &SelectedDevice,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<()> {
        match &self.task {
            Task::Train => train::<A, B>(&self.config, &self.start, selected, device, out).map(drop),
            Task::Memory { ranks, available } => {
                // Missing devices are estimated on the CPU.
                let absent = AdapterInfo { name: "absent".into(), hardware: true };
                let target = &match (self.config.training.device, selected) {
                    (DeviceChoice::Cuda, SelectedDevice::Cpu) => SelectedDevice::Cuda,
                    (DeviceChoice::Wgpu, SelectedDevice::Cpu) => SelectedDevice::Wgpu(absent),
                    _ => selected.clone(),
                };
                memory::tell(&self.memory_estimate::<B>(*ranks, target, device)?, *available, target, out)
            }
            Task::Evaluate { data, precisions } => self.evaluate::<B>(data, precisions, selected, device, out),
            Task::Generate { prompts, is_chat } => self.generate::<B>(prompts, *is_chat, selected, device, out),
            Task::Export { to, options, merge } => self.export::<B>(to, options, *merge, selected, device, out),
        }
    }

    /// Memory of a training step on `selected` for each of `ranks` ranks, which need not exist.
    /// Nothing is allocated on `device`.
    ///
    /// # Errors
    /// The errors of the configuration, as [`train()`] has them.
    pub fn memory_estimate<B: AutodiffBackend>(
        &self,
        ranks: usize,
        selected: &SelectedDevice,
        device: &B::Device,
    ) -> Result<MemoryEstimate> {
        let config = &self.config;
        config.validate()?;
        config.parallelism.mesh(ranks)?;
        check_storage::<B, _>(config, selected, device)?;
        let dims = dimensions(config, Some(config.training.seq_len), &[])?;
        memory::estimate::<B, A::Trained<B>>(config, &dims, ranks, selected, device)
    }

    /// Model for `config`, which may differ from the job's in precision. With the job's recipe, the
    /// FP8 state is the checkpoint's.
    fn model<B: AutodiffBackend + Float8Stack>(
        &self,
        config: &RunConfig<A::Section>,
        weights: Weights<'_, A::Config>,
        selected: &SelectedDevice,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<A::Trained<B>> {
        let RunConfig { training, float8, .. } = config;
        check_parameters(parameter_bytes(config, weights.dims()), selected)?;
        let dtype = self.dtype::<B>(config, selected, device)?;
        let progress = ProgressLine::new();
        let saved = self.saved().filter(|_| training.precision == Precision::Fp8 && *float8 == self.config.float8);
        let histories = saved.map(|saved| saved.float8_of_model(config.lora.is_some()));
        let mut weights = weights;
        weights.histories = histories.as_ref();
        let model = prepare::<A, B>(config, weights, device, &progress, out)?.with_compute_dtype(dtype);
        let model = match &config.lora {
            Some(lora) => adapt::<B, _>(lora, model, training.seed, self.saved())?.attached(),
            None => model,
        };
        if let Some(saved) = saved {
            let last = saved.step().saturating_sub(1);
            set_float8_enabled(&model, float8.is_float8(last, training.steps.get()));
        }
        Ok(model)
    }

    /// Compute dtype of the model.
    fn dtype<B: Backend>(
        &self,
        config: &RunConfig<A::Section>,
        selected: &SelectedDevice,
        device: &B::Device,
    ) -> Result<DType> {
        match compute_dtype::<B, _>(config, selected, device)? {
            Err(_) if self.start.may_widen => Ok(DType::F32),
            dtype => dtype,
        }
    }

    fn saved(&self) -> Option<&SavedRun> {
        self.start.saved.as_ref()
    }

    fn generate<B: AutodiffBackend + Float8Stack>(
        &self,
        prompts: &[String],
        is_chat: bool,
        selected: &SelectedDevice,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<()> {
        let config = &self.config;
        config.validate()?;
        check_cache::<B, _>(config, selected, device)?;
        let text = config.text()?;
        let texts = if prompts.is_empty() { std::slice::from_ref(&config.generate.prompt) } else { prompts };
        let prompts = texts.iter().map(|prompt| text.prompt(prompt, is_chat)).collect::<Result<Vec<_>, _>>()?;
        let dims = dimensions(config, None, &prompts.iter().map(Vec::len).collect::<Vec<_>>())?;
        let weights = Weights::open(config, self.saved(), dims)?;
        // Notes go to stderr, so that stdout has only the texts.
        notes_on_files(config, &weights)?.iter().try_for_each(|note| writeln!(io::stderr(), "{note}"))?;
        let model = self.model::<B>(config, weights, selected, device, &mut io::sink())?;
        let generation = Generation::new(config, &text, selected, independent_rows(&model, &[OUTPUT]));
        let (mut printer, batch) = (Printer::new(texts, is_chat, out)?, generation.batch_size(prompts.len()));
        let result = generation.run(&model.valid(), &prompts, |number, piece| printer.print(number, piece, batch));
        // Ends the line before an error is printed.
        printer.finish().and(result)
    }
}
