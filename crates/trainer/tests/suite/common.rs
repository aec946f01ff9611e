//! Small models, text folders and checkpoints for the other modules, and the names that they use.

pub(crate) use crate::table::table;
pub(crate) use anyhow::Error;
pub(crate) use burn::backend::{Autodiff, Flex};
pub(crate) use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
pub(crate) use burn::nn::Linear;
pub(crate) use burn::optim::GradientsParams;
pub(crate) use burn::tensor::backend::Backend;
pub(crate) use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive, bf16, f16};
pub(crate) use burn_float8::Recipe;
pub(crate) use burn_float8::Recipe::{Blockwise, Mxfp8, Rowwise, Tensorwise};
pub(crate) use burn_float8::report::{Gemm, GemmReport, LayerReport, independent_rows};
pub(crate) use burn_float8::shard_hooks::visit_params;
pub(crate) use burn_float8::{
    Float8, Float8Config, Float8Error, Float8LinearConfig, Float8State, report, set_float8_enabled, without_float8,
};
pub(crate) use clap::Parser;
pub(crate) use device_select::SelectedDevice;
pub(crate) use float8_kernels::reference::adamw::round_stochastic;
pub(crate) use models::{Decoder, DecoderConfig, Decoders, RunConfig};
pub(crate) use safetensors::tensor::TensorView;
pub(crate) use safetensors::{Dtype, SafeTensors};
pub(crate) use serde::Deserialize;
pub(crate) use serde_json::Value;
pub(crate) use serde_json::json;
pub(crate) use sha2::{Digest, Sha256};
pub(crate) use std::collections::BTreeMap;
pub(crate) use std::ffi::OsStr;
pub(crate) use std::num::NonZero;
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::{env, fs};
pub(crate) use tempfile::TempDir;
pub(crate) use toml::Table;
pub(crate) use trainer::checkpoint::{SavedRun, Which};
pub(crate) use trainer::cli::Command;
pub(crate) use trainer::grads::{clip_grad_norm, sum};
pub(crate) use trainer::hf::{ExportDtype, Float8Export, copy_assets, read_config};
pub(crate) use trainer::job::{
    GenerateSection, MemoryEstimate, Outcome, Start, Task, Text, Weights, finish, prepare, train,
};
pub(crate) use trainer::metrics::{METRICS_FILE, Record, read_metrics};
pub(crate) use trainer::profile::{ProfileTable, Profiler, RowKind};
pub(crate) use trainer::rng::Rng;
pub(crate) use trainer::rounding::Noise;
pub(crate) use trainer::run::mean_loss;
pub(crate) use trainer::schedule::{Decay, Schedule};
pub(crate) use trainer::{
    Batching, CacheDtype, CacheOptions, CausalLm, Dataset, Filters, GenerateOptions, KeyValueCache, Message,
    ProgressLine, Run, RunError, Sampling, Signals, Step, Steps, TensorFiles, Tokenizer, digest_of_file, report_of,
};
pub(crate) use trainer::{CausalLmExt, ExportOptions, Job};

/// Small models, as the tests of `models` have them.
#[path = "../../../../models/tests/decoder/common.rs"]
mod small;
pub(crate) use small::*;

/// One tensor of a checkpoint: name, dtype, shape, little-endian bytes.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn f32(name: &str, shape: &[usize], values: &[f32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }
}

/// Tensors of a Hugging Face checkpoint of `config` with random values, sorted by name.
pub(crate) fn stored_tensors(config: &DecoderConfig, seed: u64) -> Vec<Stored> {
    let dir = tempfile::tempdir().unwrap();
    model::<Flex>(*config, 0).save_hf(dir.path(), &ExportOptions::default()).unwrap();
    let files = TensorFiles::open_folder(dir.path()).unwrap();
    let random = |name: &str| {
        let mut rng = Rng::named(seed, name);
        let offset = if name.contains("norm") { 1.0 } else { 0.0 };
        let shape = files.get(name).unwrap().shape().to_vec();
        let values = (0..shape.iter().product()).map(|_| (offset + 0.1 * rng.truncated_normal(3.0)) as f32);
        Stored::f32(name, &shape, &values.collect::<Vec<_>>())
    };
    files.names().map(random).collect()
}

