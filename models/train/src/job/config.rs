//! `RunConfig`: everything about one training run, from a TOML file, `--set section.key=value` and flags.
//!
//! Later wins: defaults, file, `--set` in order, dedicated flags. A key that does not exist is an error that names it.

use std::io::Write;
use std::path::{Path, PathBuf};

use burn_float8::Float8Config;
use float8_shard::ShardConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::generate_section::GenerateSection;
use super::text::Text;
use crate::batches::{Batch, TrainBatches, held_out_batches};
use crate::config::{
    self, CheckpointSection, ConfigError, DataSection, FINE_TUNING_LR, Float8Section, LORA_LR, LoraBase, LoraSection,
    OptimizerSection, ParallelismSection, Precision, ProfileSection, RANDOM_LR, Setting, TrainingSection, require,
};
use crate::data::SequenceShape;
use crate::hf::{self, RepeatedHead, base};
use crate::metrics::METRICS_FILE;
use crate::model::{ModelConfig, ModelSection};
use crate::{ChatTemplate, Dataset, JobError, ProgressLine, StepConfig, Tokenizer, TokenizerError};

/// The largest vocabulary of a model whose tokens may be bytes by default.
const MAX_OF_BYTES: usize = 1 << 15;

/// One training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(bound = "S: JsonSchema + Default + Serialize")]
pub struct RunConfig<S> {
    /// The model.
    pub model: S,
    /// How long, on what, in which precision.
    pub training: TrainingSection,
    /// AdamW and the learning rate.
    pub optimizer: OptimizerSection,
    /// FP8, used with `training.precision = "fp8"`.
    pub float8: Float8Section,
    /// Adapters that are trained in the model's place. If absent, the model is trained.
    pub lora: Option<LoraSection>,
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
    /// Whether what only evaluates holds the weights of linears in FP8 as codes alone.
    #[serde(skip)]
    pub fp8_only: bool,
    /// Where a run is resumed, the folder that [`copy_assets`](Self::copy_assets) has filled.
    #[serde(skip)]
    pub assets: Option<PathBuf>,
}

/// A setting of the first key removes the file's second: a flag cannot remove the file's preset. A preset that a flag asks for is a
/// contradiction.
const REPLACES: [(&str, &str); 2] =
    [("model.hf_path", "model.preset"), ("activation_checkpoint.mode", "training.activation_checkpointing")];

impl<S> RunConfig<S> {
    /// Whether the weights of linears in FP8 are to be codes alone.
    pub(super) fn holds_codes(&self) -> bool {
        self.fp8_only || self.lora.as_ref().is_some_and(|lora| lora.base == LoraBase::Fp8)
    }

    /// Gives weights that were to be codes alone their values, which a precision without FP8 reads.
    pub(crate) fn hold_values(&mut self) {
        self.fp8_only = false;
        self.lora.iter_mut().for_each(|lora| lora.base = LoraBase::Values);
    }

    /// How the model is shared among ranks.
    pub(super) fn sharding(&self) -> ShardConfig {
        let ParallelismSection { reshard, reduce_dtype } = self.parallelism;
        ShardConfig { reshard, reduce_dtype }
    }
}

impl<S: ModelSection> RunConfig<S> {
    /// Reads a TOML file, if there is one, and applies `settings` of the form `section.key=value` in order.
    ///
    /// # Errors
    /// [`JobError::Config`]; [`JobError::Config`] naming the file or the setting, and the key.
    pub fn load(file: Option<&Path>, settings: &[String]) -> Result<Self, JobError> {
        let settings: Vec<_> = settings.iter().map(Setting::new).collect();
        Self::load_from(file, &settings)
    }

