//! [`Weights`]: where a model's parameters come from, compared with its dimensions before anything is allocated.

use std::io::Write;
use std::path::Path;

use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::report::LayerState;
use burn_float8::{Float8Config, Float8Stack, Float8State};

use super::config::RunConfig;
use crate::checkpoint::{ASSETS, SavedRun};
use crate::config::TrainingSection;
use crate::freeze::freeze;
use crate::hf::{Checkpoint, base};
use crate::model::{CausalLm, CausalLmExt, ModelConfig, ModelSection};
use crate::{JobError, ProgressLine};

/// What a model's parameters are read from, or drawn with.
pub struct Weights<'a, C> {
    dims: C,
    source: Source<'a>,
    training: &'a TrainingSection,
    /// The checkpoint of a run that trains some parameters, which has those alone.
    trained: Option<&'a SavedRun>,
    /// How linears are cast whose weights are to be codes alone; none if all weights have values.
    codes: Option<Codes>,
    /// The amax histories of a checkpoint.
    histories: Option<&'a Float8State>,
    /// Whether a checkpoint does not say what the frozen weights were.
    is_unknown: bool,
}

/// How the weights of linears become codes alone.
struct Codes {
    float8: Float8Config,
    /// The dtype of what is decoded.
    values: DType,
}

enum Source<'a> {
    Saved(&'a SavedRun),
    HuggingFace(Checkpoint),
    Seed(u64),
}

impl<'a, C: ModelConfig> Weights<'a, C> {
    /// The parameters of a checkpoint, or those that a run of `config` begins with, which one that trains some alone needs also where it is
    /// resumed. Of a Hugging Face folder, the files are opened, and stay open: what they hold is compared with `dims`.
    ///
    /// # Errors
    /// The errors of [`CausalLmExt::load_hf_weights`], but for tensors that cannot be read; [`JobError::Base`] where frozen weights are others
    /// than those that the run of the checkpoint began with, [`JobError::NoBase`] where their folder is gone.
    pub fn open<S: ModelSection<Config = C>>(
        config: &'a RunConfig<S>,
        saved: Option<&'a SavedRun>,
        dims: C,
    ) -> Result<Self, JobError> {
        let training = &config.training;
        let is_known = match (saved.and_then(|saved| saved.path().parent()), config.frozen_folder()) {
            (Some(_), Some(folder)) if !folder.is_dir() => return Err(JobError::NoBase { folder: folder.into() }),
            (Some(run), Some(folder)) => base::check(folder, &run.join(ASSETS))?,
            _ => true,
        };
        // A checkpoint has what is trained: of adapters nothing of the model.
        let [trained, saved] = match (&config.lora, training.freezes()) {
            (Some(_), _) => [None, None],
            (None, true) => [saved, None],
            (None, false) => [None, saved],
        };
        let source = match (saved, config.model.hf_path()) {
            (Some(saved), _) => Source::Saved(saved),
            (None, Some(path)) => Source::HuggingFace(Checkpoint::open(path, &dims, config.repeated_head())?),
            (None, None) => Source::Seed(config.training.seed),
        };
        Ok(Self { dims, source, training, trained, codes: None, histories: None, is_unknown: !is_known })
    }

    /// With the weights of linears that `float8` has in FP8 as codes alone, where they come from a Hugging Face folder; what is decoded later
    /// has the dtype `values`.
    #[must_use]
    pub(super) fn with_codes(self, float8: &Float8Config, values: DType) -> Self {
        let codes = Codes { float8: float8.clone(), values };
        // Weights that a history scales are loaded as values, and cast when the histories are restored.
        let has_history =
            |layer: &LayerState| layer.weight.as_ref().is_some_and(|weight| weight.scaling_amax.is_some());
        let are_scaled = self.histories.is_some_and(|histories| histories.layers.values().any(has_history));
        Self { codes: Some(codes).filter(|_| self.trained.is_none() && !are_scaled), ..self }
    }

    /// With the amax histories of a checkpoint, by which `delayed` casts weights that are to be codes alone.
    #[must_use]
    pub(super) fn with_histories(self, histories: &'a Float8State) -> Self {
        Self { histories: Some(histories), ..self }
    }

    /// The amax histories of a checkpoint, if they were given.
    pub(super) fn histories(&self) -> Option<&'a Float8State> {
        self.histories
    }

    /// The Hugging Face folder that the parameters come from, if they come from one.
    pub(super) fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::HuggingFace(checkpoint) => Some(checkpoint),
            _ => None,
        }
    }

    /// The scales of linears' inputs that a Hugging Face folder has, by the linears' paths.
    pub(super) fn input_scales(&self) -> Result<Vec<(String, f32)>, JobError> {
        match self.checkpoint() {
            Some(checkpoint) => checkpoint.input_scales(&self.dims, Path::new("")),
            None => Ok(vec![]),
        }
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &C {
        &self.dims
    }

    /// A model with these parameters.
    ///
    /// # Errors
    /// [`JobError::ModelConfig`], [`JobError::Train`], [`JobError::TensorFiles`], [`JobError::Output`].
    pub fn load<B: AutodiffBackend + Float8Stack, M: CausalLm<B, Config = C> + AutodiffModule<B>>(
        self,
        device: &B::Device,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<M, JobError> {
        if self.is_unknown {
            writeln!(
                out,
                "warning: the run does not say which weights it began with; those of model.hf_path are taken as they are"
            )?;
        }
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
