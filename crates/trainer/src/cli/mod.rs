//! Command lines of a model's program and example, for every [`TrainableModel`].

mod cache;
mod flags;
mod generate;
mod memory;
mod model;
mod plot;
mod tokenize;

use std::ffi::OsString;
use std::io::Write;
use std::num::NonZero;
use std::path::PathBuf;

use burn_float8::Recipe;
pub use cache::{CacheCommand, CacheFolder};
use clap::builder::{PossibleValuesParser, TypedValueParser, UnknownArgumentValueParser};
use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser};
use device_select::DeviceChoice;
pub use flags::RunFlags;
pub use generate::GenerateArgs;
pub use memory::MemoryArgs;
pub use model::{EvalArgs, ExportArgs, ModelArgs, PrecisionArgs, ResumeArgs};
pub use plot::PlotArgs;
pub use tokenize::TokenizeArgs;

use crate::config::{ConfigError, Precision, Setting, schema};
use crate::hub;
use crate::job::{Job, RunConfig, Start, Task};
use crate::model::{ModelSection, TrainableModel};

/// Parses the arguments of the program.
pub fn parse() -> Command {
    Command::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit())
}

/// Flags of other programs: the command, the flag and ours.
const OTHERS: [(&str, &str, &str); 9] = [
    ("eval", "precisions", "--compare"),
    ("eval", "step", "--from-step"),
    ("resume", "step", "--from-step"),
    ("export", "step", "--from-step"),
    ("generate", "step", "--from-step"),
    ("export", "dtype", "--format"),
    ("train", "dtype", "--precision"),
    ("train", "max-steps", "--steps"),
    ("train", "num-train-epochs", "--epochs"),
];

/// Command line that suggests our flags for flags of other programs; clap suggests similar letters.
pub fn command() -> clap::Command {
    OTHERS.iter().fold(Command::command(), |command, (name, other, ours)| {
        let parser = UnknownArgumentValueParser::suggest_arg(ours);
        let flag = Arg::new(other).long(other).hide(true).action(ArgAction::SetTrue).value_parser(parser);
        command.mut_subcommand(name, |command| command.arg(flag))
    })
}

/// Parses the arguments of an example, called `name`: a command and its arguments, or only the
/// arguments of `train`. It trains on the local Cargo registry if no data is given.
pub fn parse_example(name: &'static str) -> Command {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let is_flag = |argument: &OsString| {
        let asks = ["-h", "--help", "-V", "--version"].iter().any(|flag| argument == flag);
        argument.as_encoded_bytes().starts_with(b"-") && !asks
    };
    if arguments.get(1).is_none_or(is_flag) {
        arguments.insert(arguments.len().min(1), "train".into());
    }
    let matches = command().name(name).bin_name(name).try_get_matches_from(arguments);
    let mut command =
        matches.and_then(|matches| Command::from_arg_matches(&matches)).unwrap_or_else(|error| error.exit());
    if let Command::Train(args) = &mut command {
        args.registry = true;
    }
    command
}

/// Train, evaluate, run and export language models with FP8 linears.
#[derive(Clone, Debug, Parser)]
#[command(name = "float8", version, propagate_version = true)]
pub enum Command {
    /// Train a preset or a Hugging Face checkpoint on text, JSON Lines, Parquet or tokens.
    ///
    /// Later wins: defaults, --config, --set in order, the other flags. docs/reference/configuration.md
    /// lists every key.
    Train(Args),
    /// Resume a stopped run from its newest checkpoint.
    Resume(ResumeArgs),
    /// Print the validation loss of a run's checkpoint, or of a Hugging Face checkpoint.
    Eval(EvalArgs),
    /// Generate text.
    Generate(GenerateArgs),
    /// Write a run's checkpoint, or a Hugging Face checkpoint, as a Hugging Face checkpoint in f32,
    /// bf16 or FP8.
    Export(ExportArgs),
    /// Print the token ids of each JSON string in a file as an array per line, or write training
    /// data as a token file.
    Tokenize(TokenizeArgs),
    /// Print the memory of a training step, by part.
    Memory(MemoryArgs),
    /// List or prune the token cache.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Print a configuration with all defaults, or the JSON Schema of configurations.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Plot the losses, throughput, gradient norms and FP8 health of runs, from their
    /// metrics.jsonl.
    Plot(PlotArgs),
}

impl Command {
    /// Whether several processes may run it together.
    pub fn trains(&self) -> bool {
        matches!(self, Self::Train(_) | Self::Resume(_))
    }

    /// Number of processes on this machine, if given.
    pub fn nproc(&self) -> Option<NonZero<usize>> {
        match self {
            Self::Train(args) => args.flags.nproc_per_node,
            Self::Resume(args) => args.flags.nproc_per_node,
            _ => None,
        }
    }

    /// Job of the command; `None` if it needs no model or only prints, which is already done.
    ///
    /// # Errors
    /// Invalid arguments, configurations and checkpoints.
    pub fn job<A: TrainableModel>(&self, out: &mut dyn Write) -> anyhow::Result<Option<Job<A>>> {
        match self {
            Self::Train(args) => args.job().map(Some),
            Self::Resume(args) => args.job(out).map(Some),
            Self::Eval(args) => args.job().map(Some),
            Self::Generate(args) => args.job().map(Some),
            Self::Export(args) => args.job().map(Some),
            Self::Memory(args) => args.job().map(Some),
            Self::Tokenize(args) => args.run(out).map(|()| None),
            Self::Cache(args) => args.run(out).map(|()| None),
            Self::Config(ConfigCommand::Schema) => {
                writeln!(out, "{:#}", schema::<RunConfig<A::Section>>())?;
                Ok(None)
            }
            Self::Config(ConfigCommand::Show(args)) => {
                write!(out, "{}", args.run_config::<A::Section>()?.to_toml()?)?;
                Ok(None)
            }
            Self::Plot(args) => args.run(out).map(|()| None),
        }
    }
}

