//! [`DataSource`]: which files are read, and how much of each. The same folders give the same files
//! in the same order. Skipped files are counted.

use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataError;
use super::file_state::FileState;
use super::left_out::LeftOut;
use super::scan::Scanner;
use super::search::{Candidate, candidates};

/// Files and folders, and how to read them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSource {
    /// Files, and folders that are searched recursively, in sorted order. Links are followed.
    /// Hidden files are skipped unless `extension` is set. If a folder has files in a data format,
    /// text other than `.txt` is skipped. With `format`, all files are taken.
    pub paths: Vec<PathBuf>,
    /// Format of the files. If absent, their extensions decide: `.jsonl` and `.ndjson`, `.json` for
    /// an array of objects or lines of them, `.parquet`, `.bin`. All others are text, unless they
    /// begin like Parquet or, without an extension, like JSON Lines. `.csv`, `.tsv`, other JSON and
    /// compressed files are refused, and skipped in folders.
    pub format: Option<Format>,
    /// Field or column of JSON and Parquet that holds the text. If it is missing, the conversation
    /// in `messages` is read.
    pub field: String,
    /// Takes only files with this extension from folders, as `rs`. If absent, takes all.
    pub extension: Option<String>,
    /// Maximum number of bytes to take. If there are more, files are taken at even distances in
    /// sorted order. If that leaves more than a tenth of the bytes unused, the largest remaining
    /// files follow, and the last of them is cut. For a Parquet file, the bytes of its text count.
    pub max_bytes: Option<u64>,
    /// Share of the sequences that come from this source, relative to the weights of the other
    /// sources. Without weights, all sources are mixed by their sizes.
    pub weight: Option<f64>,
}

impl Default for DataSource {
    fn default() -> Self {
        Self { paths: vec![], format: None, field: "text".into(), extension: None, max_bytes: None, weight: None }
    }
}

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// UTF-8 text; each file is a document.
    Text,
    /// JSON Lines; each line is an object and a document.
    Jsonl,
    /// One JSON array; each element is an object and a document.
    Json,
    /// Parquet; each row is a document. Needs the cargo feature `parquet`.
    Parquet,
    /// Tokens as written by `tokenize --to`, llm.c (`uint16`, and `uint32` for Llama 3) or llmq.
    Bin,
}

impl fmt::Display for Format {
    /// Name in a configuration: `jsonl`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Jsonl => "jsonl",
            Self::Json => "json",
            Self::Parquet => "parquet",
            Self::Bin => "bin",
        })
    }
}

/// Files selected from a source.
#[derive(Debug, Default)]
pub(super) struct Selection {
    /// Files in reading order.
    pub(super) files: Vec<FileState>,
    /// Skipped files.
    pub(super) left: LeftOut,
}

impl DataSource {
    /// All text in these files and folders.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { paths: paths.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    pub(super) fn select(&self, scanner: &mut Scanner) -> Result<Selection, DataError> {
        let mut selection = Selection::default();
        let max_bytes = self.max_bytes.unwrap_or(u64::MAX);
        let mut left = max_bytes;
        let candidates = candidates(self, &mut selection.left)?;
        let mut take = |candidate: &Candidate, left: &mut u64| -> Result<(), DataError> {
            match scanner.scan(&candidate.path, candidate.format, *left, &self.field)? {
                Ok(file) => {
                    *left -= file.taken;
                    selection.files.push(file);
                }
                Err(reason) => selection.left.add(reason),
            }
            Ok(())
        };
        let (chosen, mut others) = self.choose(candidates);
        for candidate in chosen {
            take(&candidate, &mut left)?;
        }
        // Files larger than their share were not chosen, and binary files used up part of the
        // share.
        others.sort_by_key(|candidate| Reverse(candidate.bytes));
        for candidate in others {
            if left <= max_bytes / 10 {
                break;
            }
            take(&candidate, &mut left)?;
        }
        if selection.files.is_empty() {
            let (paths, left) = (self.paths.clone(), selection.left);
            return Err(DataError::NoText { paths, max_bytes: self.max_bytes, left });
        }
        Ok(selection)
    }

    /// Returns all candidates if they fit. Otherwise splits them into files that keep the bytes
    /// taken in proportion to the bytes passed, and the rest.
    fn choose(&self, candidates: Vec<Candidate>) -> (Vec<Candidate>, Vec<Candidate>) {
        let total: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        let Some(share) = self.max_bytes.map(|max| max as f64 / total as f64).filter(|share| *share < 1.0) else {
            return (candidates, vec![]);
        };
        let (mut passed, mut taken) = (0_u64, 0_u64);
        candidates.into_iter().partition(|&Candidate { bytes, .. }| {
            passed += bytes;
            let fits = (taken + bytes) as f64 <= passed as f64 * share;
            taken += if fits { bytes } else { 0 };
            fits
        })
    }
}
