//! Everything that can be wrong with a tokenizer's files, or with ids.

use std::path::{Path, PathBuf};

/// What is wrong with a tokenizer's files, or with ids.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
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
    /// A `tokenizer.json` that is none, or of a kind that is not known.
    #[error("{} is no tokenizer of Hugging Face's format: {reason}", path.display())]
    HuggingFace {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        reason: String,
    },
    /// A `tokenizer.json` that asks for more than a file of a stranger gets.
    #[error("{} is refused: {reason}", path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// What it asks for.
        reason: String,
    },
    /// Something else than a tokenizer of a format that is read.
    #[error("{}: {what}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What it is, and what to do.
        what: &'static str,
    },
    /// A line of a file of ranks that is not `BASE64 RANK`, or says what another one says.
    #[error("{}:{line}: {reason}", path.display())]
    Ranks {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A file of ranks that is not Llama 3's: its special tokens and its way to split text are not in the file.
    #[error("{} has {ranks} ranks, Llama 3's tokenizer.model has {expected}: use the checkpoint's tokenizer.json", path.display())]
    UnknownRanks {
        /// The file.
        path: PathBuf,
        /// How many it has.
        ranks: usize,
        /// How many Llama 3's has.
        expected: usize,
    },
    /// A file that says which tokens begin and end a text does not parse.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// Such a file names a token that the tokenizer does not have, or no token.
    #[error("{}: {key} = {value} is not a token of this tokenizer", path.display())]
    NotAToken {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
    },
    /// A file says that a token has an id, and the tokenizer gives it another one or does not have it.
    #[error("{}: {token:?} has the id {id}, but {problem}", path.display())]
    AddedToken {
        /// The file.
        path: Box<Path>,
        /// The token's text.
        token: Box<str>,
        /// The id that the file says.
        id: u32,
        /// The tokenizer's token of that id, and its id of that token.
        problem: Box<str>,
    },
    /// A text has a token that the model does not have.
    #[error("token {id} ({token:?}) in {text:?} is none of the model, whose vocabulary has {vocab_size}")]
    Beyond {
        /// The token.
        id: u32,
        /// Its text.
        token: Box<str>,
        /// The text around it.
        text: Box<str>,
        /// Tokens of the model.
        vocab_size: usize,
    },
    /// The model does not have the token that begins or ends each text.
    #[error(
        "{}: {key} of each text is token {id} ({token:?}), which is none of the model, whose vocabulary has {vocab_size}",
        path.display()
    )]
    BeyondMark {
        /// The tokenizer's file, or `bytes`.
        path: Box<Path>,
        /// `bos_token` or `eos_token`.
        key: &'static str,
        /// The token.
        id: u32,
        /// Its text.
        token: Box<str>,
        /// Tokens of the model.
        vocab_size: u32,
    },
    /// Text that the tokenizer does not take.
    #[error("cannot tokenize {text:?}: {reason}")]
    Encode {
        /// The beginning of the text.
        text: String,
        /// The tokenizer's reason.
        reason: String,
    },
    /// An id that is no token's.
    #[error("{id} is no token: the tokenizer has ids below {vocab_size}")]
    UnknownId {
        /// The id.
        id: u32,
        /// One more than the largest id.
        vocab_size: usize,
    },
    /// Ids that the tokenizer's decoder does not take.
    #[error("cannot decode: {reason}")]
    Decode {
        /// The tokenizer's reason.
        reason: String,
    },
}
