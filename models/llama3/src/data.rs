//! Text files to token streams: which files, which bytes, and which of them are held out. The same files give the
//! same streams.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use train::Tokenizer;

use crate::Error;

/// Where text comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct TextSource {
    /// Files, and folders that are searched recursively.
    pub paths: Vec<PathBuf>,
    /// Take only files with this extension; explicit files are always taken.
    pub extension: Option<&'static str>,
    /// Bytes to take at most. If there are more, files are taken at even distances, in sorted order; where that
    /// leaves more than a tenth of the bytes untaken, the largest other files follow, the last of them cut.
    pub max_bytes: usize,
    /// Share of the tokens to hold out, in (0, 1).
    pub held_out_fraction: f64,
    /// Nobody chose the paths: an error about them says how to choose.
    pub is_default: bool,
}

/// Tokens to train on and tokens to judge by.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// Documents, each as [`Tokenizer::document`] makes it.
    pub train: Vec<u32>,
    /// Documents that are not in `train`; the end of the last one that is, if there are too few documents.
    pub held_out: Vec<u32>,
    /// Files that were read.
    pub files: usize,
    /// Files that were passed over: empty, binary or not UTF-8.
    pub skipped: usize,
}

/// A file and its size.
type Candidate = (PathBuf, u64);

impl TextSource {
    /// The Rust sources of the local Cargo registry, `$CARGO_HOME/registry/src`.
    pub fn cargo_registry(max_bytes: usize, held_out_fraction: f64) -> Self {
        let cargo_home = std::env::var_os("CARGO_HOME")
            .map_or_else(|| std::env::home_dir().unwrap_or_default().join(".cargo"), PathBuf::from);
        let paths = vec![cargo_home.join("registry").join("src")];
        Self { paths, extension: Some("rs"), max_bytes, held_out_fraction, is_default: true }
    }

    /// Reads the text, splits it, and makes tokens of it.
    ///
    /// # Errors
    /// [`Error::Io`] for a path that is missing or unreadable, [`Error::NoText`]; for default paths either is the
    /// source of an [`Error::NoDefaultText`]. [`Error::Tokenizer`] for text that the tokenizer does not take.
    pub fn load(&self, tokenizer: &Tokenizer) -> Result<Corpus, Error> {
        self.read(tokenizer).map_err(|error| match error {
            Error::Io { .. } | Error::NoText { .. } if self.is_default => {
                Error::NoDefaultText { source: Box::new(error) }
            }
            error => error,
        })
    }

    fn read(&self, tokenizer: &Tokenizer) -> Result<Corpus, Error> {
        let mut candidates = Vec::new();
        for path in &self.paths {
            let metadata = fs::metadata(path).map_err(|source| io_error(path, source))?;
            if metadata.is_dir() {
                let first = candidates.len();
                self.search(path, &mut candidates)?;
                candidates[first..].sort();
            } else {
                candidates.push((path.clone(), metadata.len()));
            }
        }
        let (mut files, mut skipped) = (0, 0);
        let mut split = Split::new(self.held_out_fraction);
        let mut left = self.max_bytes;
        let mut take = |path: &Path, left: &mut usize| -> Result<(), Error> {
            match read_text(path, *left)? {
                Some(text) => {
                    *left -= text.len();
                    split.push(tokenizer.document(&text)?);
                    files += 1;
                }
                None => skipped += 1,
            }
            Ok(())
        };
        let (chosen, mut others) = self.choose(candidates);
        for (path, _) in chosen {
            take(&path, &mut left)?;
        }
        // Files larger than their share were passed over, and binaries took theirs.
        others.sort_by_key(|&(_, bytes)| Reverse(bytes));
        for (path, _) in others {
            if left <= self.max_bytes / 10 {
                break;
            }
            take(&path, &mut left)?;
        }
        if files == 0 {
            return Err(Error::NoText { paths: self.paths.clone(), max_bytes: self.max_bytes, skipped });
        }
        let (train, held_out) = split.finish();
        Ok(Corpus { train, held_out, files, skipped })
    }

