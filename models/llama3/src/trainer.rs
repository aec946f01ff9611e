//! The training loop: batches in, step lines out, then a held-out loss, a sample and what the linears did.

use std::io::Write;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn_float8::{Float8Error, Float8Stack, GemmTotals, Report, set_default_config};
use device_select::SelectedDevice;
use train::Tokenizer;

use crate::Error;
use crate::batches::{Batch, BatchShape, TrainBatches, held_out_batches};
use crate::config::LlamaConfig;
use crate::data::Corpus;
use crate::generate::Sampling;
use crate::metrics::{Memory, StepLine, thousands};
use crate::model::Llama;
use crate::reporting;
use crate::run_config::{ComputeDtype, Precision, RunConfig};
use crate::steps::{Step, Steps};

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The step lines.
    pub steps: Vec<StepLine>,
    /// Mean cross entropy over the held-out batches, in nats per token.
    pub held_out_loss: f64,
    /// Generated text, without the prompt.
    pub sample: String,
    /// GEMMs of linears by precision, evaluation and sampling included.
    pub gemms: GemmTotals,
    /// What each linear did; empty unless FP8 was applied.
    pub report: Report,
}

/// Trains as `config` says on `device`, which is `selected`, and writes the log to `out`.
///
/// The backend's default FP8 config is switched off for `device`: only linears that `config` names run in FP8. With
/// `float8.strict`, a GEMM in high precision that `config` does not ask for is [`Error::Strict`], after the first step in
/// FP8 or at the end.
///
/// # Errors
/// Any [`Error`].
pub fn train<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome, Error> {
    config.validate()?;
    if let Some(path) = &config.training.report {
        reporting::check_destination(path)?;
    }
    let tokenizer = config.tokenizer()?;
    let prompt = tokenizer.prompt(&config.generate.prompt)?;
    let dims = dimensions(config, &tokenizer, prompt.len())?;
    let dtype = compute_dtype::<B>(config, selected, device)?;
    let corpus = config.text().load(&tokenizer)?;
    let shape = BatchShape { batch_size: config.training.batch_size, seq_len: config.training.seq_len };
    let held_out = held_out_batches(&corpus.held_out, shape, config.training.eval_batches)?;
    let batches = TrainBatches::new(&corpus.train, shape, config.training.seed)?;
    announce(config, selected, dtype, &dims, &tokenizer, &corpus, out)?;

    let model = prepare::<B>(config, dims, device, out)?.with_compute_dtype(dtype);
    finish(config, selected, &tokenizer, Steps::new(config, model, batches), &held_out, device, out)
}

/// Makes the steps of `config` that `steps` has not made yet, then evaluates, samples and reports as [`train()`] does.
///
/// # Errors
/// As [`train()`].
pub fn finish<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    selected: &SelectedDevice,
    tokenizer: &Tokenizer,
    steps: Steps<'_, B>,
    held_out: &[Batch],
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome, Error> {
    let (model, steps) = optimize::<B>(config, selected, steps, device, out)?;
    let evaluated = model.valid();
    let held_out_loss = mean_loss(&evaluated, held_out, device)?;
    if !held_out_loss.is_finite() {
        return Err(Error::HeldOutDiverged { steps: config.training.steps, loss: held_out_loss });
    }
    let tokens: usize = held_out.iter().map(Batch::num_tokens).sum();
    writeln!(out, "held-out loss: {held_out_loss:.5}  ({} tokens)", thousands(&tokens.to_string()))?;
    let sample = sample(config, tokenizer, &evaluated)?;
    if !sample.is_empty() {
        writeln!(out, "sample:\n{}{sample}", config.generate.prompt)?;
    }
    let report = reporting::report_of(&model);
    if let Some(path) = &config.training.report {
        reporting::write(&report, path)?;
        writeln!(out, "report: {}", path.display())?;
    }
    let gemms = report.totals();
    // The report's last line is the totals, unless there is nothing to report.
    match config.training.print_report || report.layers.is_empty() {
        true => writeln!(out, "{report}")?,
        false => writeln!(out, "{gemms}")?,
    }
    verify(config, &report)?;
    Ok(Outcome { steps, held_out_loss, sample, gemms, report })
}

