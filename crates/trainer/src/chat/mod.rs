//! [`ChatTemplate`]: encodes conversations with the ids of `transformers`' `apply_chat_template`,
//! and marks the assistant's ids.

mod environment;
mod python;
mod spans;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::Environment;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::tokenizer::{ConfigFile, SPECIAL_TOKENS};
use crate::{SpecialTokens, Tokenizer, files};
use spans::{MANY, Rendered};

/// Role whose messages the loss counts.
const ASSISTANT: &str = "assistant";
/// Roles whose content is text, or a list of parts.
const TALKERS: [&str; 4] = ["system", "developer", "user", ASSISTANT];
/// Keys of a message's reasoning; the first is the usual one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Keys that say whether a message is learned: OpenAI's, which is a number, and axolotl's.
const LEARNED: [&str; 4] = ["weight", "train", "trainable", "loss"];
/// Variables that the renderer sets.
const RESERVED: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];

/// Message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Role: `system`, `user`, `assistant`, `tool`, or another one that the template knows.
    pub role: String,
    /// All other keys, as passed to the template: `content`, `tool_calls`, `name`, ...
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl Message {
    /// Creates a message with text content.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let rest = Map::from_iter([("content".to_string(), Value::String(content.into()))]);
        Self { role: role.into(), rest }
    }

    /// Whether the loss counts the message, by all keys of [`LEARNED`] that it has.
    fn is_learned(&self, index: usize) -> Result<bool> {
        let mut is_learned = true;
        for key in LEARNED {
            let Some(value) = self.rest.get(key).filter(|value| !value.is_null()) else { continue };
            let flag = value.as_bool().filter(|_| key != "weight").map(|is| f64::from(u8::from(is)));
            is_learned &= match flag.or(value.as_f64().filter(|_| key == "weight")) {
                Some(0.0) => false,
                Some(1.0) => true,
                _ => {
                    let expected = if key == "weight" { "0 or 1" } else { "true or false" };
                    bail!("`{key}` of message {index} is {value}, expected {expected}")
                }
            };
        }
        Ok(is_learned)
    }

    /// Checks the content of a message. Empty text is valid, missing content only with calls.
    ///
    /// Templates print nothing for missing content, and print other types in different ways. The
    /// content of other roles, such as `tool`, may have any type.
    fn check(&self, index: usize) -> Result<()> {
        let (role, content) = (&*self.role, self.rest.get("content").filter(|content| !content.is_null()));
        let has_calls = self.rest.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        let found = match content {
            None if has_calls => return Ok(()),
            None => {
                let keys: Vec<_> = self.rest.keys().map(|key| format!(", `{key}`")).collect();
                let found = keys.concat();
                bail!("message {index} ({role}) has neither `content` nor `tool_calls`: there are `role`{found}")
            }
            Some(_) if !TALKERS.contains(&role) => return Ok(()),
            Some(Value::String(_)) => return Ok(()),
            Some(Value::Array(parts)) if has_calls || !parts.is_empty() => return Ok(()),
            Some(Value::Array(_)) => "an empty list",
            Some(Value::Object(_)) => "an object",
            Some(_) => "a number or a boolean",
        };
        bail!("`content` of message {index} ({role}) is {found}, expected text or a list of parts")
    }
}

/// Conversation in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Ids of the whole text.
    pub ids: Vec<u32>,
    /// Whether the assistant says each id, in a message that is learned.
    pub is_assistant: Vec<bool>,
}

