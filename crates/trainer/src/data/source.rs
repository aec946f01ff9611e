//! [`DataSource`]: which files are read, and how much of each. The same folders give the same files
//! in the same order. Skipped files are counted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fmt, fs, io};

use anyhow::{Context, Result, anyhow, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use walkdir::WalkDir;

use super::scan::{Candidate, FileState, OTHER_JSON, TABLE, format_of, scan, size_and_time};
use super::{cannot_read, join};
use crate::digest::Fingerprint;
use crate::{atomic, files};

/// Files and folders, and how to read them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSource {
    /// Files, and folders that are searched recursively, in sorted order. Links are followed.
    /// Hidden files are skipped. If a folder has files in a data format,
    /// text other than `.txt` is skipped. With `format`, all files are taken.
    pub paths: Vec<PathBuf>,
    /// Format of the files. If absent, their extensions decide: `.jsonl` and `.ndjson`, `.json` for
    /// an array of objects or lines of them, `.parquet`, `.bin`. All others are text, unless they
    /// begin like Parquet or, without an extension, like JSON Lines. Text and JSON may be
    /// compressed by gzip or zstd: `.jsonl.zst`. `.csv`, `.tsv`, other JSON and other compressed
    /// files are refused, and skipped in folders.
    pub format: Option<Format>,
    /// Field or column of JSON and Parquet that holds the text. If it is missing, the conversation
    /// in `messages` is read.
    pub field: String,
    /// Takes only files with this extension from folders, as `rs`. If absent, takes all.
    #[serde(skip)]
    pub extension: Option<String>,
    /// Maximum number of bytes to take. If there are more, files are taken at even distances in
    /// sorted order. If that leaves more than a tenth of the bytes unused, the largest remaining
    /// files follow, and the last of them is cut. For a compressed or Parquet file, the bytes of
    /// its text count.
    #[serde(skip)]
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
    /// Tokens as written by `tokenize --output`.
    Bin,
}

impl fmt::Display for Format {
    /// Name in a configuration: `jsonl`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Reasons for skipping a file. Text next to data describes it, or is its licence.
const TEXT_NEXT_TO_DATA: &str = "text beside data";
const LINK: &str = "links to nothing or to what is read already";

/// Number of skipped files, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut(BTreeMap<String, usize>);

impl LeftOut {
    fn add(&mut self, reason: &str) {
        *self.0.entry(reason.into()).or_default() += 1;
    }

    pub(super) fn extend(&mut self, other: Self) {
        other.0.into_iter().for_each(|(reason, count)| *self.0.entry(reason).or_default() += count);
    }

    /// Total number of files.
    pub fn count(&self) -> usize {
        self.0.values().sum()
    }
}

impl fmt::Display for LeftOut {
    /// For example `1 csv, 2 hidden`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = self.0.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        f.write_str(&counts.join(", "))
    }
}

/// Files selected from a source.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Selection {
    /// Files in reading order.
    pub(super) files: Vec<FileState>,
    /// Skipped files.
    pub(super) left: LeftOut,
}

/// Resolution of coarse file system clocks. A change more recent than this could be followed by one
/// with the same time.
const COARSEST_CLOCK: Duration = Duration::from_secs(2);

