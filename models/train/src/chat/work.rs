//! Counts the bytes that the filters and methods of a template read while it is rendered. Their
//! time and memory grow with the bytes, but the step limit counts each call as one step.

use std::borrow::Cow;
use std::cell::Cell;

use minijinja::functions::Function;
use minijinja::value::{FunctionArgs, FunctionResult, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

/// Maximum bytes that the filters and methods of one rendering read. A conversation may have 64
/// MiB.
const WORK: usize = 1 << 30;
/// Maximum bytes of a text that a template makes or passes to a filter or method: twice the size of
/// a conversation.
pub(super) const TEXT: usize = 128 << 20;
/// Bytes that a value counts for in addition to its text.
const VALUE: usize = 32;
/// Maximum depth of nested lists.
pub(super) const DEPTH: usize = 64;

thread_local! {
    /// Rest of [`WORK`].
    static LEFT: Cell<usize> = const { Cell::new(WORK) };
}

/// Resets the count when a rendering begins on this thread.
pub(super) fn begin() {
    LEFT.set(WORK);
}

/// Counts the bytes of values that a filter or method reads.
pub(super) fn spend<'a>(values: impl IntoIterator<Item = &'a Value>) -> Result<(), Error> {
    let mut bytes = 0;
    values.into_iter().try_for_each(|value| add(value, &mut bytes, 0))?;
    match LEFT.get().checked_sub(bytes) {
        Some(left) => LEFT.set(left),
        None => return Err(invalid(format!("its filters and methods read more than {WORK} bytes"))),
    }
    Ok(())
}

/// Error of a template that exceeds a limit.
pub(super) fn invalid(detail: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

fn add(value: &Value, bytes: &mut usize, depth: usize) -> Result<(), Error> {
    *bytes += VALUE + value.as_str().map_or(0, |text| text.len());
    if *bytes > TEXT || depth > DEPTH {
        return Err(invalid(format!("a filter of more than {TEXT} bytes, or of more than {DEPTH} lists in lists")));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.try_for_each(|item| add(&item, bytes, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            add(&key, bytes, depth + 1)?;
            add(&value.get_item(&key).unwrap_or_default(), bytes, depth + 1)
        }),
        _ => Ok(()),
    }
}

/// Adds a filter that reads all of its input.
pub(super) fn add_filter<F, Rv, Args>(environment: &mut Environment<'_>, name: &'static str, filter: F)
where
    F: Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    add_checked(environment, name, filter, |_| Ok(()));
}

/// Adds a filter that reads all of its input. `check` may refuse its arguments; the first is the
/// value.
pub(super) fn add_checked<F, Rv, Args>(
    environment: &mut Environment<'_>,
    name: &'static str,
    filter: F,
    check: fn(&[Value]) -> Result<(), Error>,
) where
    F: Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let filter = Value::from_function(filter);
    environment.add_filter(name, move |state: &State<'_, '_>, arguments: Rest<Value>| {
        spend(arguments.iter())?;
        check(&arguments)?;
        filter.call(state, &arguments)
    });
}

/// Replaces the library's filters that read all of their input. The others read only the length of
/// a list or single values.
pub(super) fn set(environment: &mut Environment<'_>) {
    add_filter(environment, "upper", filters::upper);
    add_filter(environment, "lower", filters::lower);
    add_filter(environment, "title", filters::title);
    add_filter(environment, "capitalize", filters::capitalize);
    add_filter(environment, "escape", filters::escape);
    add_filter(environment, "e", filters::escape);
    add_filter(environment, "split", filters::split);
    add_filter(environment, "lines", filters::lines);
    add_filter(environment, "pprint", filters::pprint);
    add_filter(environment, "sort", filters::sort);
    add_filter(environment, "dictsort", filters::dictsort);
    add_filter(environment, "unique", filters::unique);
    add_filter(environment, "groupby", filters::groupby);
    add_filter(environment, "list", filters::list);
    add_filter(environment, "reverse", filters::reverse);
}
