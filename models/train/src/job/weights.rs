//! [`Weights`]: where a model's parameters come from, compared with its dimensions before anything is allocated.

use std::io::Write;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;

use super::config::RunConfig;
use crate::checkpoint::SavedRun;
use crate::config::TrainingSection;
use crate::freeze::freeze;
use crate::hf::Checkpoint;
use crate::model::{CausalLm, CausalLmExt, ModelConfig, ModelSection};
use crate::{JobError, ProgressLine};

/// What a model's parameters are read from, or drawn with.
pub struct Weights<'a, C> {
    dims: C,
    source: Source<'a>,
    training: &'a TrainingSection,
    /// The checkpoint of a run that trains some parameters, which has those alone.
    trained: Option<&'a SavedRun>,
}

enum Source<'a> {
    Saved(&'a SavedRun),
    HuggingFace(Checkpoint),
    Seed(u64),
}

impl<'a, C: ModelConfig> Weights<'a, C> {
    /// The parameters of a checkpoint, or those that a run of `config` begins with, which one that trains some alone needs also where it is resumed. Of a Hugging Face folder, the files are opened, and
    /// stay open: what they hold is compared with `dims`.
    ///
    /// # Errors
    /// The errors of [`CausalLmExt::load_hf_weights`], but for tensors that cannot be read.
    pub fn open<S: ModelSection<Config = C>>(
        config: &'a RunConfig<S>,
        saved: Option<&'a SavedRun>,
        dims: C,
    ) -> Result<Self, JobError> {
        let training = &config.training;
        // A checkpoint has what is trained.
        let trained = saved.filter(|_| config.lora.is_none() && training.freezes());
        let saved = saved.filter(|_| config.lora.is_none() && !training.freezes());
        let source = match (saved, config.model.hf_path()) {
            (Some(saved), _) => Source::Saved(saved),
            (None, Some(path)) => Source::HuggingFace(Checkpoint::open(path, &dims, config.repeated_head())?),
            (None, None) => Source::Seed(config.training.seed),
        };
        Ok(Self { dims, source, training, trained })
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &C {
        &self.dims
    }

    /// A model with these parameters.
    ///
    /// # Errors
    /// [`JobError::ModelConfig`], [`JobError::Train`], [`JobError::TensorFiles`], [`JobError::Output`].
    pub fn load<B: AutodiffBackend, M: CausalLm<B, Config = C> + AutodiffModule<B>>(
        self,
        device: &B::Device,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<M, JobError> {
        let model = M::new(self.dims, device)?;
        let model = match self.source {
            Source::Saved(saved) => {
                progress.track("loaded", out, |progress| saved.load_parameters(model, progress))??
            }
            Source::HuggingFace(checkpoint) => {
                progress.track("loaded", out, |progress| checkpoint.load(model, progress))??
            }
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
