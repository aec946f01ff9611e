//! [`ChatTemplate`]: conversations to the ids that `transformers`' `apply_chat_template` gives, and which of them the assistant says.

mod environment;
mod error;
mod limits;
mod marks;
mod python;
mod spans;
mod work;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use minijinja::Environment;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::tokenizer::{ConfigFile, SPECIAL_TOKENS};
use crate::{SpecialTokens, Tokenizer, files};
pub use error::ChatError;
pub(crate) use limits::with_stack;

/// The role whose messages the loss counts.
const ASSISTANT: &str = "assistant";
/// Roles whose content is text, or a list of parts.
const TALKERS: [&str; 4] = ["system", "developer", "user", ASSISTANT];
/// Names under which a message's reasoning is passed; the first is the usual one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Keys of a message that say whether it is learned: OpenAI's, which is a number, and axolotl's.
const LEARNED: [&str; 4] = ["weight", "train", "trainable", "loss"];
/// Variables that the renderer sets.
const RESERVED: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool` or what else the template knows.
    pub role: String,
    /// All other keys, as they reach the template: `content`, `tool_calls`, `name`, ...
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl Message {
    /// A message that is text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let rest = Map::from_iter([("content".to_string(), Value::String(content.into()))]);
        Self { role: role.into(), rest }
    }

    /// Whether the loss counts what the message says, by all keys of [`LEARNED`] that it has.
    fn is_learned(&self, index: usize) -> Result<bool, ChatError> {
        let mut is_learned = true;
        for key in LEARNED {
            let Some(value) = self.rest.get(key).filter(|value| !value.is_null()) else { continue };
            let flag = value.as_bool().filter(|_| key != "weight").map(|is| f64::from(u8::from(is)));
            is_learned &= match flag.or(value.as_f64().filter(|_| key == "weight")) {
                Some(0.0) => false,
                Some(1.0) => true,
                _ => return Err(ChatError::Learned { index, key, value: value.to_string() }),
            };
        }
        Ok(is_learned)
    }

    /// Content may be empty text, but somebody has to have said so. Templates print nothing for what is not there, and what they like for
    /// what is no text; what a tool returns may be anything.
    fn check(&self, index: usize) -> Result<(), ChatError> {
        let has_calls = self.rest.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        let wrong = |found| Err(ChatError::Content { index, role: self.role.clone(), found });
        match self.rest.get("content").filter(|content| !content.is_null()) {
            None if has_calls => return Ok(()),
            None => {}
            Some(_) if !TALKERS.contains(&&*self.role) => return Ok(()),
            Some(Value::String(_)) => return Ok(()),
            Some(Value::Array(parts)) if has_calls || !parts.is_empty() => return Ok(()),
            Some(Value::Array(_)) => return wrong("an empty list"),
            Some(Value::Object(_)) => return wrong("an object"),
            Some(_) => return wrong("a number or a boolean"),
        }
        let keys = self.rest.keys().map(String::as_str);
        let found = ["role"].into_iter().chain(keys).map(|key| format!("`{key}`")).collect();
        Err(ChatError::NoContent { index, role: self.role.clone(), found })
    }
}

/// A conversation in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The ids of the whole text.
    pub ids: Vec<u32>,
    /// For each id whether the assistant says it, in a message that is learned.
    pub is_assistant: Vec<bool>,
}

/// A Jinja template that makes one text of a conversation.
///
/// It is rendered as `transformers` does, but for this:
/// - `strftime_now` is not defined, so that the same conversation has the same ids tomorrow. A template that asks
///   `strftime_now is defined` takes its fixed date, or the variable that [`with`](Self::with) sets (`date_string` for Llama's); one
///   that calls it without asking is an error.
/// - In `a ~ b`, `true`, `none`, lists and maps print as `minijinja` prints them, not as Python does.
/// - A slice of what is undefined is empty, not an error.
///
/// Special tokens written in a message are taken for the tokens, as `transformers` does.
///
/// ```
/// use train::{ChatTemplate, Message};
///
/// let source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}";
/// let template = ChatTemplate::new(source, [("eos_token", "</s>")])?;
/// let text = template.render(&[Message::new("user", " Hello ")], false)?;
/// assert_eq!(text, "user: Hello</s>");
/// # Ok::<(), train::ChatError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    source: Arc<str>,
    environment: Arc<Environment<'static>>,
    /// The template says itself what the assistant says.
    has_tags: bool,
    variables: Map<String, Value>,
}

