//! `tokenize`: converts lines of JSON, writes training data as a token file, or prints it.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::{ArgGroup, Parser};
use serde_json::{Map, Value};

use crate::data::{TokenizedDocument, TokenizedSource, first_documents, tokenize_source};
use crate::metrics::counted;
use crate::{COLOUR, ChatTemplate, DataSource, ProgressLine, SpecialTokens, Tokenizer, escaped};

/// Input and options of the tokenizer.
#[derive(Clone, Debug, Parser)]
#[command(group = ArgGroup::new("data").args(["output", "show"]))]
pub struct TokenizeArgs {
    /// bytes, a checkpoint folder, a tokenizer.json or a tokenizer.model.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: String,
    /// Parse special tokens in the text as such.
    #[arg(long, conflicts_with = "decode")]
    pub special: bool,
    /// Decode: print a JSON string for each array of ids.
    #[arg(long)]
    pub decode: bool,
    /// Write the tokens that `train --data` would read from these files and folders to this new
    /// folder. `--data` accepts it instead of them.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["special", "decode"])]
    pub output: Option<PathBuf>,
    /// Print the first N documents of these files and folders, 3 by default, as `train --data`
    /// reads them.
    ///
    /// Targets are green, or between marks if the output is not a terminal: ⟦target⟧.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    #[arg(conflicts_with_all = ["special", "decode"])]
    pub show: Option<usize>,
    /// Print targets in green even if the output is not a terminal.
    #[arg(long, requires = "show")]
    pub color: bool,
    /// Field or column that holds the text.
    #[arg(long, value_name = "NAME", requires = "data", default_value = "text")]
    pub field: String,
    /// Jinja chat template that renders messages as text, instead of the one in the tokenizer's
    /// folder.
    #[arg(long, value_name = "FILE", requires = "data")]
    pub chat_template: Option<PathBuf>,
    /// Variables of the template as a JSON object, as data.chat_template_kwargs.
    #[arg(long, value_name = "JSON", requires = "data", value_parser = |text: &str| serde_json::from_str::<Map<String, Value>>(text))]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Lines of JSON; with --output and --show, files and folders of training data.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

impl TokenizeArgs {
    /// Writes a line to `out` for each line of the files, or one line about the token file.
    ///
    /// # Errors
    /// A tokenizer, template, line or document that cannot be read or is refused.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        if self.output.is_some() || self.show.is_some() {
            return self.read_data(&tokenizer, out);
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

    fn read_data(&self, tokenizer: &Tokenizer, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut template = match &self.chat_template {
            Some(path) => Some(ChatTemplate::from_file(path)?),
            None => ChatTemplate::of_tokenizer(&self.tokenizer)?,
        };
        if let Some(kwargs) = &self.chat_template_kwargs {
            template = template.map(|template| template.with_kwargs(kwargs)).transpose()?;
        }
        let source = DataSource { field: self.field.clone(), ..DataSource::new(&self.files) };
        let Some(to) = &self.output else {
            let documents = first_documents(&source, tokenizer, template.as_ref(), self.show.unwrap_or_default())?;
            return self.show(tokenizer, &documents, out);
        };
        let tokenized = ProgressLine::new().track("tokenized", out, |progress| {
            tokenize_source(&source, tokenizer, template.as_ref(), to, progress)
        })??;
        let TokenizedSource { files, left_out, documents, tokens } = tokenized;
        let left_out = if left_out.count() == 0 { String::new() } else { format!("  left out: {left_out}") };
        let counts = [(files as u64, "file"), (documents, "document"), (tokens, "token")];
        let counts = counts.map(|(count, one)| counted(count, one)).join(", ");
        Ok(writeln!(out, "{}: {counts}{left_out}", to.display())?)
    }

    fn show(&self, tokenizer: &Tokenizer, documents: &[TokenizedDocument], out: &mut dyn Write) -> anyhow::Result<()> {
        let marks = if self.color || std::io::stdout().is_terminal() { COLOUR } else { ["⟦", "⟧"] };
        for (number, TokenizedDocument { ids, is_target }) in documents.iter().enumerate() {
            let targets = is_target.iter().filter(|is| **is).count() as u64;
            let counts = [counted(ids.len() as u64, "token"), counted(targets, "target")].join(", ");
            writeln!(out, "--- {}: {counts}", number + 1)?;
            let tokens: Vec<_> = ids.iter().zip(is_target).collect();
            for run in tokens.chunk_by(|a, b| a.1 == b.1) {
                let text = tokenizer.decode(&run.iter().map(|(id, _)| **id).collect::<Vec<_>>())?;
                let [begin, end] = if *run[0].1 { marks } else { [""; 2] };
                [begin, &escaped(&text), end].iter().try_for_each(|text| out.write_all(text.as_bytes()))?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}
