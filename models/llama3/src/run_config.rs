//! `RunConfig`: everything about one training run, from a TOML file, `--set section.key=value` and flags.
//!
//! Later wins: defaults, file, `--set` in order, dedicated flags. A key that does not exist is an error that names it.

use std::io::Write;
use std::path::{Path, PathBuf};

use burn_float8::Float8Config;
use serde::{Deserialize, Serialize};
use train::batches::{Batch, TrainBatches, held_out_batches};
use train::config::{
    CheckpointSection, ConfigError, DataSection, Float8Section, OptimizerSection, ParallelismSection, ProfileSection,
    Setting, TrainingSection, require,
};
use train::data::SequenceShape;
use train::metrics::METRICS_FILE;
use train::{ChatTemplate, Dataset, ProgressLine, StepConfig, Tokenizer, TokenizerError};

use crate::Error;
use crate::config::{LlamaConfig, MoeConfig, RopeScaling};
use crate::hf::{self, RepeatedHead};
use crate::text::Text;

/// One training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// The model.
    pub model: ModelSection,
    /// How long, on what, in which precision.
    pub training: TrainingSection,
    /// AdamW and the learning rate.
    pub optimizer: OptimizerSection,
    /// FP8, used with `training.precision = "fp8"`.
    pub float8: Float8Section,
    /// What is trained on.
    pub data: DataSection,
    /// How it is shared among several ranks.
    pub parallelism: ParallelismSection,
    /// What is saved.
    pub checkpoint: CheckpointSection,
    /// The sample at the end.
    pub generate: GenerateSection,
    /// Which steps' time is broken down. If absent, no step's.
    pub profile: Option<ProfileSection>,
    /// Where a run is resumed, the folder that [`copy_assets`](Self::copy_assets) has filled.
    #[serde(skip)]
    pub assets: Option<PathBuf>,
}

/// The model: a preset with changes, or a Hugging Face checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// A size by name: `debug` and `debug_moe` (a mixture of experts), which train on a CPU; `1b` and `3b` of Llama 3.2; `8b`, `70b` and
    /// `405b` of Llama 3.1. If absent, `debug`.
    pub preset: Option<String>,
    /// Folder of a Hugging Face checkpoint to start from: its `config.json` decides the model, so of this section only
    /// `tie_word_embeddings` may be given too. Given with `--set`, it replaces the file's `preset`.
    pub hf_path: Option<PathBuf>,
    /// Tokens in the vocabulary, no fewer than the tokenizer's. If absent, the preset's.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream. If absent, the preset's.
    pub hidden_size: Option<usize>,
    /// Width of the SwiGLU, or of that of one expert. If absent, the preset's.
    pub intermediate_size: Option<usize>,
    /// Decoder layers. If absent, the preset's.
    pub num_layers: Option<usize>,
    /// Query heads. If absent, the preset's.
    pub num_heads: Option<usize>,
    /// Key and value heads; must divide `num_heads`. If absent, the preset's.
    pub num_kv_heads: Option<usize>,
    /// Width of one head; must be even. If absent, the preset's.
    pub head_dim: Option<usize>,
    /// Added to the mean square in RMSNorm. If absent, the preset's.
    pub rms_norm_eps: Option<f64>,
    /// Base of the rotary frequencies. If absent, the preset's.
    pub rope_theta: Option<f64>,
    /// Frequency scaling of Llama 3.1 and later. If absent, the preset's; a preset's cannot be removed.
    pub rope_scaling: Option<RopeScaling>,
    /// Positions of the model: neither `training.seq_len` nor prompt and sample together may be longer. If absent, the preset's.
    pub max_seq_len: Option<usize>,
    /// Whether the output layer is the transposed embedding. If absent, the preset's, or the checkpoint's. With `hf_path` it decides for a
    /// checkpoint that is tied and has an output layer of its own: `false` takes it, `true` leaves it out.
    pub tie_word_embeddings: Option<bool>,
    /// A mixture of experts in place of each SwiGLU. If absent, the preset's; a preset's cannot be removed.
    pub moe: Option<MoeConfig>,
}

/// The text that is sampled at the end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateSection {
    /// Text that the sample continues.
    pub prompt: String,
    /// Tokens to add; 0 leaves the sample out.
    pub max_new_tokens: usize,
    /// How freely tokens are drawn: logits are divided by it; 0 always takes the likeliest token.
    pub temperature: f64,
}

impl Default for GenerateSection {
    fn default() -> Self {
        Self { prompt: "    pub fn new(".into(), max_new_tokens: 100, temperature: 0.7 }
    }
}

