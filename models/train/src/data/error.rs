//! [`DataError`]: everything that can be wrong with training data, with the values that are wrong and what to do.

use std::io;
use std::path::{Path, PathBuf};

use super::left_out::LeftOut;
use crate::{ChatError, FolderError, TokenizerError};

/// Bytes of a line, an object or a row at most: it is held in memory.
pub(crate) const MAX_DOCUMENT: usize = 64 << 20;

/// What is wrong with training data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The cache cannot be written.
    #[error("cannot write {}: free space there, or choose another cache folder", path.display())]
    Cache {
        /// The file or folder of the cache.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// No source was given.
    #[error("no data: give files or folders to train on")]
    NoSource,
    /// The given paths hold no text, or none within the limit.
    #[error(
        "no text in {}{}{}{}", join(paths), max_bytes.map(|bytes| format!(" within max_bytes = {bytes}")).unwrap_or_default(),
        if left.is_empty() { String::new() } else { format!(" (left out: {left})") },
        if left.has_other_formats() { ": data.field names the field with the text, data.format = \"text\" takes files as they are" }
        else { "" }
    )]
    NoText {
        /// Where it was looked for.
        paths: Vec<PathBuf>,
        /// Bytes to take at most.
        max_bytes: Option<u64>,
        /// What was passed over.
        left: LeftOut,
    },
    /// A table of text, which was not said to be read as text.
    #[error(
        "{} is a table, and tables are not read: make JSON Lines or Parquet of it, or set data.format = \"text\" to train on the \
         file as it is", path.display()
    )]
    Table {
        /// The file.
        path: PathBuf,
    },
    /// JSON of which nobody has said how it is to be read.
    #[error(
        "{} begins with no whole JSON object, in an array or on a line of its own: set data.format = \"text\" to train on the file as \
         it is",
        path.display()
    )]
    OtherJson {
        /// The file.
        path: PathBuf,
    },
    /// A file that has to be unpacked first.
    #[error("{} is compressed with {by}: decompress it first", path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// What decompresses it.
        by: &'static str,
    },
    /// The text that is trained on by default is not there.
    #[error("no Rust sources in the local Cargo registry: give text to train on with --data PATH")]
    NoDefaultText(#[source] Box<DataError>),
    /// Too little text for a batch.
    #[error(
        "too little text: the {split} split has {tokens} tokens, which make {sequences} sequences of {seq_len} targets; \
         one batch needs {batch_size}: give more text, raise max_bytes or make batches or sequences smaller; \
         held_out_fraction moves text between the splits, and with 0 none is held out"
    )]
    TooFewTokens {
        /// `training` or `held-out`.
        split: &'static str,
        /// Tokens there are.
        tokens: u64,
        /// Sequences that they make.
        sequences: u64,
        /// Sequences in a batch.
        batch_size: usize,
        /// Targets in a sequence.
        seq_len: usize,
    },
    /// Sequences of which no target counts: conversations whose beginnings, in which the assistant has not spoken yet, fill them.
    #[error(
        "no target of the {split} sequences counts for the loss: in sequences of {seq_len} tokens the assistant says nothing that \
         is learned. Raise training.seq_len, or give other data"
    )]
    NoTargets {
        /// `training` or `held-out`.
        split: &'static str,
        /// Targets in a sequence.
        seq_len: usize,
    },
    /// A line of JSON that is no document.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: u64,
        /// What is wrong with it.
        #[source]
        problem: DocumentError,
    },
    /// A row of a Parquet file that is no document.
    #[error("{}, row {row}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// From 1.
        row: u64,
        /// What is wrong with it.
        #[source]
        problem: DocumentError,
    },
    /// A text file that the tokenizer does not take.
    #[error("{}: {source}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The tokenizer's reason.
        source: TokenizerError,
    },
    /// A Parquet file that cannot be read.
    #[error("{} is no Parquet file that can be read: {reason}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A format that was not compiled in.
    #[error("{}: this build does not read {format} files: build it with the cargo feature `{feature}`", path.display())]
    FeatureOff {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: &'static str,
        /// The cargo feature.
        feature: &'static str,
    },
    /// A token file whose header or size is wrong.
    #[error("{} is no token file: {reason}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A token file that was to be tokenized.
    #[error("{} holds tokens already: give text to tokenize", path.display())]
    AlreadyTokens {
        /// The file.
        path: PathBuf,
    },
    /// A token file that was made with another tokenizer.
    #[error("{} was made with another tokenizer, or one whose files have changed since: use that one, or tokenize again", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// The folder of a token file could not be made.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A token that the tokenizer does not have.
    #[error(
        "{}: token {token} at place {place} (byte {byte}), but the tokenizer, or the model, has ids below {vocab_size}: \
         use those that this file was made for", path.display()
    )]
    Vocabulary {
        /// The token file.
        path: PathBuf,
        /// The token.
        token: u32,
        /// How many tokens come before it in the file.
        place: u64,
        /// Where in the file it begins.
        byte: u64,
        /// One more than the largest id.
        vocab_size: usize,
    },
    /// A source with a weight, but without a token to train on.
    #[error("nothing to train on in {}, which has a weight: give more text, or leave this source out", join(paths))]
    EmptySource {
        /// Paths of the source.
        paths: Vec<PathBuf>,
    },
    /// Weights that cannot be used.
    #[error("weight = {weight} of {}: weights must be positive and finite", join(paths))]
    Weight {
        /// Paths of the source.
        paths: Vec<PathBuf>,
        /// The weight.
        weight: f64,
    },
    /// Some sources have weights, others none.
    #[error("no weight of {}, where other sources have one: give all sources a weight or none", join(paths))]
    MissingWeight {
        /// Paths of the first source without a weight.
        paths: Vec<PathBuf>,
    },
    /// A share to hold out that is none.
    #[error("held_out_fraction = {fraction}: must be at least 0 and below 1")]
    HeldOutFraction {
        /// The value.
        fraction: f64,
    },
    /// A batch or a sequence without a token.
    #[error("{name} = {value}: must be {range}")]
    Shape {
        /// `batch_size` or `seq_len`.
        name: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        range: &'static str,
    },
    /// A file was written to while it was read.
    #[error("{} changed while it was read: start again when nothing writes to it", path.display())]
    ChangedWhileRead {
        /// The file.
        path: PathBuf,
    },
    /// A file is not what it was when the checkpoint was written.
    #[error("{} changed since the checkpoint: {difference}", path.display())]
    ChangedFile {
        /// The file.
        path: PathBuf,
        /// What differs: size, time or content.
        difference: String,
    },
    /// The data is not what it was when the checkpoint was written, in another way than by one file.
    #[error("the data changed since the checkpoint: {difference}")]
    ChangedData {
        /// What differs.
        difference: String,
    },
}

