//! What the files hold, in their order, as work for the tokenizer: a piece of a text file, a line, or a row.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use super::error::cannot_read;
use super::pieces::{self, FilePieces};
use super::scan::Scanned;
use super::{DataError, DocumentError, Format};
use crate::{ChatTemplate, Message, SpecialTokens, Tokenizer};

/// Bytes of a line at most: a line is held in memory.
const MAX_LINE: usize = 64 << 20;

/// What is tokenized at once.
pub(super) struct Work<'a> {
    pub(super) file: &'a Scanned,
    pub(super) content: Content,
    /// Bytes of the file, or of a row's text.
    pub(super) bytes: u64,
}

pub(super) enum Content {
    Piece {
        text: String,
        begins: bool,
    },
    EndOfText,
    Line {
        line: u64,
        bytes: Vec<u8>,
    },
    #[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "only Parquet has rows"))]
    Row {
        row: u64,
        fields: serde_json::Map<String, Value>,
    },
}

/// What a piece of work gives.
#[derive(Default)]
pub(super) struct Tokenized {
    pub(super) ids: Vec<u32>,
    /// Where the loss counts; everywhere if absent.
    pub(super) mask: Option<Vec<bool>>,
    /// The document ends here.
    pub(super) ends: bool,
}

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

/// What makes tokens of documents.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    /// The field that holds text.
    pub(super) field: &'a str,
}

impl Encoder<'_> {
    pub(super) fn encode(&self, work: &Work<'_>) -> Result<Tokenized, DataError> {
        let path = || work.file.path.clone();
        match &work.content {
            Content::Piece { text, begins } => {
                let ids = self.tokenizer.encode(text, SpecialTokens::AreText);
                let mut ids = ids.map_err(|source| DataError::Text { path: path(), source })?;
                if let Some(bos) = self.tokenizer.bos().filter(|_| *begins) {
                    ids.insert(0, bos);
                }
                Ok(Tokenized { ids, ..Tokenized::default() })
            }
            Content::EndOfText => {
                Ok(Tokenized { ids: self.tokenizer.eos().into_iter().collect(), mask: None, ends: true })
            }
            Content::Line { line, bytes } => {
                self.encode_line(bytes).map_err(|problem| DataError::Line { path: path(), line: *line, problem })
            }
            Content::Row { row, fields } => {
                self.encode_fields(fields).map_err(|problem| DataError::Row { path: path(), row: *row, problem })
            }
        }
    }

    fn encode_line(&self, line: &[u8]) -> Result<Tokenized, DocumentError> {
        let line = std::str::from_utf8(line).map_err(|error| DocumentError::Utf8 { at: error.valid_up_to() })?;
        match serde_json::from_str(line.trim_end()).map_err(DocumentError::Json)? {
            Value::Object(fields) => self.encode_fields(&fields),
            other => Err(DocumentError::NotAnObject { found: kind(&other) }),
        }
    }

    fn encode_fields(&self, fields: &serde_json::Map<String, Value>) -> Result<Tokenized, DocumentError> {
        let wrong = |field: &str, value: &Value, expected| {
            Err(DocumentError::Type { field: field.into(), found: kind(value), expected })
        };
        match (fields.get(self.field), fields.get("messages")) {
            (Some(Value::String(text)), _) => self.encode_text(text),
            (Some(value), _) if self.field != "messages" => wrong(self.field, value, "text"),
            (_, Some(value @ Value::Array(_))) => self.encode_messages(value),
            (_, Some(value)) => wrong("messages", value, "a list"),
            _ => Err(DocumentError::Missing {
                field: self.field.into(),
                found: fields.keys().map(|key| format!("`{key}`")).collect(),
            }),
        }
    }

    /// As [`Tokenizer::document`], in pieces.
    fn encode_text(&self, text: &str) -> Result<Tokenized, DocumentError> {
        let mut ids: Vec<u32> = self.tokenizer.bos().into_iter().collect();
        for piece in pieces::of_text(text) {
            ids.extend(self.tokenizer.encode(piece, SpecialTokens::AreText)?);
        }
        ids.extend(self.tokenizer.eos());
        Ok(Tokenized { ids, mask: None, ends: true })
    }

    fn encode_messages(&self, messages: &Value) -> Result<Tokenized, DocumentError> {
        let messages: Vec<Message> = serde::Deserialize::deserialize(messages).map_err(DocumentError::Messages)?;
        let template = self.template.ok_or(DocumentError::NoTemplate)?;
        let conversation = template.encode(self.tokenizer, &messages)?;
        Ok(Tokenized { ids: conversation.ids, mask: Some(conversation.is_assistant), ends: true })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