/// A setting of the first key removes the file's second: a flag cannot remove the file's preset. A preset that a flag asks for is a
/// contradiction.
const REPLACES: [(&str, &str); 1] = [("model.hf_path", "model.preset")];

impl RunConfig {
    /// Reads a TOML file, if there is one, and applies `settings` of the form `section.key=value` in order.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Config`] naming the file or the setting, and the key.
    pub fn load(file: Option<&Path>, settings: &[String]) -> Result<Self, Error> {
        let settings: Vec<_> = settings.iter().map(Setting::new).collect();
        Self::load_from(file, &settings)
    }

    /// [`load`](Self::load) with settings that have come to be in other ways.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_from(file: Option<&Path>, settings: &[Setting]) -> Result<Self, Error> {
        Ok(train::config::load(file, settings, &REPLACES)?)
    }

    /// Reads what [`to_toml`](Self::to_toml) has written.
    ///
    /// # Errors
    /// [`Error::Config`] naming `origin` and the key.
    pub fn from_toml(origin: &Path, text: &str) -> Result<Self, Error> {
        Ok(train::config::from_toml(origin, text)?)
    }

    /// Reads what a run has saved, of an earlier version too: with a word on a key that is ignored, if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] naming `origin` and the key.
    pub fn from_saved(origin: &Path, text: &str) -> Result<(Self, Option<&'static str>), Error> {
        Ok(train::config::from_saved(origin, text)?)
    }

    /// Applies settings to a configuration that has been read.
    ///
    /// # Errors
    /// [`Error::Config`] naming the setting and the key.
    pub fn change(&self, settings: &[Setting]) -> Result<Self, Error> {
        Ok(train::config::change(self, settings, &REPLACES).map_err(|error| self.with_path(error))?)
    }

    /// The whole of it as TOML, defaults included, which [`load`](Self::load) reads back.
    ///
    /// # Errors
    /// [`Error::Config`] for what TOML cannot say, as an integer beyond 63 bits.
    pub fn to_toml(&self) -> Result<String, Error> {
        Ok(train::config::to_toml(self).map_err(|error| self.with_path(error))?)
    }

    /// The error of a configuration that TOML cannot say, which names a path that is to blame.
    fn with_path(&self, error: ConfigError) -> ConfigError {
        let Self { model, training, data, checkpoint, profile, .. } = self;
        let sources = data.sources.iter().flat_map(|source| &source.paths);
        let lists = [("data.paths", &data.paths), ("data.validation", &data.validation)];
        let lists = lists.into_iter().flat_map(|(key, paths)| paths.iter().map(move |path| (key, path)));
        let single = [
            ("model.hf_path", &model.hf_path),
            ("training.metrics", &training.metrics),
            ("training.report", &training.report),
            ("data.chat_template", &data.chat_template),
            ("data.cache", &data.cache),
            ("checkpoint.folder", &checkpoint.folder),
            ("profile.file", &profile.as_ref().and_then(|profile| profile.file.clone())),
        ];
        let single = single.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?)));
        let mut paths = single.chain(lists).chain(sources.map(|path| ("data.sources", path)));
        match paths.find(|(_, path)| path.to_str().is_none()) {
            Some((key, path)) => {
                let reason =
                    "a configuration is UTF-8, and this is not: name the folder that it lies in, or a link to it";
                ConfigError::Value { key, value: format!("{path:?}"), reason: reason.into() }
            }
            None => error,
        }
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), Error> {
        self.training.validate(&self.float8)?;
        self.optimizer.validate()?;
        self.data.validate()?;
        self.checkpoint.validate()?;
        let steps = self.training.steps;
        // Of epochs it is not known yet how many steps they have.
        let profile = self.profile.as_ref().filter(|_| steps.epochs().is_none());
        profile.map_or(Ok(()), |profile| profile.validate(steps.get()))?;
        let GenerateSection { prompt, temperature, .. } = &self.generate;
        let fits = *temperature >= 0.0 && temperature.is_finite();
        require("generate.temperature", temperature, fits, "must be finite and not negative")?;
        Ok(require("generate.prompt", format!("{prompt:?}"), !prompt.is_empty(), "must not be empty")?)
    }

    /// What decides a step.
    pub fn steps(&self) -> StepConfig<'_> {
        StepConfig { training: &self.training, optimizer: &self.optimizer, float8: &self.float8 }
    }

    /// The model's dimensions: the checkpoint's, or the preset's with this file's changes.
    ///
    /// # Errors
    /// [`Error::UnknownPreset`], [`Error::ModelConfig`], those of [`LlamaConfig::from_hf_dir`], and
    /// [`Error::Config`] if `hf_path` is combined with anything.
    pub fn llama(&self) -> Result<LlamaConfig, Error> {
        let model = &self.model;
        if let Some(path) = &model.hf_path {
            let path = self.assets.as_ref().unwrap_or(path);
            let ModelSection { hf_path, tie_word_embeddings, .. } = model.clone();
            let alone = ModelSection { hf_path, tie_word_embeddings, ..Default::default() };
            let reason = "the checkpoint decides the model: remove every other key of [model] but tie_word_embeddings";
            require("model.hf_path", path.display(), *model == alone, reason)?;
            if !path.is_dir() {
                return Err(Error::NoFolder { folder: path.clone() });
            }
            let config = LlamaConfig::from_hf_dir(path)?;
            let tie_word_embeddings = tie_word_embeddings.unwrap_or(config.tie_word_embeddings);
            return Ok(LlamaConfig { tie_word_embeddings, ..config });
        }
        let mut config = LlamaConfig::preset(model.preset.as_deref().unwrap_or("debug"))?;
        macro_rules! replace {
            ($($field:ident),*) => {$(
                if let Some(value) = model.$field { config.$field = value; }
            )*};
        }
        replace!(vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim);
        replace!(rms_norm_eps, rope_theta, max_seq_len, tie_word_embeddings);
        config.rope_scaling = model.rope_scaling.or(config.rope_scaling);
        config.moe = model.moe.or(config.moe);
        config.validate()?;
        Ok(config)
    }

    /// What becomes of an output layer in the files of a tied checkpoint: it is left out only if this was chosen.
    pub(crate) fn repeated_head(&self) -> RepeatedHead {
        match self.model.tie_word_embeddings {
            Some(true) => RepeatedHead::IsLeftOut,
            _ => RepeatedHead::MustBeEqual,
        }
    }

    /// FP8's config for a model. Unless the file says which linears stay in high precision, these are the output layer and routers: they
    /// choose by differences that FP8 may lose, and are small. A tied output is no linear of the model, so there is nothing to filter.
    pub fn float8(&self, model: &LlamaConfig) -> Float8Config {
        let names = [(!model.tie_word_embeddings, "lm_head"), (model.moe.is_some(), "moe.router")];
        let sensitive = names.into_iter().filter(|(exists, _)| *exists).map(|(_, name)| name.to_string());
        self.float8.with_default_filter(sensitive)
    }

    /// The tokenizer of text and samples.
    ///
    /// # Errors
    /// [`Error::NoFolder`], [`Error::NoTokenizer`] for a checkpoint without one, [`Error::Tokenizer`].
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        let kept = self.assets.as_ref().filter(|folder| hf::has_tokenizer(folder));
        match (self.data.tokenizer.as_deref(), kept, &self.model.hf_path) {
            (Some(Tokenizer::BYTES), ..) => Ok(Tokenizer::bytes()),
            (_, Some(folder), _) => Ok(Tokenizer::from_folder(folder)?),
            (Some(name), ..) => Ok(Tokenizer::open(name)?),
            (None, None, None) => Ok(Tokenizer::bytes()),
            (None, None, Some(folder)) if !folder.is_dir() => Err(Error::NoFolder { folder: folder.clone() }),
            (None, None, Some(folder)) => Tokenizer::from_folder(folder).map_err(|error| match error {
                source @ TokenizerError::Missing { .. } => Error::NoTokenizer { folder: folder.clone(), source },
                error => error.into(),
            }),
        }
    }

    /// Copies to the folder `to` what `resume` and `export` will need of other folders: the checkpoint's `config.json`, the tokenizer and
    /// the chat template.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Write`].
    pub fn copy_assets(&self, to: &Path) -> Result<(), Error> {
        match (&self.model.hf_path, self.data.tokenizer.as_deref()) {
            (Some(folder), None) => hf::copy_assets(folder, to),
            (folder, tokenizer) => {
                folder.as_ref().map_or(Ok(()), |folder| hf::copy_config(folder, to))?;
                tokenizer.filter(|name| *name != Tokenizer::BYTES).map_or(Ok(()), |path| hf::copy_tokenizer(path, to))
            }
        }?;
        self.data.chat_template.as_ref().map_or(Ok(()), |path| hf::copy_chat_template(path, to))
    }

    /// The template of conversations: `data.chat_template`, or that of the tokenizer's folder.
    ///
    /// # Errors
    /// [`Error::Chat`].
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, Error> {
        if let Some(folder) = &self.assets {
            return Ok(ChatTemplate::from_folder(folder)?);
        }
        if let Some(path) = &self.data.chat_template {
            return Ok(Some(ChatTemplate::from_file(path)?));
        }
        let named = self.data.tokenizer.as_ref().filter(|name| *name != Tokenizer::BYTES).map(Path::new);
        let folder = named.map(|path| if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) });
        let folder = folder.or(self.model.hf_path.as_deref());
        Ok(folder.map(ChatTemplate::from_folder).transpose()?.flatten())
    }

    /// How text becomes tokens.
    ///
    /// # Errors
    /// The errors of [`tokenizer`](Self::tokenizer) and [`chat_template`](Self::chat_template).
    pub fn text(&self) -> Result<Text, Error> {
        Ok(Text { tokenizer: self.tokenizer()?, template: self.chat_template()? })
    }

    /// The shape of batches.
    pub fn shape(&self) -> SequenceShape {
        let TrainingSection { batch_size, seq_len, .. } = self.training;
        SequenceShape { batch_size, seq_len, packing: self.data.packing }
    }

    /// What is trained on, and what is held out.
    ///
    /// # Errors
    /// [`Error::Output`], and any [`Error::Data`].
    pub fn open_data(&self, text: &Text, progress: &ProgressLine, out: &mut dyn Write) -> Result<Dataset, Error> {
        let Text { tokenizer, template } = text;
        Ok(progress.track("tokenized", out, |progress| self.data.open(tokenizer, template.as_ref(), progress))??)
    }

    /// Where the metrics of a run go: `training.metrics`, or beside its checkpoints.
    pub fn metrics_file(&self) -> Option<PathBuf> {
        let beside = || Some(self.checkpoint.folder.as_ref()?.join(METRICS_FILE));
        self.training.metrics.clone().or_else(beside)
    }

    /// Batches of what is trained on, from the first one on.
    ///
    /// # Errors
    /// The errors of [`TrainBatches::new`].
    pub fn train_batches(&self, data: &Dataset) -> Result<TrainBatches, Error> {
        let TrainingSection { attn_mask_type, seed, .. } = self.training;
        Ok(TrainBatches::new(data, self.shape(), attn_mask_type, seed)?)
    }

    /// This run with a length in steps, where it is shared by so many ranks.
    ///
    /// # Errors
    /// [`Error::Config`] for epochs of sources that have weights, each of which has epochs of its own; those of
    /// [`validate`](Self::validate).
    pub fn with_steps(&self, batches: &TrainBatches, ranks: usize) -> Result<Self, Error> {
        let mut config = self.clone();
        let TrainingSection { steps, batch_size, grad_accumulation, .. } = &mut config.training;
        let epoch = batches.sequences_per_epoch();
        let reason = "sources with weights have epochs of their own: say how many steps";
        require("training.steps", *steps, steps.epochs().is_none() || epoch.len() == 1, reason)?;
        *steps = steps.resolve(epoch.iter().sum(), *batch_size * *grad_accumulation * ranks);
        config.validate()?;
        Ok(config)
    }

    /// Batches for the held-out loss; none if nothing is to be held out.
    ///
    /// # Errors
    /// The errors of [`held_out_batches`].
    pub fn held_out_batches(&self, data: &Dataset) -> Result<Vec<Batch>, Error> {
        if self.data.held_out_fraction == 0.0 && self.data.validation.is_empty() {
            return Ok(vec![]);
        }
        self.batches_of(data, self.training.eval_batches)
    }

    /// All batches of other files, to judge a model by them, and the files.
    ///
    /// # Errors
    /// As [`open_data`](Self::open_data) and [`held_out_batches`](Self::held_out_batches).
    pub fn open_validation(
        &self,
        paths: &[PathBuf],
        text: &Text,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<(Dataset, Vec<Batch>), Error> {
        let Text { tokenizer, template } = text;
        let data = progress.track("tokenized", out, |progress| {
            self.data.open_validation(paths, tokenizer, template.as_ref(), progress)
        })??;
        let batches = self.batches_of(&data, usize::MAX)?;
        Ok((data, batches))
    }

    fn batches_of(&self, data: &Dataset, count: usize) -> Result<Vec<Batch>, Error> {
        Ok(held_out_batches(data, self.shape(), self.training.attn_mask_type, count)?)
    }
}
