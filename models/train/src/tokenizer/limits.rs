//! What a `tokenizer.json` may ask for: texts that grow without bound and words that take hours are refused before the library reads the
//! file, which comes from strangers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Bytes of an added token, and of a text that a normalizer, post-processor or decoder puts in or looks for.
const TEXT: usize = 4096;
/// Entries of a list in a post-processor.
const ENTRIES: usize = 256;
/// How many times as long replacements may make a text.
const GROWTH: f64 = 1024.0;
/// Characters of the longest word that a WordPiece model cuts up, whose time grows with their square.
const WORD: u64 = 4096;

/// Refuses what is beyond these limits, and a map of characters whose table does not fit.
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

/// Checks a value with this key, and all values in it.
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

/// A map of characters begins with the size of its table, for which the library makes room before it looks whether it is there.
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

/// How many times as long the replacements in a part make a text at most, one after the other. What is found by a regular expression
/// may have a single byte, or none.
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
