//! Scans a file before it is tokenized: its format, how much can be taken of it, and a digest of that.
//! Opens files, decompressed.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, ensure};
use flate2::bufread::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::token_file::Header;
use super::{Format, JsonReader, MAX_DOCUMENT, MESSAGES, cannot_read};
use crate::digest::{self, hex};
use crate::files;

/// Reasons for skipping a file.
const EMPTY: &str = "empty";
const BINARY: &str = "binary or not UTF-8";
const BEYOND_LIMIT: &str = "beyond max_bytes";
pub(super) const OTHER_JSON: &str = "json without the fields that are read";
pub(super) const TABLE: &str = "csv";

/// File that may be taken. Candidates sort in reading order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    pub(super) bytes: u64,
    pub(super) modified: u64,
}

/// Token files above this size are compared by samples. They are read in place, and a start must
/// not take the time to read a whole file.
const MAX_HASHED: u64 = 64 << 20;

/// State of a file when it was scanned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Path under which the file was found.
    #[serde(with = "crate::files::any_path")]
    pub path: PathBuf,
    /// Format in which it is read.
    pub format: Format,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes taken from the beginning; for a compressed or Parquet file, bytes of its text.
    pub taken: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified: u64,
    /// SHA-256 of the bytes taken; for a Parquet or token file, of the whole file. Token files
    /// above 64 MiB are sampled, and `modified` must match too.
    pub sha256: String,
}

impl FileState {
    /// Why `now` does not give the same data, if it does not.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        let Self { bytes, taken, modified, sha256, format, .. } = self;
        let is_sampled = *format == Format::Bin && *bytes > MAX_HASHED;
        if *bytes != now.bytes {
            Some(format!("it had {bytes} bytes, now it has {}", now.bytes))
        } else if *taken != now.taken {
            Some(format!("{taken} of its bytes were taken, now {}: set max_bytes as it was", now.taken))
        } else if *sha256 != now.sha256 {
            Some("it has the same size but other content".into())
        } else if is_sampled && *modified != now.modified {
            let seconds =
                |nanoseconds: u64| format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
            let [then, now] = [*modified, now.modified].map(seconds);
            Some(format!(
                "its last change was at {then}, now it is at {now} (seconds since 1970), and it is too large to compare all of it; if \
                 you know that it is the same, set the time back with `touch -d @{then}`"
            ))
        } else {
            None
        }
    }

    /// Checks that the file has not changed since its scan.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let is_same = size_and_time(&self.path)? == (self.bytes, self.modified);
        ensure!(is_same, "{} changed while it was read: start again when nothing writes to it", self.path.display());
        Ok(())
    }
}

/// Size of a file, and its last change in nanoseconds since 1970.
pub(super) fn size_and_time(path: &Path) -> Result<(u64, u64)> {
    let metadata = fs::metadata(path).with_context(cannot_read(path))?;
    let modified = metadata.modified().with_context(cannot_read(path))?;
    Ok((metadata.len(), modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64))
}

/// Scans at most `limit` bytes of a file. Returns its state, or why nothing is taken.
pub(super) fn scan(candidate: &Candidate, limit: u64, field: &str) -> Result<Result<FileState, &'static str>> {
    let Candidate { path, format, .. } = candidate;
    let (bytes, modified) = size_and_time(path)?;
    let found = match format {
        Format::Text | Format::Jsonl | Format::Json => scan_text(path, *format, limit)?,
        Format::Parquet => scan_rows(path, limit, field)?,
        Format::Bin => scan_tokens(path, bytes, limit)?,
    };
    let state = |(taken, sha256)| FileState { path: path.clone(), format: *format, bytes, taken, modified, sha256 };
    Ok(found.map(state))
}

/// Bytes taken of a file and their digest, or why nothing is taken.
type Scanned = Result<(u64, String), &'static str>;

