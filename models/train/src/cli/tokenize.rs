//! `tokenize`: lines of JSON to lines of JSON, or files to train on to a token file.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::data::{TokenizedSource, tokenize_source};
use crate::{ChatTemplate, DataSource, JobError, ProgressLine, SpecialTokens, Tokenizer};

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
    /// Make a token file of what `train --data` would read of these files and folders, in this new folder, which `--data` takes in their
    /// place.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["special", "decode"])]
    pub to: Option<PathBuf>,
    /// The field or column that holds text.
    #[arg(long, value_name = "NAME", requires = "to", default_value = "text")]
    pub field: String,
    /// Jinja file that makes text of messages, if not the one in the tokenizer's folder.
    #[arg(long, value_name = "FILE", requires = "to")]
    pub chat_template: Option<PathBuf>,
    /// Lines of JSON; with --to, files and folders to train on.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

impl TokenizeArgs {
    /// Writes a line to `out` for each line of the files, or one about the token file.
    ///
    /// # Errors
    /// [`JobError::Tokenizer`], [`JobError::Tokenize`], [`JobError::Chat`], [`JobError::Data`].
    pub fn run(&self, out: &mut dyn Write) -> Result<(), JobError> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        if let Some(to) = &self.to {
            return self.write_tokens(&tokenizer, to, out);
        }
        let special = if self.special { SpecialTokens::InText } else { SpecialTokens::AreText };
        for file in &self.files {
            match self.decode {
                true => tokenizer.decode_lines(file, out)?,
                false => tokenizer.encode_lines(file, special, out)?,
            }
        }
        Ok(())
    }

    fn write_tokens(&self, tokenizer: &Tokenizer, to: &Path, out: &mut dyn Write) -> Result<(), JobError> {
        let template = match &self.chat_template {
            Some(path) => Some(ChatTemplate::from_file(path)?),
            None => ChatTemplate::of_tokenizer(&self.tokenizer)?,
        };
        let source = DataSource { field: self.field.clone(), ..DataSource::new(&self.files) };
        let tokenized = ProgressLine::new().track("tokenized", out, |progress| {
            tokenize_source(&source, tokenizer, template.as_ref(), to, progress)
        })??;
        let TokenizedSource { files, left_out, documents, tokens } = tokenized;
        let left_out = if left_out.is_empty() { String::new() } else { format!("  left out: {left_out}") };
        Ok(writeln!(out, "{}: {files} files, {documents} documents, {tokens} tokens{left_out}", to.display())?)
    }
}
