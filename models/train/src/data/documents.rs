//! What the files hold, in their order, as work for the tokenizer.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::encode::{Content, Encoder, Work};
use super::error::{MAX_DOCUMENT, cannot_read};
use super::json_array::{ArrayError, JsonArray};
use super::pieces::FilePieces;
use super::scan::Scanned;
use super::{DataError, DocumentError, Format};
use crate::{Tokenizer, files};

/// All that a file holds, in its order.
pub(super) fn read<'a>(
    file: &'a Scanned,
    encoder: &Encoder<'a>,
) -> Result<Box<dyn Iterator<Item = Result<Work<'a>, DataError>> + 'a>, DataError> {
    Ok(match file.format {
        Format::Text => Box::new(read_text(file, encoder.tokenizer)?),
        Format::Jsonl => Box::new(read_lines(file)?),
        Format::Json => Box::new(read_array(file)?),
        #[cfg(feature = "parquet")]
        Format::Parquet => Box::new(read_rows(file, encoder.field)?),
        // The scan has refused the one; the other is not tokenized.
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Box::new(std::iter::empty()),
        Format::Bin => Box::new(std::iter::empty()),
    })
}

fn read_text<'a>(
    file: &'a Scanned,
    tokenizer: &'a Tokenizer,
) -> Result<impl Iterator<Item = Result<Work<'a>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let mut pieces = FilePieces::open(path, file.taken, tokenizer).map_err(cannot_read(path))?;
    let (mut begins, mut ended) = (true, false);
    Ok(std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let content = match pieces.next() {
            Ok(Some((text, is_new))) => Content::Piece { text, begins: std::mem::take(&mut begins), is_new },
            Ok(None) => Content::EndOfText,
            Err(error) => {
                ended = true;
                return Some(Err(cannot_read(path)(error)));
            }
        };
        ended = matches!(content, Content::EndOfText);
        let bytes = if let Content::Piece { text, .. } = &content { text.len() as u64 } else { 0 };
        Some(Ok(Work { file, content, bytes }))
    }))
}

/// The rows of a file until their texts have as many bytes as are taken.
#[cfg(feature = "parquet")]
fn read_rows<'a>(
    file: &'a Scanned,
    field: &str,
) -> Result<impl Iterator<Item = Result<Work<'a>, DataError>>, DataError> {
    let (mut rows, mut left) = (super::parquet::Rows::open(&file.path, field)?, file.taken);
    Ok(std::iter::from_fn(move || {
        let next = if left > 0 { rows.next()? } else { return None };
        Some(next.map(|super::parquet::Row { row, fields, bytes }| {
            left = left.saturating_sub(bytes);
            Work { file, content: Content::Row { row, fields }, bytes }
        }))
    }))
}

fn read_lines(file: &Scanned) -> Result<impl Iterator<Item = Result<Work<'_>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let mut reader = BufReader::new(files::open(path).map_err(cannot_read(path))?.take(file.taken));
    let mut line = 0;
    let mut next = move || -> Result<Option<Work<'_>>, DataError> {
        loop {
            let mut bytes = vec![];
            let read = reader.by_ref().take(MAX_DOCUMENT as u64 + 1).read_until(b'\n', &mut bytes);
            let read = read.map_err(cannot_read(path))?;
            line += 1;
            if read == 0 {
                return Ok(None);
            }
            if read > MAX_DOCUMENT {
                let problem = DocumentError::TooLong { limit: MAX_DOCUMENT };
                return Err(DataError::Line { path: path.into(), line, problem });
            }
            if !bytes.trim_ascii().is_empty() {
                return Ok(Some(Work { file, content: Content::Line { line, bytes }, bytes: read as u64 }));
            }
        }
    };
    Ok(std::iter::from_fn(move || next().transpose()))
}

/// An element that the limit cuts is left out.
fn read_array(file: &Scanned) -> Result<impl Iterator<Item = Result<Work<'_>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let is_cut = file.taken < file.bytes;
    let elements = JsonArray::new(BufReader::new(files::open(path).map_err(cannot_read(path))?.take(file.taken)));
    let failed = |line, problem| Some(Err(DataError::Line { path: path.into(), line, problem }));
    Ok(elements.map_while(move |element| match element {
        Ok((line, bytes)) => {
            let size = bytes.len() as u64;
            Some(Ok(Work { file, content: Content::Line { line, bytes }, bytes: size }))
        }
        Err(ArrayError::Cut(_)) if is_cut => None,
        Err(ArrayError::Io(error)) => Some(Err(cannot_read(path)(error))),
        Err(ArrayError::TooLong(line)) => failed(line, DocumentError::TooLong { limit: MAX_DOCUMENT }),
        Err(ArrayError::Cut(line)) => failed(line, DocumentError::Cut),
        Err(ArrayError::Syntax(line)) => failed(line, DocumentError::NotAnArray),
    }))
}
