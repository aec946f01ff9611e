//! Errors of chat templates, and of conversations that they render.

use std::path::PathBuf;

use crate::TokenizerError;

/// Error of a chat template or a conversation.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `chat_template` is neither text nor a list with a template named `default`.
    #[error("{}: chat_template is neither a text nor a list of names and templates with one named \"default\"", path.display())]
    NoDefault {
        /// The file.
        path: PathBuf,
    },
    /// The template is not valid Jinja.
    #[error("line {line} of the chat template: {reason}")]
    Syntax {
        /// Line number, from 1.
        line: usize,
        /// The parser's reason.
        reason: String,
    },
    /// The template exceeds a limit of time or memory.
    #[error("the chat template is not applied: {reason}")]
    Limit {
        /// Limit that it exceeds.
        reason: String,
    },
    /// The template called `raise_exception`.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template cannot be applied to these messages.
    #[error("line {line} of the chat template: {reason}")]
    Render {
        /// Line number, from 1.
        line: usize,
        /// The renderer's reason.
        reason: String,
    },
    /// A conversation without messages.
    #[error("a conversation must have a message")]
    Empty,
    /// A message with neither content nor calls. Its text is missing, or has another key.
    #[error("message {index} ({role}) has neither `content` nor `tool_calls`: there are {}", found.join(", "))]
    NoContent {
        /// Index of the message, from 0.
        index: usize,
        /// Role of the message.
        role: String,
        /// Keys of the message.
        found: Vec<String>,
    },
    /// A message whose content has a type that templates print in different ways.
    #[error("`content` of message {index} ({role}) is {found}, expected text or a list of parts")]
    Content {
        /// Index of the message, from 0.
        index: usize,
        /// Role of the message.
        role: String,
        /// Type that was found.
        found: &'static str,
    },
    /// A key that says whether a message is learned has an invalid value.
    #[error("`{key}` of message {index} is {value}, expected {}", if *key == "weight" { "0 or 1" } else { "true or false" })]
    Learned {
        /// Index of the message, from 0.
        index: usize,
        /// The key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
    },
    /// The variables of a template contain one that the renderer sets.
    #[error("`{name}` in `chat_template_kwargs` is not for others to set: remove it")]
    Reserved {
        /// The variable.
        name: &'static str,
    },
    /// A conversation without text of the assistant, which has nothing to learn from.
    #[error("the conversation has nothing that the assistant says; its roles are {}", roles.join(", "))]
    NoAssistant {
        /// Roles in the conversation.
        roles: Vec<String>,
    },
    /// The rendered text does not show which part is the assistant's.
    #[error(
        "the chat template does not show which part of the text is message {index}: mark each of the assistant, and nothing else, with {{% generation %}}"
    )]
    NotSeparable {
        /// Index of the message, from 0.
        index: usize,
    },
    /// The template changes the text between its tags `generation` and `endgeneration` afterwards.
    #[error("the chat template changes what its tags {{% generation %}} mark")]
    Tags,
    /// A tokenizer file is not valid, or the tokenizer rejects the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
