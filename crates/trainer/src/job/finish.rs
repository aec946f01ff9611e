//! The steps of a run, then the validation loss, a sample and the report.

use std::io::Write;

use anyhow::{Context, Result};
use burn::module::AutodiffModule;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::{Float8Stack, Report, report::GemmTotals};
use device_select::SelectedDevice;

use super::config::RunConfig;
use super::generation::Generation;
use super::log_header;
use super::text::Text;
use crate::config::Precision;
use crate::metrics::StepLine;
use crate::model::{CausalLm, LanguageModel, TrainableModel};
use crate::run::{Finished, HeldOut, verify};
use crate::{Ranks, Run, Steps, report_of, write_report};

/// Results of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The step lines.
    pub steps: Vec<StepLine>,
    /// Mean cross entropy over the validation batches, in nats per token; `None` if nothing is held
    /// out.
    pub validation_loss: Option<f64>,
    /// Smallest validation loss and its step.
    pub best_validation_loss: Option<(usize, f64)>,
    /// Generated text, without the prompt.
    pub sample: String,
    /// GEMMs of linears by precision, as in `report`.
    pub gemms: GemmTotals,
    /// Report of the linears in training, or in evaluation if no step was left; empty unless FP8
    /// was applied.
    pub report: Report,
}

/// Runs the remaining steps of `config`, then evaluates, samples and reports as
/// [`train()`](super::train()) does. `made` returns the model from the one with steps. With
/// `is_chat`, the prompt of the sample is a user's message.
///
/// # Errors
/// As [`train()`](super::train()).
pub fn finish<A: TrainableModel, B: AutodiffBackend + Float8Stack, M>(
    config: &RunConfig<A::Section>,
    text: &Text,
    is_chat: bool,
    mut run: Run<'_, B>,
    steps: Steps<'_, B, M>,
    made: impl FnOnce(M) -> A::Trained<B>,
) -> Result<Outcome>
where
    M: LanguageModel<B> + AutodiffModule<B, InnerModule: LanguageModel<B::InnerBackend>>,
{
    let is_first = steps.ranks().is_none_or(Ranks::is_first);
    let is_parallel = steps.ranks().is_some_and(|ranks| ranks.tensor() > 1);
    let Finished { model, lines, held_out: judged, report } = run.run(steps)?;
    let model = made(model);
    let Run { held_out, out, progress, selected, .. } = run;
    if let Some(HeldOut { last: (_, loss), best }) = judged {
        log_header::held_out(loss, held_out, out)?;
        if best.1 < loss {
            writeln!(out, "best validation loss: {:.5}  (step {})", best.1, best.0)?;
        }
    }
    let sample = match is_parallel && config.generate.max_new_tokens > 0 {
        true => {
            writeln!(out, "sample: left out: ranks of tensor parallelism do not generate")?;
            String::new()
        }
        false => sample(config, text, is_chat, selected, &model.valid(), out)?,
    };
    let report = report.unwrap_or_else(|| report_of::<B, _>(&model));
    if let Some(Some(path)) = config.fp8_report.as_ref().filter(|_| is_first) {
        write_report(&report, path)?;
        writeln!(out, "report: {}", path.display())?;
    }
    let gemms = report.totals();
    // The report already ends with the totals, unless it is empty.
    let is_fp8 = config.training.precision == Precision::Fp8;
    if config.fp8_report == Some(None) || is_fp8 && report.layers.is_empty() {
        writeln!(out, "{report}")?;
    } else if is_fp8 {
        writeln!(out, "{gemms}")?;
    }
    verify::<B, _>(&config.float8, &model)?;
    progress.check_log().context("cannot write the log")?;
    let (validation_loss, best_validation_loss) =
        (judged.map(|judged| judged.last.1), judged.map(|judged| judged.best));
    Ok(Outcome { steps: lines, validation_loss, best_validation_loss, sample, gemms, report })
}

fn sample<B: Backend, S>(
    config: &RunConfig<S>,
    text: &Text,
    is_chat: bool,
    selected: &SelectedDevice,
    model: &impl CausalLm<B>,
    out: &mut dyn Write,
) -> Result<String> {
    let mut sample = String::new();
    if config.generate.max_new_tokens == 0 {
        return Ok(sample);
    }
    let prompt = match text.prompt(&config.generate.prompt, is_chat) {
        Ok(prompt) => prompt,
        Err(error) => {
            writeln!(out, "sample: left out: {error}")?;
            return Ok(sample);
        }
    };
    Generation::new(config, text, selected, 1).run(model, &[prompt], |_, piece| {
        sample.push_str(piece);
        Ok(())
    })?;
    if !sample.is_empty() {
        let (prompt, between) = (&config.generate.prompt, if is_chat { "\n" } else { "" });
        writeln!(out, "sample:\n{prompt}{between}{sample}")?;
    }
    Ok(sample)
}