pub(crate) fn write_safetensors(path: &Path, tensors: &[Stored]) {
    let views = tensors.iter().map(|t| (t.name.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Older form of a `config.json`.
pub(crate) fn hf_json(config: &DecoderConfig) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": false,
        "vocab_size": config.dims.vocab_size,
        "hidden_size": config.dims.hidden_size,
        "intermediate_size": config.dims.intermediate_size,
        "num_hidden_layers": config.dims.num_layers,
        "num_attention_heads": config.dims.num_heads,
        "num_key_value_heads": config.dims.num_kv_heads,
        "head_dim": config.dims.head_dim,
        "rms_norm_eps": config.dims.rms_norm_eps,
        "rope_theta": config.dims.rope_theta,
        "rope_scaling": null,
        "max_position_embeddings": config.dims.max_seq_len,
        "tie_word_embeddings": config.dims.tie_word_embeddings,
    })
}

/// Hugging Face folder of a model.
pub(crate) fn hf_folder(config: &DecoderConfig, tensors: &[Stored]) -> TempDir {
    let dir = TempDir::new().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(config));
    write_safetensors(&dir.path().join("model.safetensors"), tensors);
    dir
}

pub(crate) fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_string(value).unwrap()).unwrap();
}

/// Ten files with a pattern that a tiny model can learn.
pub(crate) fn text() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in 0..10 {
        let lines: Vec<_> = (0..60).map(|line| format!("fn f{line}() {{ g({file}) }}\n")).collect();
        fs::write(dir.path().join(format!("{file:02}.rs")), lines.concat()).unwrap();
    }
    dir
}

/// Run of the tiny model on `data`.
pub(crate) fn run_config(data: &Path, settings: &[&str]) -> RunConfig {
    try_run_config(data, settings).unwrap()
}

pub(crate) fn try_run_config(data: &Path, settings: &[&str]) -> Result<RunConfig, Error> {
    let tiny = [
        "model.overrides={ vocab_size = 288, hidden_size = 48, intermediate_size = 80, num_hidden_layers = 2, \
         num_attention_heads = 6, num_key_value_heads = 2, head_dim = 12 }",
        "training.steps=12",
        "training.batch_size=4",
        "training.seq_len=24",
        "training.log_every=5",
        "training.eval_batches=2",
        "generate.max_new_tokens=8",
    ];
    let settings: Vec<_> = tiny.iter().chain(settings).map(|s| s.to_string()).collect();
    let mut config = RunConfig::load(None, &settings)?;
    config.data.paths = vec![data.into()];
    config.data.cache = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokens"));
    Ok(config)
}

pub(crate) fn run(config: &RunConfig) -> Result<(Outcome, String), Error> {
    let mut log = Vec::new();
    let outcome =
        train::<Decoders, Train>(config, &Start::default(), &SelectedDevice::Cpu, &Default::default(), &mut log)?;
    Ok((outcome, String::from_utf8(log).unwrap()))
}

/// Typed cause of a refusal.
pub(crate) fn cause<E: std::error::Error + Send + Sync + 'static, T>(result: Result<T, Error>) -> E {
    let error = result.err().expect("it was to be refused");
    error.downcast().unwrap_or_else(|error| panic!("{error:?}"))
}

/// Requires a refusal with this text.
pub(crate) fn refuses<T>(result: Result<T, Error>, text: &str) {
    let error = result.err().expect("it was to be refused").to_string();
    assert!(error.contains(text), "{error}");
}

/// Byte tokenizer.
pub(crate) fn bytes() -> Text {
    Text { tokenizer: Tokenizer::bytes(), template: None }
}

/// Data of `config`, as bytes.
pub(crate) fn open(config: &RunConfig) -> Dataset {
    config.open_data(&bytes(), &ProgressLine::hidden(), &mut std::io::sink()).unwrap()
}

