//! Training of language models, independent of the model.
//!
//! [`Job`] trains, resumes, evaluates, generates and exports a [`TrainableModel`]; [`cli`] is its
//! command line. Its parts can be used separately:
//!
//! - [`Tokenizer`] maps text to token ids and back: bytes, Hugging Face's `tokenizer.json`, or
//!   Llama 3's published ranks.
//! - [`Steps`] runs optimizer steps of any [`LanguageModel`], [`Run`] runs a whole training, and
//!   [`checkpoint`] saves it so that it resumes bit for bit.
//! - [`TensorFiles`] and [`write_shards`](tensor_files::write_shards) read and write safetensors.
//! - [`ChatTemplate`] turns a conversation into token ids and marks the ones of the assistant.
//! - [`Dataset`] turns files into training sequences, with a bounded part in memory.

/// Methods of a visitor or mapper that keep the path of the current module in its field `path`.
macro_rules! tracks_path {
    () => {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
    };
}

mod activation_checkpoint;
mod atomic;
pub mod backends;
pub mod batches;
mod chat;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
mod digest;
mod error;
mod escape;
mod file_lock;
pub mod files;
mod folder;
mod freeze;
pub mod grads;
pub mod hf;
mod hub;
pub mod job;
mod lines;
mod lora_model;
pub mod metrics;
mod model;
mod optimizer;
mod panics;
mod parameter_step;
pub mod plot;
mod pool;
pub mod profile;
mod progress;
mod ranks;
mod report;
pub mod rng;
pub mod rounding;
pub mod run;
pub mod schedule;
mod signals;
mod steps;
mod storage;
pub mod tensor_files;
mod tokenizer;

pub use chat::{ChatTemplate, Conversation, Message};
pub use data::{
    DataSource, Dataset, DatasetSize, Format, Packing, Position, Sequence, SequenceShape, TrainSequences, Validation,
};
pub use digest::digest_of_file;
pub use error::{Divergence, RunError};
pub use escape::{COLOUR, EscapedWriter, escaped};
pub use folder::create_folder;
pub use hf::ExportOptions;
pub use job::Job;
pub use job::MemoryEstimate;
pub use lora_model::Adapted;
pub use model::{
    BatchShape, Batching, CacheDtype, CacheOptions, CausalLm, CausalLmExt, Filters, GenerateOptions, KeyValueCache,
    LanguageModel, LayerBytes, MAX_TENSOR_BITS, ModelConfig, ModelSection, ModelSize, Sampling, Segments,
    TrainableModel, elements,
};
pub use optimizer::{AdamWStates, ModelSlot};
pub use pool::use_current_thread;
pub use progress::{Log, Progress, ProgressLine};
pub use ranks::Ranks;
pub use report::{check_report_path, report_of, write_report};
pub use run::Run;
pub use signals::{Signals, file_limits_are_errors};
pub use steps::{Step, StepConfig, Steps};
pub use tensor_files::TensorFiles;
pub use tokenizer::{ByteTokenizer, SpecialTokens, TextStream, Tokenizer};