/// Why a line or a row is no document.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// Not JSON.
    #[error("not valid JSON: {}", without_line(.0))]
    Json(serde_json::Error),
    /// Bytes that are no text.
    #[error("not valid UTF-8 at byte {at} of the line")]
    Utf8 {
        /// From 0.
        at: usize,
    },
    /// Too long to be held in memory.
    #[error("longer than {limit} bytes")]
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// An array that does not end.
    #[error("the file ends before the JSON array does")]
    Cut,
    /// A file that is to be an array, and is not, or not only.
    #[error("expected one JSON array and nothing else")]
    NotAnArray,
    /// JSON that is no object.
    #[error("expected an object, found {found}")]
    NotAnObject {
        /// The kind of value found.
        found: &'static str,
    },
    /// Neither text nor messages.
    #[error("neither `{field}` nor `messages`: there are {}; `field` names the one that holds the text", list(found))]
    Missing {
        /// The field that was to hold text.
        field: String,
        /// The fields there are.
        found: Vec<String>,
    },
    /// A field of another type than text or messages.
    #[error("`{field}` is {found}, expected {expected}")]
    Type {
        /// The field.
        field: String,
        /// The kind of value found.
        found: &'static str,
        /// The kind that is needed.
        expected: &'static str,
    },
    /// A message of which nobody knows whose it is.
    #[error("message {index} has no `role`: there are {}", list(found))]
    NoRole {
        /// The message, from 0.
        index: usize,
        /// The keys there are.
        found: Vec<String>,
    },
    /// A text that was to be JSON.
    #[error("`{field}` is text that is no JSON: {}", without_line(source))]
    NotJson {
        /// `tools`, the place of one of them, or `chat_template_kwargs`.
        field: String,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// Messages without a template.
    #[error("`messages` need a chat template: use a tokenizer that comes with one")]
    NoTemplate,
    /// Messages that the template does not take.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// Text that the tokenizer does not take.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// For `map_err` of what reads `path`.
pub(super) fn cannot_read(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
    |source| DataError::Io { path: path.to_path_buf(), source }
}

/// For `map_err` of what writes `path`.
pub(super) fn cannot_write(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
    |source| DataError::Cache { path: path.to_path_buf(), source }
}

/// What is named with the error is the line of the file, of which the parser may have been given one.
fn without_line(error: &serde_json::Error) -> String {
    error.to_string().replace(&format!(" at line {} column ", error.line()), " at column ")
}

fn join(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|p| p.display().to_string()).collect();
    names.join(", ")
}

fn list(fields: &[String]) -> String {
    if fields.is_empty() { "no fields".into() } else { fields.join(", ") }
}
