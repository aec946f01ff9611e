//! `RunConfig`: everything about one training run, from a TOML file, `--set section.key=value` and flags.
//!
//! Later wins: defaults, file, `--set` in order, dedicated flags. A key that does not exist is an error that names it.

use std::fs;
use std::path::{Path, PathBuf};

use burn_float8::Float8Config;
use device_select::DeviceChoice;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};
use train::{Tokenizer, TokenizerError};

use crate::Error;
use crate::config::{LlamaConfig, MoeConfig, RopeScaling};
use crate::data::TextSource;
use crate::float8_section::Float8Section;
use crate::schedule::{Decay, Schedule};

/// One training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// What to train.
    pub model: ModelSection,
    /// How long, on what, in which precision.
    pub training: TrainingSection,
    /// AdamW and the learning rate.
    pub optimizer: OptimizerSection,
    /// FP8, used with `training.precision = "fp8"`.
    pub float8: Float8Section,
    /// Text.
    pub data: DataSection,
    /// The sample at the end.
    pub generate: GenerateSection,
}

/// A preset with changes, or a Hugging Face checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// One of [`PRESETS`](crate::presets::PRESETS); `debug` if absent.
    pub preset: Option<String>,
    /// Folder of a Hugging Face checkpoint to start from, instead of `preset` and changes. Given with `--set`, it
    /// replaces the file's `preset`.
    pub hf_path: Option<PathBuf>,
    /// Replaces the preset's value.
    pub vocab_size: Option<usize>,
    /// Replaces the preset's value.
    pub hidden_size: Option<usize>,
    /// Replaces the preset's value.
    pub intermediate_size: Option<usize>,
    /// Replaces the preset's value.
    pub num_layers: Option<usize>,
    /// Replaces the preset's value.
    pub num_heads: Option<usize>,
    /// Replaces the preset's value.
    pub num_kv_heads: Option<usize>,
    /// Replaces the preset's value.
    pub head_dim: Option<usize>,
    /// Replaces the preset's value.
    pub rms_norm_eps: Option<f64>,
    /// Replaces the preset's value.
    pub rope_theta: Option<f64>,
    /// Replaces the preset's value.
    pub rope_scaling: Option<RopeScaling>,
    /// Replaces the preset's value.
    pub max_seq_len: Option<usize>,
    /// Replaces the preset's value.
    pub tie_word_embeddings: Option<bool>,
    /// Replaces the preset's value.
    pub moe: Option<MoeConfig>,
}

/// The precision of linears.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// Hidden states and GEMMs in bf16, parameters in f32.
    Bf16,
    /// GEMMs of linears in FP8, hidden states in `training.compute_dtype`, parameters in f32.
    #[default]
    Fp8,
}

/// The dtype of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 32-bit.
    F32,
    /// bfloat16.
    Bf16,
}

/// How long, on what, in which precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSection {
    /// Which device.
    pub device: DeviceChoice,
    /// Precision of linears.
    pub precision: Precision,
    /// Dtype of hidden states with precision fp8: bf16 on CUDA and f32 elsewhere if absent.
    pub compute_dtype: Option<ComputeDtype>,
    /// Optimizer steps; 0 only evaluates.
    pub steps: usize,
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches per optimizer step.
    pub grad_accumulation: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// Decides the initial weights, the batches and the sample.
    pub seed: u64,
    /// Global gradient norm to clip to; `inf` does not clip.
    pub max_norm: f64,
    /// Steps between step lines; the first and the last step always have one.
    pub log_every: usize,
    /// Batches for the held-out loss.
    pub eval_batches: usize,
    /// The device's peak in TFLOP/s, for `mfu`.
    pub peak_tflops: Option<f64>,
    /// With precision fp8, backward keeps the FP8 operand of each linear's x instead of x: less memory, same results.
    pub save_fp8_operands: bool,
    /// Where to write what each linear did, as JSON.
    pub report: Option<PathBuf>,
    /// Whether to print it as a table.
    pub print_report: bool,
}

