//! Prints values as Python and its `json.dumps` do, and corrects upstream's methods that differ
//! from Python's.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Maximum bytes of a value as text.
const TEXT: usize = 64 << 20;
/// Maximum depth of lists and maps in a value that is printed.
const DEPTH: usize = 64;
/// Maximum number of spaces of an indent.
const MAX_INDENT: i64 = 64;
/// Maximum digits of a width or precision in a format.
const DIGITS: usize = 3;
/// Characters that `str.strip()` strips.
const WHITE_SPACE: &str = "\t\n\u{b}\u{c}\r\u{1c}\u{1d}\u{1e}\u{1f} \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\
                           \u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// Methods that minijinja's values lack. They are upstream's, except that texts use Python's white
/// space and stay within limits.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, name, arguments) };
    // The engine's fuel pays for the bytes that a method makes, not for the ones that it reads.
    state.consume_fuel(text.len() as u64 / 64)?;
    match (name, arguments) {
        ("join", [list]) => join(state, list, value, None).map(Value::from),
        ("format", _) if text.split('{').any(has_large_number) => {
            Err(invalid("a format with a width of more than 3 digits"))
        }
        ("strip" | "lstrip" | "rstrip", _) if arguments.iter().all(Value::is_none) => {
            unknown_method_callback(state, value, name, &[WHITE_SPACE.into()])
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// Whether a field of a format has a width or precision of more than [`DIGITS`].
fn has_large_number(field: &str) -> bool {
    let field = field.split('}').next().unwrap_or_default();
    field.split(|c: char| !c.is_ascii_digit()).any(|number| number.len() > DIGITS)
}

/// Filter `trim`.
pub(super) fn trim(state: &mut State<'_, '_>, value: Value, characters: Option<Value>) -> Result<Value, Error> {
    let characters = characters.filter(|characters| !characters.is_none()).unwrap_or(WHITE_SPACE.into());
    unknown_method_callback(state, &str(&value)?.into(), "strip", &[characters])
}

/// Result of `str(value)`. An undefined value is empty.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    let style = Style { json: None, indent: None, item: ", ".into(), key: ": ".into() };
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None if value.is_undefined() => Ok(String::new()),
        None => style.text(value),
    }
}

/// Filter `tojson` of `transformers`: `json.dumps(value, ensure_ascii=False, indent=None,
/// separators=None, sort_keys=False)`.
pub(super) fn to_json(value: Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let option = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = options.get(name)?;
        Ok(named.or_else(|| arguments.get(position).cloned()).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let is_ascii = option(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = option(1, "indent")?.map(|value| match value.as_str() {
        Some(text) => text.to_string(),
        None => " ".repeat(value.as_i64().map_or(0, |n| n.clamp(0, MAX_INDENT) as usize)),
    });
    let item = if indent.is_some() { "," } else { ", " };
    let [item, key] = match option(2, "separators")? {
        None => [item.to_string(), ": ".to_string()],
        Some(pair) => {
            let pair: Vec<String> = pair.try_iter()?.map(|part| part.to_string()).collect();
            pair.try_into().map_err(|_| invalid("separators must be two texts"))?
        }
    };
    let is_sorted = option(3, "sort_keys")?.is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(invalid("what is undefined cannot be written as JSON"));
    }
    Style { json: Some(Json { is_ascii, is_sorted }), indent, item, key }.text(&value).map(Value::from)
}

fn invalid(detail: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

pub(super) fn too_large(_: fmt::Error) -> Error {
    invalid(format!("a value of more than {TEXT} bytes, or {DEPTH} lists in lists, as text"))
}

/// Text of bounded length.
#[derive(Default)]
pub(super) struct PythonText(String);

impl Write for PythonText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(text);
        if self.0.len() > TEXT { Err(fmt::Error) } else { Ok(()) }
    }
}

impl From<PythonText> for String {
    fn from(PythonText(text): PythonText) -> Self {
        text
    }
}

/// Differences of JSON from `repr`.
struct Json {
    is_ascii: bool,
    is_sorted: bool,
}

/// Format of values: `repr` or `json.dumps`.
struct Style {
    json: Option<Json>,
    indent: Option<String>,
    /// Separators between items, and between a key and its value.
    item: String,
    key: String,
}

impl Style {
    fn text(&self, value: &Value) -> Result<String, Error> {
        let mut text = PythonText::default();
        self.write(&mut text, value, 0).map_err(too_large)?;
        Ok(text.0)
    }