fn scanned(taken: u64, sha256: String, is_cut: bool) -> Scanned {
    match taken {
        0 if is_cut => Err(BEYOND_LIMIT),
        0 => Err(EMPTY),
        taken => Ok((taken, sha256)),
    }
}

/// Scans text, without a character or a line of JSON that the limit would cut.
fn scan_text(path: &Path, format: Format, limit: u64) -> Result<Scanned> {
    let mut data = open(path).with_context(cannot_read(path))?.0.take(limit);
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    // Beginning of an incomplete character or line.
    let mut begun: Vec<u8> = vec![];
    loop {
        let chunk = data.fill_buf().with_context(cannot_read(path))?;
        let is_end = chunk.is_empty();
        begun.extend(chunk);
        let read = chunk.len();
        data.consume(read);
        // A file that is cut has more after the limit.
        let is_cut = is_end && !data.get_mut().fill_buf().with_context(cannot_read(path))?.is_empty();
        let whole = match format {
            Format::Text => match std::str::from_utf8(&begun) {
                Ok(text) => text.len(),
                Err(error) if error.error_len().is_some() || (is_end && !is_cut) => return Ok(Err(BINARY)),
                Err(error) => error.valid_up_to(),
            },
            // The end of a file ends a line. The reader refuses a line that is too long.
            Format::Jsonl if begun.len() <= MAX_DOCUMENT && (!is_end || is_cut) => {
                begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)
            }
            _ => begun.len(),
        };
        if format == Format::Text && begun[..whole].contains(&0) {
            return Ok(Err(BINARY));
        }
        hasher.update(&begun[..whole]);
        bytes += whole as u64;
        begun.drain(..whole);
        if is_end {
            return Ok(scanned(bytes, hex(hasher), is_cut));
        }
    }
}

/// Scans rows: the bytes of text taken, and the digest of the whole file.
#[cfg(feature = "parquet")]
fn scan_rows(path: &Path, limit: u64, field: &str) -> Result<Scanned> {
    let mut bytes = 0_u64;
    for row in super::parquet::Rows::open(path, field)? {
        if bytes >= limit {
            break;
        }
        bytes = bytes.saturating_add(row?.bytes);
    }
    let sha256 = digest::of_file(path).with_context(cannot_read(path))?.1;
    Ok(scanned(bytes.min(limit), sha256, limit == 0))
}

#[cfg(not(feature = "parquet"))]
fn scan_rows(path: &Path, _: u64, _: &str) -> Result<Scanned> {
    anyhow::bail!(
        "{}: this build does not read Parquet files: build it with the cargo feature `parquet`",
        path.display()
    )
}

/// Checks the header of a token file and takes its digest. Large files are sampled at even
/// distances.
fn scan_tokens(path: &Path, bytes: u64, limit: u64) -> Result<Scanned> {
    let (header, limit) = (Header::read(path)?, limit.min(bytes));
    let is_empty = limit < bytes && header.tokens_within(limit) < 2;
    let sha256 = digest::of_file_or_samples(path, MAX_HASHED).with_context(cannot_read(path))?;
    Ok(scanned(if is_empty { 0 } else { limit }, sha256, true))
}

