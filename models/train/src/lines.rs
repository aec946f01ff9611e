//! Lines of JSON to lines of JSON: texts to ids, and ids to texts.

use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::data::{MAX_DOCUMENT, next_line};
use crate::files;
use crate::{SpecialTokens, Tokenizer, TokenizerError};

/// Why lines could not be tokenized.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A line that is not what it should be.
    #[error("{}:{line}: expected {expected}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What each line should be.
        expected: &'static str,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A line that the tokenizer does not take.
    #[error("{}:{line}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The tokenizer's reason.
        source: TokenizerError,
    },
    /// The result could not be written.
    #[error("cannot write the result")]
    Output(#[from] std::io::Error),
}

impl Tokenizer {
    /// Writes, for each JSON string of `file`, one a line, an array of its ids, without BOS and EOS. Empty lines are passed over.
    ///
    /// # Errors
    /// Any [`TokenizeError`]; the lines before have been written.
    pub fn encode_lines(&self, file: &Path, special: SpecialTokens, out: &mut dyn Write) -> Result<(), TokenizeError> {
        each_line(file, "a JSON string", out, |text: String| self.encode(&text, special))
    }

    /// The way back from [`encode_lines`](Self::encode_lines).
    ///
    /// # Errors
    /// Any [`TokenizeError`]; the lines before have been written.
    pub fn decode_lines(&self, file: &Path, out: &mut dyn Write) -> Result<(), TokenizeError> {
        each_line(file, "a JSON array of ids", out, |ids: Vec<u32>| self.decode(&ids))
    }
}

fn each_line<T: DeserializeOwned, U: serde::Serialize>(
    path: &Path,
    expected: &'static str,
    out: &mut dyn Write,
    convert: impl Fn(T) -> Result<U, TokenizerError>,
) -> Result<(), TokenizeError> {
    let io = |source| TokenizeError::Io { path: path.into(), source };
    let mut file = BufReader::new(files::open(path).map_err(io)?);
    for line in 1.. {
        let Some(text) = next_line(&mut file).map_err(io)? else { break };
        if text.len() > MAX_DOCUMENT {
            return Err(io(std::io::Error::other(format!("line {line} is longer than {MAX_DOCUMENT} bytes"))));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let value = serde_json::from_slice(&text).map_err(|source| TokenizeError::Line {
            path: path.into(),
            line,
            expected,
            source,
        })?;
        let converted =
            convert(value).map_err(|source| TokenizeError::Tokenizer { path: path.into(), line, source })?;
        serde_json::to_writer(&mut *out, &converted).map_err(std::io::Error::from)?;
        writeln!(out)?;
    }
    Ok(out.flush()?)
}
