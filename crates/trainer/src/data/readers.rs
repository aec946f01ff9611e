//! Reads the documents of files in order, as work for the tokenizer.

use std::io::{BufRead, Read, Take};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::chunk_text::{CHUNK, Chunks};
use super::encode::{Content, Encoder, Work};
use super::scan::{FileState, open};
use super::{Format, MAX_DOCUMENT, cannot_read};

/// All work of a file, in order. It ends at the first error.
pub(super) fn read<'a>(
    file: &'a FileState,
    encoder: &Encoder<'a>,
) -> Result<Box<dyn Iterator<Item = Result<Work<'a>>> + 'a>> {
    let path: &Path = &file.path;
    let work = move |content, number, bytes| Ok(Work { file, content, number, bytes });
    Ok(match file.format {
        Format::Text => {
            let text = open(path).with_context(cannot_read(path))?.0.take(file.taken);
            let chunks = Chunks::new(text, CHUNK, encoder.tokenizer).enumerate().map(move |(i, text)| {
                let text = text.with_context(cannot_read(path))?;
                let bytes = text.len() as u64;
                work(Content::Chunk { text, begins: i == 0 }, 1, bytes)
            });
            Box::new(chunks.chain([work(Content::EndOfText, 1, 0)]))
        }
        Format::Jsonl | Format::Json => {
            let documents = JsonReader::open(path, file.format, file.taken)?;
            Box::new(documents.map(move |document| {
                let (number, json) = document?;
                let bytes = json.len() as u64;
                work(Content::Json(json), number, bytes)
            }))
        }
        #[cfg(feature = "parquet")]
        Format::Parquet => {
            // Rows are taken until their texts have the number of bytes.
            let (mut rows, mut left) = (super::parquet::Rows::open(path, encoder.field)?, file.taken);
            Box::new(std::iter::from_fn(move || {
                let row = if left > 0 { rows.next()? } else { return None };
                Some(row.and_then(|super::parquet::Row { row, fields, bytes }| {
                    left = left.saturating_sub(bytes);
                    work(Content::Object(fields), row, bytes)
                }))
            }))
        }
        // The scan refuses Parquet here, and token files are not tokenized.
        _ => Box::new(std::iter::empty()),
    })
}

/// Reader of JSON Lines, or of the elements of a JSON array that fills a file, as bytes.
pub(crate) struct JsonReader<'a> {
    path: &'a Path,
    data: Take<Box<dyn BufRead>>,
    is_array: bool,
    /// Number of the current line, from 1.
    line: u64,
    /// Whether the array has begun.
    has_begun: bool,
}

impl<'a> JsonReader<'a> {
    /// Opens the first `limit` bytes of a file.
    pub(crate) fn open(path: &'a Path, format: Format, limit: u64) -> Result<Self> {
        Ok(Self::new(path, open(path).with_context(cannot_read(path))?.0, format, limit))
    }

    /// Reader of `data` in the file `path`.
    pub(super) fn new(path: &'a Path, data: Box<dyn BufRead>, format: Format, limit: u64) -> Self {
        Self { path, data: data.take(limit), is_array: format == Format::Json, line: 1, has_begun: false }
    }

    fn next_line(&mut self) -> Result<Option<(u64, Vec<u8>)>> {
        loop {
            let mut json = vec![];
            let mut line = self.data.by_ref().take(MAX_DOCUMENT as u64 + 1);
            if line.read_until(b'\n', &mut json).with_context(cannot_read(self.path))? == 0 {
                return Ok(None);
            }
            self.check_len(&json, self.line)?;
            self.line += 1;
            if !json.trim_ascii().is_empty() {
                return Ok(Some((self.line - 1, json)));
            }
        }
    }

    fn check_len(&self, json: &[u8], line: u64) -> Result<()> {
        match json.len() {
            0..=MAX_DOCUMENT => Ok(()),
            _ => bail!("{}:{line}: longer than {MAX_DOCUMENT} bytes", self.path.display()),
        }
    }

    fn next_element(&mut self) -> Result<Option<(u64, Vec<u8>)>> {
        let (mut json, mut depth, mut in_string, mut is_escaped) = (vec![], 0, false, false);
        // Line of the first byte other than white space.
        let mut begin = None;
        while let Some(byte) = self.byte()? {
            match byte {
                _ if in_string => {
                    in_string = is_escaped || byte != b'"';
                    is_escaped = byte == b'\\' && !is_escaped;
                }
                b' ' | b'\t' | b'\r' | b'\n' if json.is_empty() => continue,
                // A byte order mark.
                0xef | 0xbb | 0xbf if !self.has_begun => continue,
                b'[' if !self.has_begun => {
                    self.has_begun = true;
                    continue;
                }
                _ if !self.has_begun => return self.not_an_array(),
                b',' if depth == 0 => return Ok(Some((begin.unwrap_or(self.line), json))),
                b']' if depth == 0 => {
                    while let Some(byte) = self.byte()? {
                        if !byte.is_ascii_whitespace() {
                            return self.not_an_array();
                        }
                    }
                    self.is_array = false;
                    return Ok(begin.map(|begin| (begin, json)));
                }
                b'"' => in_string = true,
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = i32::max(depth - 1, 0),
                _ => {}
            }
            json.push(byte);
            let begin = *begin.get_or_insert(self.line);
            self.check_len(&json, begin)?;
        }
        // With a limit, the file continues.
        match self.data.get_mut().fill_buf().with_context(cannot_read(self.path))? {
            [] => bail!("{}:{}: the file ends before the JSON array does", self.path.display(), self.line),
            _ => Ok(None),
        }
    }

    fn not_an_array<T>(&self) -> Result<T> {
        bail!("{}:{}: expected one JSON array and nothing else", self.path.display(), self.line)
    }

    fn byte(&mut self) -> Result<Option<u8>> {
        let byte = self.data.fill_buf().with_context(cannot_read(self.path))?.first().copied();
        self.data.consume(usize::from(byte.is_some()));
        self.line += u64::from(byte == Some(b'\n'));
        Ok(byte)
    }
}

impl Iterator for JsonReader<'_> {
    /// Line on which a document begins, and its bytes. Blank lines, and an element that the limit
    /// cuts, are skipped.
    type Item = Result<(u64, Vec<u8>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_array { self.next_element() } else { self.next_line() }.transpose()
    }
}
