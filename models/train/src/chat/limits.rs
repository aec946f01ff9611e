//! Limits for chat templates from untrusted sources: length, steps, size and nesting of values, and
//! stack size.

use std::io;
use std::sync::OnceLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Value, filters};
use rayon::{ThreadPool, ThreadPoolBuilder};
use regex::Regex;

use super::ChatError;
use super::work::{self, DEPTH, TEXT, invalid};
use crate::panics::caught;

/// Maximum bytes of a template. The longest known templates have about 30,000.
const SOURCE: usize = 256 << 10;
/// Stack bytes of the parser, whose recursion is as deep as a chain of operators is long.
const PARSER_STACK: usize = 1 << 30;
/// Stack bytes for calls and nested values.
const STACK: usize = 64 << 20;
/// Maximum instructions of one rendering.
const FUEL: u64 = 10_000_000;
/// Maximum values in a variable.
const VALUES: usize = 1_000_000;
/// Maximum digits of widths and precisions in a format.
const DIGITS: usize = 3;
/// Maximum parts into which a list is cut, and thousands of characters that an indent adds.
const COUNT: usize = 100_000;
/// Filter that is applied to every assigned value.
const ASSIGNED: &str = "__assigned";

/// Runs `parse` on a thread with enough stack. Refuses a template whose `bytes` exceed [`SOURCE`].
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

/// Runs `run` on a thread with enough stack to render templates. Nested calls run directly.
pub(crate) fn with_stack<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let name = |i| format!("chat template {i}");
    match POOL.get_or_init(|| ThreadPoolBuilder::new().stack_size(STACK).thread_name(name).build().ok()) {
        Some(pool) => pool.install(run),
        None => run(),
    }
}

/// Renders into a text of bounded size. `failed` converts errors of the template itself.
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

/// Limits the steps, and replaces filters that take time or memory without taking steps.
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

/// Bounds the output of `replace`: short texts in many places add up. Methods may limit the count.
pub(super) fn check_replace(text: &Value, arguments: &[Value]) -> Result<(), Error> {
    let [from, to, rest @ ..] = arguments else { return Ok(()) };
    let count = rest.first().and_then(Value::as_usize).unwrap_or(usize::MAX);
    let found = text.to_string().matches(&from.to_string()).count().min(count);
    match found.saturating_mul(to.to_string().len()) > TEXT {
        true => Err(invalid("the text after `replace` is too long")),
        false => Ok(()),
    }
}

/// Bounds the output of `join`, which repeats the separator between all items.
pub(super) fn check_join(list: &Value, separator: Option<&Value>) -> Result<(), Error> {
    let len = separator.map_or(0, |separator| separator.to_string().len());
    match list.try_iter().map_or(0, Iterator::count).saturating_mul(len) > TEXT {
        true => Err(invalid("the text after `join` is too long")),
        false => Ok(()),
    }
}

/// Bounds the output of `format`: a large width or precision makes a text of that length.
pub(super) fn check_format(text: &Value) -> Result<(), Error> {
    let mut digits = 0;
    for c in text.as_str().unwrap_or_default().chars() {
        digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
        // `*` takes the width from an argument.
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

/// Checks that a value is not nested too deeply to be printed, compared and dropped, and that no
/// namespace contains itself.
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

/// Adds a filter to each assigned value of a template. Comments and raw text stay unchanged.
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
        // A namespace may be a variable, but not an attribute of another namespace.
        let is_attribute = set.contains('.');
        checked += &format!(" ({value})|{ASSIGNED}({is_attribute}) ");
        rest = &rest[value.len()..];
    }
    checked + rest
}

/// Text before the end of a tag. An end in quotes does not count.
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
