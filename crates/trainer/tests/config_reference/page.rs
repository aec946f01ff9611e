//! Generates `docs/reference/configuration.md`.

use std::collections::BTreeMap;

use serde_json::Value;
use trainer::checkpoint::MAY_CHANGE;
use trainer::metrics::Peak;

use crate::reference::{Path, Reference, Section};

/// Text before the sections.
const INTRODUCTION: &str = include_str!("introduction.md");
/// Maximum line length.
const WIDTH: usize = 130;

/// The whole page.
pub fn page(reference: &Reference<'_>) -> String {
    let mut page = Page { reference, text: INTRODUCTION.into(), listed: BTreeMap::new() };
    // The root has only sections.
    reference.sections.iter().skip(1).for_each(|section| page.section(section));
    page.text + &may_change() + &peaks()
}

fn may_change() -> String {
    let mut keys = MAY_CHANGE.map(|key| if key.ends_with('.') { format!("{key}*") } else { key.into() });
    keys.sort_unstable();
    let keys = code_list(keys.into_iter());
    let text = format!("`resume` accepts other values of {keys}. Another value of any other key is an error.");
    format!("\n## What resume may change\n\n{}", wrap("", 0, &text))
}

fn peaks() -> String {
    let text = "A step line has `mfu`, the share of the device's peak that the model's own FLOPs use (PaLM's formula), for the devices \
                below, with sums in f32 and without sparsity. Peaks are at the rated clock, in TFLOP/s.";
    format!("\n## Peaks of devices\n\n{}\n{}", wrap("", 0, text), Peak::TABLE)
}

struct Page<'a> {
    reference: &'a Reference<'a>,
    text: String,
    /// Key whose entry lists the values of a type, by the address of the type's schema.
    listed: BTreeMap<*const Value, String>,
}

/// `[a.b]`, or `[[a.b]]` for the tables of a list.
fn heading(path: &Path) -> String {
    let dotted = path.dotted();
    if path.0.last().is_some_and(|(_, is_list)| *is_list) { format!("[[{dotted}]]") } else { format!("[{dotted}]") }
}

fn link(text: &str, path: &Path) -> String {
    format!("[{text}](#{})", path.dotted().replace('.', ""))
}

