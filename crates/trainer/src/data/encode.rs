//! [`Encoder`]: encodes a chunk of a text file, a line or a row as tokens.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Map, Value};

use super::chunk_text::{CHUNK, Chunks};
use super::scan::FileState;
use super::token_file::Tokenized;
use super::{KWARGS, MESSAGES, THINKING, TOOLS, missing, names};
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
    Chunk {
        text: String,
        begins: bool,
    },
    EndOfText,
    /// Line, or element of an array.
    Json(Vec<u8>),
    /// Row.
    #[cfg(feature = "parquet")]
    Object(Map<String, Value>),
}

/// Encodes documents as tokens.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    /// Field that holds the text.
    pub(super) field: &'a str,
}

impl Encoder<'_> {
    pub(super) fn encode(&self, work: &Work<'_>) -> Result<Tokenized> {
        let (path, number) = (work.file.path.display(), work.number);
        match &work.content {
            Content::Chunk { text, begins } => {
                let mut ids: Vec<u32> = self.tokenizer.bos().filter(|_| *begins).into_iter().collect();
                let encoded = self.tokenizer.encode(text, SpecialTokens::AreText);
                ids.extend(encoded.map_err(|error| anyhow!("{path}: {error}"))?);
                Ok(Tokenized { ids, ..Tokenized::default() })
            }
            Content::EndOfText => {
                Ok(Tokenized { ids: self.tokenizer.eos().into_iter().collect(), mask: None, ends: true })
            }
            Content::Json(json) => {
                let text = std::str::from_utf8(json).map_err(|error| {
                    anyhow!("{path}:{number}: not valid UTF-8 at byte {} of the line", error.valid_up_to())
                })?;
                // Some editors write a byte order mark first.
                let text = text.trim_start_matches('\u{feff}').trim_end();
                let value: Value = serde_json::from_str(text).map_err(|error| {
                    // An element may have several lines.
                    let line = number + (error.line() as u64).saturating_sub(1);
                    anyhow!("{path}:{line}: not valid JSON: {}", without_line(&error))
                })?;
                let document = match &value {
                    Value::Object(fields) => self.encode_fields(fields),
                    other => Err(anyhow!("expected an object, found {}", kind(other))),
                };
                document.map_err(|error| anyhow!("{path}:{number}: {error:#}"))
            }
            #[cfg(feature = "parquet")]
            Content::Object(fields) => {
                self.encode_fields(fields).map_err(|error| anyhow!("{path}, row {number}: {error:#}"))
            }
        }
    }

    /// Treats a null field as missing: a Parquet row has a value in every column.
    fn encode_fields(&self, fields: &Map<String, Value>) -> Result<Tokenized> {
        let there = |field: &str| fields.get(field).filter(|value| !value.is_null());
        match (there(self.field), there(MESSAGES)) {
            (Some(Value::String(text)), _) => self.encode_text(text),
            (Some(value), _) if self.field != MESSAGES => wrong(self.field, value, "text"),
            (_, Some(Value::Array(messages))) => self.encode_messages(messages, [TOOLS, KWARGS, THINKING].map(there)),
            (_, Some(value)) => wrong(MESSAGES, value, "a list"),
            _ if fields.contains_key(self.field) && self.field != MESSAGES => wrong(self.field, &Value::Null, "text"),
            _ if fields.contains_key(MESSAGES) => wrong(MESSAGES, &Value::Null, "a list"),
            _ => Err(missing(self.field, fields.keys())),
        }
    }

    /// Encodes text like [`Tokenizer::document`], but in chunks.
    fn encode_text(&self, text: &str) -> Result<Tokenized> {
        let mut ids: Vec<u32> = self.tokenizer.bos().into_iter().collect();
        for chunk in Chunks::new(text.as_bytes(), CHUNK, self.tokenizer) {
            ids.extend(self.tokenizer.encode(&chunk?, SpecialTokens::AreText)?);
        }
        ids.extend(self.tokenizer.eos());
        Ok(Tokenized { ids, mask: None, ends: true })
    }

    /// Encodes messages with the record's tools and template variables.
    fn encode_messages(&self, messages: &[Value], [tools, kwargs, thinking]: [Option<&Value>; 3]) -> Result<Tokenized> {
        let messages = messages.iter().enumerate().map(message).collect::<Result<Vec<_>>>()?;
        let template = self
            .template
            .context("`messages` need a chat template: set data.chat_template, or use a tokenizer that has one")?;
        let mut variables = match kwargs.map(|kwargs| parsed(KWARGS, kwargs)).transpose()? {
            None => Map::new(),
            Some(Value::Object(variables)) => variables,
            Some(other) => return wrong(KWARGS, &other, "an object"),
        };
        match thinking {
            Some(Value::Bool(_)) | None => {
                variables.extend(thinking.map(|thinking| (THINKING.into(), thinking.clone())))
            }
            Some(other) => return wrong(THINKING, other, "a boolean"),
        }
        let mut template = template.with_kwargs(&variables)?;
        if let Some(tools) = tools.map(list_of_tools).transpose()?.flatten() {
            template = template.with(TOOLS, tools);
        }
        let conversation = template.encode(self.tokenizer, &messages)?;
        Ok(Tokenized { ids: conversation.ids, mask: Some(conversation.is_assistant), ends: true })
    }
}

fn message((index, value): (usize, &Value)) -> Result<Message> {
    let Value::Object(keys) = value else { return wrong(&format!("{MESSAGES}[{index}]"), value, "an object") };
    let mut rest = keys.clone();
    match rest.remove("role") {
        Some(Value::String(role)) => Ok(Message { role, rest }),
        Some(role) if !role.is_null() => wrong(&format!("{MESSAGES}[{index}].role"), &role, "text"),
        _ => bail!("message {index} has no `role`: there are {}", names(keys.keys())),
    }
}

/// A value, parsed if it is JSON text. Data sets store values as text if their shape varies by
/// record.
fn parsed(field: &str, value: &Value) -> Result<Value> {
    match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| anyhow!("`{field}` is text that is no JSON: {}", without_line(&error))),
        value => Ok(value.clone()),
    }
}

/// List of objects. The list and each object may be JSON text.
fn list_of_tools(tools: &Value) -> Result<Option<Value>> {
    if tools.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(None);
    }
    let tool = |(index, tool): (usize, &Value)| {
        let field = format!("{TOOLS}[{index}]");
        match parsed(&field, tool)? {
            tool @ Value::Object(_) => Ok(tool),
            other => wrong(&field, &other, "an object"),
        }
    };
    match parsed(TOOLS, tools)? {
        Value::Null => Ok(None),
        Value::Array(tools) => Ok(Some(tools.iter().enumerate().map(tool).collect::<Result<_>>()?)),
        other => wrong(TOOLS, &other, "a list"),
    }
}

fn wrong<T>(field: &str, value: &Value, expected: &str) -> Result<T> {
    bail!("`{field}` is {}, expected {expected}", kind(value))
}

/// The parser's message without its line, which is a line of the document.
fn without_line(error: &serde_json::Error) -> String {
    error.to_string().replace(&format!(" at line {} column ", error.line()), " at column ")
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
