//! The command lines of `examples/llama3_fp8.rs` and of the program `llama3`.

use std::io::Write;
use std::path::PathBuf;

use burn_float8::Recipe;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use device_select::DeviceChoice;
use train::{SpecialTokens, Tokenizer};

use crate::Error;
use crate::run_config::{Precision, RunConfig};

/// Llama 3 in FP8.
#[derive(Clone, Debug, Parser)]
#[command(name = "llama3")]
pub enum Command {
    /// Train on text files; takes what the example llama3_fp8 takes.
    Train(Args),
    /// Print an array of token ids for each JSON string of a file, one a line.
    Tokenize(TokenizeArgs),
}

/// What to tokenize, and how.
#[derive(Clone, Debug, Parser)]
pub struct TokenizeArgs {
    /// bytes, a checkpoint folder, a tokenizer.json or a tokenizer.model.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: String,
    /// Take special tokens in the text for what they are.
    #[arg(long, conflicts_with = "decode")]
    pub special: bool,
    /// The way back: a JSON string for each array of ids.
    #[arg(long)]
    pub decode: bool,
    /// Lines of JSON.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

impl TokenizeArgs {
    /// Writes a line to `out` for each line of the file.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], [`Error::Tokenize`].
    pub fn run(&self, out: &mut dyn Write) -> Result<(), Error> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        let special = if self.special { SpecialTokens::InText } else { SpecialTokens::AreText };
        match self.decode {
            true => tokenizer.decode_lines(&self.file, out)?,
            false => tokenizer.encode_lines(&self.file, special, out)?,
        }
        Ok(())
    }
}

/// Train a Llama 3 with FP8 linears on text files.
///
/// Later wins: defaults, --config, --set in order, the other flags. configs/llama3_debug.toml lists every key.
#[derive(Clone, Debug, Default, Parser)]
#[command(name = "llama3_fp8")]
pub struct Args {
    /// auto, cuda, wgpu or cpu; auto takes CUDA, else a hardware wgpu adapter, else the CPU.
    #[arg(long)]
    pub device: Option<DeviceChoice>,
    /// Precision of linears.
    #[arg(long)]
    pub precision: Option<Precision>,
    /// How FP8 operands are scaled.
    #[arg(long, value_parser = recipe())]
    pub recipe: Option<Recipe>,
    /// TOML file; configs/ has examples.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a key of the config; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// File or folder of text to train on instead of the local Cargo registry; repeatable.
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Optimizer steps.
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// Decides weights, batches and sample.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Write what each linear did, GEMM by GEMM, as JSON.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print it as a table at the end.
    #[arg(long)]
    pub print_report: bool,
    /// Print the configuration with all its defaults, and end.
    #[arg(long)]
    pub print_config: bool,
}

/// Recipes by name.
fn recipe() -> impl TypedValueParser<Value = Recipe> {
    let parse = |name: String| {
        Recipe::ALL.into_iter().find(|recipe| recipe.to_string() == name).ok_or("not one of the possible values")
    };
    PossibleValuesParser::new(Recipe::ALL.map(|recipe| recipe.to_string())).try_map(parse)
}

impl ValueEnum for Precision {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::F32, Self::Bf16, Self::Fp8]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        let (name, help) = match self {
            Self::F32 => ("f32", "everything in f32"),
            Self::Bf16 => ("bf16", "hidden states and GEMMs in bf16"),
            Self::Fp8 => ("fp8", "GEMMs of linears in FP8"),
        };
        Some(clap::builder::PossibleValue::new(name).help(help))
    }
}

impl Args {
    /// The run that these arguments ask for, validated.
    ///
    /// # Errors
    /// Those of [`RunConfig::load`] and [`RunConfig::validate`].
    pub fn run_config(&self) -> Result<RunConfig, Error> {
        let mut settings: Vec<_> =
            self.set.iter().map(|setting| (format!("--set {setting}"), setting.clone())).collect();
        // The recipe decides what the file's other keys of [float8] mean, so it has to be there when they are read.
        settings.extend(self.recipe.map(|name| (format!("--recipe {name}"), format!("float8.recipe={name}"))));
        let mut config = RunConfig::load_from(self.config.as_deref(), &settings)?;
        if !self.data.is_empty() {
            config.data.paths = self.data.clone();
        }
        let training = &mut config.training;
        training.device = self.device.unwrap_or(training.device);
        training.precision = self.precision.unwrap_or(training.precision);
        training.steps = self.steps.unwrap_or(training.steps);
        training.seed = self.seed.unwrap_or(training.seed);
        training.report = self.report.clone().or(training.report.take());
        training.print_report |= self.print_report;
        if let (Some(recipe), precision @ (Precision::F32 | Precision::Bf16)) = (self.recipe, training.precision) {
            let precision = format!("{precision:?}").to_lowercase();
            let reason = format!("contradicts precision {precision}, in which nothing runs in FP8");
            return Err(Error::RunConfig { origin: format!("--recipe {recipe}"), reason });
        }
        config.validate()?;
        Ok(config)
    }
}