    /// [`load`](Self::load) with settings that have come to be in other ways.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_from(file: Option<&Path>, settings: &[Setting]) -> Result<Self, JobError> {
        Ok(config::load(file, settings, &REPLACES)?)
    }

    /// Reads what [`to_toml`](Self::to_toml) has written.
    ///
    /// # Errors
    /// [`JobError::Config`] naming `origin` and the key.
    pub fn from_toml(origin: &Path, text: &str) -> Result<Self, JobError> {
        Ok(config::from_toml(origin, text)?)
    }

    /// Applies settings to a configuration that has been read.
    ///
    /// # Errors
    /// [`JobError::Config`] naming the setting and the key.
    pub fn change(&self, settings: &[Setting]) -> Result<Self, JobError> {
        Ok(config::change(self, settings, &REPLACES).map_err(|error| self.with_path(error))?)
    }

    /// The whole of it as TOML, defaults included, which [`load`](Self::load) reads back.
    ///
    /// # Errors
    /// [`JobError::Config`] for what TOML cannot say, as an integer beyond 63 bits.
    pub fn to_toml(&self) -> Result<String, JobError> {
        Ok(config::to_toml(self).map_err(|error| self.with_path(error))?)
    }

    /// The error of a configuration that TOML cannot say, which names a path that is to blame.
    fn with_path(&self, error: ConfigError) -> ConfigError {
        let Self { training, data, checkpoint, profile, .. } = self;
        let sources = data.sources.iter().flat_map(|source| &source.paths);
        let lists = [("data.paths", &data.paths), ("data.validation", &data.validation)];
        let lists = lists.into_iter().flat_map(|(key, paths)| paths.iter().map(move |path| (key, path)));
        let hf_path = self.model.hf_path().map(Path::to_path_buf);
        let single = [
            ("model.hf_path", &hf_path),
            ("training.metrics", &training.metrics),
            ("training.report", &training.report),
            ("data.chat_template", &data.chat_template),
            ("data.cache", &data.cache),
            ("checkpoint.folder", &checkpoint.folder),
            ("lora.adapter", &self.lora.as_ref().and_then(|lora| lora.adapter.clone())),
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
    /// [`JobError::Config`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), JobError> {
        self.training.validate(&self.float8)?;
        self.optimizer.validate()?;
        self.optimizer.check_in_backward(&self.training)?;
        self.optimizer.check_master_weights(&self.training)?;
        if let Some(lora) = &self.lora {
            lora.validate(self.training.precision == Precision::Fp8)?;
            let masters = self.optimizer.master_weights;
            require("optimizer.master_weights", masters, !masters, "adapters are kept in f32: leave it out")?;
            let reason = "with [lora] the whole model stays as it is";
            let TrainingSection { freeze, train_only, .. } = &self.training;
            for (key, names) in [("training.freeze", freeze), ("training.train_only", train_only)] {
                require(key, format!("{names:?}"), names.is_empty(), reason)?;
            }
        }
        self.data.validate()?;
        self.checkpoint.validate()?;
        let steps = self.training.steps;
        // Of epochs it is not known yet how many steps they have.
        let profile = self.profile.as_ref().filter(|_| steps.epochs().is_none());
        profile.map_or(Ok(()), |profile| profile.validate(steps.get()))?;
        Ok(self.generate.validate()?)
    }

    /// What decides a step.
    pub fn steps(&self) -> StepConfig<'_> {
        StepConfig { training: &self.training, optimizer: &self.optimizer, float8: &self.float8 }
    }

    /// The model's dimensions: the checkpoint's, or the preset's with this file's changes.
    ///
    /// # Errors
    /// [`JobError::UnknownPreset`], [`JobError::ModelConfig`], [`JobError::NoFolder`], those of [`hf::read_config`], and
    /// [`JobError::Config`] if `hf_path` is combined with anything.
    pub fn dimensions(&self) -> Result<S::Config, JobError> {
        let model = &self.model;
        let Some(hf_path) = model.hf_path() else {
            let config = model.to_config()?;
            config.validate()?;
            return Ok(config);
        };
        let path = self.assets.as_deref().unwrap_or(hf_path);
        let tie = model.tie_word_embeddings();
        let alone = S::of_folder(Some(hf_path.into()), tie);
        let reason = "the checkpoint decides the model: remove every other key of [model] but tie_word_embeddings";
        require("model.hf_path", path.display(), *model == alone, reason)?;
        if !path.is_dir() {
            return Err(JobError::NoFolder { folder: path.into() });
        }
        let config = hf::read_config::<S::Config>(path)?;
        Ok(match tie {
            Some(tie) => config.with_tie_word_embeddings(tie),
            None => config,
        })
    }

    /// What becomes of an output layer in the files of a tied checkpoint: it is left out only if this was chosen.
    pub(crate) fn repeated_head(&self) -> RepeatedHead {
        match self.model.tie_word_embeddings() {
            Some(true) => RepeatedHead::IsLeftOut,
            _ => RepeatedHead::MustBeEqual,
        }
    }

    /// FP8's config for a model. Unless the file says which linears stay in high precision, these are
    /// [those that the model names](ModelConfig::high_precision_linears).
    pub fn float8(&self, model: &S::Config) -> Float8Config {
        self.float8.with_default_filter(model.high_precision_linears().into_iter().map(String::from))
    }

    /// The tokenizer of text and samples.
    ///
    /// # Errors
    /// [`JobError::NoFolder`], [`JobError::NoTokenizer`] for a checkpoint without one, [`JobError::Tokenizer`].
    pub fn tokenizer(&self) -> Result<Tokenizer, JobError> {
        let kept = self.assets.as_ref().filter(|folder| hf::has_tokenizer(folder));
        match (self.data.tokenizer.as_deref(), kept, self.model.hf_path()) {
            (Some(Tokenizer::BYTES), ..) => Ok(Tokenizer::bytes()),
            (_, Some(folder), _) => Ok(Tokenizer::from_folder(folder)?),
            (Some(name), ..) => Ok(Tokenizer::open(name)?),
            (None, None, None) => Ok(Tokenizer::bytes()),
            (None, None, Some(folder)) if !folder.is_dir() => Err(JobError::NoFolder { folder: folder.into() }),
            (None, None, Some(folder)) => Tokenizer::from_folder(folder).map_err(|error| match error {
                source @ TokenizerError::Missing { .. } => JobError::NoTokenizer { folder: folder.into(), source },
                error => error.into(),
            }),
        }
    }

    /// The folder that has what checkpoints do not, because it is not trained.
    pub(super) fn frozen_folder(&self) -> Option<&Path> {
        self.model.hf_path().filter(|_| self.lora.is_some() || self.training.freezes())
    }

    /// Copies to the folder `to` what `resume` and `export` will need of other folders: the checkpoint's `config.json`, the tokenizer and
    /// the chat template; of frozen weights, which are not saved, what identifies their files.
    ///
    /// # Errors
    /// [`JobError::Io`], [`JobError::Write`], [`JobError::TensorFiles`].
    pub fn copy_assets(&self, to: &Path) -> Result<(), JobError> {
        match (self.model.hf_path(), self.data.tokenizer.as_deref()) {
            (Some(folder), None) => hf::copy_assets(folder, to),
            (folder, tokenizer) => {
                folder.map_or(Ok(()), |folder| hf::copy_config(folder, to))?;
                tokenizer.filter(|name| *name != Tokenizer::BYTES).map_or(Ok(()), |path| hf::copy_tokenizer(path, to))
            }
        }?;
        if let Some(folder) = self.frozen_folder() {
            base::keep(folder, to)?;
        }
        self.data.chat_template.as_ref().map_or(Ok(()), |path| hf::copy_chat_template(path, to))
    }

    /// The template of conversations, `data.chat_template` or the tokenizer's, with
    /// `data.chat_template_kwargs`.
    ///
    /// # Errors
    /// [`JobError::Chat`].
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, JobError> {
        let kwargs = &self.data.chat_template_kwargs;
        Ok(self.plain_template()?.map(|template| template.with_kwargs(kwargs)).transpose()?)
    }

    fn plain_template(&self) -> Result<Option<ChatTemplate>, JobError> {
        if let Some(folder) = &self.assets {
            return Ok(ChatTemplate::from_folder(folder)?);
        }
        if let Some(path) = &self.data.chat_template {
            return Ok(Some(ChatTemplate::from_file(path)?));
        }
        match (&self.data.tokenizer, self.model.hf_path()) {
            (Some(name), _) if name != Tokenizer::BYTES => Ok(ChatTemplate::of_tokenizer(name)?),
            (_, Some(folder)) => Ok(ChatTemplate::from_folder(folder)?),
            _ => Ok(None),
        }
    }

    /// How text becomes tokens.
    ///
    /// # Errors
    /// [`JobError::ByteTokens`]; the errors of [`tokenizer`](Self::tokenizer),
    /// [`chat_template`](Self::chat_template), [`dimensions`](Self::dimensions) and
    /// [`Tokenizer::for_vocabulary`].
    pub fn text(&self) -> Result<Text, JobError> {
        let (template, kwargs) = (self.chat_template()?, &self.generate.chat_template_kwargs);
        let prompts = template.as_ref().map(|template| template.with_kwargs(kwargs)).transpose()?;
        let (tokenizer, vocab_size) = (self.tokenizer()?, self.dimensions()?.size().vocab_size);
        let is_bytes = tokenizer.format() == Tokenizer::BYTES;
        // With random weights, bytes may be asked for.
        let is_meant = self.data.tokenizer.is_some() && self.model.hf_path().is_none();
        if is_bytes && vocab_size > MAX_OF_BYTES && !is_meant {
            return Err(JobError::ByteTokens { vocab_size });
        }
        Ok(Text { tokenizer: tokenizer.for_vocabulary(vocab_size)?, template, prompts })
    }

    /// The shape of batches.
    pub fn shape(&self) -> SequenceShape {
        let TrainingSection { batch_size, seq_len, .. } = self.training;
        SequenceShape { batch_size, seq_len, packing: self.data.packing }
    }

    /// What is trained on, and what is held out.
    ///
    /// # Errors
    /// [`JobError::Output`], and any [`JobError::Data`].
    pub fn open_data(&self, text: &Text, progress: &ProgressLine, out: &mut dyn Write) -> Result<Dataset, JobError> {
        let Text { tokenizer, template, .. } = text;
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
    pub fn train_batches(&self, data: &Dataset) -> Result<TrainBatches, JobError> {
        let TrainingSection { attn_mask_type, seed, .. } = self.training;
        Ok(TrainBatches::new(data, self.shape(), attn_mask_type, seed)?)
    }

    /// Peak learning rate: `optimizer.lr`, or the default for what is trained.
    pub(super) fn learning_rate(&self) -> f64 {
        let default = match (&self.lora, self.model.hf_path()) {
            (Some(_), _) => LORA_LR,
            (None, Some(_)) => FINE_TUNING_LR,
            (None, None) => RANDOM_LR,
        };
        self.optimizer.lr.unwrap_or(default)
    }

    /// This run with a learning rate and a length in steps, on `ranks` ranks.
    ///
    /// # Errors
    /// [`JobError::Config`] for epochs of sources that have weights, each of which has epochs of its own; those of
    /// [`validate`](Self::validate).
    pub fn with_steps(&self, batches: &TrainBatches, ranks: usize) -> Result<Self, JobError> {
        let mut config = self.clone();
        config.optimizer.lr = Some(self.learning_rate());
        let TrainingSection { steps, batch_size, grad_accumulation, .. } = &mut config.training;
        let epoch = batches.sequences_per_epoch();
        let reason = "sources with weights have epochs of their own: say how many steps";
        require("training.steps", *steps, steps.epochs().is_none() || epoch.len() == 1, reason)?;
        *steps = steps.resolve(epoch.iter().sum(), batch_size.saturating_mul(*grad_accumulation).saturating_mul(ranks));
        config.validate()?;
        config.check_ranks(ranks)?;
        Ok(config)
    }

    /// Checks what a run over so many ranks cannot have.
    ///
    /// # Errors
    /// [`JobError::Config`] naming the first key that cannot be.
    pub(super) fn check_ranks(&self, ranks: usize) -> Result<(), JobError> {
        let is_fp8 = self.lora.as_ref().is_some_and(|lora| lora.base == LoraBase::Fp8);
        let reason = "over several ranks frozen weights have their values, of which each rank keeps some rows";
        Ok(require("lora.base", "fp8", ranks == 1 || !is_fp8, reason)?)
    }

    /// Batches for the held-out loss; none if nothing is to be held out.
    ///
    /// # Errors
    /// The errors of [`held_out_batches`].
    pub fn held_out_batches(&self, data: &Dataset) -> Result<Vec<Batch>, JobError> {
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
    ) -> Result<(Dataset, Vec<Batch>), JobError> {
        let Text { tokenizer, template, .. } = text;
        let data = progress.track("tokenized", out, |progress| {
            self.data.open_validation(paths, tokenizer, template.as_ref(), progress)
        })??;
        let batches = self.batches_of(&data, usize::MAX)?;
        Ok((data, batches))
    }

    fn batches_of(&self, data: &Dataset, count: usize) -> Result<Vec<Batch>, JobError> {
        Ok(held_out_batches(data, self.shape(), self.training.attn_mask_type, count)?)
    }
}
