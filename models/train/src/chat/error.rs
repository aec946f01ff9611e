//! Everything that can be wrong with a chat template, or with a conversation it is given.

use std::path::PathBuf;

use crate::TokenizerError;

/// What is wrong with a chat template, or with a conversation.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `chat_template` is neither text nor a list in which `default` has one.
    #[error("{}: chat_template is neither a text nor a list of names and templates with one named \"default\"", path.display())]
    NoDefault {
        /// The file.
        path: PathBuf,
    },
    /// The template is not Jinja.
    #[error("line {line} of the chat template: {reason}")]
    Syntax {
        /// From 1.
        line: usize,
        /// The parser's reason.
        reason: String,
    },
    /// The template takes more time or memory than any conversation needs.
    #[error("the chat template is not applied: {reason}")]
    Limit {
        /// Which limit it exceeds.
        reason: String,
    },
    /// The template called `raise_exception`.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template cannot be applied to these messages.
    #[error("line {line} of the chat template: {reason}")]
    Render {
        /// From 1.
        line: usize,
        /// What went wrong.
        reason: String,
    },
    /// A conversation without messages.
    #[error("a conversation must have a message")]
    Empty,
    /// A message that says nothing and calls nothing: its text is under another name, or is missing.
    #[error("message {index} ({role}) has neither `content` nor `tool_calls`: there are {}", found.join(", "))]
    NoContent {
        /// The message, from 0.
        index: usize,
        /// Whose it is.
        role: String,
        /// Its keys.
        found: Vec<String>,
    },
    /// A message whose content is of a type that templates print as they like.
    #[error("`content` of message {index} ({role}) is {found}, expected text or a list of parts")]
    Content {
        /// The message, from 0.
        index: usize,
        /// Whose it is.
        role: String,
        /// The kind of value found.
        found: &'static str,
    },
    /// A key that says whether a message is learned has another value.
    #[error("`{key}` of message {index} is {value}, expected {}", if *key == "weight" { "0 or 1" } else { "true or false" })]
    Learned {
        /// The message, from 0.
        index: usize,
        /// The key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
    },
    /// Variables of a template contain one that the renderer sets.
    #[error("`{name}` in `chat_template_kwargs` is not for others to set: remove it")]
    Reserved {
        /// The variable.
        name: &'static str,
    },
    /// A conversation in which the assistant says nothing, so that there is nothing to learn from.
    #[error("the conversation has nothing that the assistant says; its roles are {}", roles.join(", "))]
    NoAssistant {
        /// The roles there are.
        roles: Vec<String>,
    },
    /// The text does not show what is the assistant's.
    #[error(
        "the chat template does not show which part of the text is message {index}: mark each of the assistant, and nothing else, with {{% generation %}}"
    )]
    NotSeparable {
        /// The message, from 0.
        index: usize,
    },
    /// The template changes what is between its tags `generation` and `endgeneration` afterwards.
    #[error("the chat template changes what its tags {{% generation %}} mark")]
    Tags,
    /// A tokenizer's file is not valid, or the tokenizer does not take the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