impl ChatTemplate {
    /// The template of a checkpoint: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` or, if that has none, of
    /// `chat_template.json`. That is a text, or a list of `{name, template}`, of which the one named `default` is taken. None if the
    /// checkpoint has no template. The special tokens are those of `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ChatError::Io`], [`ChatError::Tokenizer`], [`ChatError::NoDefault`], [`ChatError::Syntax`].
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Option<Self>, ChatError> {
        let folder = folder.as_ref();
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            return Self::from_file(path).map(Some);
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(name);
            let file = ConfigFile::read(path.clone())?;
            if let Some(value) = file.get("chat_template") {
                let source = default_template(value).ok_or(ChatError::NoDefault { path })?;
                return Self::new(source, special_tokens(folder)?).map(Some);
            }
        }
        Ok(None)
    }

    /// The template that comes with a tokenizer, of which [`Tokenizer::open`] takes the name: that of its folder.
    ///
    /// # Errors
    /// The errors of [`from_folder`](Self::from_folder).
    pub fn of_tokenizer(name: &str) -> Result<Option<Self>, ChatError> {
        let path = Path::new(name);
        match name == Tokenizer::BYTES {
            true => Ok(None),
            false if path.is_dir() => Self::from_folder(path),
            false => Self::from_folder(path.parent().unwrap_or(Path::new(""))),
        }
    }

    /// A file that is the template. The special tokens are those of `tokenizer_config.json` beside it, if there is one.
    ///
    /// # Errors
    /// [`ChatError::Io`], [`ChatError::Tokenizer`], [`ChatError::Syntax`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ChatError> {
        let path = path.as_ref();
        let source = files::read_to_string(path).map_err(|source| ChatError::Io { path: path.into(), source })?;
        Self::new(&source, special_tokens(path.parent().unwrap_or(Path::new("")))?)
    }

    /// A template and the special tokens it uses: `("bos_token", "<s>")`.
    ///
    /// # Errors
    /// [`ChatError::Syntax`].
    pub fn new<N: Into<String>, T: Into<String>>(
        source: &str,
        tokens: impl IntoIterator<Item = (N, T)>,
    ) -> Result<Self, ChatError> {
        let translated = environment::without_tags(source);
        let has_tags = matches!(translated, Cow::Owned(_));
        let environment = Arc::new(environment::environment(translated.into_owned())?);
        let variables = tokens.into_iter().map(|(name, token)| (name.into(), Value::String(token.into()))).collect();
        Ok(Self { source: source.into(), environment, has_tags, variables })
    }

    /// This template with one more variable: `tools`, `date_string`, `enable_thinking`, ...
    #[must_use]
    pub fn with(&self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        let mut template = self.clone();
        template.variables.insert(name.into(), value.into());
        template
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// This template with more variables: the table `chat_template_kwargs` of data, or of a configuration.
    ///
    /// # Errors
    /// [`ChatError::Reserved`] for a variable that the renderer sets.
    pub fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Self, ChatError> {
        if let Some(name) = RESERVED.into_iter().find(|name| kwargs.contains_key(*name)) {
            return Err(ChatError::Reserved { name });
        }
        let mut template = self.clone();
        template.variables.extend(kwargs.clone());
        Ok(template)
    }

    /// What the template is rendered with besides the messages: special tokens, and what [`with`](Self::with) has set.
    pub fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// The text of a conversation, at its end what the assistant's next message begins with if `add_generation_prompt` is set.
    ///
    /// # Errors
    /// [`ChatError::Empty`], [`ChatError::Refused`], [`ChatError::Render`].
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        if messages.is_empty() {
            return Err(ChatError::Empty);
        }
        self.render_with(messages, add_generation_prompt, None)
    }

    /// The ids of a whole conversation, and which of them the assistant says, the token that ends its turn included.
    ///
    /// If the template has the tags `{% generation %}` and `{% endgeneration %}`, that is what is between them. Else it is what the
    /// template adds for a message of the assistant to the text so far that ends with the generation prompt, without white space
    /// after a special token at its end. If later messages change that text (some templates drop earlier reasoning), it is looked for
    /// in the text of the whole conversation. Where no special token ends a turn, the one that follows belongs to it, that of the next
    /// role, and to the last turn what ends the conversation. A token of which only a part is the assistant's counts as the assistant's.
    ///
    /// A message with `weight` 0 is not learned: none of its ids counts.
    /// Neither is one whose `train`, `trainable` or `loss` is false.
    ///
    /// # Errors
    /// Any [`ChatError`] not about files.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation, ChatError> {
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
                return Err(ChatError::NotSeparable { index });
            }
            spans
        } else {
            let specials = ids.iter().zip(&ranges).filter(|(id, _)| tokenizer.is_special(**id));
            let specials: Vec<_> = specials.map(|(_, range)| range.clone()).collect();
            self.untagged(tokenizer, messages, &text, &specials)?
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
            return Err(ChatError::NoAssistant { roles: roles(messages) });
        }
        Ok(Conversation { ids, is_assistant })
    }

    /// The ids of the conversation so far with the generation prompt: what a model is to continue.
    ///
    /// # Errors
    /// [`ChatError::Empty`], [`ChatError::Refused`], [`ChatError::Render`], [`ChatError::Tokenizer`].
    pub fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>, ChatError> {
        let text = self.render(messages, true)?;
        Ok(tokenizer.encode(&text, SpecialTokens::InText)?)
    }

    /// The special token at which the assistant's turns end: the last of a turn, or the one that follows it. None if there is no such
    /// token, or the template takes no conversation of a user and the assistant.
    pub fn turn_end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let turns = ["user", ASSISTANT, "user"].map(|role| Message::new(role, "a"));
        let conversation = self.encode(tokenizer, &turns).or_else(|_| self.encode(tokenizer, &turns[..2]));
        let Conversation { ids, is_assistant } = conversation.ok()?;
        let last = is_assistant.iter().rposition(|is| *is)?;
        // White space after the token may be the assistant's.
        let is_blank = |ids: &[u32]| tokenizer.decode(ids).is_ok_and(|text| text.trim().is_empty());
        let ends = (0..=last).rev().take_while(|at| is_assistant[*at] && is_blank(&ids[at + 1..=last]));
        ends.chain([last + 1]).filter_map(|at| ids.get(at).copied()).find(|id| tokenizer.is_special(*id))
    }

    /// Renders any number of messages; the template's tags put `marks` around what the assistant says.
    fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        marks: Option<marks::Marks>,
    ) -> Result<String, ChatError> {
        use minijinja::Value;
        let messages: Vec<_> = messages.iter().map(seen_by_templates).collect();
        let mut context = BTreeMap::from([
            ("messages", Value::from_serialize(&messages)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ]);
        context.extend(self.variables.iter().map(|(name, value)| (name.as_str(), Value::from_serialize(value))));
        if let Some(marks) = marks {
            context.insert(environment::MARKS, Value::from_iter(marks.map(String::from)));
        }
        limits::render(&self.environment, context, environment::render_error)
    }
}

impl core::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).field("variables", &self.variables).finish()
    }
}

/// Each role once.
fn roles(messages: &[Message]) -> Vec<String> {
    let roles: BTreeSet<&str> = messages.iter().map(|message| &*message.role).collect();
    roles.into_iter().map(|role| format!("`{role}`")).collect()
}

/// A message as `transformers` passes it: without keys whose value is null, its reasoning under the names that templates know.
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

fn special_tokens(folder: &Path) -> Result<Vec<(&'static str, String)>, ChatError> {
    let config = ConfigFile::read(folder.join("tokenizer_config.json"))?;
    let mut tokens = vec![];
    for name in SPECIAL_TOKENS {
        tokens.extend(config.token_text(name)?.map(|token| (name, token.to_string())));
    }
    Ok(tokens)
}
