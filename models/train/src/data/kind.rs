//! Kind of a file before it is read: data in one of the formats, text, or neither. The extension
//! decides; where it does not, the first bytes do.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{MAX_DOCUMENT, cannot_read};
use super::json_array;
use super::token_file::Header;
use super::{DataError, Format, MESSAGES};
use crate::files;

/// Bytes read to tell text from binary data.
const HEAD: u64 = 4096;
/// Magic bytes of compressed files, which have to be decompressed first.
const PACKED: [(&[u8], &str); 4] =
    [(b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")];

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Documents or tokens.
    Data(Format),
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
    /// Everything else.
    Text,
}

/// Kind of a file whose documents have the field `field`.
pub(super) fn kind(path: &Path, field: &str) -> Result<Kind, DataError> {
    let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
    Ok(match extension.as_ref().map(|extension| extension.to_str().unwrap_or_default()) {
        Some("jsonl" | "ndjson") => Kind::Data(Format::Jsonl),
        Some("parquet") => Kind::Data(Format::Parquet),
        Some("csv" | "tsv") => Kind::Table,
        Some("json") => objects(path, field)?.unwrap_or(Kind::OtherJson),
        Some("bin") => match Header::read(path) {
            // Other programs also write `.bin` files.
            Err(DataError::TokenFile { .. }) => by_bytes(path)?,
            header => header.map(|_| Kind::Data(Format::Bin))?,
        },
        Some(_) => by_bytes(path)?,
        // Caches name files by their digests, without an extension.
        None => match by_bytes(path)? {
            Kind::Text => objects(path, field)?.filter(|kind| matches!(kind, Kind::Data(_))).unwrap_or(Kind::Text),
            kind => kind,
        },
    })
}

fn by_bytes(path: &Path) -> Result<Kind, DataError> {
    let mut head = vec![];
    files::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head)).map_err(cannot_read(path))?;
    let packed = PACKED.iter().find(|(begin, _)| head.starts_with(begin));
    Ok(match packed {
        Some((_, by)) => Kind::Packed(by),
        None if head.starts_with(b"PAR1") => Kind::Data(Format::Parquet),
        None if head.contains(&0) => Kind::Binary,
        None => Kind::Text,
    })
}

/// Kind of a JSON file that begins with an object; `None` for other JSON.
fn objects(path: &Path, field: &str) -> Result<Option<Kind>, DataError> {
    let first = first_object(path).map_err(cannot_read(path))?;
    Ok(first.map(|(format, object)| match [field, MESSAGES].iter().any(|field| object.contains_key(*field)) {
        true => Kind::Data(format),
        false => Kind::OtherObjects(format),
    }))
}

/// First element of an array, or first line, if it is an object.
fn first_object(path: &Path) -> io::Result<Option<(Format, Map<String, Value>)>> {
    let mut reader = BufReader::new(files::open(path)?);
    let begin = loop {
        match reader.fill_buf()?.first() {
            None => return Ok(None),
            // White space and a byte order mark.
            Some(b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf) => reader.consume(1),
            Some(byte) => break *byte,
        }
    };
    let object = |bytes: &[u8]| serde_json::from_slice::<Map<String, Value>>(bytes).ok();
    if begin == b'[' {
        let mut first = None;
        // Only the first element is needed. An error before it means that there is no object.
        let _ = json_array::each(reader, |_, value, _| {
            first = Some(value);
            ControlFlow::Break(())
        });
        return Ok(first.and_then(|value| Some((Format::Json, value.as_object()?.clone()))));
    }
    if begin != b'{' {
        return Ok(None);
    }
    let mut line = vec![];
    reader.take(MAX_DOCUMENT as u64).read_until(b'\n', &mut line)?;
    Ok(object(&line).map(|object| (Format::Jsonl, object)))
}
