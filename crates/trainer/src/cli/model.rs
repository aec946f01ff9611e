//! Commands on an existing model: a run's checkpoint or a Hugging Face checkpoint.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use burn_float8::{Float8LinearConfig, Recipe};
use clap::{Parser, ValueEnum};
use device_select::DeviceChoice;
use serde_json::Map;

use super::{RunFlags, recipe};
use crate::checkpoint::{
    ASSETS, CONFIG, Change, SavedRun, Which, changes, missing, noted_latest, saved_steps, verify_assets,
};
use crate::config::{ConfigError, LoraSection, Precision, Setting, require};
use crate::hf::{ExportDtype, ExportOptions, Float8Folder, has_tokenizer, is_bf16, peft};
use crate::hub;
use crate::job::{EvalPrecision, Job, RunConfig, Start, Task};
use crate::model::{ModelSection, TrainableModel};

/// An existing model.
#[derive(Clone, Debug, Parser)]
pub struct ModelArgs {
    /// Folder of a run, as in checkpoint.output_dir. All commands except `resume` also accept a folder
    /// of a Hugging Face checkpoint or of a PEFT adapter, and the name of a model on the Hugging Face
    /// Hub. The base model of an adapter is set by
    /// its configuration or by model.hf_path.
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Use the run's checkpoint after step N instead of the newest.
    #[arg(long, value_name = "N")]
    pub from_step: Option<u64>,
    /// Use the run's checkpoint with the smallest validation loss instead of the newest.
    #[arg(long, conflicts_with = "from_step")]
    pub best: bool,
    /// auto, cuda, wgpu or cpu. If absent, the run's, or auto for a Hugging Face checkpoint.
    #[arg(long)]
    pub device: Option<DeviceChoice>,
    /// Override a key of the config; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// An existing run.
struct OpenedRun<S> {
    config: RunConfig<S>,
    /// Its checkpoint, if there is one.
    saved: Option<SavedRun>,
}

impl ModelArgs {
    pub(super) fn settings(&self) -> Vec<Setting> {
        self.set.iter().map(Setting::new).collect()
    }

    /// Opens the run in the folder.
    fn open_run<S: ModelSection>(&self) -> anyhow::Result<OpenedRun<S>> {
        let which = match self.from_step {
            Some(step) => Which::Step(step),
            None if self.best => Which::Best,
            None => Which::Latest,
        };
        let saved = match (which, saved_steps(&self.folder)?.is_empty()) {
            (Which::Latest, true) => None,
            _ => Some(SavedRun::open(&self.folder, which)?),
        };
        if let (None, Some(wanted)) = (&saved, noted_latest(&self.folder)) {
            return Err(missing(&self.folder, &wanted, &[]));
        }
        let (path, text) = match &saved {
            Some(saved) => (saved.path().to_path_buf(), saved.config().to_string()),
            None => (self.folder.clone(), read_config(&self.folder)?),
        };
        verify_assets(&self.folder)?;
        let mut config = RunConfig::from_toml(&path, &text)?;
        config.checkpoint.output_dir = Some(self.folder.clone());
        config.assets = Some(self.folder.join(ASSETS));
        Ok(OpenedRun { config, saved })
    }

    /// Opens a run's checkpoint or a Hugging Face checkpoint.
    pub(super) fn open<S: ModelSection>(&self) -> anyhow::Result<(RunConfig<S>, Start)> {
        self.open_with(|_, config| Ok(config))
    }

