//! Opens files, decompressed, and finds their kind before they are read: data in one of the
//! formats, text, or neither. The extension decides; where it does not, the first bytes do.

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result};
use flate2::bufread::MultiGzDecoder;
use serde_json::{Map, Value};

use super::token_file::Header;
use super::{Format, JsonReader, MESSAGES, cannot_read};
use crate::files;

/// Bytes that tell text from binary data.
const HEAD: usize = 4096;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Magic bytes of compressed files that are not read.
const PACKED: [(&[u8], &str); 2] = [(b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")];

/// Kind of a file.
pub(super) enum Kind {
    /// Documents or tokens.
    Is(Format),
    /// JSON objects. The first one has none of the fields that are read.
    OtherObjects(Format),
    /// Comma-separated or tab-separated values.
    Table,
    /// JSON whose first element or line is not an object.
    OtherJson,
    /// Compressed by this program.
    Packed(&'static str),
    /// Bytes that are not text.
    Binary,
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

/// Kind of a file whose documents have the field `field`.
pub(super) fn kind(path: &Path, field: &str) -> Result<Kind> {
    let (mut data, by) = open(path).with_context(cannot_read(path))?;
    // `a.jsonl.gz` is read like `a.jsonl`.
    let name = if by.is_some() { path.with_extension("") } else { path.into() };
    let extension = name.extension().map(|extension| extension.to_ascii_lowercase()).unwrap_or_default();
    let head = data.fill_buf().with_context(cannot_read(path))?;
    let by_bytes = match PACKED.iter().find(|(begin, _)| head.starts_with(begin)) {
        Some((_, by)) => Kind::Packed(by),
        None if head.starts_with(b"PAR1") => Kind::Is(Format::Parquet),
        None if head[..head.len().min(HEAD)].contains(&0) => Kind::Binary,
        None => Kind::Is(Format::Text),
    };
    let kind = match (extension.to_str().unwrap_or_default(), by_bytes) {
        ("jsonl" | "ndjson", _) => Kind::Is(Format::Jsonl),
        ("parquet", _) => Kind::Is(Format::Parquet),
        ("csv" | "tsv", _) => Kind::Table,
        ("json", _) => objects(path, data, field)?.unwrap_or(Kind::OtherJson),
        // Other programs also write `.bin` files.
        ("bin", _) if Header::read(path).is_ok() => Kind::Is(Format::Bin),
        // Caches name files by their digests, without an extension.
        ("", Kind::Is(Format::Text)) => match objects(path, data, field)? {
            Some(Kind::Is(format)) => Kind::Is(format),
            _ => Kind::Is(Format::Text),
        },
        (_, by_bytes) => by_bytes,
    };
    Ok(match (kind, by) {
        // Their end is read first, so that all of it would have to be decompressed.
        (Kind::Is(Format::Parquet), Some(by)) => Kind::Packed(by),
        (kind, _) => kind,
    })
}

/// Kind of a JSON file that begins with an object, as a line or in an array; `None` for other JSON.
fn objects(path: &Path, mut data: Box<dyn BufRead>, field: &str) -> Result<Option<Kind>> {
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
        true => Kind::Is(format),
        false => Kind::OtherObjects(format),
    }))
}
