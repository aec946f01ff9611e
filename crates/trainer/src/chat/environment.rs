//! Jinja environment for chat templates, set up as in `transformers`, within limits of time and
//! memory. A template may come with a model of unknown origin.

use std::borrow::Cow;
use std::cell::Cell;
use std::cmp::Ordering;
use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{DynObject, Kwargs, Object, ObjectRepr, Rest, ValueOrKwargs, merge_maps};
use minijinja::{Environment, Error, ErrorKind, State, Value, functions};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::python::{self, join};
use crate::panics::caught;

/// Maximum bytes of a template. The longest known templates have about 30,000.
const SOURCE: usize = 256 << 10;
/// Maximum time of compiling or rendering, which take milliseconds for known templates. The compiler
/// folds the constants of a long expression anew for each operator, and adding lists takes no fuel.
const TIME: Duration = Duration::from_secs(5);
/// Fuel of one rendering. A unit pays for a step, or for 64 bytes of text that are made or read.
const FUEL: u64 = 2_000_000;
/// Stack bytes, enough for values that are nested as deep as the fuel allows.
const STACK: usize = 1 << 30;

/// Function that replaces the tags `generation` and `endgeneration`.
const MARK: &str = "__mark_generation";
/// Variable with the two characters that this function puts around the text.
pub(super) const MARKS: &str = "__generation_marks";

/// Replaces the tags that mark the assistant's text with a call of [`MARK`].
pub(super) fn without_tags(source: &str) -> Cow<'_, str> {
    let tags = regex::Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("the expression is valid");
    tags.replace_all(source, |tag: &regex::Captures<'_>| {
        let (open, close) = (&tag[1], &tag[3]);
        if tag.get(2).is_some() { format!("{open}endcall{close}") } else { format!("{open}call {MARK}(){close}") }
    })
}

/// Environment with the single template `chat`, made from `source`.
pub(super) fn environment(source: String) -> anyhow::Result<Environment<'static>> {
    ensure!(source.len() <= SOURCE, not_applied(&format!("it has {} bytes, more than {SOURCE}", source.len())));
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::str(value)?)?),
    });
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("trim", python::trim);
    environment.add_filter("string", |value: Value| python::str(&value));
    environment.add_filter("join", join_filter);
    // In Python a string is a sequence.
    environment.add_test("sequence", |value: Value| value.as_str().is_some() || value.len().is_some());
    environment.add_function("namespace", namespace);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function(MARK, mark_generation);
    let compile = move || environment.add_template_owned("chat", source).map(|()| environment);
    limited("compiling", compile)?.map_err(|error| located(&error))
}

fn not_applied(reason: &str) -> anyhow::Error {
    anyhow!("the chat template is not applied: {reason}")
}

/// Runs `run` on a thread with enough stack for templates, for [`TIME`] at most. A template that
/// takes longer keeps its thread and memory: the program should end.
fn limited<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let name = |i| format!("chat template {i}");
    let pool = POOL.get_or_init(|| ThreadPoolBuilder::new().stack_size(STACK).thread_name(name).build().ok());
    let (sender, result) = channel();
    let pool = pool.as_ref().context("cannot start the threads of chat templates")?;
    pool.spawn(move || drop(sender.send(caught(run))));
    match result.recv_timeout(TIME) {
        Ok(result) => result.map_err(|reason| not_applied(&reason)),
        Err(RecvTimeoutError::Disconnected) => bail!(not_applied("its thread has ended")),
        Err(RecvTimeoutError::Timeout) => {
            bail!(not_applied(&format!("{what} it takes more than {} seconds", TIME.as_secs())))
        }
    }
}

/// Renders the template `chat`.
pub(super) fn render(environment: &Arc<Environment<'static>>, context: Value) -> anyhow::Result<String> {
    let environment = environment.clone();
    let rendered = limited("rendering", move || {
        NAMESPACES.set(0);
        let template = environment.get_template("chat").expect("the environment has this template");
        template.render(context).map(|text| (NAMESPACES.get() == 0).then_some(text))
    })?;
    match rendered {
        Ok(text) => text.ok_or_else(|| not_applied("a namespace contains itself")),
        Err(error) if error.kind() == ErrorKind::OutOfFuel => {
            let limits = format!("it takes more than {FUEL} steps, or makes more than {} bytes", 64 * FUEL);
            Err(not_applied(&limits))
        }
        Err(error) => Err(render_error(&error)),
    }
}

/// Message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn render_error(error: &Error) -> anyhow::Error {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    if let Some(Refusal(message)) = causes.filter_map(|cause| cause.downcast_ref()).next() {
        return anyhow!("the chat template refuses the conversation: {message}");
    }
    located(error)
}

fn located(error: &Error) -> anyhow::Error {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    anyhow!("line {} of the chat template: {}{detail}", error.line().unwrap_or(1), error.kind())
}

fn raise_exception(message: Value, _rest: Rest<Value>) -> Result<Value, Error> {
    let message = python::str(&message)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

fn mark_generation(state: &mut State<'_, '_>, arguments: Kwargs) -> Result<Value, Error> {
    let text = arguments.get::<Value>("caller")?.call(state, &[])?;
    let marks = state.lookup(MARKS).unwrap_or_default().to_string();
    let mut marks = marks.chars().map(String::from);
    let (start, end) = (marks.next().unwrap_or_default(), marks.next().unwrap_or_default());
    Ok(format!("{start}{text}{end}").into())
}

fn join_filter(
    state: &State<'_, '_>,
    list: Value,
    separator: Option<Value>,
    attribute: Option<String>,
    options: Kwargs,
) -> Result<String, Error> {
    let attribute = attribute.map_or_else(|| options.get("attribute"), |name| Ok(Some(name)))?;
    let separator: Option<Value> = separator.map_or_else(|| options.get("d"), |separator| Ok(Some(separator)))?;
    options.assert_all_used()?;
    join(state, &list, &separator.unwrap_or_default(), attribute.as_deref())
}

thread_local! {
    /// Number of namespaces of this thread that are not dropped.
    static NAMESPACES: Cell<usize> = const { Cell::new(0) };
}

/// Creates a namespace with a [`Guard`]. Its key is first in order and no name of an attribute.
fn namespace(values: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    NAMESPACES.set(NAMESPACES.get() + 1);
    let guard = Value::from_pairs([("", Value::from_object(Guard))]);
    functions::namespace(Some(merge_maps(values.into_values().into_iter().chain([guard])).into()))
}

/// Value that panics if its namespace is printed or compared. A namespace may contain itself.
#[derive(Debug)]
struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        NAMESPACES.set(NAMESPACES.get().saturating_sub(1));
    }
}

impl Object for Guard {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn custom_cmp(self: &Arc<Self>, _other: &DynObject) -> Option<Ordering> {
        panic!("it compares a namespace")
    }

    fn render(self: &Arc<Self>, _out: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("it prints a namespace")
    }
}
