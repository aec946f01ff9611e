//! [`Encoder`]: encodes a piece of a text file, a line or a row as tokens.

use serde_json::{Map, Value};

use super::file_state::FileState;
use super::pieces;
use super::{DataError, DocumentError, Format, KWARGS, MESSAGES, THINKING, TOOLS};
use crate::{ChatTemplate, Message, SpecialTokens, Tokenizer};

/// Unit of work for the tokenizer.
pub(super) struct Work<'a> {
    pub(super) file: &'a FileState,
    pub(super) content: Content,
    /// Line or row of the document, from 1.
    pub(super) number: u64,
    /// Bytes of the file, or of a row's text.
    pub(super) bytes: u64,
}

pub(super) enum Content {
    Piece {
        text: String,
        begins: bool,
    },
    EndOfText,
    Line(Vec<u8>),
    /// Element of an array, or a row.
    Object(Value),
}

/// Tokens of a unit of work.
#[derive(Default)]
pub(super) struct Tokenized {
    pub(super) ids: Vec<u32>,
    /// Whether the loss counts each token as a target. `None` counts all.
    pub(super) mask: Option<Vec<bool>>,
    /// Whether the document ends here.
    pub(super) ends: bool,
}

/// Encodes documents as tokens.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    /// Field that holds the text.
    pub(super) field: &'a str,
}

impl Encoder<'_> {
    pub(super) fn encode(&self, work: &Work<'_>) -> Result<Tokenized, DataError> {
        let (path, number) = (work.file.path.clone(), work.number);
        let document = match &work.content {
            Content::Piece { text, begins } => {
                let ids = self.tokenizer.encode(text, SpecialTokens::AreText);
                let mut ids = ids.map_err(|source| DataError::Text { path, source })?;
                if let Some(bos) = self.tokenizer.bos().filter(|_| *begins) {
                    ids.insert(0, bos);
                }
                return Ok(Tokenized { ids, ..Tokenized::default() });
            }
            Content::EndOfText => {
                let ids = self.tokenizer.eos().into_iter().collect();
                return Ok(Tokenized { ids, ends: true, ..Tokenized::default() });
            }
            Content::Line(line) => self.encode_line(line),
            Content::Object(value) => self.encode_object(value),
        };
        match (work.file.format, document) {
            (Format::Parquet, Err(problem)) => Err(DataError::Row { path, row: number, problem }),
            (_, document) => document.map_err(|problem| DataError::Line { path, line: number, problem }),
        }
    }

    fn encode_line(&self, line: &[u8]) -> Result<Tokenized, DocumentError> {
        let line = std::str::from_utf8(line).map_err(|error| DocumentError::Utf8 { at: error.valid_up_to() })?;
        // Some editors write a byte order mark first.
        let line = line.trim_start_matches('\u{feff}').trim_end();
        self.encode_object(&serde_json::from_str(line).map_err(DocumentError::Json)?)
    }

    fn encode_object(&self, value: &Value) -> Result<Tokenized, DocumentError> {
        match value {
            Value::Object(fields) => self.encode_fields(fields),
            other => Err(DocumentError::NotAnObject { found: kind(other) }),
        }
    }

    /// Treats a null field as missing: a Parquet row has a value in every column.
    fn encode_fields(&self, fields: &Map<String, Value>) -> Result<Tokenized, DocumentError> {
        let wrong = |field: &str, value: &Value, expected| {
            Err(DocumentError::Type { field: field.into(), found: kind(value), expected })
        };
        let there = |field: &str| fields.get(field).filter(|value| !value.is_null());
        match (there(self.field), there(MESSAGES), fields.get(self.field).or(fields.get(MESSAGES))) {
            (Some(Value::String(text)), ..) => self.encode_text(text),
            (Some(value), ..) if self.field != MESSAGES => wrong(self.field, value, "text"),
            (_, Some(value @ Value::Array(_)), _) => self.encode_messages(value, [TOOLS, KWARGS, THINKING].map(there)),
            (_, Some(value), _) => wrong(MESSAGES, value, "a list"),
            (.., Some(null)) => {
                let field = if fields.contains_key(self.field) { self.field } else { MESSAGES };
                wrong(field, null, if field == MESSAGES { "a list" } else { "text" })
            }
            _ => Err(DocumentError::Missing { field: self.field.into(), found: names(fields) }),
        }
    }

    /// Encodes text like [`Tokenizer::document`], but in pieces.
    fn encode_text(&self, text: &str) -> Result<Tokenized, DocumentError> {
        let mut ids: Vec<u32> = self.tokenizer.bos().into_iter().collect();
        for piece in pieces::of_text(text, self.tokenizer) {
            ids.extend(self.tokenizer.encode(piece, SpecialTokens::AreText)?);
        }
        ids.extend(self.tokenizer.eos());
        Ok(Tokenized { ids, mask: None, ends: true })
    }

    /// Encodes messages with the record's tools and template variables.
    fn encode_messages(
        &self,
        messages: &Value,
        [tools, kwargs, thinking]: [Option<&Value>; 3],
    ) -> Result<Tokenized, DocumentError> {
        let messages = messages.as_array().into_iter().flatten().enumerate();
        let messages = messages.map(|(index, value)| message(index, value)).collect::<Result<Vec<_>, _>>()?;
        let template = self.template.ok_or(DocumentError::NoTemplate)?;
        let wrong = |field: &str, value: &Value, expected| DocumentError::Type {
            field: field.into(),
            found: kind(value),
            expected,
        };
        let mut variables = Map::new();
        if let Some(kwargs) = kwargs {
            let kwargs = parsed(KWARGS.into(), kwargs)?;
            variables = kwargs.as_object().ok_or_else(|| wrong(KWARGS, &kwargs, "an object"))?.clone();
        }
        if let Some(thinking) = thinking {
            thinking.as_bool().ok_or_else(|| wrong(THINKING, thinking, "a boolean"))?;
            variables.insert(THINKING.into(), thinking.clone());
        }
        let mut template = template.with_kwargs(&variables)?;
        if let Some(tools) = tools.map(list_of_tools).transpose()?.flatten() {
            template = template.with(TOOLS, tools);
        }
        let conversation = template.encode(self.tokenizer, &messages)?;
        Ok(Tokenized { ids: conversation.ids, mask: Some(conversation.is_assistant), ends: true })
    }
}