    /// Like [`open`](Self::open). `change` edits the configuration before settings are applied; it
    /// receives the folder of a Hugging Face checkpoint, if it is one.
    pub(super) fn open_with<S: ModelSection>(
        &self,
        change: impl FnOnce(Option<&Path>, RunConfig<S>) -> anyhow::Result<RunConfig<S>>,
    ) -> anyhow::Result<(RunConfig<S>, Start)> {
        let folder = hub::folder(&self.folder.to_string_lossy())?.unwrap_or_else(|| self.folder.clone());
        let named = Self { folder, ..self.clone() };
        if !named.folder.is_dir() {
            bail!("there is no folder {}", named.folder.display());
        }
        let hf = named.hf_folder::<S>()?;
        let (config, saved) = match &hf {
            Some(hf) => (named.hugging_face(hf)?, None),
            None => {
                let OpenedRun { config, saved, .. } = named.open_run()?;
                (config, Some(saved.ok_or_else(|| missing(&self.folder, "newest", &[]))?))
            }
        };
        let mut config = change(hf.as_deref(), config)?;
        let settings = self.settings();
        config = config.change(&settings)?;
        config.fp8_only &= config.training.precision == Precision::Fp8;
        config.training.device = self.device.unwrap_or(config.training.device);
        let may_widen = hf.is_some() && !settings.iter().any(|setting| setting.is_of(&["training.precision"]));
        Ok((config, Start { saved, may_widen, ..Start::default() }))
    }

    /// Folder of a Hugging Face checkpoint, or of the base of an adapter; `None` for a run.
    fn hf_folder<S: ModelSection>(&self) -> anyhow::Result<Option<PathBuf>> {
        if self.folder.join("config.json").exists() {
            return Ok(Some(self.folder.clone()));
        }
        if !peft::is_adapter(&self.folder) {
            return Ok(None);
        }
        let set: Vec<_> = self.settings().into_iter().filter(|setting| setting.is_of(&["model.hf_path"])).collect();
        let base = RunConfig::<S>::default().change(&set)?.model.hf_path().map(Path::to_path_buf);
        Ok(Some(base.map_or_else(|| peft::base(&self.folder), Ok)?))
    }

    /// Configuration of a Hugging Face checkpoint. The precision is the checkpoint's, or f32 for an
    /// f16 checkpoint.
    ///
    /// A tokenizer in the folder of an adapter replaces the checkpoint's.
    fn hugging_face<S: ModelSection>(&self, folder: &Path) -> anyhow::Result<RunConfig<S>> {
        let step = self.from_step.map(|step| format!("--from-step {step}"));
        if let Some(flag) = step.or(self.best.then(|| "--best".into())) {
            bail!("{} is a Hugging Face checkpoint: {flag} is for the folder of a run", self.folder.display());
        }
        let mut config = RunConfig { model: S::of_folder(folder.into(), Map::new()), ..RunConfig::default() };
        if folder != self.folder {
            let adapter = Some(self.folder.clone());
            config.lora = Some(LoraSection { adapter, ..peft::read_config(&self.folder)?.into() });
            config.data.tokenizer = self.folder.to_str().filter(|_| has_tokenizer(&self.folder)).map(String::from);
        }
        config.training.precision = if is_bf16(folder)? { Precision::Bf16 } else { Precision::F32 };
        // A checkpoint in FP8 uses the recipes of its weights.
        if let Some(Float8Folder { recipe, others, high_precision }) = Float8Folder::read::<S::Config>(folder)? {
            config.float8.config.linear = Float8LinearConfig::new(recipe);
            // A recipe set by the user applies to all linears.
            let is_set = self.settings().iter().any(|setting| setting.is_of(&["float8.recipe"]));
            for (recipe, linears) in if is_set { vec![] } else { others } {
                let linear = Float8LinearConfig::new(recipe);
                config.float8.config = config.float8.config.with_override(linears, linear);
            }
            config.float8.filter_fqns = Some(high_precision);
            (config.training.precision, config.fp8_only) = (Precision::Fp8, true);
        }
        Ok(config)
    }
}

/// Compute precision of an existing model.
#[derive(Clone, Copy, Debug, Default, Parser)]
pub struct PrecisionArgs {
    /// Precision of linears. If absent, the precision of the run or of the Hugging Face
    /// checkpoint's weights.
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Keep the weights of FP8 linears as FP8 only, one byte per parameter, and run in FP8. This is
    /// the default for a Hugging Face checkpoint in FP8.
    #[arg(long, conflicts_with = "precision")]
    pub fp8_weights: bool,
}

impl PrecisionArgs {
    pub(super) fn apply<S>(self, config: &mut RunConfig<S>, start: &mut Start) {
        if let Some(precision) = self.precision {
            config.training.precision = precision;
            config.fp8_only = false;
            if precision != Precision::Fp8 {
                config.hold_values();
            }
            start.may_widen = false;
        }
        if self.fp8_weights {
            config.training.precision = Precision::Fp8;
            config.fp8_only = true;
        }
    }
}

fn read_config(folder: &Path) -> anyhow::Result<String> {
    let path = folder.join(CONFIG);
    let no_run = || match folder.is_dir() {
        true => anyhow!("{} holds no run: no config.toml and no checkpoint", folder.display()),
        false => anyhow!("there is no folder {}", folder.display()),
    };
    crate::files::read_to_string(&path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => no_run(),
        _ => anyhow::Error::from(source).context(format!("cannot read {}", path.display())),
    })
}

