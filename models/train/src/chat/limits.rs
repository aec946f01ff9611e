//! What a chat template may cost, which comes from strangers: how long it is, how many steps it takes, how large and how nested what it
//! makes is, and the stack that it runs on.

use std::io;
use std::sync::OnceLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Value, filters};
use rayon::{ThreadPool, ThreadPoolBuilder};
use regex::Regex;

use super::ChatError;
use super::work::{self, DEPTH, TEXT, invalid};
use crate::panics::caught;

/// Bytes of a template. The longest of known models has some 30,000.
const SOURCE: usize = 256 << 10;
/// Bytes of stack for the parser, which goes as deep as a chain of operators is long.
const PARSER_STACK: usize = 1 << 30;
/// Bytes of stack for calls and for nested values.
const STACK: usize = 64 << 20;
/// Instructions of one rendering.
const FUEL: u64 = 10_000_000;
/// Values in a variable.
const VALUES: usize = 1_000_000;
/// Numbers in what is formatted: widths and precisions.
const DIGITS: usize = 3;
/// Parts that a list is cut into, and thousands of characters that an indent adds.
const COUNT: usize = 100_000;
/// The filter that every assigned value goes through.
const ASSIGNED: &str = "__assigned";

/// Runs `parse` of a template of as many bytes where there is stack for it.
pub(super) fn parse<T: Send>(bytes: usize, parse: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    if bytes > SOURCE {
        return Err(ChatError::Limit { reason: format!("it has {bytes} bytes, more than {SOURCE}") });
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(PARSER_STACK).spawn_scoped(scope, || caught(parse));
        let thread =
            thread.map_err(|error| ChatError::Limit { reason: format!("there is no stack for it: {error}") })?;
        let parsed = thread.join().map_err(|_| ()).and_then(|parsed| parsed.map_err(drop));
        parsed.map_err(|()| ChatError::Limit { reason: "its parser fails on it".into() })
    })
}

/// Runs what renders templates where there is stack for it; inside of itself it is only a call.
pub(crate) fn with_stack<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let name = |i| format!("chat template {i}");
    match POOL.get_or_init(|| ThreadPoolBuilder::new().stack_size(STACK).thread_name(name).build().ok()) {
        Some(pool) => pool.install(run),
        None => run(),
    }
}

/// Renders into a text of bounded size; `failed` says what an error of the template's own means.
pub(super) fn render(
    environment: &Environment<'_>,
    context: impl serde::Serialize + Send,
    failed: fn(&Error) -> ChatError,
) -> Result<String, ChatError> {
    let template = environment.get_template("chat").expect("the environment has this template");
    with_stack(|| {
        let mut text = Text(vec![]);
        work::begin();
        match caught(|| template.render_captured_to(context, &mut text).map(drop)) {
            Ok(Ok(())) => Ok(String::from_utf8_lossy(&text.0).into_owned()),
            Ok(Err(_)) if text.0.len() > TEXT => {
                Err(ChatError::Limit { reason: format!("it makes a text of more than {TEXT} bytes") })
            }
            Ok(Err(error)) if error.kind() == ErrorKind::OutOfFuel => {
                Err(ChatError::Limit { reason: format!("it takes more than {FUEL} steps") })
            }
            Ok(Err(error)) => Err(failed(&error)),
            Err(_) => Err(ChatError::Limit { reason: "rendering it fails".into() }),
        }
    })
}

struct Text(Vec<u8>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() > TEXT { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces what takes time or memory without taking steps.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(FUEL));
    environment.add_filter(ASSIGNED, assigned);
    work::set(environment);
    work::add_checked(environment, "format", filters::format, |arguments| check_format(&arguments[0]));
    work::add_checked(environment, "replace", filters::replace, |arguments| {
        check_replace(&arguments[0], &arguments[1..])
    });
    work::add_checked(environment, "join", filters::join, |arguments| check_join(&arguments[0], arguments.get(1)));
    work::add_checked(environment, "indent", filters::indent, check_indent);
    work::add_checked(environment, "batch", filters::batch, |arguments| check_count("a batch", arguments));
    work::add_checked(environment, "slice", filters::slice, |arguments| check_count("a slice", arguments));
}

fn check_count(what: &str, arguments: &[Value]) -> Result<(), Error> {
    match arguments.get(1).and_then(Value::as_usize) {
        Some(count) if count > COUNT => Err(invalid(format!("{what} of {count} is too large"))),
        _ => Ok(()),
    }
}

