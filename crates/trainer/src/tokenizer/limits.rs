//! Limits for `tokenizer.json`, which may be untrusted. Texts of unbounded size and words that take
//! hours are refused before the library reads the file.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Maximum bytes of an added token, and of a text that a normalizer, post-processor or decoder
/// inserts or searches for.
const TEXT: usize = 4096;
/// Maximum entries of a list in a post-processor.
const ENTRIES: usize = 256;
/// Maximum growth factor of a text by replacements.
const GROWTH: f64 = 1024.0;
/// Maximum characters of a word that a WordPiece model splits, which takes quadratic time.
const WORD: u64 = 4096;

/// Error of a file beyond a limit.
pub(super) fn refused(path: &Path, reason: String) -> anyhow::Error {
    anyhow::anyhow!("{} is refused: {reason}", path.display())
}

/// Refuses files beyond these limits, and character maps whose table does not fit.
pub(super) fn check(file: &Value) -> Result<(), String> {
    for part in ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        check_part(part, "", &file[part])?;
        let growth = growth(&file[part]);
        if growth > GROWTH {
            return Err(format!("its {part} can make a text {growth:.0} times as long: at most {GROWTH} times"));
        }
    }
    let word = &file["model"]["max_input_chars_per_word"];
    match word.as_u64() {
        Some(chars) if chars > WORD => Err(format!("max_input_chars_per_word is {chars}: at most {WORD}")),
        _ => Ok(()),
    }
}

/// Checks the value of this key, and all values in it.
pub(super) fn check_part(part: &str, key: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::String(text) if key == "precompiled_charsmap" => check_map(text),
        Value::String(text) if text.len() > TEXT => {
            Err(format!("a text in {part} has {} bytes: at most {TEXT}", text.len()))
        }
        Value::Array(values) if part == "post_processor" && values.len() > ENTRIES => {
            Err(format!("a list in {part} has {} entries: at most {ENTRIES}", values.len()))
        }
        Value::Array(values) => values.iter().try_for_each(|value| check_part(part, key, value)),
        Value::Object(map) => map.iter().try_for_each(|(key, value)| check_part(part, key, value)),
        _ => Ok(()),
    }
}

/// Checks a character map. It begins with the size of its table, which the library allocates before
/// it checks that the table is there.
fn check_map(text: &str) -> Result<(), String> {
    let key = "precompiled_charsmap";
    let bytes = STANDARD.decode(text).map_err(|error| format!("{key} is not base64: {error}"))?;
    let (size, rest) = bytes.split_first_chunk().ok_or_else(|| format!("{key} has {} bytes", bytes.len()))?;
    let size = u32::from_le_bytes(*size) as usize;
    match size <= rest.len() {
        true => Ok(()),
        false => Err(format!("{key} has {} bytes, of which {size} are to be its table", bytes.len())),
    }
}

/// Largest growth factor of a text by the replacements in a part, applied one after another. A
/// match of a regular expression may have one byte or none.
fn growth(value: &Value) -> f64 {
    match value {
        Value::Array(values) => values.iter().map(growth).product(),
        Value::Object(map) if map.get("type").and_then(Value::as_str) == Some("Replace") => {
            let content = value["content"].as_str().map_or(0, str::len) as f64;
            let (found, between) = match value["pattern"]["String"].as_str() {
                Some(pattern) if !pattern.is_empty() => (pattern.len() as f64, 0.0),
                _ => (1.0, 1.0),
            };
            (content / found + between).max(1.0)
        }
        Value::Object(map) => map.values().map(growth).product(),
        _ => 1.0,
    }
}