/// A new run of `config`, step by step; `change` is applied to the model last.
pub(crate) fn steps<'a>(
    config: &'a RunConfig,
    data: &Dataset,
    change: impl FnOnce(Decoder<Train>) -> Decoder<Train>,
) -> Steps<'a, Train, Decoder<Train>> {
    let weights = Weights::open(config, None, config.dimensions().unwrap()).unwrap();
    let model =
        prepare::<Decoders, Train>(config, weights, &Default::default(), &ProgressLine::hidden(), &mut std::io::sink())
            .unwrap();
    Steps::new(config.steps(), change(model), config.train_batches(data).unwrap(), None).unwrap()
}

/// Takes `count` steps.
pub(crate) fn advance<'a>(
    mut steps: Steps<'a, Train, Decoder<Train>>,
    count: usize,
) -> (Steps<'a, Train, Decoder<Train>>, Vec<Step<Train>>) {
    let made = (0..count).map(|_| steps.step(&Default::default()).unwrap()).collect();
    (steps, made)
}

/// Name, shape and values of every parameter in f32, by its path.
pub(crate) fn named_values<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut all = vec![];
    visit_params::<B, M>(model, |param| {
        let value = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(param.float().unwrap()));
        let data = value.cast(DType::F32).into_data();
        all.push((param.name(), data.shape.to_vec(), data.to_vec().unwrap()));
    });
    all
}

/// Bits of every parameter in f32.
pub(crate) fn parameters(model: &Decoder<Train>) -> Vec<u32> {
    named_values(model).into_iter().flat_map(|(_, _, values)| values).map(f32::to_bits).collect()
}

/// Metadata of a file of vectors.
pub(crate) fn metadata(path: &Path) -> BTreeMap<String, String> {
    let file = fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    header.metadata().clone().unwrap().into_iter().collect()
}

/// Compares a model's logits with transformers' logits in a file of vectors. They may differ by
/// `bound` of the largest logit.
pub(crate) fn check_logits(vectors: &Path, model: &Decoder<Flex>, bound: f32) {
    let vectors = TensorFiles::open_file(vectors).unwrap();
    let input_ids = vectors.get("input_ids").unwrap();
    let shape = input_ids.shape().try_into().unwrap();
    let input_ids: Vec<_> = input_ids.bytes().unwrap().as_chunks().0.iter().map(|&id| i32::from_le_bytes(id)).collect();
    let expected = vectors.get("logits").unwrap().to_f32().unwrap();
    let error = relative(&values(model.forward(ids(&input_ids, shape))), &expected);
    println!("at most {error:.1e} of the largest logit from transformers' logits");
    assert!(error <= bound, "{error:e}");
}

/// Text of an error with all its causes.
pub(crate) fn chain(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

/// Runs this test alone in another process, and requires it to pass.
pub(crate) fn run_alone(test: &str, variable: &str, folder: &Path) {
    let mut command = std::process::Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(variable, folder).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}{err}");
    assert!(output.status.success() && out.contains("1 passed"), "{test} failed");
}

/// Output of `float8` with these arguments.
pub(crate) fn float8(arguments: &[&str]) -> Result<String, Error> {
    let mut out = vec![];
    let job = Command::try_parse_from([&["float8"], arguments].concat()).unwrap().job::<Decoders>(&mut out)?;
    job.unwrap().run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

/// Output of `float8 export FROM --output TO`.
pub(crate) fn exported(from: impl AsRef<Path>, to: impl AsRef<Path>, flags: &[&str]) -> Result<String, Error> {
    let [from, to] = [from.as_ref(), to.as_ref()].map(|path| path.to_str().unwrap());
    float8(&[&["export", from, "--output", to], flags].concat())
}

/// Setting of the folder in which a run is saved.
pub(crate) fn saved(folder: impl AsRef<Path>) -> String {
    format!("checkpoint.output_dir={}", folder.as_ref().display())
}

/// Validation loss that a command printed.
pub(crate) fn printed_loss(printed: &str) -> f64 {
    let (_, rest) = printed.split_once("validation loss: ").expect(printed);
    rest.split_whitespace().next().unwrap().parse().unwrap()
}