/// A short text in many places is a long one. Methods may be told how many places.
pub(super) fn check_replace(text: &Value, arguments: &[Value]) -> Result<(), Error> {
    let [from, to, rest @ ..] = arguments else { return Ok(()) };
    let count = rest.first().and_then(Value::as_usize).unwrap_or(usize::MAX);
    let found = text.to_string().matches(&from.to_string()).count().min(count);
    match found.saturating_mul(to.to_string().len()) > TEXT {
        true => Err(invalid("the text after `replace` is too long")),
        false => Ok(()),
    }
}

/// A separator stands between all texts of a list.
pub(super) fn check_join(list: &Value, separator: Option<&Value>) -> Result<(), Error> {
    let len = separator.map_or(0, |separator| separator.to_string().len());
    match list.try_iter().map_or(0, Iterator::count).saturating_mul(len) > TEXT {
        true => Err(invalid("the text after `join` is too long")),
        false => Ok(()),
    }
}

/// A width or a precision of many digits is a text of as many characters.
pub(super) fn check_format(text: &Value) -> Result<(), Error> {
    let mut digits = 0;
    for c in text.as_str().unwrap_or_default().chars() {
        digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
        // A width may also be an argument.
        if digits > DIGITS || c == '*' {
            return Err(invalid("a format with a width that is an argument or has more than 3 digits"));
        }
    }
    Ok(())
}

fn check_indent(arguments: &[Value]) -> Result<(), Error> {
    let (text, width, _, options): (String, Option<usize>, Rest<Value>, Kwargs) = from_args(arguments)?;
    let width = width.map_or_else(|| options.get("width"), |width| Ok(Some(width)))?.unwrap_or(4);
    match width.saturating_mul(text.lines().count()) / 1000 {
        thousands if thousands > COUNT => {
            Err(invalid(format!("an indent of {thousands} thousand characters in all is too large")))
        }
        _ => Ok(()),
    }
}

/// A value that is not nested too deeply to be printed, compared and dropped, and that no namespace holds which it holds itself.
fn assigned(value: Value, is_attribute: bool) -> Result<Value, Error> {
    check_nesting(&value, usize::from(is_attribute), &mut { VALUES })?;
    Ok(value)
}

fn check_nesting(value: &Value, depth: usize, left: &mut usize) -> Result<(), Error> {
    *left = left.checked_sub(1).ok_or_else(|| invalid(format!("a variable of more than {VALUES} values")))?;
    let Some(object) = value.as_object() else {
        return match value.as_str() {
            Some(text) if text.len() > TEXT => Err(invalid("a variable is too long")),
            _ => Ok(()),
        };
    };
    if object.type_name().ends_with("::Namespace") && depth > 0 {
        return Err(invalid("a namespace in a variable of another, or in a list"));
    }
    if depth > DEPTH {
        return Err(invalid(format!("a variable of more than {DEPTH} lists in lists")));
    }
    match value.kind() {
        ValueKind::Map => {
            let mut check = |key| check_nesting(&value.get_item(&key).unwrap_or_default(), depth + 1, left);
            value.try_iter()?.try_for_each(&mut check)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.try_for_each(|item| check_nesting(&item, depth + 1, left))
        }
        _ => Ok(()),
    }
}

/// The template with a filter on each assigned value. In comments and raw text nothing changes.
pub(super) fn with_checks(source: &str) -> String {
    let begin = r"(?s)\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}|(?P<set>\{%[-+]?\s*set\s+[\w\s.,()]+=)[^=]";
    let begin = Regex::new(begin).expect("the expression is valid");
    let (mut checked, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(found) = begin.captures(rest) {
        let end = match found.name("set") {
            Some(set) => set.end(),
            None => found.get(0).map_or(0, |all| all.end()),
        };
        checked += &rest[..end];
        let set = found.name("set").map(|set| set.as_str());
        rest = &rest[end..];
        let Some((set, value)) = set.zip(tag_value(rest)) else { continue };
        // A namespace may be a variable, but not in another.
        let is_attribute = set.contains('.');
        checked += &format!(" ({value})|{ASSIGNED}({is_attribute}) ");
        rest = &rest[value.len()..];
    }
    checked + rest
}

/// What comes before the end of a tag, texts in quotes passed over.
fn tag_value(text: &str) -> Option<&str> {
    let (mut quote, mut is_escaped) = (None, false);
    for (place, c) in text.char_indices() {
        match quote {
            Some(open) => {
                quote = quote.filter(|_| is_escaped || c != open);
                is_escaped = !is_escaped && c == '\\';
            }
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text[place..].starts_with("%}") => {
                let value = &text[..place];
                return Some(value.strip_suffix(['-', '+']).unwrap_or(value));
            }
            None => {}
        }
    }
    None
}