/// AdamW and the learning rate; see [`Schedule`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSection {
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled, on every parameter.
    pub weight_decay: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: usize,
    /// The curve after warm-up.
    pub decay: Decay,
    /// Share of the peak that the decay ends at.
    pub min_lr_ratio: f64,
    /// With the decay `wsd`, the share of the steps that it takes.
    pub decay_ratio: f64,
}

/// Text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataSection {
    /// Files and folders; the Rust sources of the local Cargo registry if empty.
    pub paths: Vec<PathBuf>,
    /// A checkpoint folder, a `tokenizer.json` or a `tokenizer.model`, or `bytes`. If absent, that of `model.hf_path`, and bytes for a
    /// preset.
    pub tokenizer: Option<String>,
    /// Bytes to take at most.
    pub max_bytes: usize,
    /// Share to hold out.
    pub held_out_fraction: f64,
}

/// The sample at the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateSection {
    /// What to continue.
    pub prompt: String,
    /// Tokens to add; 0 leaves the sample out.
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f64,
}

impl Default for TrainingSection {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            precision: Precision::Fp8,
            compute_dtype: None,
            steps: 600,
            batch_size: 8,
            grad_accumulation: 1,
            seq_len: 128,
            seed: 0,
            max_norm: 1.0,
            log_every: 20,
            eval_batches: 16,
            peak_tflops: None,
            save_fp8_operands: false,
            report: None,
            print_report: false,
        }
    }
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self {
            lr: 5e-3,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            warmup_steps: 20,
            decay: Decay::Cosine,
            min_lr_ratio: 0.1,
            decay_ratio: 0.2,
        }
    }
}

impl Default for DataSection {
    fn default() -> Self {
        Self { paths: Vec::new(), tokenizer: None, max_bytes: 4_000_000, held_out_fraction: 0.05 }
    }
}

impl Default for GenerateSection {
    fn default() -> Self {
        Self { prompt: "    pub fn new(".into(), max_new_tokens: 100, temperature: 0.7 }
    }
}

impl RunConfig {
    /// Reads a TOML file, if there is one, and applies `settings` of the form `section.key=value` in order.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::RunConfig`] naming the file or the setting, and the key.
    pub fn load(file: Option<&Path>, settings: &[String]) -> Result<Self, Error> {
        let settings: Vec<_> = settings.iter().map(|setting| (format!("--set {setting}"), setting.clone())).collect();
        Self::load_from(file, &settings)
    }

    /// [`load`](Self::load) with settings that have come to be in other ways: where each is from, and the setting.
    pub(crate) fn load_from(file: Option<&Path>, settings: &[(String, String)]) -> Result<Self, Error> {
        let mut table = Table::new();
        let mut config = Self::default();
        if let Some(path) = file {
            let text = fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
            let fail = |error: toml::de::Error| Error::RunConfig {
                origin: path.display().to_string(),
                reason: error.to_string().trim_end().into(),
            };
            // From the text, so that an error shows the line.
            config = toml::from_str(&text).map_err(fail)?;
            table = toml::from_str(&text).map_err(fail)?;
            // So that what is set later replaces it under either name.
            if let Some(Value::Table(float8)) = table.get_mut("float8")
                && let Some(recipe) = float8.remove("recipe_name")
            {
                float8.insert("recipe".into(), recipe);
            }
        }
        // A flag cannot remove the file's preset; a preset that a flag asks for is a contradiction.
        if settings.iter().any(|(_, setting)| key_of(setting) == Some("model.hf_path"))
            && let Some(Value::Table(model)) = table.get_mut("model")
        {
            model.remove("preset");
        }
        let fail = |origin: &str, reason: &str| Error::RunConfig { origin: origin.into(), reason: reason.into() };
        // Settings may make sense only together, so all are there before they are judged; to blame is the first since
        // which there has been an error.
        let (start, mut tables) = (table.clone(), vec![]);
        for (origin, setting) in settings {
            set(&mut table, setting).map_err(|reason| fail(origin, &reason))?;
            tables.push((origin, table.clone()));
        }
        let Some((_, all)) = tables.last() else { return Ok(config) };
        if let Ok(config) = all.clone().try_into() {
            return Ok(config);
        }
        let errors: Vec<_> = tables.iter().map(|(_, table)| table.clone().try_into::<Self>().err()).collect();
        let first = errors.iter().rposition(Option::is_none).map_or(0, |fine| fine + 1);
        // What there is to say of it may have changed since, unless that is of another setting.
        let mut without = start;
        let mut others = settings.iter().enumerate().filter(|(i, _)| *i != first);
        let is_only_one =
            others.all(|(_, (_, setting))| set(&mut without, setting).is_ok()) && without.try_into::<Self>().is_ok();
        let error = &errors[if is_only_one { errors.len() - 1 } else { first }];
        Err(fail(tables[first].0, error.as_ref().map_or("", toml::de::Error::message)))
    }

