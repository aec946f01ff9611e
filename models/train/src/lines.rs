//! Conversion of JSON lines between texts and token ids.

use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::data::{MAX_DOCUMENT, next_line};
use crate::files;
use crate::{SpecialTokens, Tokenizer, TokenizerError};

/// Error of tokenizing lines.
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
    /// Invalid line.
    #[error("{}:{line}: expected {expected}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// Expected content of each line.
        expected: &'static str,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A line that the tokenizer refuses.
    #[error("{}:{line}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// The tokenizer's reason.
        source: TokenizerError,
    },
    /// The result could not be written.
    #[error("cannot write the result")]
    Output(#[from] std::io::Error),
}

impl Tokenizer {
    /// Writes an array of token ids, without BOS and EOS, for each line of `file`, a JSON string.
    /// Empty lines are skipped.
    ///
    /// # Errors
    /// Any [`TokenizeError`]; earlier lines are already written.
    pub fn encode_lines(&self, file: &Path, special: SpecialTokens, out: &mut dyn Write) -> Result<(), TokenizeError> {
        each_line(file, "a JSON string", out, |text: String| self.encode(&text, special))
    }

    /// Inverse of [`encode_lines`](Self::encode_lines).
    ///
    /// # Errors
    /// Any [`TokenizeError`]; earlier lines are already written.
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