fn message(index: usize, value: &Value) -> Result<Message, DocumentError> {
    let wrong = |field: String, value, expected| Err(DocumentError::Type { field, found: kind(value), expected });
    let Value::Object(keys) = value else { return wrong(format!("{MESSAGES}[{index}]"), value, "an object") };
    let mut rest = keys.clone();
    match rest.remove("role") {
        Some(Value::String(role)) => Ok(Message { role, rest }),
        Some(role) if !role.is_null() => wrong(format!("{MESSAGES}[{index}].role"), &role, "text"),
        _ => Err(DocumentError::NoRole { index, found: names(keys) }),
    }
}

/// A value, parsed if it is JSON text. Data sets store values as text if their shape varies by
/// record.
fn parsed(field: String, value: &Value) -> Result<Value, DocumentError> {
    match value {
        Value::String(text) => serde_json::from_str(text).map_err(|source| DocumentError::NotJson { field, source }),
        value => Ok(value.clone()),
    }
}

/// List of objects. The list and each object may be JSON text.
fn list_of_tools(tools: &Value) -> Result<Option<Value>, DocumentError> {
    if tools.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(None);
    }
    match parsed(TOOLS.into(), tools)? {
        Value::Null => Ok(None),
        Value::Array(tools) => {
            let tool = |(index, tool)| {
                let field = format!("{TOOLS}[{index}]");
                match parsed(field.clone(), tool)? {
                    tool @ Value::Object(_) => Ok(tool),
                    other => Err(DocumentError::Type { field, found: kind(&other), expected: "an object" }),
                }
            };
            Ok(Some(tools.iter().enumerate().map(tool).collect::<Result<_, _>>()?))
        }
        other => Err(DocumentError::Type { field: TOOLS.into(), found: kind(&other), expected: "a list" }),
    }
}

fn names(keys: &Map<String, Value>) -> Vec<String> {
    keys.keys().map(|key| format!("`{key}`")).collect()
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