    /// The whole of it as TOML, defaults included, which [`load`](Self::load) reads back.
    ///
    /// # Errors
    /// [`Error::RunConfig`] for what TOML cannot say, as an integer beyond 63 bits.
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(self)
            .map_err(|error| Error::RunConfig { origin: "the configuration".into(), reason: error.to_string() })
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// [`Error::RunValue`] naming the first key that cannot be.
    pub fn validate(&self) -> Result<(), Error> {
        let Self { training, optimizer, data, generate, .. } = self;
        for (key, value) in [
            ("training.batch_size", training.batch_size),
            ("training.grad_accumulation", training.grad_accumulation),
            ("training.seq_len", training.seq_len),
            ("training.log_every", training.log_every),
            ("training.eval_batches", training.eval_batches),
            ("data.max_bytes", data.max_bytes),
        ] {
            require(key, value, value >= 1, "must be at least 1")?;
        }
        let [beta1, beta2] = optimizer.betas;
        let range = "must be in [0, 1)";
        require("optimizer.betas[0]", beta1, (0.0..1.0).contains(&beta1), range)?;
        require("optimizer.betas[1]", beta2, (0.0..1.0).contains(&beta2), range)?;
        let OptimizerSection { lr, eps, weight_decay, min_lr_ratio, decay_ratio, .. } = *optimizer;
        require("optimizer.lr", lr, lr > 0.0 && lr.is_finite(), "must be positive and finite")?;
        require("optimizer.eps", eps, eps > 0.0 && eps.is_finite(), "must be positive and finite")?;
        let fits = weight_decay >= 0.0 && weight_decay.is_finite();
        require("optimizer.weight_decay", weight_decay, fits, "must be finite and not negative")?;
        let fits = (0.0..=1.0).contains(&min_lr_ratio);
        require("optimizer.min_lr_ratio", min_lr_ratio, fits, "must be in [0, 1]")?;
        let fits = decay_ratio > 0.0 && decay_ratio <= 1.0;
        require("optimizer.decay_ratio", decay_ratio, fits, "must be in (0, 1]")?;
        let max_norm = training.max_norm;
        require("training.max_norm", max_norm, max_norm > 0.0, "must be positive; inf does not clip")?;
        if let Some(peak) = training.peak_tflops {
            let fits = peak > 0.0 && peak.is_finite();
            require("training.peak_tflops", peak, fits, "must be positive and finite")?;
        }
        let held_out = data.held_out_fraction;
        let fits = held_out > 0.0 && held_out < 1.0;
        require("data.held_out_fraction", held_out, fits, "must be in (0, 1)")?;
        let temperature = generate.temperature;
        let fits = temperature >= 0.0 && temperature.is_finite();
        require("generate.temperature", temperature, fits, "must be finite and not negative")?;
        let prompt = &generate.prompt;
        require("generate.prompt", format!("{prompt:?}"), !prompt.is_empty(), "must not be empty")?;
        let steps = training.steps;
        if let Some(schedule) = &self.float8.schedule
            && training.precision == Precision::Fp8
        {
            let fits = steps == 0 || (0..steps).any(|step| self.float8.is_float8(step, steps));
            let value = Value::try_from(schedule).map_or_else(|_| format!("{schedule:?}"), |value| value.to_string());
            require("float8.schedule", value, fits, &format!("none of {steps} steps runs in FP8"))?;
        }
        Ok(())
    }

