//! [`DataSource`]: which files are read, and how much of each. The same folders give the same files in the same order.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::DataError;
use super::error::cannot_read;
use super::scan::{Scanned, Scanner};

/// Files and folders, and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataSource {
    /// Files, and folders that are searched recursively, in sorted order; links in them are not followed.
    pub paths: Vec<PathBuf>,
    /// How files are read. If absent, their extensions decide: `.jsonl` and `.ndjson`, `.parquet`, `.bin`; all others are text.
    pub format: Option<Format>,
    /// The field or column of JSON Lines and Parquet that holds text. Where it is missing, the conversation in `messages` is read.
    pub field: String,
    /// Of folders, take only files with this extension, as `rs`. If absent, all.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// UTF-8; a file is a document.
    Text,
    /// JSON Lines: each line is an object and a document.
    Jsonl,
    /// Parquet: a row is a document. Needs the cargo feature `parquet`.
    Parquet,
    /// Tokens as llm.c (`uint16`, and `uint32` for Llama 3) and llmq write them.
    Bin,
}

impl Format {
    /// The format that the extension stands for: `jsonl` and `ndjson`, `parquet`, `bin`; all others are text.
    pub fn of(path: &Path) -> Self {
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        match extension.to_str() {
            Some("jsonl" | "ndjson") => Self::Jsonl,
            Some("parquet") => Self::Parquet,
            Some("bin") => Self::Bin,
            _ => Self::Text,
        }
    }
}

/// A file that may be taken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    path: PathBuf,
    bytes: u64,
    /// The user named it, rather than a folder in which it is.
    explicit: bool,
}

/// What is taken of a source.
#[derive(Debug, Default)]
pub(super) struct Selection {
    /// In the order in which they are read.
    pub(super) files: Vec<Scanned>,
    /// Files that were passed over.
    pub(super) skipped: usize,
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
        let mut take = |candidate: &Candidate, left: &mut u64| -> Result<(), DataError> {
            let format = self.format.unwrap_or_else(|| Format::of(&candidate.path));
            // A folder may hold `.bin` files of other programs.
            let must_be_of_format = candidate.explicit || self.format.is_some();
            match scanner.scan(&candidate.path, format, *left, must_be_of_format)? {
                Some(file) => {
                    *left -= file.taken;
                    selection.files.push(file);
                }
                None => selection.skipped += 1,
            }
            Ok(())
        };
        let (chosen, mut others) = self.choose(self.candidates()?);
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
            let (paths, skipped) = (self.paths.clone(), selection.skipped);
            return Err(DataError::NoText { paths, max_bytes: self.max_bytes, skipped });
        }
        Ok(selection)
    }

    fn candidates(&self) -> Result<Vec<Candidate>, DataError> {
        let mut candidates = vec![];
        for path in &self.paths {
            let metadata = fs::metadata(path).map_err(cannot_read(path))?;
            if metadata.is_dir() {
                let first = candidates.len();
                self.search(path, &mut candidates)?;
                candidates[first..].sort();
            } else {
                candidates.push(Candidate { path: path.clone(), bytes: metadata.len(), explicit: true });
            }
        }
        Ok(candidates)
    }

    fn search(&self, dir: &Path, found: &mut Vec<Candidate>) -> Result<(), DataError> {
        for entry in fs::read_dir(dir).map_err(cannot_read(dir))? {
            let entry = entry.map_err(cannot_read(dir))?;
            let path = entry.path();
            let metadata = entry.metadata().map_err(cannot_read(&path))?;
            let wanted = self.extension.as_ref();
            // Links are not followed, so a search ends and no file counts twice.
            if metadata.is_dir() {
                self.search(&path, found)?;
            } else if metadata.is_file() && wanted.is_none_or(|wanted| path.extension().is_some_and(|e| e == &**wanted))
            {
                found.push(Candidate { path, bytes: metadata.len(), explicit: false });
            }
        }
        Ok(())
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
