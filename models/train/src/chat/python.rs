//! How Python prints values, and how its `json.dumps` does.

use std::fmt::{self, Write};
use std::io;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::{limits, work};

/// More spaces than anybody indents by.
const MAX_INDENT: i64 = 64;

/// `str(value)`.
pub(super) fn str(value: &Value) -> String {
    let mut text = String::new();
    write_str(&mut text, value).expect("strings take all text");
    text
}

/// Writes `str(value)`; what is undefined is nothing.
pub(super) fn write_str(out: &mut impl Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => write_repr(out, value),
    }
}

/// Writes `repr(value)`.
fn write_repr(out: &mut impl Write, value: &Value) -> fmt::Result {
    if let Some(text) = value.as_str() {
        return write_quoted(out, text);
    }
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.write_str(&float(number)),
            Err(_) => write!(out, "{value}"),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_repr(out, &item)?;
            }
            out.write_char(']')
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_repr(out, &key)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default())?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value}"),
    }
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

/// `c.isprintable()`.
fn is_printable(c: char) -> bool {
    // Rust's debug format escapes the same characters, and at the beginning of a text combining ones.
    matches!(c, '\'' | '"') || !String::from_iter(['a', c]).escape_debug().any(|c| c == '\\')
}

/// `repr` of a float: the shortest digits that give it back, with an exponent below 1e-4 and from 1e16.
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

/// The filter `trim`.
pub(super) fn trim(value: Value, characters: Option<String>) -> String {
    strip(&str(&value), characters.as_deref(), [true; 2]).to_string()
}

/// Methods of texts that count characters, or know Python's white space.
pub(super) fn method(state: &State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, name, arguments) };
    work::spend(std::iter::once(value).chain(arguments))?;
    let sides = match name {
        "count" => {
            let (part,): (&str,) = from_args(arguments)?;
            return Ok(text.matches(part).count().into());
        }
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            return limits::replace(text, from, to, count.and_then(|count| usize::try_from(count).ok()));
        }
        "format" => {
            limits::check_format(value)?;
            return unknown_method_callback(state, value, name, arguments);
        }
        "find" | "rfind" => {
            let (part,): (&str,) = from_args(arguments)?;
            let at = if name == "find" { text.find(part) } else { text.rfind(part) };
            return Ok(at.map_or(Value::from(-1), |at| text[..at].chars().count().into()));
        }
        "strip" => [true, true],
        "lstrip" => [true, false],
        "rstrip" => [false, true],
        _ => return unknown_method_callback(state, value, name, arguments),
    };
    let (characters,): (Option<&str>,) = from_args(arguments)?;
    Ok(strip(text, characters, sides).into())
}

fn strip<'a>(text: &'a str, characters: Option<&str>, [left, right]: [bool; 2]) -> &'a str {
    let strips = |c: char| match characters {
        Some(characters) => characters.contains(c),
        None => c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}'),
    };
    let text = if left { text.trim_start_matches(strips) } else { text };
    if right { text.trim_end_matches(strips) } else { text }
}

/// The filter `tojson` of `transformers`: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn to_json(value: Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let option = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = options.get(name)?;
        Ok(named.or_else(|| arguments.get(position).cloned()).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let invalid = |detail: &'static str| Error::new(ErrorKind::InvalidOperation, detail);
    let ascii = option(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
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
    let mut out = vec![];
    let style = Style { ascii, indent, item, key, depth: 0, has_items: false };
    json.serialize(&mut Serializer::with_formatter(&mut out, style))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8_lossy(&out).into_owned().into())
}

/// The style of `json.dumps`.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    depth: usize,
    has_items: bool,
}

impl Style {
    fn begin<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn end<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.new_line(out)?;
        }
        self.has_items = true;
        out.write_all(bracket)
    }

    fn separate<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.has_items = true;
        self.new_line(out)
    }

    fn new_line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        match &self.indent {
            Some(indent) => write!(out, "\n{}", indent.repeat(self.depth)),
            None => Ok(()),
        }
    }
}

impl Formatter for Style {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, out: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ascii {
            return out.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        for c in fragment.chars() {
            match c {
                ' '..='~' => write!(out, "{c}")?,
                c => c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))?,
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}