/// Run to resume, and changes.
#[derive(Clone, Debug, Parser)]
pub struct ResumeArgs {
    /// The run.
    #[command(flatten)]
    pub model: ModelArgs,
    /// TOML file to use instead of the folder's config.toml. Keys that define the run must not
    /// change.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// New location of the run's data; repeatable. It must be the same data.
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Length and reports of the run.
    #[command(flatten)]
    pub flags: RunFlags,
}

impl ResumeArgs {
    pub(super) fn job<A: TrainableModel>(&self, out: &mut dyn Write) -> anyhow::Result<Job<A>> {
        let OpenedRun { config: was, saved } = self.model.open_run::<A::Section>()?;
        let settings = self.model.settings();
        // The configuration of the last resume counts, even if it has no checkpoint yet.
        let noted = self.model.folder.join(CONFIG);
        let mut config = match &self.config {
            Some(path) => RunConfig::load_from(Some(path), &settings)?,
            None if noted.exists() => {
                RunConfig::from_toml(&noted, &read_config(&self.model.folder)?)?.change(&settings)?
            }
            None => was.change(&settings)?,
        };
        config.checkpoint.output_dir.clone_from(&was.checkpoint.output_dir);
        config.assets.clone_from(&was.assets);
        config.data.replace_paths(&self.data);
        config.training.device = self.model.device.unwrap_or(config.training.device);
        self.flags.apply(&mut config);
        config.validate()?;
        let (steps, done) = (config.training.steps, saved.as_ref().map_or(0, SavedRun::step));
        let is_known = steps.epochs().is_none();
        let reason = format!("the checkpoint is of step {done}; `--from-step` takes an older one");
        require("training.steps", steps, !is_known || done <= steps.get(), &reason)?;
        if saved.is_none() {
            writeln!(out, "no checkpoint yet: the run begins again")?;
        }
        for Change { key, saved, now } in changes(&was, &config)? {
            writeln!(out, "changed: {key} was {saved}, is {now}")?;
        }
        let start = Start { saved, is_resumed: true, listens: true, ..Start::default() };
        Ok(Job { config, start, task: Task::Train })
    }
}

/// Model and data to evaluate.
#[derive(Clone, Debug, Parser)]
pub struct EvalArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// File or folder of text to evaluate completely, instead of the run's validation data;
    /// repeatable.
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Precision.
    #[command(flatten)]
    pub precision: PrecisionArgs,
    /// Compare precisions in a table: f32, bf16 and FP8 recipes, separated by commas; all if none
    /// is named.
    #[arg(long, value_name = "LIST", value_delimiter = ',', num_args = 0.., conflicts_with_all = ["precision", "fp8_weights"])]
    pub compare: Option<Vec<EvalPrecision>>,
}

