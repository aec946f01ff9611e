//! [`DataError`]: errors in training data, with the wrong values and what to do about them.

use std::io;
use std::path::{Path, PathBuf};

use super::left_out::LeftOut;
use crate::{ChatError, TokenizerError};

/// Maximum bytes of a line, an object or a row, since it is held in memory.
pub(crate) const MAX_DOCUMENT: usize = 64 << 20;

/// Error in training data.
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
        /// Paths that were searched.
        paths: Vec<PathBuf>,
        /// Maximum number of bytes to take.
        max_bytes: Option<u64>,
        /// Skipped files.
        left: LeftOut,
    },
    /// A table, without a request to read it as text.
    #[error(
        "{} is a table, and tables are not read: make JSON Lines or Parquet of it, or set data.format = \"text\" to train on the \
         file as it is", path.display()
    )]
    Table {
        /// The file.
        path: PathBuf,
    },
    /// JSON that does not begin with a whole object, without a request to read it as text.
    #[error(
        "{} begins with no whole JSON object, in an array or on a line of its own: set data.format = \"text\" to train on the file as \
         it is",
        path.display()
    )]
    OtherJson {
        /// The file.
        path: PathBuf,
    },
    /// A compressed file.
    #[error("{} is compressed with {by}: decompress it first", path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// Program that decompresses it.
        by: &'static str,
    },
    /// The default training text is missing.
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
        /// Tokens in the split.
        tokens: u64,
        /// Sequences made from them.
        sequences: u64,
        /// Sequences per batch.
        batch_size: usize,
        /// Targets per sequence.
        seq_len: usize,
    },
    /// Sequences without a target that counts: beginnings of conversations fill them, before the
    /// assistant speaks.
    #[error(
        "no target of the {split} sequences counts for the loss: in sequences of {seq_len} tokens the assistant says nothing that \
         is learned. Raise training.seq_len, or give other data"
    )]
    NoTargets {
        /// `training` or `held-out`.
        split: &'static str,
        /// Targets per sequence.
        seq_len: usize,
    },
    /// A line of JSON that is not a document.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Problem with the line.
        #[source]
        problem: DocumentError,
    },
    /// A row of a Parquet file that is not a document.
    #[error("{}, row {row}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Row number, from 1.
        row: u64,
        /// Problem with the row.
        #[source]
        problem: DocumentError,
    },
    /// A text file that the tokenizer rejects.
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
        /// Problem with the file.
        reason: String,
    },
    /// A format whose cargo feature is off.
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
        /// Problem with the file.
        reason: String,
    },
    /// A token file in a source to tokenize.
    #[error("{} holds tokens already: give text to tokenize", path.display())]
    AlreadyTokens {
        /// The file.
        path: PathBuf,
    },
    /// A token file made with another tokenizer.
    #[error("{} was made with another tokenizer, or one whose files have changed since: use that one, or tokenize again", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// Any other error, with its context.
    #[error(transparent)]
    Other(#[from] anyhow::Error),
    /// A token outside the tokenizer's vocabulary.
    #[error(
        "{}: token {token} at place {place} (byte {byte}), but the tokenizer, or the model, has ids below {vocab_size}: \
         use those that this file was made for", path.display()
    )]
    Vocabulary {
        /// The token file.
        path: PathBuf,
        /// Id of the token.
        token: u32,
        /// Index of the token in the file.
        place: u64,
        /// Byte of the file at which the token begins.
        byte: u64,
        /// One more than the largest id.
        vocab_size: usize,
    },
    /// A source with a weight but without training tokens.
    #[error("nothing to train on in {}, which has a weight: give more text, or leave this source out", join(paths))]
    EmptySource {
        /// Paths of the source.
        paths: Vec<PathBuf>,
    },
    /// A weight that is not positive and finite.
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
    /// A held-out fraction outside its range.
    #[error("held_out_fraction = {fraction}: must be at least 0 and below 1")]
    HeldOutFraction {
        /// The value.
        fraction: f64,
    },
    /// A batch size or sequence length outside its range.
    #[error("{name} = {value}: must be {range}")]
    Shape {
        /// `batch_size` or `seq_len`.
        name: &'static str,
        /// Its value.
        value: usize,
        /// Valid values.
        range: &'static str,
    },
    /// A file was written to while it was read.
    #[error("{} changed while it was read: start again when nothing writes to it", path.display())]
    ChangedWhileRead {
        /// The file.
        path: PathBuf,
    },
    /// A file has changed since the checkpoint was written.
    #[error("{} changed since the checkpoint: {difference}", path.display())]
    ChangedFile {
        /// The file.
        path: PathBuf,
        /// Difference in size, time or content.
        difference: String,
    },
    /// The data has changed since the checkpoint was written, in another way than by one file.
    #[error("the data changed since the checkpoint: {difference}")]
    ChangedData {
        /// Difference found.
        difference: String,
    },
}

/// Why a line or a row is not a document.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// Not JSON.
    #[error("not valid JSON: {}", without_line(.0))]
    Json(serde_json::Error),
    /// Bytes that are not UTF-8.
    #[error("not valid UTF-8 at byte {at} of the line")]
    Utf8 {
        /// Byte in the line, from 0.
        at: usize,
    },
    /// Too long to be held in memory.
    #[error("longer than {limit} bytes")]
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// A JSON array that does not end.
    #[error("the file ends before the JSON array does")]
    Cut,
    /// A file that is not exactly one JSON array.
    #[error("expected one JSON array and nothing else")]
    NotAnArray,
    /// JSON that is not an object.
    #[error("expected an object, found {found}")]
    NotAnObject {
        /// The kind of value found.
        found: &'static str,
    },
    /// Neither text nor messages.
    #[error("neither `{field}` nor `messages`: there are {}; `field` names the one that holds the text", list(found))]
    Missing {
        /// Field that was to hold the text.
        field: String,
        /// Fields that were found.
        found: Vec<String>,
    },
    /// A field of another type than text or messages.
    #[error("`{field}` is {found}, expected {expected}")]
    Type {
        /// The field.
        field: String,
        /// Type that was found.
        found: &'static str,
        /// Type that is needed.
        expected: &'static str,
    },
    /// A message without a role.
    #[error("message {index} has no `role`: there are {}", list(found))]
    NoRole {
        /// Index of the message, from 0.
        index: usize,
        /// Keys that were found.
        found: Vec<String>,
    },
    /// Text that was expected to be JSON.
    #[error("`{field}` is text that is no JSON: {}", without_line(source))]
    NotJson {
        /// `tools`, an element of it, or `chat_template_kwargs`.
        field: String,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// Messages without a chat template.
    #[error("`messages` need a chat template: use a tokenizer that comes with one")]
    NoTemplate,
    /// Messages that the chat template rejects.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// Text that the tokenizer rejects.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Argument of `map_err` for errors of reading `path`.
pub(super) fn cannot_read(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
    |source| DataError::Io { path: path.to_path_buf(), source }
}

/// Argument of `map_err` for errors of writing `path`.
pub(super) fn cannot_write(path: &Path) -> impl Fn(io::Error) -> DataError + '_ {
    |source| DataError::Cache { path: path.to_path_buf(), source }
}

/// The parser's message without its line. The parser may have seen only one line of the file, whose
/// number the error names.
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
