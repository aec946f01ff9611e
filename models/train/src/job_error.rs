//! [`JobError`]: what can go wrong between a command line and a trained model; each variant carries the values that are wrong.

use std::path::PathBuf;

use burn_float8::Float8Error;
use device_select::DeviceError;

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::hf::Float8FilesError;
use crate::plot::PlotError;
use crate::{
    ByteTokenizer, ChatError, DataError, FolderError, TensorFilesError, TokenizeError, TokenizerError, TrainError,
};

/// What can go wrong between a command line and a trained model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// `mpirun` could not be started.
    #[error("cannot start mpirun (apt-get install openmpi-bin)")]
    Launcher(#[source] std::io::Error),
    /// A launcher has started several processes of a command that one alone does.
    #[error("{started} processes were started, but only `train` and `resume` are done by several: start one")]
    OneProcess {
        /// How many.
        started: usize,
    },
    /// The model cannot be sharded.
    #[error("cannot shard the model")]
    Shard(#[from] float8_shard::ShardError),
    /// The ranks cannot work together.
    #[error(transparent)]
    Ranks(#[from] float8_shard::CommError),
    /// A model dimension that cannot be.
    #[error("model config: {field} = {value}: {reason}")]
    ModelConfig {
        /// Field of the model's configuration.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A preset name that does not exist.
    #[error("unknown model preset `{name}`; there are {}", known.join(", "))]
    UnknownPreset {
        /// What was asked for.
        name: String,
        /// The presets that exist.
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
    /// A JSON file that does not parse.
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
        /// What is supported instead.
        supported: String,
    },
    /// A folder of an adapter has one for a linear that has none here.
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
    /// A Hugging Face checkpoint was to be loaded into a mixture of experts.
    #[error("{}: checkpoints are read into dense models only; this one has {num_experts} experts in a layer", path.display())]
    MoeCheckpoint {
        /// The folder.
        path: PathBuf,
        /// Experts of the model's config.
        num_experts: usize,
    },
    /// A run that saves adapters, or some parameters alone, is to go on beside other weights than those that it began with.
    #[error(
        "{}: {difference} since this run began, whose checkpoints do not have the frozen weights: put the file back, or set model.hf_path \
         to a folder that has it",
        path.display()
    )]
    Base {
        /// The file of model.hf_path.
        path: PathBuf,
        /// What has changed.
        difference: String,
    },
    /// A tied checkpoint has an output layer that is not its embedding.
    #[error(
        "{}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: \
         set model.tie_word_embeddings to false to take lm_head.weight, or to true to leave it out",
        path.display()
    )]
    TiedHead {
        /// The folder.
        path: PathBuf,
    },
    /// A mixture of experts was to be exported: Hugging Face has no name for it.
    #[error("only dense models are exported: this one has {num_experts} experts in a layer")]
    MoeExport {
        /// Experts of the model's config.
        num_experts: usize,
    },
    /// Weights that cannot be read or written.
    #[error(transparent)]
    TensorFiles(#[from] TensorFilesError),
    /// FP8 weights in files that cannot be read, or are not written.
    #[error(transparent)]
    Float8Files(#[from] Float8FilesError),
    /// A folder that cannot be made.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A vocabulary that has no room for tokens that are certainly used.
    #[error("vocab_size = {vocab_size}, but there are tokens up to {}", needed - 1)]
    Vocabulary {
        /// The model's vocabulary.
        vocab_size: usize,
        /// The vocabulary that the tokens need.
        needed: usize,
    },
    /// A model with a large vocabulary, and no tokenizer.
    #[error(
        "the model has {vocab_size} tokens, and the tokenizer would be `bytes`, which has {}: set data.tokenizer to the path of the \
         model's tokenizer; a model of random weights, without model.hf_path, may have \"bytes\" there",
        ByteTokenizer::VOCAB_SIZE
    )]
    ByteTokens {
        /// The model's vocabulary.
        vocab_size: usize,
    },
    /// A text that is longer than the model is made for.
    #[error(
        "the {tokens} tokens of prompt {} and {max_new_tokens} new ones exceed the model's {max_seq_len} positions", prompt + 1
    )]
    Positions {
        /// Which prompt, counted from 0.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// Tokens to add.
        max_new_tokens: usize,
        /// Positions that the model has.
        max_seq_len: usize,
    },
    /// The model says nothing about the next token.
    #[error(
        "the logits of the token after prompt {} are NaN or infinite: weights, or a precision that overflows, are to blame; `llama3 eval` \
         and another --precision tell which", prompt + 1
    )]
    Logits {
        /// Which prompt, counted from 0.
        prompt: usize,
    },
    /// A checkpoint folder without a tokenizer: its model knows other tokens than bytes.
    #[error("no tokenizer in {}: set data.tokenizer to the path of one", folder.display())]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
        /// What is missing.
        source: TokenizerError,
    },
    /// The data cannot be read, or is not what it was.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model is to be judged by what its run held out, and it held out nothing.
    #[error("nothing is held out (data.held_out_fraction = 0): give text to evaluate on with --data PATH")]
    NothingHeldOut,
    /// A model is to be judged, and there is no run that says by what.
    #[error("a Hugging Face checkpoint says nothing of data: give text to evaluate on with --data PATH")]
    NothingToEvaluate,
    /// Neither a run's folder nor a Hugging Face checkpoint's, as there is none.
    #[error("there is no folder {}", folder.display())]
    NoFolder {
        /// What was given.
        folder: PathBuf,
    },
    /// The folder of the frozen weights that a run trains beside is gone.
    #[error(
        "there is no folder {}, which has the weights that the run keeps frozen: its checkpoints hold only what it trains. It must be where it was (model.hf_path)", folder.display()
    )]
    NoBase {
        /// The folder.
        folder: PathBuf,
    },
    /// One of a run's checkpoints was asked for where there is only one model.
    #[error("{} is a Hugging Face checkpoint: {flag} is for the folder of a run", folder.display())]
    NotARun {
        /// The folder.
        folder: PathBuf,
        /// What was asked for.
        flag: String,
    },
    /// A conversation with a model whose tokenizer came without a template.
    #[error(
        "the model has no chat template: set data.chat_template to a Jinja file, or take a checkpoint that brings one"
    )]
    NoTemplate,
    /// A chat template that cannot be read, or does not take a conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A key of the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A run, or what is saved of it.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A tokenizer that cannot be read, or does not take a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A file that is not tokenized.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// Runs that are not drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// The machine has less memory than is certainly needed.
    #[error(
        "{what} takes at least {needed}, and this machine has {there}: take a smaller model, or share it among the ranks of several machines"
    )]
    Memory {
        /// What takes it.
        what: &'static str,
        /// How much.
        needed: String,
        /// What there is, swap included.
        there: String,
    },
    /// A training step takes more memory than the device has.
    #[error(
        "a training step takes about {needed}, and there is {there}: shorter sequences, a smaller training.batch_size with more \
         grad_accumulation, training.activation_checkpointing = \"full\", training.param_dtype = \"bf16\", optimizer.in_backward, \
         lora.base = \"fp8\" or more ranks take less; docs/fine-tune.md says how much"
    )]
    StepMemory {
        /// How much it takes.
        needed: String,
        /// What there is.
        there: String,
    },
    /// A model whose held-out loss is no number.
    #[error("the held-out loss is {loss}: a weight or an activation is not finite")]
    LossNotFinite {
        /// The loss.
        loss: f64,
    },
    /// The memory of a step was asked for, of a model that does not say what its layers keep.
    #[error("how much a training step of this model takes is unknown: it has no `ModelConfig::layer_bytes`")]
    NoEstimate,
    /// The device does not compute in this dtype.
    #[error("{device} does not compute in {dtype}: use precision f32, or fp8 with training.compute_dtype = \"f32\"")]
    UnsupportedDtype {
        /// The dtype asked for.
        dtype: String,
        /// The device.
        device: String,
    },
    /// The device asked for was not compiled in.
    #[error("this build has no {device} support: enable the `{feature}` feature")]
    FeatureOff {
        /// The device asked for.
        device: &'static str,
        /// The cargo feature.
        feature: &'static str,
    },
    /// The device is not there.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// FP8 could not be applied.
    #[error(transparent)]
    Float8(#[from] Float8Error),
    /// The output could not be written.
    #[error("cannot write the log")]
    Output(#[from] std::io::Error),
}

impl From<CheckpointError> for JobError {
    fn from(error: CheckpointError) -> Self {
        Self::Train(error.into())
    }
}