    /// The model's dimensions: the checkpoint's, or the preset's with this file's changes.
    ///
    /// # Errors
    /// [`Error::UnknownPreset`], [`Error::ModelConfig`], those of [`LlamaConfig::from_hf_dir`], and
    /// [`Error::RunValue`] if `hf_path` is combined with anything.
    pub fn llama(&self) -> Result<LlamaConfig, Error> {
        let model = &self.model;
        if let Some(path) = &model.hf_path {
            let alone = ModelSection { hf_path: Some(path.clone()), ..Default::default() };
            let reason = "the checkpoint decides the model: remove every other key of [model]";
            require("model.hf_path", path.display(), *model == alone, reason)?;
            return LlamaConfig::from_hf_dir(path);
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

    /// FP8's config for a model; see [`Float8Section::for_model`].
    pub fn float8(&self, model: &LlamaConfig) -> Float8Config {
        self.float8.for_model(model)
    }

    /// The tokenizer of text and samples.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`] for a checkpoint without one, [`Error::Tokenizer`].
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        match (&self.data.tokenizer, &self.model.hf_path) {
            (Some(name), _) => Ok(Tokenizer::open(name)?),
            (None, None) => Ok(Tokenizer::bytes()),
            (None, Some(folder)) => Tokenizer::from_folder(folder).map_err(|error| match error {
                source @ TokenizerError::Missing { .. } => Error::NoTokenizer { folder: folder.clone(), source },
                error => error.into(),
            }),
        }
    }

    /// Where the text comes from.
    pub fn text(&self) -> TextSource {
        let DataSection { paths, max_bytes, held_out_fraction, .. } = self.data.clone();
        if paths.is_empty() {
            return TextSource::cargo_registry(max_bytes, held_out_fraction);
        }
        TextSource { paths, extension: None, max_bytes, held_out_fraction, is_default: false }
    }

    /// The learning rate by step.
    pub fn schedule(&self) -> Schedule {
        let OptimizerSection { lr, warmup_steps, decay, min_lr_ratio, decay_ratio, .. } = self.optimizer;
        Schedule { lr, warmup_steps, steps: self.training.steps, decay, min_lr_ratio, decay_ratio }
    }
}

/// The key of `section.key=value`.
fn key_of(setting: &str) -> Option<&str> {
    setting.split_once('=').map(|(key, _)| key.trim())
}

/// Puts `section.key=value` into `table`. A value that is not TOML is a string, so `precision=fp8` needs no quotes.
fn set(table: &mut Table, setting: &str) -> Result<(), String> {
    let key = key_of(setting).ok_or("expected section.key=value")?;
    let text = setting.split_once('=').map_or("", |(_, text)| text);
    let value = toml::from_str::<Table>(&format!("value = {text}"))
        .ok()
        .and_then(|mut table| table.remove("value").filter(|_| table.is_empty()))
        .unwrap_or_else(|| Value::String(text.into()));
    let key = if key == "float8.recipe_name" { "float8.recipe" } else { key };
    let mut parts: Vec<&str> = key.split('.').collect();
    let last = parts.pop().filter(|last| !last.is_empty() && !parts.is_empty());
    let last = last.ok_or("expected section.key=value")?;
    let mut inner = table;
    for part in parts {
        let entry = inner.entry(part).or_insert_with(|| Value::Table(Table::new()));
        inner = entry.as_table_mut().ok_or_else(|| format!("`{part}` of `{key}` is not a section"))?;
    }
    inner.insert(last.into(), value);
    Ok(())
}

fn require(key: &'static str, value: impl ToString, holds: bool, reason: &str) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::RunValue { key, value: value.to_string(), reason: reason.into() })
}
