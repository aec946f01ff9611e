//! Reads the documents of files in order, as work for the tokenizer.

use std::io::{BufRead, Read, Take};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::chunk_text::{CHUNK, Chunks};
use super::encode::{Content, Encoder, Work};
use super::scan::FileState;
use super::sniff::open;
use super::{Format, MAX_DOCUMENT, cannot_read};

/// Takes work. Returning false ends reading.
pub(super) type TakeWork<'a, 't> = &'t mut dyn FnMut(Work<'a>) -> Result<bool>;

/// Reads all work of a file, in order. Returns false if `take` ended reading.
pub(super) fn read<'a>(file: &'a FileState, encoder: &Encoder<'a>, take: TakeWork<'a, '_>) -> Result<bool> {
    let path: &Path = &file.path;
    match file.format {
        Format::Text => {
            let text = open(path).with_context(cannot_read(path))?.0.take(file.taken);
            let (mut chunks, mut begins) = (Chunks::new(text, CHUNK, encoder.tokenizer), true);
            while let Some(text) = chunks.next().with_context(cannot_read(path))? {
                let bytes = text.len() as u64;
                if !take(Work { file, content: Content::Chunk { text, begins }, number: 1, bytes })? {
                    return Ok(false);
                }
                begins = false;
            }
            take(Work { file, content: Content::EndOfText, number: 1, bytes: 0 })
        }
        Format::Jsonl | Format::Json => {
            let mut documents = JsonReader::open(path, file.format, file.taken)?;
            while let Some((number, json)) = documents.next()? {
                let bytes = json.len() as u64;
                if !take(Work { file, content: Content::Json(json), number, bytes })? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        #[cfg(feature = "parquet")]
        Format::Parquet => {
            // Rows are taken until their texts have the number of bytes.
            let (mut rows, mut left) = (super::parquet::Rows::open(path, encoder.field)?, file.taken);
            while left > 0 {
                let Some(super::parquet::Row { row: number, fields, bytes }) = rows.next().transpose()? else { break };
                left = left.saturating_sub(bytes);
                if !take(Work { file, content: Content::Object(fields), number, bytes })? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        // The scan refuses Parquet here, and token files are not tokenized.
        _ => Ok(true),
    }
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

    /// Next document and the line on which it begins; `None` at the end. Blank lines, and an element
    /// that the limit cuts, are skipped.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Vec<u8>)>> {
        if self.is_array {
            return self.next_element();
        }
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
