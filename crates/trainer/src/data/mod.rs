//! Training data in two stages: files to token files, and token files to sequences. Texts and
//! tokens are in memory a bounded part at a time; of each document 16 bytes stay.
//!
//! ```text
//! source, scan                        which files, and how much of each
//! readers, parquet, chunk_text        what they hold
//! encode, tokenize, token_file        its tokens, in a token file
//! ---------------------------------------------------------------------------------
//! token_file, split_stream            what is trained on, and what is held out
//! packing, order, sequences, position sequences, in which order, from where on
//! ---------------------------------------------------------------------------------
//! cache, dataset                      both
//! ```
//!
//! [`tokenize_source`] runs only the first stage. [`Dataset::open`] runs it into a cache on disk
//! for all sources that are neither token files nor cached. [`Dataset::train`] gives endless
//! [`TrainSequences`] in an order that depends only on seed and epoch. They resume from the
//! [`Position`] in a checkpoint. [`Dataset::held_out`] gives the validation sequences.

mod cache;
mod chunk_text;
mod dataset;
mod encode;
mod order;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod position;
mod readers;
mod scan;
mod sequences;
mod source;
mod split_stream;
mod token_file;
mod tokenize;

use std::path::{Path, PathBuf};

pub use cache::KeptTokens;
pub use dataset::{Dataset, DatasetSize, SequenceShape, Validation};
pub use packing::{Packing, Sequence};
pub use position::{DataPlace, Position, SourceState, StreamPosition};
pub(crate) use readers::JsonReader;
pub use scan::FileState;
pub use sequences::{EpochSize, TrainSequences};
pub use source::{DataSource, Format, LeftOut};
pub use tokenize::{TokenizedDocument, TokenizedSource, check_source, first_documents, tokenize_source};

/// Maximum bytes of a line, an object or a row, since it is held in memory.
const MAX_DOCUMENT: usize = 64 << 20;

/// Field that holds a conversation.
const MESSAGES: &str = "messages";
/// Field that holds the tools of a conversation.
const TOOLS: &str = "tools";
/// Field with variables of the chat template. `enable_thinking` may also be a separate field.
const KWARGS: &str = "chat_template_kwargs";
const THINKING: &str = "enable_thinking";

/// Context of an error of reading `path`.
fn cannot_read(path: &Path) -> impl Fn() -> String + '_ {
    || format!("cannot read {}", path.display())
}

/// Context of an error of writing `path`.
fn cannot_write(path: &Path) -> impl Fn() -> String + '_ {
    || format!("cannot write {}: free space there, or choose another cache folder", path.display())
}

fn join(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Error of training without a target that counts. `split` is `training` or `validation`.
pub(crate) fn no_targets(split: &str, seq_len: usize) -> anyhow::Error {
    anyhow::anyhow!(
        "no target of the {split} sequences counts for the loss: in sequences of {seq_len} tokens the assistant says nothing that is \
         learned. Raise training.seq_len, or give other data"
    )
}

/// Error of a document or a table without the field `field`.
fn missing<K: AsRef<str>>(field: &str, found: impl Iterator<Item = K>) -> anyhow::Error {
    anyhow::anyhow!(
        "neither `{field}` nor `messages`: there are {}; `data.field` names the one with the text",
        names(found)
    )
}

fn names<K: AsRef<str>>(keys: impl Iterator<Item = K>) -> String {
    let names: Vec<_> = keys.map(|key| format!("`{}`", key.as_ref())).collect();
    if names.is_empty() { "no fields".into() } else { names.join(", ") }
}