/// Jinja template that renders a conversation as text.
///
/// It renders as `transformers` does, with these exceptions:
/// - `strftime_now` is not defined, so that a conversation has the same ids on every day. A
///   template that tests `strftime_now is defined` takes its fixed date, or the variable that
///   [`with`](Self::with) sets (`date_string` for Llama's). A template that calls it without a test
///   is an error.
/// - In `a ~ b`, floats below 1e-4 and from 1e16 print as in `minijinja`, not as in Python.
/// - A slice of an undefined value is empty, not an error.
///
/// Special tokens written in a message are encoded as special tokens, as in `transformers`.
///
/// ```
/// use trainer::{ChatTemplate, Message};
///
/// let source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}";
/// let template = ChatTemplate::new(source, [("eos_token", "</s>")])?;
/// let text = template.render(&[Message::new("user", " Hello ")], false)?;
/// assert_eq!(text, "user: Hello</s>");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: Arc<str>,
    environment: Arc<Environment<'static>>,
    /// Whether the template marks the assistant's text with tags.
    has_tags: bool,
    variables: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads the template of a checkpoint: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json`, else of `chat_template.json`.
    ///
    /// The value of `chat_template` is a text, or a list of `{name, template}`, from which the one
    /// named `default` is taken. `None` if the checkpoint has no template. Special tokens come from
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// A file that cannot be read, or a template that is not valid Jinja or exceeds a limit.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            return Self::from_file(path).map(Some);
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(name);
            let file = ConfigFile::read(path.clone())?;
            if let Some(value) = file.get("chat_template") {
                let source = default_template(value).with_context(|| {
                    let expected = "a text nor a list of names and templates with one named \"default\"";
                    format!("{}: chat_template is neither {expected}", path.display())
                })?;
                return Self::new(source, special_tokens(folder)?).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads the template from the folder of a tokenizer, named as in [`Tokenizer::open`].
    ///
    /// # Errors
    /// The errors of [`from_folder`](Self::from_folder).
    pub fn of_tokenizer(name: &str) -> Result<Option<Self>> {
        let path = Path::new(name);
        match name == Tokenizer::BYTES {
            true => Ok(None),
            false if path.is_dir() => Self::from_folder(path),
            false => Self::from_folder(path.parent().unwrap_or(Path::new(""))),
        }
    }

    /// Reads a template from a file. Special tokens come from `tokenizer_config.json` next to it,
    /// if there is one.
    ///
    /// # Errors
    /// The errors of [`from_folder`](Self::from_folder).
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let source = files::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::new(&source, special_tokens(path.parent().unwrap_or(Path::new("")))?)
    }

    /// Creates a template with the special tokens that it uses: `("bos_token", "<s>")`.
    ///
    /// # Errors
    /// A template that is not valid Jinja or exceeds a limit.
    pub fn new<N: Into<String>, T: Into<String>>(
        source: &str,
        tokens: impl IntoIterator<Item = (N, T)>,
    ) -> Result<Self> {
        let translated = environment::without_tags(source);
        let has_tags = matches!(translated, Cow::Owned(_));
        let environment = Arc::new(environment::environment(translated.into_owned())?);
        let variables = tokens.into_iter().map(|(name, token)| (name.into(), Value::String(token.into()))).collect();
        Ok(Self { source: source.into(), environment, has_tags, variables })
    }

    /// Returns this template with one more variable: `tools`, `date_string`, `enable_thinking`, ...
    #[must_use]
    pub fn with(&self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        let mut template = self.clone();
        template.variables.insert(name.into(), value.into());
        template
    }

    /// Source text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns this template with more variables: the table `chat_template_kwargs` of data or of a
    /// configuration.
    ///
    /// # Errors
    /// A variable that the renderer sets.
    pub fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Self> {
        if let Some(name) = RESERVED.into_iter().find(|name| kwargs.contains_key(*name)) {
            bail!("`{name}` in `chat_template_kwargs` is not for others to set: remove it");
        }
        let mut template = self.clone();
        template.variables.extend(kwargs.clone());
        Ok(template)
    }

    /// Variables in addition to the messages: special tokens, and the ones set by
    /// [`with`](Self::with).
    pub fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// Renders a conversation as text. With `add_generation_prompt`, the beginning of the
    /// assistant's next message follows.
    ///
    /// # Errors
    /// No messages, or messages that the template refuses.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        ensure!(!messages.is_empty(), "a conversation must have a message");
        self.render_with(messages, add_generation_prompt, None)
    }

    /// Encodes a whole conversation and marks the assistant's ids, including the token that ends
    /// its turn.
    ///
    /// With the tags `{% generation %}` and `{% endgeneration %}`, the text between them is the
    /// assistant's. Without tags, it is the text that the template adds for an assistant message
    /// after the generation prompt. White space after a special token at its end is excluded. If
    /// later messages change that text (some templates drop earlier reasoning), it is searched for
    /// in the text of the whole conversation.
    ///
    /// If no special token ends a turn, the special token that follows, such as the next role's,
    /// belongs to the turn. The last turn includes the end of the conversation. A token that is
    /// partly the assistant's counts as the assistant's.
    ///
    /// A message with `weight` 0 is not learned: none of its ids counts. The same holds if `train`,
    /// `trainable` or `loss` is false.
    ///
    /// # Errors
    /// Messages that the template refuses, or a text that does not show the assistant's part.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation> {
        messages.iter().enumerate().try_for_each(|(index, message)| message.check(index))?;
        let mut learned = vec![];
        let mut unlearned = None;
        for (index, message) in messages.iter().enumerate() {
            let is_learned = message.is_learned(index)?;
            if message.role == ASSISTANT {
                learned.push(is_learned);
                unlearned = unlearned.or((!is_learned).then_some(index));
            }
        }
        let text = self.render(messages, false)?;
        let (ids, ranges) = tokenizer.encode_with_ranges(&text)?;
        let spans = if self.has_tags {
            let spans = self.tagged(messages, &text)?;
            if let Some(index) = unlearned.filter(|_| spans.len() != learned.len()) {
                return Err(not_separable(index));
            }
            spans
        } else {
            let specials = ids.iter().zip(&ranges).filter(|(id, _)| tokenizer.is_special(**id));
            let specials: Vec<_> = specials.map(|(_, range)| range.clone()).collect();
            Rendered { template: self, tokenizer, messages, text: &text, specials: &specials }.turns(MANY)?
        };
        let mut is_assistant = vec![false; ids.len()];
        let mut says_something = false;
        for (number, span) in spans.into_iter().enumerate().filter(|(_, span)| !span.is_empty()) {
            says_something = true;
            if learned.get(number) == Some(&false) {
                continue;
            }
            let first = ranges.partition_point(|range| range.end <= span.start);
            let others = ranges[first..].partition_point(|range| range.start < span.end);
            is_assistant[first..first + others].fill(true);
        }
        if !says_something {
            bail!("the conversation has no text of the assistant; its roles are {}", roles(messages));
        }
        Ok(Conversation { ids, is_assistant })
    }

    /// Ids of the conversation so far with the generation prompt, for a model to continue.
    ///
    /// # Errors
    /// No messages, messages that the template refuses, or text that the tokenizer refuses.
    pub fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>> {
        let text = self.render(messages, true)?;
        tokenizer.encode(&text, SpecialTokens::InText)
    }

    /// Special token that ends the assistant's turns: the last of a turn, or the one after it.
    /// `None` if there is no such token, or if the template cannot render user and assistant
    /// messages.
    pub fn turn_end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let turns = ["user", ASSISTANT, "user"].map(|role| Message::new(role, "a"));
        let conversation = self.encode(tokenizer, &turns).or_else(|_| self.encode(tokenizer, &turns[..2]));
        let Conversation { ids, is_assistant } = conversation.ok()?;
        let last = is_assistant.iter().rposition(|is| *is)?;
        // White space after the token may belong to the assistant.
        let is_blank = |ids: &[u32]| tokenizer.decode(ids).is_ok_and(|text| text.trim().is_empty());
        let ends = (0..=last).rev().take_while(|at| is_assistant[*at] && is_blank(&ids[at + 1..=last]));
        ends.chain([last + 1]).filter_map(|at| ids.get(at).copied()).find(|id| tokenizer.is_special(*id))
    }

    /// Renders any number of messages. The template's tags put `marks` around the assistant's text.
    fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        marks: Option<spans::Marks>,
    ) -> Result<String> {
        use minijinja::Value;
        use minijinja::value::Serde;
        let messages: Vec<_> = messages.iter().map(seen_by_templates).collect();
        let mut context = vec![
            ("messages", Value::from(Serde(&messages))),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        context.extend(self.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        if let Some(marks) = marks {
            context.push((environment::MARKS, Value::from(String::from_iter(marks))));
        }
        environment::render(&self.environment, Value::from_pairs(context))
    }
}

/// Error of a template whose text does not show what the assistant says.
fn not_separable(index: usize) -> anyhow::Error {
    anyhow!(
        "the chat template does not show which part of the text is message {index}: \
         mark each of the assistant, and nothing else, with {{% generation %}}"
    )
}

/// Roles of the messages, without duplicates.
fn roles(messages: &[Message]) -> String {
    let roles: BTreeSet<String> = messages.iter().map(|message| format!("`{}`", message.role)).collect();
    roles.into_iter().collect::<Vec<_>>().join(", ")
}

/// Message as `transformers` passes it: without null keys, and with its reasoning under the keys
/// that templates know.
fn seen_by_templates(message: &Message) -> Map<String, Value> {
    let keys = message.rest.iter().filter(|(_, value)| !value.is_null());
    let reasoning = REASONING.iter().find_map(|key| message.rest.get(*key).filter(|value| !value.is_null()));
    let mut seen = Map::new();
    seen.extend(reasoning.map(|reasoning| ("thinking".to_string(), reasoning.clone())));
    seen.insert("role".into(), message.role.clone().into());
    seen.extend(keys.map(|(key, value)| (key.clone(), value.clone())));
    seen.extend(reasoning.map(|reasoning| ("reasoning_content".to_string(), reasoning.clone())));
    seen
}

fn default_template(value: &Value) -> Option<&str> {
    match value {
        Value::String(source) => Some(source),
        Value::Array(named) => named.iter().find(|named| named["name"] == "default")?["template"].as_str(),
        _ => None,
    }
}

fn special_tokens(folder: &Path) -> Result<Vec<(&'static str, String)>> {
    let config = ConfigFile::read(folder.join("tokenizer_config.json"))?;
    let mut tokens = vec![];
    for name in SPECIAL_TOKENS {
        tokens.extend(config.token_text(name)?.map(|token| (name, token.to_string())));
    }
    Ok(tokens)
}
