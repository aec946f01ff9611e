//! [`Encoder`]: a piece of a text file, a line, or a row to tokens.

use serde_json::Value;

use super::pieces;
use super::scan::Scanned;
use super::{DataError, DocumentError};
use crate::{ChatTemplate, Message, SpecialTokens, Tokenizer};

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
        // Some editors put a byte order mark first.
        match serde_json::from_str(line.trim_start_matches('\u{feff}').trim_end()).map_err(DocumentError::Json)? {
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
            (_, Some(value @ Value::Array(_))) => self.encode_messages(value, fields.get("tools")),
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

    /// With the tools that the record offers the assistant, if it does.
    fn encode_messages(&self, messages: &Value, tools: Option<&Value>) -> Result<Tokenized, DocumentError> {
        let messages: Vec<Message> = serde::Deserialize::deserialize(messages).map_err(DocumentError::Messages)?;
        let template = self.template.ok_or(DocumentError::NoTemplate)?;
        let conversation = match tools.filter(|tools| !tools.is_null()) {
            Some(tools) => template.with("tools", tools.clone()).encode(self.tokenizer, &messages)?,
            None => template.encode(self.tokenizer, &messages)?,
        };
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
