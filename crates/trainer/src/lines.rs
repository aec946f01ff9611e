//! Conversion of JSON lines between texts and token ids.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde::de::DeserializeOwned;

use crate::data::{Format, JsonReader};
use crate::{SpecialTokens, Tokenizer};

impl Tokenizer {
    /// Writes an array of token ids, without BOS and EOS, for each line of `file`, a JSON string.
    /// Empty lines are skipped.
    ///
    /// # Errors
    /// A line that is no JSON string or that the tokenizer refuses; earlier lines are already
    /// written.
    pub fn encode_lines(&self, file: &Path, special: SpecialTokens, out: &mut dyn Write) -> Result<()> {
        each_line(file, "a JSON string", out, |text: String| self.encode(&text, special))
    }

    /// Inverse of [`encode_lines`](Self::encode_lines).
    ///
    /// # Errors
    /// A line that is no array of ids; earlier lines are already written.
    pub fn decode_lines(&self, file: &Path, out: &mut dyn Write) -> Result<()> {
        each_line(file, "a JSON array of ids", out, |ids: Vec<u32>| self.decode(&ids))
    }
}

fn each_line<T: DeserializeOwned, U: serde::Serialize>(
    path: &Path,
    expected: &str,
    out: &mut dyn Write,
    convert: impl Fn(T) -> Result<U>,
) -> Result<()> {
    for line in JsonReader::open(path, Format::Jsonl, u64::MAX)? {
        let (number, line) = line?;
        let place = || format!("{}:{number}", path.display());
        let value = serde_json::from_slice(&line).with_context(|| format!("{}: expected {expected}", place()))?;
        let converted = convert(value).map_err(|error| anyhow!("{}: {error}", place()))?;
        serde_json::to_writer(&mut *out, &converted).context("cannot write the result")?;
        writeln!(out).context("cannot write the result")?;
    }
    out.flush().context("cannot write the result")
}
