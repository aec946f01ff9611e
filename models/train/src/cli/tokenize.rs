//! `tokenize`: lines of JSON to lines of JSON.

use std::io::Write;
use std::path::PathBuf;

use clap::Parser;

use crate::{JobError, SpecialTokens, Tokenizer};

/// What to tokenize, and how.
#[derive(Clone, Debug, Parser)]
pub struct TokenizeArgs {
    /// bytes, a checkpoint folder, a tokenizer.json or a tokenizer.model.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: String,
    /// Take special tokens in the text for what they are.
    #[arg(long, conflicts_with = "decode")]
    pub special: bool,
    /// The way back: a JSON string for each array of ids.
    #[arg(long)]
    pub decode: bool,
    /// Lines of JSON.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

impl TokenizeArgs {
    /// Writes a line to `out` for each line of the file.
    ///
    /// # Errors
    /// [`JobError::Tokenizer`], [`JobError::Tokenize`].
    pub fn run(&self, out: &mut dyn Write) -> Result<(), JobError> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        let special = if self.special { SpecialTokens::InText } else { SpecialTokens::AreText };
        match self.decode {
            true => tokenizer.decode_lines(&self.file, out)?,
            false => tokenizer.encode_lines(&self.file, special, out)?,
        }
        Ok(())
    }
}
