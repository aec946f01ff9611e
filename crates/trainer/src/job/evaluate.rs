//! Validation loss of an existing model, in one or several precisions.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, bail};
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::AutodiffBackend;
use burn_float8::backend::Float8Backend;
use burn_float8::report::LayerState;
use burn_float8::{Float8Config, Float8Stack, Float8State, Recipe};
use device_select::SelectedDevice;

use super::build_model::{compute_dtype, dimensions};
use super::config::RunConfig;
use super::{Job, Weights, log_header};
use crate::ProgressLine;
use crate::config::{Float8Section, Precision};
use crate::model::TrainableModel;
use crate::run::mean_loss;

/// Precision in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalPrecision {
    /// Everything in f32.
    F32,
    /// Hidden states and the GEMMs of linears in bf16.
    Bf16,
    /// GEMMs of linears in FP8.
    Fp8(Recipe),
}

impl EvalPrecision {
    /// All precisions, the most accurate first.
    pub fn all() -> Vec<Self> {
        [Self::F32, Self::Bf16].into_iter().chain(Recipe::ALL.map(Self::Fp8)).collect()
    }

    /// `config` in this precision. The configured recipe keeps its other settings.
    fn apply<S: Clone>(self, config: &RunConfig<S>) -> RunConfig<S> {
        let mut config = config.clone();
        if !matches!(self, Self::Fp8(_)) {
            config.hold_values();
        }
        let training = &mut config.training;
        match self {
            Self::F32 => (training.precision, training.compute_dtype) = (Precision::F32, None),
            Self::Bf16 => (training.precision, training.compute_dtype) = (Precision::Bf16, None),
            Self::Fp8(recipe) => {
                training.precision = Precision::Fp8;
                if config.float8.config.linear.recipe() != recipe {
                    let filter_fqns = config.float8.filter_fqns.take();
                    config.float8 = Float8Section { config: Float8Config::new(recipe), filter_fqns, schedule: None };
                }
            }
        }
        config
    }
}

/// Note for the recipe `delayed` without amax histories.
const NO_HISTORIES: &str = "no histories: scaled as tensorwise";

/// Whether the recipe is `delayed` and no linear has an amax history of its inputs.
fn lacks_histories<B: Float8Stack, M: Module<B>, S>(config: &RunConfig<S>, model: &M) -> bool {
    let of_input = |layer: &LayerState| layer.input.as_ref().is_some_and(|input| input.scaling_amax.is_some());
    config.training.precision == Precision::Fp8
        && config.float8.config.linear.recipe() == Recipe::Delayed
        && !Float8State::export::<B, M>(model).layers.values().any(of_input)
}

impl fmt::Display for EvalPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.pad("f32"),
            Self::Bf16 => f.pad("bf16"),
            Self::Fp8(recipe) => f.pad(&recipe.to_string()),
        }
    }
}

impl FromStr for EvalPrecision {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::all();
        let found = known.iter().copied().find(|precision| precision.to_string() == name);
        found.ok_or_else(|| {
            let known: Vec<_> = known.iter().map(ToString::to_string).collect();
            let known = format!("there are {}", known.join(", "));
            match Path::new(name).is_dir() || name.contains(std::path::is_separator) {
                true => format!("{known}; {name} looks like the folder of the model, which goes before --compare"),
                false => known,
            }
        })
    }
}

impl<A: TrainableModel> Job<A> {
    pub(super) fn evaluate<B: AutodiffBackend + Float8Stack>(
        &self,
        paths: &[PathBuf],
        precisions: &[EvalPrecision],
        selected: &SelectedDevice,
        device: &B::Device,
        out: &mut dyn Write,
    ) -> Result<()> {
        let config = &self.config;
        config.validate()?;
        let text = config.text()?;
        let dims = dimensions(config, Some(config.training.seq_len), &[])?;
        let weights = Weights::open(config, self.saved(), dims.clone())?;
        let progress = ProgressLine::new();
        let (data, held_out) = match paths {
            [] => {
                let data = config.open_data(&text, &progress, out)?;
                let held_out = config.held_out_batches(&data)?;
                (data, held_out)
            }
            paths => config.open_validation(paths, &text, &progress, out)?,
        };
        if held_out.is_empty() {
            bail!("nothing is held out (data.validation_split = 0): give text to evaluate on with --data PATH");
        }
        if precisions.is_empty() {
            let dtype = self.dtype::<B>(config, selected, device)?;
            log_header::device(config, selected, (dtype, B::Inner::fp8_facts(device).attention_of(dtype)), out)?;
            log_header::files(&data, out)?;
            log_header::checkpoint(self.saved(), out)?;
            let model = self.model::<B>(config, weights, selected, device, out)?;
            if lacks_histories::<B, _, _>(config, &model) {
                writeln!(out, "{NO_HISTORIES}")?;
            }
            let loss = mean_loss(&model.valid(), &held_out, &config.training, device)?;
            log_header::held_out(loss, &held_out, out)?;
            return finite(&[loss]);
        }
        drop(weights);
        log_header::files(&data, out)?;
        log_header::checkpoint(self.saved(), out)?;
        log_header::precisions(selected, &held_out, out)?;
        let mut losses = vec![];
        for precision in precisions {
            let config = precision.apply(config);
            if compute_dtype::<B, _>(&config, selected, device)?.is_err() {
                writeln!(out, "{precision:<22}  {:>9}  this device does not compute in it", "")?;
                continue;
            }
            let weights = Weights::open(&config, self.saved(), dims.clone())?;
            let model = self.model::<B>(&config, weights, selected, device, &mut std::io::sink())?;
            let loss = mean_loss(&model.valid(), &held_out, &config.training, device)?;
            let note = lacks_histories::<B, _, _>(&config, &model).then_some(NO_HISTORIES);
            losses.push(loss);
            log_header::precision(&precision.to_string(), loss, losses[0], note, out)?;
        }
        finite(&losses)
    }
}

/// Returns an error if a loss, already printed, is not finite.
fn finite(losses: &[f64]) -> Result<()> {
    match losses.iter().find(|loss| !loss.is_finite()) {
        Some(&loss) => bail!("the validation loss is {loss}: a weight or an activation is not finite"),
        None => Ok(()),
    }
}
