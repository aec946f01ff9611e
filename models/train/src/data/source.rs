//! [`DataSource`]: which files are read, and how much of each. The same folders give the same files in the same order, and what is
//! left out is counted.

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

/// Files and folders, and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSource {
    /// Files, and folders that are searched recursively, in sorted order. Links are followed, hidden files left out, and where there
    /// are files in a format of data, text that is not `.txt` too; `format` takes all.
    pub paths: Vec<PathBuf>,
    /// How files are read. If absent, their extensions decide: `.jsonl` and `.ndjson`, `.json` for an array of objects or lines of them,
    /// `.parquet`, `.bin`; `.csv`, `.tsv`, other JSON and what is compressed are refused, and left out of folders. All others are text,
    /// unless they begin as Parquet files do or, without an extension, as JSON Lines do.
    pub format: Option<Format>,
    /// The field or column of JSON Lines and Parquet that holds text. Where it is missing, the conversation in `messages` is read.
    pub field: String,
    /// Take of folders only files with this extension, as `rs`. If absent, all.
    pub extension: Option<String>,
    /// Bytes to take at most. If there are more, files are taken at even distances, in sorted order; where that
    /// leaves more than a tenth of the bytes untaken, the largest other files follow, the last of them cut. Of a Parquet file,
    /// rows are taken until their texts have as many bytes.
    pub max_bytes: Option<u64>,
    /// Share of the sequences that come from this source, relative to the weights of the others. Without weights all
    /// sources are one, and their sizes decide.
    pub weight: Option<f64>,
}

impl Default for DataSource {
    fn default() -> Self {
        Self { paths: vec![], format: None, field: "text".into(), extension: None, max_bytes: None, weight: None }
    }
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// UTF-8; a file is a document.
    Text,
    /// JSON Lines: each line is an object and a document.
    Jsonl,
    /// One JSON array: each element is an object and a document.
    Json,
    /// Parquet: a row is a document. Needs the cargo feature `parquet`.
    Parquet,
    /// Tokens as `tokenize --to`, llm.c (`uint16`, and `uint32` for Llama 3) and llmq write them.
    Bin,
}

impl fmt::Display for Format {
    /// As in a configuration: `jsonl`.
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

/// What is taken of a source.
#[derive(Debug, Default)]
pub(super) struct Selection {
    /// In the order in which they are read.
    pub(super) files: Vec<FileState>,
    /// Files that were passed over.
    pub(super) left: LeftOut,
}

impl DataSource {
    /// Text of these files and folders, all of it.
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
        // Files larger than their share were passed over, and binaries took theirs.
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

    /// All candidates if they fit; else those that keep the bytes taken in proportion to the bytes passed, and the
    /// others.
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
