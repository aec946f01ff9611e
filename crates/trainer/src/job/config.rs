//! `RunConfig`: the configuration of a training run, from a TOML file, `--set section.key=value`
//! and flags.
//!
//! Later wins: defaults, file, `--set` in order, dedicated flags. An unknown key is an error that
//! names it.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use burn_float8::Float8Config;
use float8_shard::{ParallelPlan, ShardConfig, ShardError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::generate_section::GenerateSection;
use super::text::Text;
use crate::batches::{Batch, TrainBatches, held_out_batches};
use crate::config::{
    self, CheckpointSection, ConfigError, DataSection, FINE_TUNING_LR, Float8Section, LORA_LR, LoraBase, LoraSection,
    OptimizerSection, Precision, RANDOM_LR, Setting, TrainingSection, require,
};
use crate::data::SequenceShape;
use crate::hf::{self, RepeatedHead, base};
use crate::model::{ModelConfig, ModelSection};
use crate::{Dataset, ProgressLine, StepConfig, Tokenizer};

/// One training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(bound = "S: JsonSchema + Default + Serialize")]
pub struct RunConfig<S> {
    /// The model.
    pub model: S,
    /// Length, device and precision.
    pub training: TrainingSection,
    /// AdamW and the learning rate.
    pub optimizer: OptimizerSection,
    /// FP8, used with `training.precision = "fp8"`.
    pub float8: Float8Section,
    /// Adapters trained instead of the model. If absent, the model is trained.
    pub lora: Option<LoraSection>,
    /// Training data.
    pub data: DataSection,
    /// Sharding over several ranks.
    pub parallelism: ShardConfig,
    /// Checkpoints.
    pub checkpoint: CheckpointSection,
    /// Sample at the end.
    pub generate: GenerateSection,
    /// Whether evaluation keeps the weights of FP8 linears as FP8 only.
    #[serde(skip)]
    pub fp8_only: bool,
    /// Report of each linear's GEMMs, if one is wanted: a JSON file, or a table at the end.
    #[serde(skip)]
    pub fp8_report: Option<Option<PathBuf>>,
    /// For a resumed run, the folder filled by [`copy_assets`](Self::copy_assets).
    #[serde(skip)]
    pub assets: Option<PathBuf>,
}

/// A setting of the first key removes the file's second, because a flag cannot remove the file's
/// preset. A preset set by a flag too is a contradiction.
const REPLACES: [(&str, &str); 2] = [("model.hf_path", "model.preset"), ("model.preset", "model.hf_path")];

impl<S> RunConfig<S> {
    /// Whether the weights of FP8 linears are FP8 only.
    pub(super) fn holds_codes(&self) -> bool {
        self.fp8_only || self.lora.as_ref().is_some_and(|lora| lora.base == LoraBase::Fp8)
    }

    /// Keeps weights as values instead of FP8 only; precisions other than FP8 need them.
    pub(crate) fn hold_values(&mut self) {
        self.fp8_only = false;
        self.lora.iter_mut().for_each(|lora| lora.base = LoraBase::HighPrecision);
    }
}

impl<S: ModelSection> RunConfig<S> {
    /// Reads a TOML file, if given, and applies `settings` of the form `section.key=value` in
    /// order.
    ///
    /// # Errors
    /// [`ConfigError`] naming the file or the setting, and the key.
    pub fn load(file: Option<&Path>, settings: &[String]) -> Result<Self> {
        let settings: Vec<_> = settings.iter().map(Setting::new).collect();
        Self::load_from(file, &settings)
    }

    /// Like [`load`](Self::load), with settings that carry their origin.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_from(file: Option<&Path>, settings: &[Setting]) -> Result<Self> {
        Ok(config::load(file, settings, &REPLACES)?)
    }

    /// Parses the output of [`to_toml`](Self::to_toml).
    ///
    /// # Errors
    /// [`ConfigError`] naming `origin` and the key.
    pub fn from_toml(origin: &Path, text: &str) -> Result<Self> {
        Ok(config::from_toml(origin, text)?)
    }

    /// Applies settings to an existing configuration. Options that no file has stay.
    ///
    /// # Errors
    /// [`ConfigError`] naming the setting and the key.
    pub fn change(&self, settings: &[Setting]) -> Result<Self> {
        let changed: Self = config::change(self, settings, &REPLACES).map_err(|error| self.with_path(error))?;
        let GenerateSection { prompt, max_new_tokens, .. } = changed.generate;
        let generate = GenerateSection { prompt, max_new_tokens, ..self.generate.clone() };
        let Self { fp8_only, fp8_report, assets, .. } = self.clone();
        Ok(Self { generate, fp8_only, fp8_report, assets, ..changed })
    }

    /// Whole configuration as TOML, including defaults. [`load`](Self::load) reads it back.
    ///
    /// # Errors
    /// [`ConfigError`] for values that TOML cannot represent, such as an integer beyond 63 bits.
    pub fn to_toml(&self) -> Result<String> {
        Ok(config::to_toml(self).map_err(|error| self.with_path(error))?)
    }

    /// Replaces an error of serialization by one that names the path that is not UTF-8, if there is
    /// one.
    fn with_path(&self, error: ConfigError) -> ConfigError {
        let Self { data, checkpoint, .. } = self;
        let sources = data.sources.iter().flat_map(|source| &source.paths);
        let lists = [("data.paths", &data.paths), ("data.validation", &data.validation)];
        let lists = lists.into_iter().flat_map(|(key, paths)| paths.iter().map(move |path| (key, path)));
        let hf_path = self.model.hf_path().map(Path::to_path_buf);
        let single = [
            ("model.hf_path", &hf_path),
            ("data.chat_template", &data.chat_template),
            ("data.cache", &data.cache),
            ("checkpoint.output_dir", &checkpoint.output_dir),
            ("lora.adapter", &self.lora.as_ref().and_then(|lora| lora.adapter.clone())),
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

    /// Checks beyond the types.
    ///
    /// # Errors
    /// [`ConfigError`] naming the first invalid key.
    pub fn validate(&self) -> Result<()> {
        self.training.validate(&self.float8)?;
        self.optimizer.validate()?;
        self.optimizer.check_in_backward(&self.training)?;
        self.optimizer.check_master_weights(&self.training)?;
        if let Some(lora) = &self.lora {
            lora.validate(self.training.precision == Precision::Fp8)?;
            let masters = self.optimizer.master_weights;
            require("optimizer.master_weights", masters, !masters, "adapters are kept in f32: leave it out")?;
            let (names, reason) = (&self.training.freeze, "with [lora] the whole model stays as it is");
            require("training.freeze", format!("{names:?}"), names.is_empty(), reason)?;
        }
        self.data.validate()?;
        self.checkpoint.validate()?;
        Ok(self.generate.validate()?)
    }

    /// Sections that determine a step.
    pub fn steps(&self) -> StepConfig<'_> {
        StepConfig { training: &self.training, optimizer: &self.optimizer, float8: &self.float8 }
    }

    /// Dimensions of the model: the checkpoint's or the preset's, with this file's changes.
    ///
    /// # Errors
    /// An unknown preset, an invalid dimension, a missing folder, the errors of [`hf::read_config`],
    /// and [`ConfigError`] if `hf_path` is combined with other keys.
    pub fn dimensions(&self) -> Result<S::Config> {
        let (model, overrides) = (&self.model, self.model.overrides());
        let config = match model.hf_path() {
            None => model.preset_config()?,
            Some(hf_path) => {
                let path = self.assets.as_deref().unwrap_or(hf_path);
                let alone = S::of_folder(hf_path.into(), overrides.clone());
                let reason = "the checkpoint decides the model: remove model.type and model.preset";
                require("model.hf_path", path.display(), *model == alone, reason)?;
                if !path.is_dir() {
                    bail!("there is no folder {}", path.display());
                }
                hf::read_config(path)?
            }
        };
        let config = if overrides.is_empty() { config } else { config.with_overrides(overrides)? };
        config.validate()?;
        Ok(config)
    }

    /// Handling of an output layer in the files of a tied checkpoint. It is dropped only if tying
    /// was requested explicitly.
    pub(crate) fn repeated_head(&self) -> RepeatedHead {
        match self.model.overrides().get("tie_word_embeddings") {
            Some(Value::Bool(true)) => RepeatedHead::IsLeftOut,
            _ => RepeatedHead::MustBeEqual,
        }
    }

    /// FP8 configuration for a model. If the file has no filter, the [sensitive linears of the
    /// model](ModelConfig::high_precision_linears) stay in high precision.
    pub fn float8(&self, model: &S::Config) -> Float8Config {
        self.float8.with_default_filter(model.high_precision_linears().into_iter().map(String::from))
    }

    /// Folder of the frozen weights, which checkpoints do not contain.
    pub(super) fn frozen_folder(&self) -> Option<&Path> {
        self.model.hf_path().filter(|_| self.lora.is_some() || !self.training.freeze.is_empty())
    }

    /// Copies the files that `resume` and `export` need to the folder `to`: the checkpoint's
    /// `config.json`, the tokenizer and the chat template. Frozen weights are not saved; the
    /// identity of their files is.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn copy_assets(&self, to: &Path) -> Result<()> {
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

    /// Shape of batches.
    pub fn shape(&self) -> SequenceShape {
        let TrainingSection { batch_size, seq_len, .. } = self.training;
        SequenceShape { batch_size, seq_len, packing: self.data.packing }
    }

    /// Opens the training and validation data.
    ///
    /// # Errors
    /// A log that cannot be written, and data that cannot be read.
    pub fn open_data(&self, text: &Text, progress: &ProgressLine, out: &mut dyn Write) -> Result<Dataset> {
        let Text { tokenizer, template, .. } = text;
        progress.track("tokenized", out, |progress| self.data.open(tokenizer, template.as_ref(), progress))?
    }

    /// Path of a file in the run's folder, if it has one.
    pub(super) fn file(&self, name: &str) -> Option<PathBuf> {
        self.checkpoint.output_dir.as_ref().map(|folder| folder.join(name))
    }

    /// Training batches from the first one on.
    ///
    /// # Errors
    /// The errors of [`TrainBatches::new`].
    pub fn train_batches(&self, data: &Dataset) -> Result<TrainBatches> {
        let TrainingSection { attn_mask_type, seed, .. } = self.training;
        TrainBatches::new(data, self.shape(), attn_mask_type, seed)
    }

    /// Peak learning rate: `optimizer.lr`, or the default for the kind of training.
    pub(super) fn learning_rate(&self) -> f64 {
        let default = match (&self.lora, self.model.hf_path()) {
            (Some(_), _) => LORA_LR,
            (None, Some(_)) => FINE_TUNING_LR,
            (None, None) => RANDOM_LR,
        };
        self.optimizer.lr.unwrap_or(default)
    }

    /// This configuration with the learning rate set and epochs resolved to steps, for `ranks`
    /// ranks.
    ///
    /// # Errors
    /// [`ConfigError`] for epochs of weighted sources, which have separate epochs; the errors of
    /// [`validate`](Self::validate).
    pub fn with_steps(&self, batches: &TrainBatches, ranks: usize) -> Result<Self> {
        let mut config = self.clone();
        config.optimizer.lr = Some(self.learning_rate());
        let TrainingSection { steps, batch_size, grad_accumulation, .. } = &mut config.training;
        let epoch = batches.sequences_per_epoch();
        let reason = "sources with weights have epochs of their own: say how many steps";
        require("training.steps", *steps, steps.epochs().is_none() || epoch.len() == 1, reason)?;
        let readers = self.readers(ranks)?;
        *steps =
            steps.resolve(epoch.iter().sum(), batch_size.saturating_mul(*grad_accumulation).saturating_mul(readers));
        config.validate()?;
        config.parallelism.mesh(ranks)?;
        Ok(config)
    }

    /// Plan of tensor parallelism of a model with these dimensions; empty without it.
    ///
    /// # Errors
    /// [`ConfigError`] for sizes that ranks do not divide, and for `parallelism.experts`.
    pub(super) fn tensor_plan(&self, dims: &S::Config, ranks: usize) -> Result<ParallelPlan> {
        let tensor = self.parallelism.mesh(ranks)?.tensor;
        let (experts, size) = (self.parallelism.experts, dims.size());
        let divides_none = experts && ranks > 1 && !size.has_experts;
        require("parallelism.experts", experts, !divides_none, "the model has no experts")?;
        if tensor == 1 {
            return Ok(vec![]);
        }
        let reason = "experts are not divided with `parallelism.tensor`: leave out one of the two";
        require("parallelism.experts", experts, !experts, reason)?;
        dims.tensor_plan(tensor)
    }

    /// Checks that ranks of tensor parallelism have whole blocks of tokens, multiples of `alignment`.
    ///
    /// # Errors
    /// [`ConfigError`] naming the first invalid key.
    pub(super) fn check_tokens(&self, alignment: usize, tensor: usize) -> Result<(), ConfigError> {
        let (TrainingSection { seq_len, loss_chunk, .. }, multiple) = (&self.training, alignment * tensor);
        let reason = format!("must be a multiple of {multiple}: each rank has whole blocks of its tokens");
        require("training.seq_len", seq_len, seq_len.is_multiple_of(multiple), &reason)?;
        let reason = format!("must be a multiple of {alignment}, with parallelism.tensor");
        let chunk = loss_chunk.unwrap_or(alignment);
        require("training.loss_chunk", chunk, tensor == 1 || chunk.is_multiple_of(alignment), &reason)
    }

    /// Number of ranks with batches of their own.
    pub(super) fn readers(&self, ranks: usize) -> Result<usize, ShardError> {
        Ok(self.parallelism.mesh(ranks)?.readers())
    }

    /// Batches for the validation loss; empty if nothing is held out.
    ///
    /// # Errors
    /// The errors of [`held_out_batches`].
    pub fn held_out_batches(&self, data: &Dataset) -> Result<Vec<Batch>> {
        if self.data.validation_split == 0.0 && self.data.validation.is_empty() {
            return Ok(vec![]);
        }
        self.batches_of(data, self.training.eval_batches)
    }

    /// Data set and all batches of other files, to evaluate a model.
    ///
    /// # Errors
    /// As [`open_data`](Self::open_data) and [`held_out_batches`](Self::held_out_batches).
    pub fn open_validation(
        &self,
        paths: &[PathBuf],
        text: &Text,
        progress: &ProgressLine,
        out: &mut dyn Write,
    ) -> Result<(Dataset, Vec<Batch>)> {
        let Text { tokenizer, template, .. } = text;
        let data = progress.track("tokenized", out, |progress| {
            self.data.open_validation(paths, tokenizer, template.as_ref(), progress)
        })??;
        let batches = self.batches_of(&data, usize::MAX)?;
        Ok((data, batches))
    }

    fn batches_of(&self, data: &Dataset, count: usize) -> Result<Vec<Batch>> {
        held_out_batches(data, self.shape(), self.training.attn_mask_type, count)
    }
}
