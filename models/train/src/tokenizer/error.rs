//! Errors of tokenizer files and of ids.

use std::path::{Path, PathBuf};

/// Error of tokenizer files or of ids.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A folder without a tokenizer.
    #[error("{} has neither tokenizer.json nor tokenizer.model", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// A `tokenizer.json` that is not valid, or of an unknown kind.
    #[error("{} is no tokenizer of Hugging Face's format: {reason}", path.display())]
    HuggingFace {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        reason: String,
    },
    /// A `tokenizer.json` that exceeds a limit for untrusted files.
    #[error("{} is refused: {reason}", path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// Limit that it exceeds.
        reason: String,
    },
    /// A file that is not a tokenizer of a supported format.
    #[error("{}: {what}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// Kind of the file, and what to do.
        what: &'static str,
    },
    /// A line of a file of ranks that is not `BASE64 RANK`, or that contradicts other lines.
    #[error("{}:{line}: {reason}", path.display())]
    Ranks {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Problem with the line.
        reason: String,
    },
    /// A file of ranks that is not Llama 3's. Its special tokens and split expression are not in
    /// the file.
    #[error("{} has {ranks} ranks, Llama 3's tokenizer.model has {expected}: use the checkpoint's tokenizer.json", path.display())]
    UnknownRanks {
        /// The file.
        path: PathBuf,
        /// Number of ranks in the file.
        ranks: usize,
        /// Number of ranks of Llama 3.
        expected: usize,
    },
    /// A file with the tokens that begin and end a text does not parse.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A file next to the tokenizer names a token that the tokenizer lacks, or has a value that is
    /// not a token.
    #[error("{}: {key} = {value} is not a token of this tokenizer", path.display())]
    NotAToken {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
    },
    /// A file gives a token an id that differs from the tokenizer's, or the tokenizer lacks the
    /// token.
    #[error("{}: {token:?} has the id {id}, but {problem}", path.display())]
    AddedToken {
        /// The file.
        path: Box<Path>,
        /// Text of the token.
        token: Box<str>,
        /// Id in the file.
        id: u32,
        /// The tokenizer's token with that id, and its id of that token.
        problem: Box<str>,
    },
    /// A text has a token outside the model's vocabulary.
    #[error("token {id} ({token:?}) in {text:?} is none of the model, whose vocabulary has {vocab_size}")]
    Beyond {
        /// Id of the token.
        id: u32,
        /// Text of the token.
        token: Box<str>,
        /// Text around the token.
        text: Box<str>,
        /// Vocabulary size of the model.
        vocab_size: usize,
    },
    /// The token that begins or ends each text is outside the model's vocabulary.
    #[error(
        "{}: {key} of each text is token {id} ({token:?}), which is none of the model, whose vocabulary has {vocab_size}",
        path.display()
    )]
    BeyondMark {
        /// The tokenizer's file, or `bytes`.
        path: Box<Path>,
        /// `bos_token` or `eos_token`.
        key: &'static str,
        /// Id of the token.
        id: u32,
        /// Text of the token.
        token: Box<str>,
        /// Vocabulary size of the model.
        vocab_size: u32,
    },
    /// Text that the tokenizer rejects.
    #[error("cannot tokenize {text:?}: {reason}")]
    Encode {
        /// Beginning of the text.
        text: String,
        /// The tokenizer's reason.
        reason: String,
    },
    /// An id outside the tokenizer's vocabulary.
    #[error("{id} is no token: the tokenizer has ids below {vocab_size}")]
    UnknownId {
        /// The id.
        id: u32,
        /// One more than the largest id.
        vocab_size: usize,
    },
    /// Ids that the tokenizer's decoder rejects.
    #[error("cannot decode: {reason}")]
    Decode {
        /// The tokenizer's reason.
        reason: String,
    },
}
