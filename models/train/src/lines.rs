//! Conversion of JSON lines between texts and token ids.

use std::io::{self, BufReader, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde::de::DeserializeOwned;

use crate::data::{MAX_DOCUMENT, next_line};
use crate::files;
use crate::{SpecialTokens, Tokenizer};

/// Context of an error of the result.
const OUTPUT: &str = "cannot write the result";

impl Tokenizer {
    /// Writes an array of token ids, without BOS and EOS, for each line of `file`, a JSON string.
    /// Empty lines are skipped.
    ///
    /// # Errors
    /// A line that cannot be read, parsed or converted; earlier lines are already written.
    pub fn encode_lines(&self, file: &Path, special: SpecialTokens, out: &mut dyn Write) -> Result<()> {
        each_line(file, "a JSON string", out, |text: String| self.encode(&text, special))
    }

    /// Inverse of [`encode_lines`](Self::encode_lines).
    ///
    /// # Errors
    /// A line that cannot be read, parsed or converted; earlier lines are already written.
    pub fn decode_lines(&self, file: &Path, out: &mut dyn Write) -> Result<()> {
        each_line(file, "a JSON array of ids", out, |ids: Vec<u32>| self.decode(&ids))
    }
}

fn each_line<T: DeserializeOwned, U: serde::Serialize>(
    path: &Path,
    expected: &'static str,
    out: &mut dyn Write,
    convert: impl Fn(T) -> Result<U>,
) -> Result<()> {
    let path_name = path.display();
    let cannot_read = || format!("cannot read {path_name}");
    let mut file = BufReader::new(files::open(path).with_context(cannot_read)?);
    for line in 1.. {
        let Some(text) = next_line(&mut file).with_context(cannot_read)? else { break };
        if text.len() > MAX_DOCUMENT {
            return Err(anyhow!("line {line} is longer than {MAX_DOCUMENT} bytes").context(cannot_read()));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let value =
            serde_json::from_slice(&text).with_context(|| format!("{path_name}:{line}: expected {expected}"))?;
        let converted = convert(value).map_err(|error| anyhow!("{path_name}:{line}: {error}"))?;
        serde_json::to_writer(&mut *out, &converted).map_err(io::Error::from).context(OUTPUT)?;
        writeln!(out).context(OUTPUT)?;
    }
    out.flush().context(OUTPUT)
}
