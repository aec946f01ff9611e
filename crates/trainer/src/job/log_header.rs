//! Log lines before and after the steps of a run.

use std::io::Write;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use device_select::SelectedDevice;

use super::config::RunConfig;
use crate::batches::{Batch, TrainBatches};
use crate::checkpoint::SavedRun;
use crate::config::{RANDOM_LR, TrainingSection};
use crate::data::{DatasetSize, EpochSize};
use crate::metrics::{counted, thousands};
use crate::model::{ModelConfig, ModelSection, ModelSize};
use crate::schedule::Schedule;
use crate::{Dataset, Tokenizer, freeze};

/// Prints the model, device, precision and attention backend.
pub(super) fn model<S: ModelSection>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    computed: (DType, &str),
    dims: &S::Config,
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<()> {
    let count = |n: usize| thousands(&n.to_string());
    device(config, selected, computed, out)?;
    let from_folder = config.model.hf_path();
    let name = from_folder.map_or_else(|| config.model.preset(), |path| path.display().to_string());
    let ModelSize { num_params, num_active_params, .. } = dims.size();
    write!(out, "model: {name}  parameters: {}", count(num_params))?;
    match num_active_params < num_params {
        true => writeln!(out, "  active: {}", count(num_active_params))?,
        false => writeln!(out)?,
    }
    // Presets use bytes by default.
    if from_folder.is_some() || config.data.tokenizer.is_some() {
        writeln!(out, "tokenizer: {}, {} tokens", tokenizer.format(), tokenizer.vocab_size())?;
    }
    Ok(())
}

/// Prints the number of trainable parameters if some are frozen.
pub(super) fn trainable<S: ModelSection, B: Backend, M: Module<B>>(
    config: &RunConfig<S>,
    model: &M,
    out: &mut dyn Write,
) -> Result<()> {
    let [trained, all] = freeze::trainable(model);
    if trained == all {
        return Ok(());
    }
    let percent = 100.0 * trained as f64 / all as f64;
    let [trained, all] = [trained, all].map(|count| thousands(&count.to_string()));
    write!(out, "trainable parameters: {trained} of {all} ({percent:.2}%)")?;
    if config.model.hf_path().is_none() {
        write!(out, "  frozen ones are random: model.hf_path is absent")?;
    }
    Ok(writeln!(out)?)
}

/// Prints the device, precision and attention backend.
pub(super) fn device<S>(
    config: &RunConfig<S>,
    selected: &SelectedDevice,
    (dtype, attention): (DType, &str),
    out: &mut dyn Write,
) -> Result<()> {
    let precision = format!("{:?}", config.training.precision).to_lowercase();
    let dtype = format!("{dtype:?}").to_lowercase();
    Ok(writeln!(out, "device: {selected}  precision: {precision}  compute dtype: {dtype}  attention: {attention}")?)
}

/// Prints the files read, the files skipped, and the token counts.
pub(super) fn files(dataset: &Dataset, out: &mut dyn Write) -> Result<()> {
    let DatasetSize { files, train_tokens, held_out_tokens, held_out_documents, .. } = dataset.size();
    let [train, held_out] = [train_tokens, held_out_tokens].map(|count| thousands(&count.to_string()));
    let held_out = match held_out_documents {
        0 => held_out,
        documents => format!("{held_out} ({})", counted(documents, "document")),
    };
    let formats: Vec<_> = dataset.formats().iter().map(|(format, count)| format!("{count} {format}")).collect();
    write!(out, "data: {} ({})", counted(files as u64, "file"), formats.join(", "))?;
    if dataset.left_out().count() > 0 {
        write!(out, "  left out: {}", dataset.left_out())?;
    }
    // Data for evaluation only is all held out.
    match train_tokens {
        0 => writeln!(out, "  tokens: {held_out}")?,
        _ => writeln!(out, "  tokens: {train}  held out: {held_out}")?,
    }
    Ok(())
}

/// Prints the training data and the size of an epoch.
pub(super) fn data<S>(
    config: &RunConfig<S>,
    dataset: &Dataset,
    batches: &TrainBatches,
    ranks: usize,
    out: &mut dyn Write,
) -> Result<()> {
    let count = |n: u64| thousands(&n.to_string());
    files(dataset, out)?;
    let EpochSize { sequences, without_targets, tokens, documents, targets, cut } = batches.epoch_size();
    let TrainingSection { batch_size, grad_accumulation, .. } = config.training;
    let steps = sequences as f64 / (batch_size as f64 * grad_accumulation as f64 * ranks as f64);
    write!(out, "epoch: {}, {} steps", counted(sequences, "sequence"), thousands(&format!("{steps:.1}")))?;
    write!(out, "  documents: {}", count(documents))?;
    if targets < tokens {
        write!(out, "  targets: {} of {} tokens", count(targets), count(tokens))?;
    }
    if without_targets > 0 {
        write!(out, "  without targets, and left out: {}", counted(without_targets, "sequence"))?;
    }
    if cut > 0 {
        write!(out, "  longer than training.seq_len, and cut: {}", count(cut))?;
    }
    Ok(writeln!(out)?)
}