/// Command on configurations.
#[derive(Clone, Debug, Parser)]
pub enum ConfigCommand {
    /// Print the configuration that `train` would use with the same flags.
    Show(Box<Args>),
    /// Print the JSON Schema, for completion and checks in editors.
    Schema,
}

/// Train with FP8 linears, from a preset or a Hugging Face checkpoint.
///
/// Later wins: defaults, --config, --set in order, the other flags.
/// docs/reference/configuration.md lists every key.
#[derive(Clone, Debug, Default, Parser)]
pub struct Args {
    /// Overrides of the file.
    #[command(flatten)]
    pub overrides: Overrides,
    /// TOML file; configs/ has examples.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Model to start from: a folder of a Hugging Face checkpoint; a name on the Hugging Face Hub,
    /// `org/name`; or a preset with random weights, such as `llama3-1b`.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// File or folder to train on: text, JSON Lines of texts or conversations, Parquet, or tokens;
    /// repeatable.
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Folder for checkpoints and metrics, from which `resume` continues.
    #[arg(short, long, value_name = "FOLDER")]
    pub output_dir: Option<PathBuf>,
    /// Peak learning rate. If absent, 5e-3 for random weights, 2e-5 for a checkpoint's, 2e-4 for LoRA.
    #[arg(long, value_name = "LR")]
    pub lr: Option<f64>,
    /// Sequences per micro-batch, 8 by default.
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// Seed of weights, batches and sample, 0 by default.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Length and reports of the run.
    #[command(flatten)]
    pub flags: RunFlags,
    /// Whether the local Cargo registry is the data if none is given.
    #[arg(skip)]
    pub registry: bool,
}

/// Overrides of a run's configuration on the command line.
#[derive(Clone, Debug, Default, Parser)]
pub struct Overrides {
    /// auto, cuda, wgpu or cpu. The default, auto, selects CUDA, else a hardware wgpu adapter, else the
    /// CPU.
    #[arg(long)]
    pub device: Option<DeviceChoice>,
    /// Precision of linears, fp8 by default.
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Scaling recipe of FP8 operands, tensorwise by default.
    #[arg(long, value_parser = recipe())]
    pub recipe: Option<Recipe>,
    /// Override a key of the config; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// Parser of recipe names.
fn recipe() -> impl TypedValueParser<Value = Recipe> {
    let parse = |name: String| {
        Recipe::ALL.into_iter().find(|recipe| recipe.to_string() == name).ok_or("not one of the possible values")
    };
    PossibleValuesParser::new(Recipe::ALL.map(|recipe| recipe.to_string())).try_map(parse)
}

impl Args {
    /// Training job.
    ///
    /// # Errors
    /// [`ConfigError::Parse`] without data; the errors of [`run_config`](Self::run_config).
    pub fn job<A: TrainableModel>(&self) -> anyhow::Result<Job<A>> {
        let config = self.run_config::<A::Section>()?;
        if config.data.is_default() && !self.registry {
            let reason = "no data: `--data` names files or folders of text, JSON Lines, Parquet or tokens".into();
            return Err(ConfigError::Parse { origin: "train".into(), reason }.into());
        }
        let start = Start { listens: true, ..Start::default() };
        Ok(Job { config, start, task: Task::Train })
    }

    /// Validated configuration of the run.
    ///
    /// # Errors
    /// The errors of [`RunConfig::load`] and [`RunConfig::validate`].
    pub fn run_config<S: ModelSection>(&self) -> anyhow::Result<RunConfig<S>> {
        let mut settings: Vec<_> = self.overrides.set.iter().map(Setting::new).collect();
        let flag = |flag: &str, key: &str, value: String| Setting {
            origin: format!("--{flag} {value}"),
            setting: format!("{key}={}", toml::Value::from(value)),
        };
        // The recipe must be set first, because the file's other keys of [float8] depend on it.
        settings.extend(self.overrides.recipe.map(|name| flag("recipe", "float8.recipe", name.to_string())));
        if let Some(model) = &self.model {
            let folder = hub::folder(model)?.or_else(|| Some(model.into()).filter(|path: &PathBuf| path.is_dir()));
            settings.push(match folder {
                Some(folder) => flag("model", "model.hf_path", folder.display().to_string()),
                None => flag("model", "model.preset", model.clone()),
            });
        }
        let mut config = RunConfig::load_from(self.config.as_deref(), &settings)?;
        config.data.replace_paths(&self.data);
        config.checkpoint.output_dir = self.output_dir.clone().or(config.checkpoint.output_dir);
        config.optimizer.lr = self.lr.or(config.optimizer.lr);
        self.flags.apply(&mut config);
        let training = &mut config.training;
        training.device = self.overrides.device.unwrap_or(training.device);
        training.precision = self.overrides.precision.unwrap_or(training.precision);
        training.batch_size = self.batch_size.unwrap_or(training.batch_size);
        training.seed = self.seed.unwrap_or(training.seed);
        // A recipe in the file is allowed: this is how a baseline is run.
        let recipe = settings.iter().find(|setting| setting.is_of(&["float8.recipe"]));
        if let (Some(Setting { origin, .. }), Precision::F32 | Precision::Bf16) = (recipe, training.precision) {
            let precision = format!("{:?}", training.precision).to_lowercase();
            let reason = format!("contradicts precision {precision}, in which nothing runs in FP8");
            return Err(ConfigError::Parse { origin: origin.clone(), reason }.into());
        }
        config.validate()?;
        Ok(config)
    }
}
