//! Reads the documents of files in order, as work for the tokenizer.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;

use super::encode::{Content, Encoder, Work};
use super::error::{MAX_DOCUMENT, cannot_read};
use super::file_state::FileState;
use super::json_array::{self, ArrayError};
use super::pieces::FilePieces;
use super::{DataError, DocumentError, Format};
use crate::files;

const TOO_LONG: DocumentError = DocumentError::TooLong { limit: MAX_DOCUMENT };

/// Why reading stopped before the end of the files: an error, or `None` if nothing more is needed.
pub(super) type Stopped = Option<DataError>;

/// Takes work. Returning [`Stopped`] ends reading.
pub(super) type Take<'a, 't> = &'t mut dyn FnMut(Work<'a>) -> Result<(), Stopped>;

/// Reads all work of a file, in order.
pub(super) fn read<'a>(file: &'a FileState, encoder: &Encoder<'a>, take: Take<'a, '_>) -> Result<(), Stopped> {
    match file.format {
        Format::Text => read_text(file, encoder, take),
        Format::Jsonl => read_lines(file, take),
        Format::Json => read_array(file, take),
        #[cfg(feature = "parquet")]
        Format::Parquet => read_rows(file, encoder.field, take),
        // The scan refuses Parquet here, and token files are not tokenized.
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Ok(()),
        Format::Bin => Ok(()),
    }
}

fn read_text<'a>(file: &'a FileState, encoder: &Encoder<'a>, take: Take<'a, '_>) -> Result<(), Stopped> {
    let path: &Path = &file.path;
    let mut pieces = FilePieces::open(path, file.taken, encoder.tokenizer).map_err(cannot_read(path))?;
    let mut begins = true;
    while let Some(text) = pieces.next().map_err(cannot_read(path))? {
        let bytes = text.len() as u64;
        take(Work { file, content: Content::Piece { text, begins }, number: 1, bytes })?;
        begins = false;
    }
    take(Work { file, content: Content::EndOfText, number: 1, bytes: 0 })
}

fn read_lines<'a>(file: &'a FileState, take: Take<'a, '_>) -> Result<(), Stopped> {
    let path: &Path = &file.path;
    let mut reader = BufReader::new(files::open(path).map_err(cannot_read(path))?.take(file.taken));
    for number in 1.. {
        let Some(line) = next_line(&mut reader).map_err(cannot_read(path))? else { break };
        if line.len() > MAX_DOCUMENT {
            return Err(wrong(file, number, TOO_LONG));
        }
        if !line.trim_ascii().is_empty() {
            let bytes = line.len() as u64;
            take(Work { file, content: Content::Line(line), number, bytes })?;
        }
    }
    Ok(())
}

/// Reads the next line with its end; `None` at the end of the file. Of a line longer than
/// [`MAX_DOCUMENT`], reads one byte more than that.
pub(crate) fn next_line(reader: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = vec![];
    let read = reader.take(MAX_DOCUMENT as u64 + 1).read_until(b'\n', &mut line)?;
    Ok((read > 0).then_some(line))
}

fn wrong(file: &FileState, line: u64, problem: DocumentError) -> Stopped {
    Some(DataError::Line { path: file.path.clone(), line, problem })
}

/// Reads the elements of an array. An element that the limit cuts is skipped.
fn read_array<'a>(file: &'a FileState, take: Take<'a, '_>) -> Result<(), Stopped> {
    let path: &Path = &file.path;
    let reader = BufReader::new(files::open(path).map_err(cannot_read(path))?.take(file.taken));
    let mut taken = Ok(());
    let read = json_array::each(reader, |number, value, bytes| {
        taken = take(Work { file, content: Content::Object(value), number, bytes });
        if taken.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    match read {
        Ok(()) => taken,
        Err(ArrayError::Cut(_)) if file.taken < file.bytes => Ok(()),
        Err(ArrayError::Cut(line)) => Err(wrong(file, line, DocumentError::Cut)),
        Err(ArrayError::TooLong(line)) => Err(wrong(file, line, TOO_LONG)),
        Err(ArrayError::NotAnArray(line)) => Err(wrong(file, line, DocumentError::NotAnArray)),
        Err(ArrayError::Syntax(error)) => Err(wrong(file, error.line() as u64, DocumentError::Json(error))),
        Err(ArrayError::Io(error)) => Err(Some(cannot_read(path)(error))),
    }
}

/// Reads rows until their texts have the number of bytes taken.
#[cfg(feature = "parquet")]
fn read_rows<'a>(file: &'a FileState, field: &str, take: Take<'a, '_>) -> Result<(), Stopped> {
    let (mut rows, mut left) = (super::parquet::Rows::open(&file.path, field)?, file.taken);
    while left > 0 {
        let Some(super::parquet::Row { row: number, fields, bytes }) = rows.next().transpose()? else { break };
        left = left.saturating_sub(bytes);
        take(Work { file, content: Content::Object(fields.into()), number, bytes })?;
    }
    Ok(())
}
