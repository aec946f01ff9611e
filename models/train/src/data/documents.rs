//! What the files hold, in their order, as work for the tokenizer.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::encode::{Content, Work};
use super::error::cannot_read;
use super::pieces::FilePieces;
use super::scan::Scanned;
use super::{DataError, DocumentError, Format};

/// Bytes of a line at most: a line is held in memory.
const MAX_LINE: usize = 64 << 20;

/// All that a file holds, in its order.
pub(super) fn read<'a>(
    file: &'a Scanned,
    #[cfg_attr(not(feature = "parquet"), expect(unused_variables, reason = "only Parquet has columns"))] field: &'a str,
) -> Result<Box<dyn Iterator<Item = Result<Work<'a>, DataError>> + 'a>, DataError> {
    Ok(match file.format {
        Format::Text => Box::new(read_text(file)?),
        Format::Jsonl => Box::new(read_lines(file)?),
        #[cfg(feature = "parquet")]
        Format::Parquet => Box::new(super::parquet::read_rows(file, field)?),
        // The scan has refused the one; the other is not tokenized.
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Box::new(std::iter::empty()),
        Format::Bin => Box::new(std::iter::empty()),
    })
}

fn read_text(file: &Scanned) -> Result<impl Iterator<Item = Result<Work<'_>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let mut pieces = FilePieces::open(path, file.taken).map_err(cannot_read(path))?;
    let (mut begins, mut ended) = (true, false);
    Ok(std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let content = match pieces.next() {
            Ok(Some(text)) => Content::Piece { text, begins: std::mem::take(&mut begins) },
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

fn read_lines(file: &Scanned) -> Result<impl Iterator<Item = Result<Work<'_>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let mut reader = BufReader::new(File::open(path).map_err(cannot_read(path))?.take(file.taken));
    let mut line = 0;
    let mut next = move || -> Result<Option<Work<'_>>, DataError> {
        loop {
            let mut bytes = vec![];
            let read = reader.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut bytes);
            let read = read.map_err(cannot_read(path))?;
            line += 1;
            if read == 0 {
                return Ok(None);
            }
            if read > MAX_LINE {
                let problem = DocumentError::TooLong { limit: MAX_LINE };
                return Err(DataError::Line { path: path.into(), line, problem });
            }
            if !bytes.trim_ascii().is_empty() {
                return Ok(Some(Work { file, content: Content::Line { line, bytes }, bytes: read as u64 }));
            }
        }
    };
    Ok(std::iter::from_fn(move || next().transpose()))
}
