//! What a file is, before it is read: data in one of the formats, text, or neither. The extension says it, and of `.json` and `.bin`
//! the first bytes.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{MAX_DOCUMENT, cannot_read};
use super::json_array::JsonArray;
use super::token_file::Header;
use super::{DataError, Format, MESSAGES};
use crate::files;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Documents, or tokens.
    Data(Format),
    /// Objects, but none of the fields that are read is in the first one.
    OtherObjects(Format),
    /// Comma-separated or tab-separated values.
    Table,
    /// JSON that is no list of objects.
    OtherJson,
    /// All else.
    Text,
}

/// The kind of a file whose documents have the field `field`.
pub(super) fn kind(path: &Path, field: &str) -> Result<Kind, DataError> {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    Ok(match extension.to_str() {
        Some("jsonl" | "ndjson") => Kind::Data(Format::Jsonl),
        Some("parquet") => Kind::Data(Format::Parquet),
        Some("bin") => match Header::read(path) {
            // Other programs write files of this name.
            Err(DataError::TokenFile { .. }) => Kind::Text,
            header => header.map(|_| Kind::Data(Format::Bin))?,
        },
        Some("csv" | "tsv") => Kind::Table,
        Some("json") => match first_object(path).map_err(cannot_read(path))? {
            None => Kind::OtherJson,
            Some((format, object)) if [field, MESSAGES].iter().any(|field| object.contains_key(*field)) => {
                Kind::Data(format)
            }
            Some((format, _)) => Kind::OtherObjects(format),
        },
        _ => Kind::Text,
    })
}

/// The first object of an array, or on the first line.
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
        let first = JsonArray::new(reader).next();
        return Ok(first.and_then(Result::ok).and_then(|(_, bytes)| Some((Format::Json, object(&bytes)?))));
    }
    let mut line = vec![];
    reader.take(MAX_DOCUMENT as u64).read_until(b'\n', &mut line)?;
    Ok(object(&line).map(|object| (Format::Jsonl, object)))
}
