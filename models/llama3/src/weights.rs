//! [`Weights`]: where a model's parameters come from, compared with its dimensions before anything is allocated.

use std::io::Write;

use burn::tensor::backend::AutodiffBackend;
use train::ProgressLine;
use train::checkpoint::SavedRun;

use crate::Error;
use crate::config::LlamaConfig;
use crate::hf::Checkpoint;
use crate::model::Llama;
use crate::run_config::RunConfig;

/// What a model's parameters are read from, or drawn with.
pub struct Weights<'a> {
    dims: LlamaConfig,
    source: Source<'a>,
}

enum Source<'a> {
    Saved(&'a SavedRun),
    HuggingFace(Checkpoint),
    Seed(u64),
}

impl<'a> Weights<'a> {
    /// The parameters of a checkpoint, or those that a run of `config` begins with. Of a Hugging Face folder, the files are opened, and
    /// stay open: what they hold is compared with `dims`.
    ///
    /// # Errors
    /// The errors of [`Llama::load_hf_weights`], but for tensors that cannot be read.
    pub fn open(config: &RunConfig, saved: Option<&'a SavedRun>, dims: LlamaConfig) -> Result<Self, Error> {
        let source = match (saved, &config.model.hf_path) {
            (Some(saved), _) => Source::Saved(saved),
            (None, Some(path)) => Source::HuggingFace(Checkpoint::open(path, &dims, config.repeated_head())?),
            (None, None) => Source::Seed(config.training.seed),
        };
        Ok(Self { dims, source })
    }

    /// The model's dimensions.
    pub fn dims(&self) -> &LlamaConfig {
        &self.dims
    }

    /// A model with these parameters.
    ///
    /// # Errors
    /// [`Error::ModelConfig`], [`Error::Train`], [`Error::TensorFiles`], [`Error::Output`].
    pub fn load<B: AutodiffBackend>(
        self,
        device: &B::Device,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<Llama<B>, Error> {
        let model = Llama::<B>::new(self.dims, device)?;
        match self.source {
            Source::Saved(saved) => {
                Ok(progress.track("loaded", out, |progress| saved.load_parameters(model, progress))??)
            }
            Source::HuggingFace(checkpoint) => {
                progress.track("loaded", out, |progress| checkpoint.load(model, progress))?
            }
            Source::Seed(seed) => {
                Ok(progress.track("initialized", out, |progress| model.init_weights_with(seed, progress))?)
            }
        }
    }
}
