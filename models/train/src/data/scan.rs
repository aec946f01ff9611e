//! Scans each file before it is tokenized: how much can be taken of it, and a digest of that. A
//! file with the size and modification time of its last scan is not read again.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::cannot_read;
use super::file_state::{FileState, MAX_HASHED};
use super::left_out::Reason;
use super::token_file::Header;
use super::{DataError, Format};
use crate::digest::{self, hex};
use crate::{atomic, files};

/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Resolution of coarse file system clocks. A change more recent than this could be followed by one
/// with the same time.
const COARSEST_CLOCK: Duration = Duration::from_secs(2);

/// Checks that a file has not changed since its scan.
///
/// # Errors
/// [`DataError::ChangedWhileRead`] if it has.
pub(super) fn check_unchanged(file: &FileState) -> Result<(), DataError> {
    let (bytes, changed) = size_and_time(&file.path)?;
    match (bytes, nanoseconds(changed)) == (file.bytes, file.modified) {
        true => Ok(()),
        false => Err(DataError::ChangedWhileRead { path: file.path.clone() }),
    }
}

fn size_and_time(path: &Path) -> Result<(u64, SystemTime), DataError> {
    let metadata = fs::metadata(path).map_err(cannot_read(path))?;
    Ok((metadata.len(), metadata.modified().map_err(cannot_read(path))?))
}

/// Nanoseconds since 1970.
fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

/// Scans files and remembers the results.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    known: HashMap<PathBuf, Seen>,
    seen: Vec<Seen>,
}

/// Result of one scan of a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Seen {
    field: String,
    limit: u64,
    file: FileState,
    /// Whether the file is not text.
    is_binary: bool,
}

impl Scanner {
    /// Loads the results that an earlier [`save`](Self::save) wrote to `memory`. A missing or
    /// broken file is ignored.
    pub(super) fn load(memory: &Path) -> Self {
        let seen: Vec<Seen> =
            files::read(memory).ok().and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default();
        Self { known: seen.into_iter().map(|seen| (seen.file.path.clone(), seen)).collect(), seen: vec![] }
    }

    /// Writes the results to `memory`. Errors are ignored, since the next start can scan the files
    /// again.
    pub(super) fn save(&self, memory: &Path) {
        let _ = serde_json::to_vec(&self.seen).map_err(io::Error::from).and_then(|json| atomic::replace(memory, &json));
    }

    /// Scans at most `limit` bytes of `path`. Returns its state, or why nothing is taken.
    pub(super) fn scan(
        &mut self,
        path: &Path,
        format: Format,
        limit: u64,
        field: &str,
    ) -> Result<Result<FileState, Reason>, DataError> {
        #[cfg(not(feature = "parquet"))]
        if format == Format::Parquet {
            return Err(DataError::FeatureOff { path: path.into(), format: "Parquet", feature: "parquet" });
        }
        let now = SystemTime::now();
        let (bytes, changed) = size_and_time(path)?;
        let modified = nanoseconds(changed);
        // The text of a Parquet file may be larger than the file.
        let limit = if format == Format::Parquet { limit } else { limit.min(bytes) };
        // The result for a Parquet file depends on its text column.
        let field = if format == Format::Parquet { field } else { "" };
        let same = |Seen { field: then, limit: before, file, .. }: &&Seen| {
            (file.format, file.bytes, file.modified, *before, &**then) == (format, bytes, modified, limit, field)
        };
        let seen = match self.known.get(path).filter(same) {
            Some(seen) => seen.clone(),
            None => {
                let result = match format {
                    Format::Text => scan_text(path, bytes, limit)?,
                    Format::Jsonl => Some(scan_lines(path, bytes, limit)?),
                    Format::Json => Some(scan_bytes(path, limit)?),
                    Format::Parquet => Some(scan_rows(path, bytes, limit, field)?),
                    Format::Bin => Some(scan_tokens(path, bytes, limit)?),
                };
                let is_binary = result.is_none();
                let (taken, sha256) = result.unwrap_or_default();
                let file = FileState { path: path.into(), format, bytes, taken, modified, sha256 };
                Seen { field: field.into(), limit, file, is_binary }
            }
        };
        let file = match seen.file.clone() {
            _ if seen.is_binary => Err(Reason::Binary),
            file if file.taken > 0 => Ok(file),
            _ if limit < bytes => Err(Reason::Beyond),
            _ => Err(Reason::Empty),
        };
        if now.duration_since(changed).is_ok_and(|age| age > COARSEST_CLOCK) {
            self.seen.push(seen);
        }
        Ok(file)
    }
}