/// Bytes that tell text from binary data.
const HEAD: usize = 4096;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Magic bytes of compressed files that are not read.
const PACKED: [(&[u8], &str); 2] = [(b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")];

/// File that folders leave out.
pub(super) struct Other {
    /// Reason for skipping it.
    pub(super) left: &'static str,
    /// Format in which it is read if the user names it, or why it is not read.
    pub(super) named: Result<Format, String>,
}

/// Opened file, and the program that compressed it.
type Opened = (Box<dyn BufRead>, Option<&'static str>);

/// Opens a file. One that begins like gzip or zstd is decompressed while it is read. A compressed
/// file that ends too early is an error where it ends.
pub(super) fn open(path: &Path) -> io::Result<Opened> {
    let mut file = BufReader::with_capacity(CHUNK, files::open(path)?);
    Ok(match file.fill_buf()? {
        [0x1f, 0x8b, ..] => (Box::new(BufReader::with_capacity(CHUNK, MultiGzDecoder::new(file))), Some("gzip")),
        // A frame, or a skippable one before it.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            (Box::new(BufReader::with_capacity(CHUNK, zstd::Decoder::with_buffer(file)?)), Some("zstd"))
        }
        _ => (Box::new(file), None),
    })
}

/// Format of a file whose documents have the field `field`. The extension decides; where it does not,
/// the first bytes do.
pub(super) fn format_of(path: &Path, field: &str) -> Result<Result<Format, Other>> {
    let (mut data, by) = open(path).with_context(cannot_read(path))?;
    // `a.jsonl.gz` is read like `a.jsonl`.
    let name = if by.is_some() { path.with_extension("") } else { path.into() };
    let extension = name.extension().map(|extension| extension.to_ascii_lowercase()).unwrap_or_default();
    let other = |left, named: &str| Err(Other { left, named: Err(named.into()) });
    let packed = |by: &str| other("compressed", &format!("is compressed with {by}: decompress it first"));
    let head = data.fill_buf().with_context(cannot_read(path))?;
    let is_token_file = head.starts_with(b"{\"");
    let by_bytes = match PACKED.iter().find(|(begin, _)| head.starts_with(begin)) {
        Some((_, by)) => packed(by),
        None if head.starts_with(b"PAR1") => Ok(Format::Parquet),
        None if head[..head.len().min(HEAD)].contains(&0) => Err(Other { left: BINARY, named: Ok(Format::Text) }),
        None => Ok(Format::Text),
    };
    let format = match (extension.to_str().unwrap_or_default(), by_bytes) {
        ("jsonl" | "ndjson", _) => Ok(Format::Jsonl),
        ("parquet", _) => Ok(Format::Parquet),
        ("csv" | "tsv", _) => other(
            TABLE,
            "is a table, and tables are not read: make JSON Lines or Parquet of it, or set data.format = \"text\" to train on the \
             file as it is",
        ),
        ("json", _) => objects(path, data, field)?.unwrap_or_else(|| {
            other(
                OTHER_JSON,
                "begins with no whole JSON object, in an array or on a line of its own: set data.format = \"text\" to train on the \
                 file as it is",
            )
        }),
        // Other programs write `.bin` files too, but none that begin like a token file.
        ("bin", _) if is_token_file => Header::read(path).map(|_| Ok(Format::Bin))?,
        // Caches name files by their digests, without an extension.
        ("", Ok(Format::Text)) => objects(path, data, field)?.filter(Result::is_ok).unwrap_or(Ok(Format::Text)),
        (_, by_bytes) => by_bytes,
    };
    Ok(match (format, by) {
        // Their end is read first, so that all of it would have to be decompressed.
        (Ok(Format::Parquet), Some(by)) => packed(by),
        (format, _) => format,
    })
}

/// Format of a JSON file that begins with an object, as a line or in an array; `None` for other JSON.
fn objects(path: &Path, mut data: Box<dyn BufRead>, field: &str) -> Result<Option<Result<Format, Other>>> {
    let format = loop {
        match data.fill_buf().with_context(cannot_read(path))?.first() {
            // White space and a byte order mark.
            Some(b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf) => data.consume(1),
            Some(b'[') => break Format::Json,
            Some(b'{') => break Format::Jsonl,
            _ => return Ok(None),
        }
    };
    // An error before the end of the first document means that there is no object.
    let first = JsonReader::new(path, data, format, u64::MAX).next().and_then(Result::ok);
    let object = first.and_then(|(_, json)| serde_json::from_slice::<Map<String, Value>>(&json).ok());
    Ok(object.map(|object| match [field, MESSAGES].iter().any(|field| object.contains_key(*field)) {
        true => Ok(format),
        false => Err(Other { left: OTHER_JSON, named: Ok(format) }),
    }))
}