    fn search(&self, dir: &Path, found: &mut Vec<Candidate>) -> Result<(), Error> {
        for entry in fs::read_dir(dir).map_err(|source| io_error(dir, source))? {
            let entry = entry.map_err(|source| io_error(dir, source))?;
            let path = entry.path();
            let metadata = entry.metadata().map_err(|source| io_error(&path, source))?;
            // Links are not followed, so a search ends and no file counts twice.
            if metadata.is_dir() {
                self.search(&path, found)?;
            } else if metadata.is_file()
                && self.extension.is_none_or(|wanted| path.extension().is_some_and(|e| e == wanted))
            {
                found.push((path, metadata.len()));
            }
        }
        Ok(())
    }

    /// All candidates if they fit; else those that keep the bytes taken in proportion to the bytes passed, and the
    /// others.
    fn choose(&self, candidates: Vec<Candidate>) -> (Vec<Candidate>, Vec<Candidate>) {
        let total: u64 = candidates.iter().map(|(_, bytes)| bytes).sum();
        let share = self.max_bytes as f64 / total as f64;
        if share >= 1.0 {
            return (candidates, Vec::new());
        }
        let (mut passed, mut taken) = (0_u64, 0_u64);
        candidates.into_iter().partition(|(_, bytes)| {
            passed += bytes;
            let fits = (taken + bytes) as f64 <= passed as f64 * share;
            taken += if fits { *bytes } else { 0 };
            fits
        })
    }
}

/// The first `max_bytes` of a file, less a character that they would cut, or none if they are empty, binary or not
/// UTF-8.
fn read_text(path: &Path, max_bytes: usize) -> Result<Option<String>, Error> {
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    let mut bytes = Vec::new();
    // One more, to know whether the file goes on.
    let limit = (max_bytes as u64).saturating_add(1);
    file.take(limit).read_to_end(&mut bytes).map_err(|source| io_error(path, source))?;
    let goes_on = bytes.len() > max_bytes;
    bytes.truncate(max_bytes);
    if let Err(error) = std::str::from_utf8(&bytes) {
        // No length: a character that has not ended.
        if error.error_len().is_some() || !goes_on {
            return Ok(None);
        }
        bytes.truncate(error.valid_up_to());
    }
    if bytes.is_empty() || bytes.contains(&0) {
        return Ok(None);
    }
    Ok(String::from_utf8(bytes).ok())
}

fn io_error(path: &Path, source: io::Error) -> Error {
    Error::Io { path: path.to_path_buf(), source }
}

/// Deals documents to the two streams.
struct Split {
    fraction: f64,
    train: Vec<u32>,
    held_out: Vec<u32>,
}

impl Split {
    fn new(fraction: f64) -> Self {
        Self { fraction, train: Vec::new(), held_out: Vec::new() }
    }

    /// A document is held out when the held-out stream is behind its share by the document's length or more.
    fn push(&mut self, document: Vec<u32>) {
        let len = document.len();
        let total = self.train.len() + self.held_out.len() + len;
        let behind = self.fraction * total as f64 - self.held_out.len() as f64;
        let stream = if len as f64 <= behind { &mut self.held_out } else { &mut self.train };
        stream.extend(document);
    }

    fn finish(mut self) -> (Vec<u32>, Vec<u32>) {
        let total = self.train.len() + self.held_out.len();
        let wanted = (self.fraction * total as f64) as usize;
        // Few documents, or only large ones: the end of the training stream makes up for it.
        if self.held_out.len() * 2 < wanted {
            let cut = self.train.len() - (wanted - self.held_out.len());
            let tail = self.train.split_off(cut);
            self.held_out.extend(tail);
        }
        (self.train, self.held_out)
    }
}