fn code_list(words: impl Iterator<Item = String>) -> String {
    words.map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

fn description(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_else(|| panic!("it has no doc comment: {schema}"))
}

/// A value as TOML, with numbers in their shortest form.
fn value(value: &Value) -> String {
    match value {
        Value::Array(values) => format!("[{}]", values.iter().map(self::value).collect::<Vec<_>>().join(", ")),
        Value::Number(number) if number.is_f64() => format!("{:?}", number.as_f64().unwrap()),
        value => value.to_string(),
    }
}

impl Page<'_> {
    fn section(&mut self, section: &Section<'_>) {
        let marks = "#".repeat(section.path.0.len().min(2) + 1);
        self.text += &format!("\n{marks} {}\n\n", heading(&section.path));
        for part in description(section.schema).split("\n\n") {
            self.text += &if part.starts_with("```") { format!("{part}\n\n") } else { wrap("", 0, part) + "\n" };
        }
        if !section.others.is_empty() {
            let others = code_list(section.others.iter().map(heading));
            self.text += &(wrap("", 0, &format!("The same keys are in {others}.")) + "\n");
        }
        for (key, schema) in section.keys() {
            self.entry(section, key, schema);
        }
    }

    fn entry(&mut self, section: &Section<'_>, key: &str, schema: &Value) {
        let mut kind = self.words(schema, "");
        let mut text = description(schema).replace("\n\n", " ");
        let table = self.reference.table(schema).map(|(table, _)| table);
        if let Some(at) = table.and_then(|table| self.reference.section(table)) {
            kind = link(&kind, &at.path);
        } else if let Some((at, table)) = table.and_then(|table| Some((self.reference.part_of(table)?, table))) {
            let keys = code_list(table["properties"].as_object().unwrap().keys().cloned());
            text += &format!(" The keys are {keys} of {}.", link(&format!("`{}`", heading(&at.path)), &at.path));
        }
        let is_required =
            section.schema["required"].as_array().is_some_and(|required| required.iter().any(|it| it == key));
        let absent = match &schema["default"] {
            _ if is_required => "required".into(),
            // The defaults of its keys are in its section.
            Value::Null => "optional".into(),
            default => format!("default `{}`", value(default)),
        };
        let named = self.named_values(schema);
        if let Some((of, _)) = &named {
            let own = format!("{}.{key}", section.path.dotted());
            match self.listed.get(of) {
                Some(first) => text += &format!(" For the values, see `{first}`."),
                None => drop(self.listed.insert(*of, own.clone())),
            }
            if self.listed[of] != own {
                self.text += &wrap("- ", 2, &format!("**`{key}`** ({kind}, {absent}): {text}"));
                return;
            }
        }
        self.text += &wrap("- ", 2, &format!("**`{key}`** ({kind}, {absent}): {text}"));
        for value in named.into_iter().flat_map(|(_, values)| values) {
            self.text += &wrap("  - ", 4, &value);
        }
    }

    /// Type of a value in words, in plural with an `s`.
    fn words(&self, schema: &Value, plural: &str) -> String {
        let schema = self.reference.resolve(schema);
        if let Some(any) = schema["anyOf"].as_array() {
            let mut words: Vec<_> = any.iter().map(|one| self.words(one, plural)).collect();
            words.dedup();
            return words.join(" or ");
        }
        let name = |name: &str| match name {
            "array" => {
                let length = schema["minItems"].as_u64().map_or(String::new(), |length| format!("{length} "));
                format!("list{plural} of {length}{}", self.words(&schema["items"], "s"))
            }
            "object" => format!("table{plural}"),
            name => format!("{name}{plural}"),
        };
        match &schema["type"] {
            Value::Array(names) => names.iter().map(|it| name(it.as_str().unwrap())).collect::<Vec<_>>().join(" or "),
            // An enum's variants have the type.
            Value::Null => name("string"),
            it => name(it.as_str().unwrap()),
        }
    }

    /// Values with names or separate docs, and the schema that lists them.
    fn named_values(&self, schema: &Value) -> Option<(*const Value, Vec<String>)> {
        let schema = self.reference.resolve(schema.get("items").unwrap_or(schema));
        let values = schema["oneOf"].as_array().or_else(|| schema["anyOf"].as_array())?;
        let name = |value: &Value| value.get("const").map_or_else(|| self.words(value, ""), |name| format!("`{name}`"));
        Some((schema, values.iter().map(|value| format!("{}: {}", name(value), description(value))).collect()))
    }
}

/// Wraps text. The first line begins with `first`, the others with `indent` spaces. Code is not
/// broken, and no line begins like a Markdown list item.
pub fn wrap(first: &str, indent: usize, text: &str) -> String {
    let mut is_code = false;
    let is_gap = |letter: char| {
        is_code ^= letter == '`';
        letter == ' ' && !is_code
    };
    let mut words: Vec<String> = vec![];
    for word in text.split(is_gap).filter(|word| !word.is_empty()) {
        let is_marker = matches!(word, "-" | "+" | "*" | "=" | "·") || word.starts_with(['#', '>', '|']);
        match words.last_mut() {
            Some(last) if is_marker => *last = format!("{last} {word}"),
            _ => words.push(word.into()),
        }
    }
    let mut wrapped = String::new();
    let mut line = first.to_string();
    let mut is_empty = true;
    for word in words {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            wrapped += &format!("{line}\n");
            line = " ".repeat(indent);
            is_empty = true;
        }
        line += &format!("{}{word}", if is_empty { "" } else { " " });
        is_empty = false;
    }
    wrapped + &line + "\n"
}