/// Passes the first `limit` bytes of a file to `visit`, in pieces, until it returns false.
fn visit(path: &Path, limit: u64, mut visit: impl FnMut(&[u8]) -> bool) -> Result<(), DataError> {
    let file = files::open(path).map_err(cannot_read(path))?.take(limit);
    let mut reader = BufReader::with_capacity(CHUNK.min(limit as usize + 1), file);
    loop {
        let piece = reader.fill_buf().map_err(cannot_read(path))?;
        let bytes = piece.len();
        if bytes == 0 || !visit(piece) {
            return Ok(());
        }
        reader.consume(bytes);
    }
}

/// Scans text, without a character that the limit would cut.
fn scan_text(path: &Path, bytes: u64, limit: u64) -> Result<Option<(u64, String)>, DataError> {
    let mut hasher = Sha256::new();
    let (mut taken, mut is_text) = (0_u64, true);
    // Beginning of an incomplete character.
    let mut begun: Vec<u8> = vec![];
    visit(path, limit, |piece| {
        begun.extend(piece);
        let valid = match std::str::from_utf8(&begun) {
            Ok(text) => text.len(),
            Err(error) => {
                is_text &= error.error_len().is_none();
                error.valid_up_to()
            }
        };
        is_text &= !begun[..valid].contains(&0);
        hasher.update(&begun[..valid]);
        taken += valid as u64;
        begun.drain(..valid);
        is_text
    })?;
    let ends_in_character = !begun.is_empty() && limit == bytes;
    Ok(Some((taken, hex(hasher))).filter(|_| is_text && !ends_in_character))
}

/// Scans lines, without a line that the limit would cut.
fn scan_lines(path: &Path, bytes: u64, limit: u64) -> Result<(u64, String), DataError> {
    let mut taken = limit;
    if limit < bytes {
        let mut at = 0;
        taken = 0;
        visit(path, limit, |piece| {
            if let Some(end) = piece.iter().rposition(|byte| *byte == b'\n') {
                taken = at + end as u64 + 1;
            }
            at += piece.len() as u64;
            true
        })?;
    }
    scan_bytes(path, taken)
}

fn scan_bytes(path: &Path, limit: u64) -> Result<(u64, String), DataError> {
    let mut hasher = Sha256::new();
    visit(path, limit, |piece| {
        hasher.update(piece);
        true
    })?;
    Ok((limit, hex(hasher)))
}

/// Scans rows: the bytes of text taken, and the digest of the whole file.
#[cfg(feature = "parquet")]
fn scan_rows(path: &Path, bytes: u64, limit: u64, field: &str) -> Result<(u64, String), DataError> {
    let text = super::parquet::text_bytes(path, field, limit)?;
    Ok((text, scan_bytes(path, bytes)?.1))
}

/// Never called, since [`Scanner::scan`] refuses the file first.
#[cfg(not(feature = "parquet"))]
fn scan_rows(_: &Path, _: u64, _: u64, _: &str) -> Result<(u64, String), DataError> {
    Ok((0, String::new()))
}

/// Checks the header of a token file and takes its digest. Large files are sampled at even
/// distances.
fn scan_tokens(path: &Path, bytes: u64, limit: u64) -> Result<(u64, String), DataError> {
    let header = Header::read(path)?;
    if limit < bytes && header.tokens_within(limit) < 2 {
        return Ok((0, String::new()));
    }
    let sha256 = match bytes <= MAX_HASHED {
        true => scan_bytes(path, bytes)?.1,
        false => digest::of_samples(path).map_err(cannot_read(path))?,
    };
    Ok((limit, sha256))
}
