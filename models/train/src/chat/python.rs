//! Prints values as Python and its `json.dumps` do, and corrects upstream's methods that differ
//! from Python's.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{limits, work};

/// Maximum number of spaces of an indent.
const MAX_INDENT: i64 = 64;
/// Characters that `str.strip()` strips.
const WHITE_SPACE: &str = "\t\n\u{b}\u{c}\r\u{1c}\u{1d}\u{1e}\u{1f} \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\
                           \u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// Methods that minijinja's values lack. They are upstream's, except that texts count characters,
/// use Python's white space and stay within limits.
pub(super) fn method(state: &State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let upstream = |arguments: &[Value]| unknown_method_callback(state, value, name, arguments);
    let Some(text) = value.as_str() else { return upstream(arguments) };
    work::spend(std::iter::once(value).chain(arguments))?;
    match (name, arguments) {
        // Upstream counts bytes.
        ("find" | "rfind", _) => {
            let at = upstream(arguments)?;
            Ok(at.as_usize().map_or(at, |at| text[..at].chars().count().into()))
        }
        // Upstream never terminates.
        ("count", [part]) if part.as_str() == Some("") => Ok((text.chars().count() + 1).into()),
        ("replace", _) => {
            limits::check_replace(value, arguments)?;
            upstream(arguments)
        }
        ("join", [list]) => {
            limits::check_join(list, Some(value))?;
            upstream(arguments)
        }
        ("format", _) => {
            limits::check_format(value)?;
            upstream(arguments)
        }
        ("strip" | "lstrip" | "rstrip", []) => upstream(&[WHITE_SPACE.into()]),
        ("strip" | "lstrip" | "rstrip", [none]) if none.is_none() => upstream(&[WHITE_SPACE.into()]),
        _ => upstream(arguments),
    }
}

/// Filter `trim`.
pub(super) fn trim(state: &State<'_, '_>, value: Value, characters: Option<Value>) -> Result<Value, Error> {
    let characters = characters.filter(|characters| !characters.is_none()).unwrap_or(WHITE_SPACE.into());
    unknown_method_callback(state, &str(&value).into(), "strip", &[characters])
}

/// Result of `str(value)`.
pub(super) fn str(value: &Value) -> String {
    let mut text = String::new();
    write_str(&mut text, value).expect("strings take all text");
    text
}

/// Writes `str(value)`. An undefined value prints nothing.
pub(super) fn write_str(out: &mut impl Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => Style::repr().write(out, value, 0),
    }
}

/// Filter `tojson` of `transformers`: `json.dumps(value, ensure_ascii=False, indent=None,
/// separators=None, sort_keys=False)`.
pub(super) fn to_json(value: Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let option = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = options.get(name)?;
        Ok(named.or_else(|| arguments.get(position).cloned()).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let invalid = |detail: &'static str| Error::new(ErrorKind::InvalidOperation, detail);
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
    let sorted = option(3, "sort_keys")?.is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(invalid("what is undefined cannot be written as JSON"));
    }
    let mut json =
        serde_json::to_value(&value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    if sorted {
        json.sort_all_objects();
    }
    let mut text = Bounded(String::new());
    let style = Style { json: Some(Json { is_ascii }), indent, item, key };
    let written = style.write(&mut text, &Value::from_serialize(&json), 0);
    written.map_err(|_| invalid("the text of `tojson` is too long"))?;
    Ok(text.0.into())
}

/// Text of bounded length, since templates choose indents and separators.
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(text);
        if self.0.len() > work::TEXT { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Differences of JSON from `repr`.
struct Json {
    is_ascii: bool,
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
    fn repr() -> Self {
        Self { json: None, indent: None, item: ", ".into(), key: ": ".into() }
    }

    fn write(&self, out: &mut impl Write, value: &Value, depth: usize) -> fmt::Result {
        let [open, close] = match value.kind() {
            ValueKind::Map => ['{', '}'],
            ValueKind::Seq | ValueKind::Iterable => ['[', ']'],
            _ => return self.write_single(out, value),
        };
        out.write_char(open)?;
        let mut is_empty = true;
        for item in value.try_iter().into_iter().flatten() {
            out.write_str(if is_empty { "" } else { &self.item })?;
            self.new_line(out, depth + 1)?;
            self.write(out, &item, depth + 1)?;
            if open == '{' {
                out.write_str(&self.key)?;
                self.write(out, &value.get_item(&item).unwrap_or_default(), depth + 1)?;
            }
            is_empty = false;
        }
        if !is_empty {
            self.new_line(out, depth)?;
        }
        out.write_char(close)
    }

    fn new_line(&self, out: &mut impl Write, depth: usize) -> fmt::Result {
        match &self.indent {
            Some(indent) => write!(out, "\n{}", indent.repeat(depth)),
            None => Ok(()),
        }
    }

    fn write_single(&self, out: &mut impl Write, value: &Value) -> fmt::Result {
        if let Some(text) = value.as_str() {
            return match &self.json {
                Some(Json { is_ascii }) => write_json_text(out, text, *is_ascii),
                None => write_quoted(out, text),
            };
        }
        match (value.kind(), &self.json) {
            (ValueKind::Undefined, _) => out.write_str("Undefined"),
            (ValueKind::Number, _) if !value.is_integer() => match f64::try_from(value.clone()) {
                Ok(number) => out.write_str(&float(number)),
                Err(_) => write!(out, "{value}"),
            },
            (ValueKind::None, None) => out.write_str("None"),
            (ValueKind::Bool, None) => out.write_str(if value.is_true() { "True" } else { "False" }),
            (ValueKind::None, Some(_)) => out.write_str("null"),
            (ValueKind::Bool, Some(_)) => out.write_str(if value.is_true() { "true" } else { "false" }),
            _ => write!(out, "{value}"),
        }
    }
}

fn write_json_text(out: &mut impl Write, text: &str, is_ascii: bool) -> fmt::Result {
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

fn write_quoted(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
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