/// With `float8.strict`, whether all ran in FP8 that was to.
fn verify(config: &RunConfig, report: &Report) -> Result<(), Error> {
    match config.float8.config.strict {
        true => report.verify().map_err(Error::Strict),
        false => Ok(()),
    }
}

/// The model's dimensions, with rotary tables no longer than this run needs; the prompt has so many tokens.
fn dimensions(config: &RunConfig, tokenizer: &Tokenizer, prompt: usize) -> Result<LlamaConfig, Error> {
    let mut dims = config.llama()?;
    let needed = tokenizer.vocab_size();
    if dims.vocab_size < needed {
        return Err(Error::Vocabulary { vocab_size: dims.vocab_size, needed });
    }
    let (seq_len, max_seq_len) = (config.training.seq_len, dims.max_seq_len);
    if seq_len > max_seq_len {
        let reason = format!("the model has {max_seq_len} positions");
        return Err(Error::RunValue { key: "training.seq_len", value: seq_len.to_string(), reason });
    }
    let new = config.generate.max_new_tokens;
    let generated = prompt.saturating_add(new);
    if generated > max_seq_len {
        let reason = format!("with a prompt of {prompt} tokens exceeds the model's {max_seq_len} positions");
        return Err(Error::RunValue { key: "generate.max_new_tokens", value: new.to_string(), reason });
    }
    dims.max_seq_len = generated.max(seq_len);
    Ok(dims)
}

