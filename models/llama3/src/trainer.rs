//! The training loop: batches in, step lines out, then a held-out loss, a sample and the GEMM counts.

use std::io::Write;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn_float8::device::SelectedDevice;
use burn_float8::{Float8Ops, GemmTotals, report, set_default_config};

use crate::Error;
use crate::batches::{Batch, BatchShape, TrainBatches, held_out_batches};
use crate::config::LlamaConfig;
use crate::data::Corpus;
use crate::generate::Sampling;
use crate::grads::clip_grad_norm;
use crate::metrics::{Memory, StepLine, thousands};
use crate::model::Llama;
use crate::run_config::{ComputeDtype, Precision, RunConfig};
use crate::tokenizer::ByteTokenizer;

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
}

/// Trains as `config` says on `device`, which is `selected`, and writes the log to `out`.
///
/// The backend's default FP8 config is switched off for `device`: only linears that `config` names run in FP8.
///
/// # Errors
/// Any [`Error`].
pub fn train<B: AutodiffBackend + Float8Ops>(
    config: &RunConfig,
    selected: &SelectedDevice,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<Outcome, Error> {
    config.validate()?;
    let dims = dimensions(config)?;
    let dtype = compute_dtype::<B>(config, selected, device)?;
    let corpus = config.text().load()?;
    let shape = BatchShape { batch_size: config.training.batch_size, seq_len: config.training.seq_len };
    let held_out = held_out_batches(&corpus.held_out, shape, config.training.eval_batches)?;
    let batches = TrainBatches::new(&corpus.train, shape, config.training.seed)?;
    announce(config, selected, dtype, &dims, &corpus, out)?;

    let model = prepare::<B>(config, dims, device, out)?.with_compute_dtype(dtype);
    let (model, steps) = optimize::<B>(config, selected, model, batches, device, out)?;

    let evaluated = model.valid();
    let held_out_loss = mean_loss(&evaluated, &held_out, device)?;
    if !held_out_loss.is_finite() {
        return Err(Error::HeldOutDiverged { steps: config.training.steps, loss: held_out_loss });
    }
    let tokens: usize = held_out.iter().map(Batch::num_tokens).sum();
    writeln!(out, "held-out loss: {held_out_loss:.5}  ({} tokens)", thousands(&tokens.to_string()))?;
    let sample = sample(config, &evaluated)?;
    if !sample.is_empty() {
        writeln!(out, "sample:\n{}{sample}", config.generate.prompt)?;
    }
    let gemms = report::<B, _>(&model).totals();
    writeln!(out, "{gemms}")?;
    Ok(Outcome { steps, held_out_loss, sample, gemms })
}

/// The model's dimensions, with rotary tables no longer than this run needs.
fn dimensions(config: &RunConfig) -> Result<LlamaConfig, Error> {
    let mut dims = config.llama()?;
    let needed = ByteTokenizer::VOCAB_SIZE;
    if dims.vocab_size < needed {
        return Err(Error::Vocabulary { vocab_size: dims.vocab_size, needed });
    }
    let (seq_len, max_seq_len) = (config.training.seq_len, dims.max_seq_len);
    if seq_len > max_seq_len {
        let reason = format!("the model has {max_seq_len} positions");
        return Err(Error::RunValue { key: "training.seq_len", value: seq_len.to_string(), reason });
    }
    let (prompt, new) = (config.generate.prompt.len(), config.generate.max_new_tokens);
    let generated = (1 + prompt).saturating_add(new);
    if generated > max_seq_len {
        let reason = format!("with a BOS token and a prompt of {prompt} exceeds the model's {max_seq_len} positions");
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
    writeln!(out, "model: llama3 {name}  parameters: {}", count(dims.num_params()))?;
    let Corpus { train, held_out, files, skipped } = corpus;
    let (train, held_out) = (count(train.len()), count(held_out.len()));
    writeln!(out, "data: {} files ({skipped} skipped)  tokens: {train}  held out: {held_out}", count(*files))?;
    Ok(())
}

/// The initial model, with FP8 applied if asked for.
fn prepare<B: AutodiffBackend + Float8Ops>(
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
    set_default_config::<B>(device, None);
    if config.training.precision != Precision::Fp8 {
        return Ok(model);
    }
    let (model, summary) = float8.convert::<B, _>(model)?;
    writeln!(out, "{summary}")?;
    Ok(model)
}

fn optimize<B: AutodiffBackend>(
    config: &RunConfig,
    selected: &SelectedDevice,
    mut model: Llama<B>,
    mut batches: TrainBatches<'_>,
    device: &B::Device,
    out: &mut dyn Write,
) -> Result<(Llama<B>, Vec<StepLine>), Error> {
    let (training, optimizer) = (&config.training, &config.optimizer);
    let schedule = config.schedule();
    let mut adamw = AdamWConfig::new()
        .with_beta_1(optimizer.betas[0] as f32)
        .with_beta_2(optimizer.betas[1] as f32)
        .with_epsilon(optimizer.eps as f32)
        .with_weight_decay(optimizer.weight_decay as f32)
        .init::<B, Llama<B>>();
    let flops_per_token = model.config().flops_per_token(training.seq_len);
    let micro_batches = training.grad_accumulation;

    let mut lines = Vec::new();
    let mut since = Instant::now();
    let mut tokens = 0;
    for step in 1..=training.steps {
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], (device, DType::F32));
        let mut accumulator = GradientsAccumulator::new();
        for batch in batches.by_ref().take(micro_batches) {
            tokens += batch.num_tokens();
            let [inputs, targets] = batch.tensors::<B>(device);
            let part = model.loss(inputs, targets).div_scalar(micro_batches as f64);
            loss = loss + part.clone().inner();
            let grads = GradientsParams::from_grads(part.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        let mut grads = accumulator.grads();
        let norm = clip_grad_norm(&model, &mut grads, training.max_norm, device);
        model = adamw.step(schedule.at(step - 1), model, grads);

        if step == 1 || step == training.steps || step.is_multiple_of(training.log_every) {
            let [loss, grad_norm] = [read(loss)?, read(norm)?];
            if !loss.is_finite() || !grad_norm.is_finite() {
                return Err(Error::Diverged { step, loss, grad_norm });
            }
            let line = StepLine {
                step,
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
    Ok((model, lines))
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

fn sample<B: Backend>(config: &RunConfig, model: &Llama<B>) -> Result<String, Error> {
    let generate = &config.generate;
    let sampling = match generate.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Temperature { temperature, seed: config.training.seed },
    };
    let mut prompt = vec![ByteTokenizer::BOS];
    prompt.extend(ByteTokenizer::encode(&generate.prompt));
    let tokens = model.generate(&prompt, generate.max_new_tokens, ByteTokenizer::NUM_BYTES, sampling)?;
    Ok(ByteTokenizer::decode(&tokens))
}

fn read<B: Backend>(scalar: Tensor<B, 1>) -> Result<f64, Error> {
    let data = scalar
        .try_into_data()
        .map_err(|error| Error::Execution { doing: "reading the loss", reason: error.to_string() })?;
    Ok(data.iter::<f64>().sum())
}