/// Warns about the learning rate: a default for fine-tuning, a long warm-up, a jump on resume.
///
/// `asked` is `config` before its defaults were filled in.
pub(super) fn schedule<S: ModelSection>(
    asked: &RunConfig<S>,
    config: &RunConfig<S>,
    saved: Option<&SavedRun>,
    out: &mut dyn Write,
) -> Result<()> {
    let schedule = config.optimizer.schedule(config.training.steps.get());
    let Schedule { lr, warmup_steps, steps, .. } = schedule;
    if asked.optimizer.lr.is_none() && lr != RANDOM_LR {
        writeln!(out, "learning rate: {lr:e}, the default for fine-tuning (optimizer.lr is absent)")?;
    }
    if warmup_steps > steps / 10 && steps > 0 {
        writeln!(out, "warm-up: {warmup_steps} of {steps} steps, more than a tenth (optimizer.warmup_steps)")?;
    }
    if let Some(saved) = saved {
        let before = RunConfig::<S>::from_toml(saved.path(), saved.config())?;
        let (step, steps) = (saved.step(), before.training.steps.get());
        let [before, now] = [before.optimizer.schedule(steps).at(step), schedule.at(step)];
        if (now / before - 1.0).abs() > 0.1 && step < schedule.steps {
            writeln!(
                out,
                "learning rate: jumps to {now:.2e} in step {}; before, that step had {before:.2e}",
                step + 1
            )?;
        }
    }
    Ok(())
}

/// Prints the step of the loaded checkpoint.
pub(super) fn checkpoint(saved: Option<&SavedRun>, out: &mut dyn Write) -> Result<()> {
    saved.map_or(Ok(()), |saved| Ok(writeln!(out, "checkpoint: step {}", saved.step())?))
}

/// Prints the validation loss, its perplexity and its number of tokens.
pub(super) fn held_out(loss: f64, batches: &[Batch], out: &mut dyn Write) -> Result<()> {
    let tokens: usize = batches.iter().map(Batch::num_targets).sum();
    let tokens = thousands(&tokens.to_string());
    Ok(writeln!(out, "validation loss: {loss:.5}  perplexity: {:.3}  ({tokens} tokens)", loss.exp())?)
}

/// Prints the header of the table of precisions.
pub(super) fn precisions(selected: &SelectedDevice, batches: &[Batch], out: &mut dyn Write) -> Result<()> {
    let tokens: usize = batches.iter().map(Batch::num_targets).sum();
    writeln!(out, "device: {selected}  {} tokens", thousands(&tokens.to_string()))?;
    Ok(writeln!(out, "{:<22}  {:>9}  {:>11}  {:>9}", "precision", "loss", "perplexity", "to first")?)
}

/// Prints a row of the table. `first` is the loss of the first row; `note` ends the line.
pub(super) fn precision(precision: &str, loss: f64, first: f64, note: Option<&str>, out: &mut dyn Write) -> Result<()> {
    let change = 100.0 * (loss - first).exp_m1();
    let note = note.map(|note| format!("  {note}")).unwrap_or_default();
    Ok(writeln!(out, "{precision:<22}  {loss:>9.5}  {:>11.4}  {change:>+8.3}%{note}", loss.exp())?)
}

/// Prints the fraction of the adapters' weight update that survives rounding in the merged files.
pub(super) fn merged(share: f64, out: &mut dyn Write) -> Result<()> {
    let advice = match (share - 1.0).abs() > 0.1 {
        true => "; --format f32 has all of it, --format fp8 more with a --recipe of other scales than the base's",
        false => "",
    };
    // A fraction above 1 is a rounding error too.
    let more = if share >= 1.0005 { format!(", and adds {:.1} %", 100.0 * (share - 1.0)) } else { String::new() };
    let left = 100.0 * share.clamp(0.0, 1.0);
    Ok(writeln!(out, "merged: rounding leaves {left:.1} % of what the adapters change{more}{advice}")?)
}