fn compute_dtype<B: Backend>(
    config: &RunConfig,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<DType, Error> {
    let training = &config.training;
    let implied = match (training.precision, selected) {
        (Precision::F32, _) => ComputeDtype::F32,
        (Precision::Bf16, _) | (Precision::Fp8, SelectedDevice::Cuda) => ComputeDtype::Bf16,
        (Precision::Fp8, _) => ComputeDtype::F32,
    };
    let chosen = training.compute_dtype.unwrap_or(implied);
    if training.precision != Precision::Fp8 && chosen != implied {
        let reason = format!("precision {:?} computes in {implied:?}", training.precision);
        let value = format!("{chosen:?}").to_lowercase();
        return Err(Error::RunValue { key: "training.compute_dtype", value, reason: reason.to_lowercase() });
    }
    let dtype = match chosen {
        ComputeDtype::F32 => DType::F32,
        ComputeDtype::Bf16 => DType::BF16,
    };
    if B::supports_dtype(device, dtype) {
        return Ok(dtype);
    }
    Err(Error::UnsupportedDtype { dtype: format!("{dtype:?}").to_lowercase(), device: selected.to_string() })
}

fn announce(
    config: &RunConfig,
    selected: &SelectedDevice,
    dtype: DType,
    dims: &LlamaConfig,
    tokenizer: &Tokenizer,
    corpus: &Corpus,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let count = |n: usize| thousands(&n.to_string());
    let precision = format!("{:?}", config.training.precision).to_lowercase();
    let dtype = format!("{dtype:?}").to_lowercase();
    writeln!(out, "device: {selected}  precision: {precision}  compute dtype: {dtype}")?;
    let name = match (&config.model.hf_path, &config.model.preset) {
        (Some(path), _) => path.display().to_string(),
        (None, preset) => preset.clone().unwrap_or_else(|| "debug".into()),
    };
    write!(out, "model: llama3 {name}  parameters: {}", count(dims.num_params()))?;
    match dims.moe {
        Some(_) => writeln!(out, "  active: {}", count(dims.num_active_params()))?,
        None => writeln!(out)?,
    }
    // Bytes are what a preset has.
    if config.model.hf_path.is_some() || config.data.tokenizer.is_some() {
        writeln!(out, "tokenizer: {}, {} tokens", tokenizer.format(), tokenizer.vocab_size())?;
    }
    let Corpus { train, held_out, files, skipped } = corpus;
    let (train, held_out) = (count(train.len()), count(held_out.len()));
    writeln!(out, "data: {} files ({skipped} skipped)  tokens: {train}  held out: {held_out}", count(*files))?;
    Ok(())
}

/// The initial model of a run, of these dimensions, with FP8 applied if `config` asks for it.
///
/// The backend's default FP8 config is switched off for `device`.
///
/// # Errors
/// Weights that do not load, an FP8 config that does not fit the model, a log that cannot be written.
pub fn prepare<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    dims: LlamaConfig,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Llama<B>, Error> {
    let float8 = config.float8(&dims);
    let model = Llama::<B>::new(dims, device)?;
    let model = match &config.model.hf_path {
        Some(path) => model.load_hf_weights(path)?,
        None => model.init_weights(config.training.seed),
    };
    set_default_config::<B>(device, None)?;
    if config.training.precision != Precision::Fp8 {
        return Ok(model);
    }
    // Strict mode panics in the GEMM; a run reports an error instead.
    let (model, summary) = float8.with_strict(false).convert::<B, _>(model).map_err(Float8Error::from)?;
    writeln!(out, "{summary}")?;
    Ok(if config.training.save_fp8_operands { model.with_saved_fp8_operands() } else { model })
}

fn optimize<B: AutodiffBackend + Float8Stack>(
    config: &RunConfig,
    selected: &SelectedDevice,
    mut steps: Steps<'_, B>,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<(Llama<B>, Vec<StepLine>), Error> {
    let training = &config.training;
    let fp8 = training.precision == Precision::Fp8;
    let flops_per_token = steps.model.config().flops_per_token(training.seq_len);
    let mut lines = Vec::new();
    let (mut since, mut tokens) = (Instant::now(), 0);
    // As `prepare` leaves the model.
    let mut was_float8 = fp8;
    let mut verified = false;
    while steps.done() < training.steps {
        let step;
        (steps, step) = steps.step(device);
        let Step { number, is_float8, .. } = step;
        tokens += step.tokens;
        if is_float8 != was_float8 {
            let precision = if is_float8 { "FP8" } else { "high precision" };
            writeln!(out, "step: {number:2}  linears switch to {precision} (float8.schedule)")?;
            was_float8 = is_float8;
        }
        if is_float8 && !verified {
            verify(config, &reporting::report_of(&steps.model))?;
            verified = true;
        }
        if number == 1 || number == training.steps || number.is_multiple_of(training.log_every) {
            let [loss, grad_norm] = [read(step.loss)?, read(step.grad_norm)?];
            if !loss.is_finite() || !grad_norm.is_finite() {
                return Err(Error::Diverged { step: number, loss, grad_norm });
            }
            let line = StepLine {
                step: number,
                loss,
                grad_norm,
                memory: (*selected == SelectedDevice::Cpu).then(Memory::of_process).flatten(),
                tokens_per_second: tokens as f64 / since.elapsed().as_secs_f64(),
                flops_per_token,
                peak_flops: training.peak_tflops.map(|peak| peak * 1e12),
            };
            writeln!(out, "{line}")?;
            lines.push(line);
            (since, tokens) = (Instant::now(), 0);
        }
    }
    Ok((steps.model, lines))
}

/// Mean loss per token over `batches`, which are all of one shape.
fn mean_loss<B: Backend>(model: &Llama<B>, batches: &[Batch], device: &B::Device) -> Result<f64, Error> {
    let mut sum = 0.0;
    for batch in batches {
        let [inputs, targets] = batch.tensors::<B>(device);
        sum += read(model.loss(inputs, targets))?;
    }
    Ok(sum / batches.len() as f64)
}

fn sample<B: Backend>(config: &RunConfig, tokenizer: &Tokenizer, model: &Llama<B>) -> Result<String, Error> {
    let generate = &config.generate;
    let sampling = match generate.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Temperature { temperature, seed: config.training.seed },
    };
    let prompt = tokenizer.prompt(&generate.prompt)?;
    let (choices, stop) = (tokenizer.num_choices(), tokenizer.stop());
    let tokens = model.generate(&prompt, generate.max_new_tokens, choices, stop, sampling)?;
    Ok(tokenizer.stream_text().read(&tokens)?)
}

fn read<B: Backend>(scalar: Tensor<B, 1>) -> Result<f64, Error> {
    let data = scalar
        .try_into_data()
        .map_err(|error| Error::Execution { doing: "reading the loss", reason: error.to_string() })?;
    Ok(data.iter::<f64>().sum())
}
