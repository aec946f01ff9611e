//! Tables of test cases in `tests`: a JSON list on each line.

use std::path::Path;

use serde::de::DeserializeOwned;

/// Rows of `tests/NAME.jsonl`.
pub(crate) fn table<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(format!("{name}.jsonl"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}