    fn write(&self, out: &mut PythonText, value: &Value, depth: usize) -> fmt::Result {
        let is_json = self.json.is_some();
        let [open, close] = match value.kind() {
            ValueKind::Map => ['{', '}'],
            ValueKind::Seq | ValueKind::Iterable if value.is_tuple() && !is_json => ['(', ')'],
            ValueKind::Seq | ValueKind::Iterable => ['[', ']'],
            _ => return self.write_single(out, value),
        };
        if depth > DEPTH {
            return Err(fmt::Error);
        }
        let mut items: Box<dyn Iterator<Item = Value>> = Box::new(value.try_iter().into_iter().flatten());
        if open == '{' && self.json.as_ref().is_some_and(|json| json.is_sorted) {
            let mut keys: Vec<Value> = items.collect();
            keys.sort();
            items = Box::new(keys.into_iter());
        }
        out.write_char(open)?;
        let mut count = 0;
        for item in items {
            out.write_str(if count == 0 { "" } else { &self.item })?;
            self.new_line(out, depth + 1)?;
            match item.as_str() {
                None if open == '{' && is_json => write_json_text(out, &item.to_string(), false)?,
                _ => self.write(out, &item, depth + 1)?,
            }
            if open == '{' {
                out.write_str(&self.key)?;
                self.write(out, &value.get_item(&item).unwrap_or_default(), depth + 1)?;
            }
            count += 1;
        }
        if open == '(' && count == 1 {
            out.write_char(',')?;
        }
        if count > 0 {
            self.new_line(out, depth)?;
        }
        out.write_char(close)
    }

    fn new_line(&self, out: &mut PythonText, depth: usize) -> fmt::Result {
        match &self.indent {
            Some(indent) => write!(out, "\n{}", indent.repeat(depth)),
            None => Ok(()),
        }
    }

    fn write_single(&self, out: &mut PythonText, value: &Value) -> fmt::Result {
        if let Some(text) = value.as_str() {
            return match &self.json {
                Some(Json { is_ascii, .. }) => write_json_text(out, text, *is_ascii),
                None => write_quoted(out, text),
            };
        }
        match (value.kind(), &self.json) {
            (ValueKind::Undefined, None) => out.write_str("Undefined"),
            (ValueKind::Number, _) if !value.is_integer() => match f64::try_from(value.clone()) {
                Ok(number) => out.write_str(&float(number)),
                Err(_) => write!(out, "{value}"),
            },
            (ValueKind::None, None) => out.write_str("None"),
            (ValueKind::Bool, None) => out.write_str(if value.is_true() { "True" } else { "False" }),
            (ValueKind::None | ValueKind::Undefined, Some(_)) => out.write_str("null"),
            (ValueKind::Bool, Some(_)) => out.write_str(if value.is_true() { "true" } else { "false" }),
            _ => write!(out, "{value}"),
        }
    }
}

fn write_json_text(out: &mut PythonText, text: &str, is_ascii: bool) -> fmt::Result {
    let quoted = serde_json::to_string(text).map_err(|_| fmt::Error)?;
    if !is_ascii {
        return out.write_str(&quoted);
    }
    let mut units = [0; 2];
    quoted.chars().try_for_each(|c| match c {
        ' '..='~' => out.write_char(c),
        c => c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}")),
    })
}

fn write_quoted(out: &mut PythonText, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            ' '..='~' => out.write_char(c)?,
            c if is_printable(c) => out.write_char(c)?,
            c if (c as u32) < 0x100 => write!(out, "\\x{:02x}", c as u32)?,
            c if (c as u32) < 0x10000 => write!(out, "\\u{:04x}", c as u32)?,
            c => write!(out, "\\U{:08x}", c as u32)?,
        }
    }
    out.write_char(quote)
}

/// Result of `c.isprintable()`.
fn is_printable(c: char) -> bool {
    // Rust's debug format escapes the same characters. It also escapes combining characters at the
    // beginning of a text, hence the `a`.
    matches!(c, '\'' | '"') || !String::from_iter(['a', c]).escape_debug().any(|c| c == '\\')
}

/// `repr` of a float: the shortest digits that round-trip, with an exponent below 1e-4 and from
/// 1e16.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() { "nan".into() } else { format!("{number}") };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    match exponent.parse::<i32>().expect("the exponent is a number") {
        -4..16 => format!("{number:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Joins the items of a list, or an attribute of each. Upstream's memory has no limit.
pub(super) fn join(
    state: &State<'_, '_>,
    list: &Value,
    separator: &Value,
    attribute: Option<&str>,
) -> Result<String, Error> {
    let (separator, mut text) = (str(separator)?, PythonText::default());
    for (i, item) in list.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        let item = attribute.map_or(Ok(item.clone()), |name| item.get_attr(name))?;
        text.write_str(if i > 0 { &separator } else { "" }).map_err(too_large)?;
        text.write_str(&str(&item)?).map_err(too_large)?;
    }
    Ok(text.into())
}
