//! Jinja environment for chat templates, set up as in `transformers`.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use regex::Regex;

use super::{ChatError, limits, python, work};

/// Function that replaces the tags `generation` and `endgeneration`.
const MARK: &str = "__mark_generation";
/// Variable with the characters that this function puts around the text.
pub(super) const MARKS: &str = "__generation_marks";

/// Message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// Replaces the tags that mark the assistant's text with a call of [`MARK`].
pub(super) fn without_tags(source: &str) -> Cow<'_, str> {
    let tags = Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("the expression is valid");
    tags.replace_all(source, |tag: &regex::Captures<'_>| {
        let (open, close) = (&tag[1], &tag[3]);
        if tag.get(2).is_some() { format!("{open}endcall{close}") } else { format!("{open}call {MARK}(){close}") }
    })
}

/// Environment with the single template `chat`, made from `source`.
pub(super) fn environment(source: String) -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, _, value| python::write_str(out, value).map_err(Error::from));
    work::add_filter(&mut environment, "tojson", python::to_json);
    work::add_filter(&mut environment, "trim", python::trim);
    work::add_filter(&mut environment, "string", |value: Value| python::str(&value));
    limits::set(&mut environment);
    // In Python a string is a sequence.
    environment.add_test("sequence", |value: Value| value.as_str().is_some() || value.len().is_some());
    environment.add_function("raise_exception", raise_exception);
    environment.add_function(MARK, mark_generation);
    let checked = limits::with_checks(&source);
    limits::parse(source.len(), move || environment.add_template_owned("chat", checked).map(|()| environment))?.map_err(
        |error| {
            let (line, reason) = line_and_reason(&error);
            ChatError::Syntax { line, reason }
        },
    )
}

/// Converts an error of rendering.
pub(super) fn render_error(error: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Refusal(message)) = error.downcast_ref() {
            return ChatError::Refused(message.clone());
        }
        cause = error.source();
    }
    let (line, reason) = line_and_reason(error);
    ChatError::Render { line, reason }
}

fn line_and_reason(error: &Error) -> (usize, String) {
    let reason = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    (error.line().unwrap_or(1), reason)
}

fn raise_exception(message: Value, _rest: Rest<Value>) -> Result<Value, Error> {
    let message = python::str(&message);
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

fn mark_generation(state: &State<'_, '_>, arguments: Kwargs) -> Result<Value, Error> {
    let text = arguments.get::<Value>("caller")?.call(state, &[])?.to_string();
    let Some(marks) = state.lookup(MARKS) else { return Ok(text.into()) };
    let marks: Vec<String> = marks.try_iter()?.map(|mark| mark.to_string()).collect();
    Ok(match &*marks {
        [start, end] => format!("{start}{text}{end}").into(),
        _ => text.into(),
    })
}
