//! [`JobError`]: errors between a command line and a trained model. Each variant carries the wrong
//! values.

use std::path::PathBuf;

use burn_float8::Float8Error;
use device_select::DeviceError;

use crate::config::ConfigError;
use crate::hf::Float8FilesError;
use crate::plot::PlotError;
use crate::{ByteTokenizer, ChatError, DataError, TensorFilesError, TokenizeError, TokenizerError, TrainError};

/// Error of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// Any other error, with its context.
    #[error(transparent)]
    Other(#[from] anyhow::Error),
    /// `mpirun` could not be started.
    #[error("cannot start mpirun (apt-get install openmpi-bin)")]
    Launcher(#[source] std::io::Error),
    /// A launcher started several processes of a single-process command.
    #[error("{started} processes were started, but only `train` and `resume` are done by several: start one")]
    OneProcess {
        /// Number of processes.
        started: usize,
    },
    /// The model cannot be sharded.
    #[error("cannot shard the model")]
    Shard(#[from] float8_shard::ShardError),
    /// Communication between the ranks failed.
    #[error(transparent)]
    Ranks(#[from] float8_shard::CommError),
    /// Invalid model dimension.
    #[error("model config: {field} = {value}: {reason}")]
    ModelConfig {
        /// Field of the model's configuration.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why it is invalid.
        reason: String,
    },
    /// Unknown preset.
    #[error("unknown model preset `{name}`; there are {}", known.join(", "))]
    UnknownPreset {
        /// The given name.
        name: String,
        /// Existing presets.
        known: Vec<&'static str>,
    },
    /// A file or folder could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Invalid JSON in a file.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A key of a Hugging Face `config.json` has a value that the model does not implement.
    #[error("{}: {key} = {value} is not supported; {supported}", path.display())]
    HfUnsupported {
        /// The `config.json`.
        path: PathBuf,
        /// The key, dotted if nested.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// Supported values.
        supported: String,
    },
    /// An adapter folder has an adapter for a linear that has none here.
    #[error("{}: {tensor} belongs to no adapter of lora.target_modules", path.display())]
    UnknownAdapter {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A Hugging Face `config.json` lacks a key that has no default.
    #[error("{}: {key} is missing", path.display())]
    HfMissingKey {
        /// The `config.json`.
        path: PathBuf,
        /// The key, dotted if nested.
        key: String,
    },
    /// A Hugging Face checkpoint cannot be loaded into a mixture of experts.
    #[error("{}: checkpoints are read into dense models only; this one has {num_experts} experts in a layer", path.display())]
    MoeCheckpoint {
        /// The folder.
        path: PathBuf,
        /// Experts of the model's config.
        num_experts: usize,
    },
    /// Frozen weights differ from the ones the run started with. Its checkpoints do not contain
    /// them.
    #[error(
        "{}: {difference} since this run began, whose checkpoints do not have the frozen weights: put the file back, or set model.hf_path \
         to a folder that has it",
        path.display()
    )]
    Base {
        /// The file of model.hf_path.
        path: PathBuf,
        /// The difference.
        difference: String,
    },
    /// The output layer of a tied checkpoint differs from its embedding.
    #[error(
        "{}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: \
         set model.tie_word_embeddings to false to take lm_head.weight, or to true to leave it out",
        path.display()
    )]
    TiedHead {
        /// The folder.
        path: PathBuf,
    },
    /// A mixture of experts cannot be exported: Hugging Face has no name for it.
    #[error("only dense models are exported: this one has {num_experts} experts in a layer")]
    MoeExport {
        /// Experts of the model's config.
        num_experts: usize,
    },
    /// Weights cannot be read or written.
    #[error(transparent)]
    TensorFiles(#[from] TensorFilesError),
    /// FP8 weights in files cannot be read or written.
    #[error(transparent)]
    Float8Files(#[from] Float8FilesError),
    /// The vocabulary is too small for the tokens in use.
    #[error("vocab_size = {vocab_size}, but there are tokens up to {}", needed - 1)]
    Vocabulary {
        /// The model's vocabulary.
        vocab_size: usize,
        /// Vocabulary size that the tokens need.
        needed: usize,
    },
    /// A model with a large vocabulary has no tokenizer.
    #[error(
        "the model has {vocab_size} tokens, and the tokenizer would be `bytes`, which has {}: set data.tokenizer to the path of the \
         model's tokenizer; a model of random weights, without model.hf_path, may have \"bytes\" there",
        ByteTokenizer::VOCAB_SIZE
    )]
    ByteTokens {
        /// The model's vocabulary.
        vocab_size: usize,
    },
    /// A text is longer than the model supports.
    #[error(
        "the {tokens} tokens of prompt {} and {max_new_tokens} new ones exceed the model's {max_seq_len} positions", prompt + 1
    )]
    Positions {
        /// Index of the prompt, counted from 0.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// Tokens to add.
        max_new_tokens: usize,
        /// Positions that the model has.
        max_seq_len: usize,
    },
    /// The logits of the next token are not finite.
    #[error(
        "the logits of the token after prompt {} are NaN or infinite: weights, or a precision that overflows, are to blame; `llama3 eval` \
         and another --precision tell which", prompt + 1
    )]
    Logits {
        /// Index of the prompt, counted from 0.
        prompt: usize,
    },
    /// A checkpoint folder has no tokenizer, and its model does not use byte tokens.
    #[error("no tokenizer in {}: set data.tokenizer to the path of one", folder.display())]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
        /// The tokenizer's error.
        source: TokenizerError,
    },
    /// The data cannot be read or has changed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Evaluation on the run's held-out data, but nothing is held out.
    #[error("nothing is held out (data.held_out_fraction = 0): give text to evaluate on with --data PATH")]
    NothingHeldOut,
    /// Evaluation of a model without a run, which would define the data.
    #[error("a Hugging Face checkpoint says nothing of data: give text to evaluate on with --data PATH")]
    NothingToEvaluate,
    /// The given folder does not exist.
    #[error("there is no folder {}", folder.display())]
    NoFolder {
        /// The given folder.
        folder: PathBuf,
    },
    /// The folder of a run's frozen weights is gone.
    #[error(
        "there is no folder {}, which has the weights that the run keeps frozen: its checkpoints hold only what it trains. It must be where it was (model.hf_path)", folder.display()
    )]
    NoBase {
        /// The folder.
        folder: PathBuf,
    },
    /// A flag for checkpoints of a run was used with a Hugging Face checkpoint.
    #[error("{} is a Hugging Face checkpoint: {flag} is for the folder of a run", folder.display())]
    NotARun {
        /// The folder.
        folder: PathBuf,
        /// The flag.
        flag: String,
    },
    /// A chat with a model whose tokenizer has no template.
    #[error(
        "the model has no chat template: set data.chat_template to a Jinja file, or take a checkpoint that brings one"
    )]
    NoTemplate,
    /// A chat template cannot be read or refuses a conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// Error in the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Error of a run or its checkpoints.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A tokenizer cannot be read or does not accept a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A file cannot be tokenized.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// Runs cannot be plotted.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// The machine has less memory than is certainly needed.
    #[error(
        "{what} takes at least {needed}, and this machine has {there}: take a smaller model, or share it among the ranks of several machines"
    )]
    Memory {
        /// Consumer of the memory.
        what: &'static str,
        /// Needed memory.
        needed: String,
        /// Available memory, including swap.
        there: String,
    },
    /// A training step takes more memory than the device has.
    #[error(
        "a training step takes about {needed}, and there is {there}: shorter sequences, a smaller training.batch_size with more \
         grad_accumulation, training.activation_checkpointing = \"full\", training.param_dtype = \"bf16\", optimizer.in_backward, \
         lora.base = \"fp8\" or more ranks take less; docs/fine-tune.md says how much"
    )]
    StepMemory {
        /// Needed memory.
        needed: String,
        /// Available memory.
        there: String,
    },
    /// The held-out loss is not finite.
    #[error("the held-out loss is {loss}: a weight or an activation is not finite")]
    LossNotFinite {
        /// The loss.
        loss: f64,
    },
    /// Memory estimate of a model without `layer_bytes`.
    #[error("how much a training step of this model takes is unknown: it has no `ModelConfig::layer_bytes`")]
    NoEstimate,
    /// The device does not support this compute dtype.
    #[error("{device} does not compute in {dtype}: use precision f32, or fp8 with training.compute_dtype = \"f32\"")]
    UnsupportedDtype {
        /// The requested dtype.
        dtype: String,
        /// The device.
        device: String,
    },
    /// The requested device was not compiled in.
    #[error("this build has no {device} support: enable the `{feature}` feature")]
    FeatureOff {
        /// The requested device.
        device: &'static str,
        /// Its cargo feature.
        feature: &'static str,
    },
    /// The device is not available.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// FP8 could not be applied.
    #[error(transparent)]
    Float8(#[from] Float8Error),
    /// The output could not be written.
    #[error("cannot write the log")]
    Output(#[from] std::io::Error),
}
