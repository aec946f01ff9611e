//! [`Weights`]: source of a model's parameters, checked against its dimensions before anything is
//! allocated.

use std::io::Write;

use anyhow::{Result, bail};
use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::report::LayerState;
use burn_float8::{Float8Config, Float8Stack, Float8State};

use super::config::RunConfig;
use crate::ProgressLine;
use crate::checkpoint::{ASSETS, SavedRun};
use crate::config::TrainingSection;
use crate::freeze::freeze;
use crate::hf::{Checkpoint, base};
use crate::model::{CausalLm, CausalLmExt, ModelConfig, ModelSection};

/// Files or seed of a model's parameters.
pub struct Weights<'a, C> {
    dims: C,
    source: Source<'a>,
    training: &'a TrainingSection,
    /// Checkpoint of a run with frozen parameters; it contains only the trained ones.
    trained: Option<&'a SavedRun>,
    /// Casts of FP8-only linears; `None` if all weights have values.
    codes: Option<Codes>,
    /// Amax histories of a checkpoint.
    pub(super) histories: Option<&'a Float8State>,
}

/// Casts of FP8-only weights.
struct Codes {
    float8: Float8Config,
    /// Dtype of dequantized values.
    values: DType,
}

enum Source<'a> {
    Saved(&'a SavedRun),
    HuggingFace(Checkpoint),
    Seed(u64),
}

impl<'a, C: ModelConfig> Weights<'a, C> {
    /// Opens the parameters of a checkpoint, or the initial ones of `config`. A resumed run with
    /// frozen parameters needs both. Files of a Hugging Face folder are opened, stay open, and are
    /// checked against `dims`.
    ///
    /// # Errors
    /// The errors of [`CausalLmExt::load_hf_weights`], except for tensors that cannot be read;
    /// Frozen weights that differ from the ones that the run started with, or whose folder is gone.
    pub fn open<S: ModelSection<Config = C>>(
        config: &'a RunConfig<S>,
        saved: Option<&'a SavedRun>,
        dims: C,
    ) -> Result<Self> {
        let training = &config.training;
        if let (Some(run), Some(folder)) = (saved.and_then(|saved| saved.path().parent()), config.frozen_folder()) {
            if !folder.is_dir() {
                bail!(
                    "there is no folder {}, which has the weights that the run keeps frozen: its checkpoints hold only what it trains. \
                     It must be where it was (model.hf_path)",
                    folder.display()
                );
            }
            base::check(folder, &run.join(ASSETS))?;
        }
        // A checkpoint contains only trained parameters; with adapters, none of the model.
        let [trained, saved] = match (&config.lora, !training.freeze.is_empty()) {
            (Some(_), _) => [None, None],
            (None, true) => [saved, None],
            (None, false) => [None, saved],
        };
        let source = match (saved, config.model.hf_path()) {
            (Some(saved), _) => Source::Saved(saved),
            (None, Some(path)) => Source::HuggingFace(Checkpoint::open(path, &dims, config.repeated_head())?),
            (None, None) => Source::Seed(config.training.seed),
        };
        Ok(Self { dims, source, training, trained, codes: None, histories: None })
    }

    /// Makes linears that `float8` casts FP8 only, if they come from a Hugging Face folder. Values
    /// dequantized later have the dtype `values`.
    #[must_use]
    pub(super) fn with_codes(self, float8: &Float8Config, values: DType) -> Self {
        let codes = Codes { float8: float8.clone(), values };
        // Weights scaled by a history are loaded as values, and cast when the histories are
        // restored.
        let has_history =
            |layer: &LayerState| layer.weight.as_ref().is_some_and(|weight| weight.scaling_amax.is_some());
        let are_scaled = self.histories.is_some_and(|histories| histories.layers.values().any(has_history));
        Self { codes: Some(codes).filter(|_| self.trained.is_none() && !are_scaled), ..self }
    }

    /// Hugging Face folder of the parameters, if any.
    pub(super) fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::HuggingFace(checkpoint) => Some(checkpoint),
            _ => None,
        }
    }

    /// Input scales in a Hugging Face folder, by path of the linear.
    pub(super) fn input_scales(&self) -> Result<Vec<(String, f32)>> {
        match self.checkpoint() {
            Some(checkpoint) => Ok(checkpoint.input_scales()?),
            None => Ok(vec![]),
        }
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &C {
        &self.dims
    }

    /// Loads the model with these parameters.
    ///
    /// # Errors
    /// An invalid dimension, a device that fails, weights that cannot be read, a log that cannot be
    /// written.
    pub fn load<B: AutodiffBackend + Float8Stack, M: CausalLm<B, Config = C> + AutodiffModule<B>>(
        self,
        device: &B::Device,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<M> {
        let model = M::new(self.dims, device)?;
        let model = match self.source {
            Source::Saved(saved) => {
                progress.track("loaded", out, |progress| saved.load_parameters(model, progress))??
            }
            Source::HuggingFace(checkpoint) => progress.track("loaded", out, |progress| match &self.codes {
                Some(Codes { float8, values }) => checkpoint.load_codes(model, float8, *values, progress),
                None => checkpoint.load(model, progress),
            })??,
            Source::Seed(seed) => {
                progress.track("initialized", out, |progress| model.init_weights_with(seed, progress))?
            }
        };
        let model = freeze(model, self.training)?;
        Ok(match self.trained {
            Some(saved) => saved.load_parameters(model, &mut |_| ())?,
            None => model,
        })
    }
}