impl DataSource {
    /// All text in these files and folders.
    pub fn new(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { paths: paths.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Scans the files. While none has another size or time, the result in the file `memory` is
    /// used, so that a start does not read them.
    pub(super) fn select(&self, memory: Option<&Path>) -> Result<Selection> {
        let mut left = LeftOut::default();
        let candidates = self.candidates(&mut left)?;
        let settings = (&self.paths, self.format, &self.field, &self.extension, self.max_bytes);
        let key = Fingerprint::default().field(format!("{settings:?} {candidates:?}")).hex();
        let known = memory.and_then(|memory| serde_json::from_slice(&files::read(memory).ok()?).ok());
        if let Some((_, selection)) = known.filter(|(then, _): &(String, Selection)| *then == key) {
            return Ok(selection);
        }
        let last = candidates.iter().map(|candidate| Duration::from_nanos(candidate.modified)).max();
        let settled = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
            > last.unwrap_or_default() + COARSEST_CLOCK;
        let selection = self.scan(candidates, left)?;
        if let Some(memory) = memory.filter(|_| settled) {
            // Without it, the next start scans the files again.
            let json = serde_json::to_vec(&(key, &selection)).map_err(io::Error::from);
            let _ = json.and_then(|json| atomic::replace(memory, &json));
        }
        Ok(selection)
    }

    /// Unscanned files that the source names. A path that cannot be read is an error.
    pub(super) fn named_files(&self) -> Result<Vec<FileState>> {
        let mut files = vec![];
        for path in &self.paths {
            if fs::metadata(path).with_context(cannot_read(path))?.is_file() {
                let Candidate { path, format, bytes, modified } = self.named(path)?;
                files.push(FileState { path, format, bytes, taken: u64::MAX, modified, sha256: String::new() });
            }
        }
        Ok(files)
    }

    fn named(&self, path: &Path) -> Result<Candidate> {
        Candidate::new(path, self.format.map_or_else(|| named_format(path, &self.field), Ok)?)
    }

    fn scan(&self, candidates: Vec<Candidate>, left: LeftOut) -> Result<Selection> {
        let mut selection = Selection { files: vec![], left };
        let max_bytes = self.max_bytes.unwrap_or(u64::MAX);
        let mut rest = max_bytes;
        let mut take = |candidate: &Candidate, rest: &mut u64| -> Result<()> {
            match scan(candidate, *rest, &self.field)? {
                Ok(file) => {
                    *rest -= file.taken;
                    selection.files.push(file);
                }
                Err(reason) => selection.left.add(reason),
            }
            Ok(())
        };
        let (chosen, mut others) = self.choose(candidates);
        chosen.iter().try_for_each(|candidate| take(candidate, &mut rest))?;
        // Files larger than their share were not chosen, and binary files used up part of the
        // share.
        others.sort_by_key(|candidate| Reverse(candidate.bytes));
        for candidate in others {
            if rest <= max_bytes / 10 {
                break;
            }
            take(&candidate, &mut rest)?;
        }
        if selection.files.is_empty() {
            let LeftOut(left) = &selection.left;
            bail!(
                "no text in {}{}{}{}",
                join(&self.paths),
                self.max_bytes.map(|bytes| format!(" within max_bytes = {bytes}")).unwrap_or_default(),
                if left.is_empty() { String::new() } else { format!(" (left out: {})", selection.left) },
                match left.contains_key(OTHER_JSON) || left.contains_key(TABLE) {
                    true =>
                        ": data.field names the field with the text, data.format = \"text\" takes files as they are",
                    false if left.is_empty() => ": name files or folders with text by --data",
                    false => "",
                }
            );
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

    /// Files that may be taken: the named ones, and data files in folders.
    fn candidates(&self, left: &mut LeftOut) -> Result<Vec<Candidate>> {
        let mut candidates = vec![];
        for path in &self.paths {
            if fs::metadata(path).with_context(cannot_read(path))?.is_dir() {
                candidates.extend(self.of_folder(path, left)?);
            } else {
                candidates.push(self.named(path)?);
            }
        }
        Ok(candidates)
    }

    /// Data files and `.txt` files of a folder, or all text if there are no data files. Other text
    /// next to data describes it, and JSON is text only if `format` says so.
    fn of_folder(&self, folder: &Path, left: &mut LeftOut) -> Result<Vec<Candidate>> {
        let found = files_of(folder, self.extension.as_deref(), left)?;
        if let Some(format) = self.format {
            return found.iter().map(|path| Candidate::new(path, format)).collect();
        }
        let (mut data, mut texts) = (vec![], vec![]);
        for path in found {
            match format_of(&path, &self.field)? {
                Ok(Format::Text) => texts.push(Candidate::new(&path, Format::Text)?),
                Ok(format) => data.push(Candidate::new(&path, format)?),
                Err(other) => left.add(other.left),
            }
        }
        if data.is_empty() {
            return Ok(texts);
        }
        for text in texts {
            let is_named = text.path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt"));
            if is_named { data.push(text) } else { left.add(TEXT_NEXT_TO_DATA) }
        }
        data.sort();
        Ok(data)
    }
}

impl Candidate {
    fn new(path: &Path, format: Format) -> Result<Self> {
        let (bytes, modified) = size_and_time(path)?;
        Ok(Self { path: path.into(), format, bytes, modified })
    }
}

/// Format of a file that the user named.
fn named_format(path: &Path, field: &str) -> Result<Format> {
    // Reading an invalid header reports its error.
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("bin")) {
        return Ok(Format::Bin);
    }
    let format = format_of(path, field)?.or_else(|other| other.named);
    format.map_err(|reason| anyhow!("{} {reason}", path.display()))
}

/// Files below a folder, sorted. Links are followed, and no file or folder is taken twice.
fn files_of(folder: &Path, extension: Option<&str>, left: &mut LeftOut) -> Result<Vec<PathBuf>> {
    let (mut found, mut links, mut folders) = (vec![], vec![], HashSet::new());
    let real = |path: &Path| fs::canonicalize(path).with_context(cannot_read(path));
    // A link to nothing, or to a folder around it.
    let is_dead_end = |path: &Path, error: &walkdir::Error| {
        path.is_symlink() && (error.loop_ancestor().is_some() || fs::metadata(path).is_err())
    };
    let mut entries = WalkDir::new(folder).follow_links(true).sort_by_file_name().into_iter();
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Err(error) if error.path().is_some_and(|path| is_dead_end(path, &error)) => {
                left.add(LINK);
                continue;
            }
            entry => entry.with_context(cannot_read(folder))?,
        };
        let (path, kind) = (entry.path(), entry.file_type());
        let is_hidden = entry.depth() > 0 && entry.file_name().as_encoded_bytes().starts_with(b".");
        let skipped = if extension.is_none() && is_hidden {
            "hidden"
        } else if kind.is_dir() {
            if folders.insert(real(path)?) {
                continue;
            }
            LINK
        } else if extension.is_some_and(|wanted| path.extension().is_none_or(|extension| extension != wanted)) {
            // Not counted as skipped.
            continue;
        } else if kind.is_file() {
            (if entry.path_is_symlink() { &mut links } else { &mut found }).push(entry.into_path());
            continue;
        } else {
            "pipes or devices"
        };
        left.add(skipped);
        if kind.is_dir() {
            entries.skip_current_dir();
        }
    }
    let mut seen = HashSet::new();
    if !links.is_empty() {
        seen.extend(found.iter().filter_map(|path| fs::canonicalize(path).ok()));
    }
    for link in links {
        if seen.insert(real(&link)?) { found.push(link) } else { left.add(LINK) }
    }
    found.sort();
    Ok(found)
}