impl EvalArgs {
    pub(super) fn job<A: TrainableModel>(&self) -> anyhow::Result<Job<A>> {
        let (mut config, mut start) = self.model.open()?;
        if self.data.is_empty() && start.saved.is_none() && config.data.is_default() {
            bail!("a Hugging Face checkpoint says nothing of data: give text to evaluate on with --data PATH");
        }
        self.precision.apply(&mut config, &mut start);
        let precisions = match &self.compare {
            None => vec![],
            Some(named) if named.is_empty() => EvalPrecision::all(),
            Some(named) => named.clone(),
        };
        // In a table each precision must be exact.
        start.may_widen &= precisions.is_empty();
        Ok(Job { config, start, task: Task::Evaluate { data: self.data.clone(), precisions } })
    }
}

/// Model and format to export.
#[derive(Clone, Debug, Parser)]
pub struct ExportArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// A folder that does not exist or is empty.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// Format of the weights. If absent, bf16, or with --merge-adapters the dtype of the base. fp8 writes
    /// the run's FP8 linears in FP8 and everything else in bf16.
    #[arg(long, value_enum)]
    pub format: Option<ExportDtype>,
    /// Scaling recipe of FP8 weights. If absent, the run's; for a Hugging Face checkpoint in FP8,
    /// its codes are kept.
    #[arg(long, value_parser = recipe())]
    pub recipe: Option<Recipe>,
    /// Maximum size of a file, 5GB if absent: a number with an optional KB, MB, GB, KiB, MiB or
    /// GiB. Larger weights are split over several files.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub max_shard_size: Option<u64>,
    /// Merge a run's adapters into the weights and write these, instead of the adapters in PEFT's
    /// format.
    #[arg(long)]
    pub merge_adapters: bool,
}

/// Parses a number of bytes with an optional unit.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" | "B" => 1.0,
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        _ => return Err("a number of bytes is like 5000000, 5MB or 5GiB".into()),
    };
    let bytes = number.parse::<f64>().map_err(|error| error.to_string())? * unit;
    if bytes >= 1.0 && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err("must be at least 1".into()) }
}

impl ExportArgs {
    pub(super) fn job<A: TrainableModel>(&self) -> anyhow::Result<Job<A>> {
        let default = ExportOptions::default();
        if let (Some(recipe), None | Some(ExportDtype::F32 | ExportDtype::Bf16)) = (self.recipe, self.format) {
            let reason = "needs --format fp8".into();
            return Err(ConfigError::Parse { origin: format!("--recipe {recipe}"), reason }.into());
        }
        let (config, start) = self.model.open_with::<A::Section>(|_, mut config| {
            if let Some(recipe) = self.recipe {
                config.float8.config.linear = Float8LinearConfig::new(recipe);
                config.float8.config.overrides.clear();
            }
            Ok(config)
        })?;
        if config.lora.is_some() && !self.merge_adapters {
            let reason = "adapters are written as they are, in f32 and one file: --merge-adapters writes the weights with the adapters in them";
            let format = self.format.and_then(|format| format.to_possible_value());
            let format = format.map(|format| format.get_name().to_string());
            require("--format", format.clone().unwrap_or_default(), format.is_none(), reason)?;
            let bytes = self.max_shard_size;
            require("--max-shard-size", bytes.unwrap_or_default(), bytes.is_none(), reason)?;
        }
        let base = config.model.hf_path().filter(|folder| self.merge_adapters && folder.is_dir());
        let dtype = match (self.format, base) {
            (Some(format), _) => format,
            (None, Some(base)) if !is_bf16(base)? => ExportDtype::F32,
            _ => ExportDtype::Bf16,
        };
        let max_shard_bytes = self.max_shard_size.unwrap_or(default.max_shard_bytes);
        let source = config.assets.clone().or_else(|| config.model.hf_path().map(Path::to_path_buf));
        let options = ExportOptions { dtype, max_shard_bytes, source, ..default };
        let (to, merge) = (self.output.clone(), self.merge_adapters);
        Ok(Job { config, start, task: Task::Export { to, options, merge } })
    }
}
