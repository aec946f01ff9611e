//! `docs/config.md`.

use std::collections::BTreeMap;

use toml::Value;

use crate::reference::{Absent, Entry, Keys, Path, Reference, Section};
use crate::source::Shape;
use crate::text::{Block, blocks, sentences, wrap};

/// What stands before the sections.
const INTRODUCTION: &str = include_str!("introduction.md");

/// The page.
pub fn page(reference: &Reference) -> String {
    let mut page = Page { text: INTRODUCTION.into(), listed: BTreeMap::new() };
    // The root has no keys but the sections.
    reference.sections.iter().skip(1).for_each(|section| page.section(section));
    page.text
}

struct Page {
    text: String,
    /// The key whose entry lists the values of a type.
    listed: BTreeMap<String, String>,
}

/// `[a.b]`, or `[[a.b]]` for the tables of a list.
fn heading(path: &Path) -> String {
    let dotted = path.dotted();
    if path.0.last().is_some_and(|(_, is_list)| *is_list) { format!("[[{dotted}]]") } else { format!("[{dotted}]") }
}

fn link(text: &str, path: &Path) -> String {
    format!("[{text}](#{})", path.dotted().replace('.', ""))
}

fn code_list(words: &[String]) -> String {
    let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

/// A value as TOML, numbers as short as they can be.
pub fn value(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        Value::Array(values) => format!("[{}]", values.iter().map(self::value).collect::<Vec<_>>().join(", ")),
        value => value.to_string(),
    }
}

/// What a reader calls a value of this shape, or several of them.
fn words(shape: &Shape, several: bool) -> String {
    let word = match shape {
        Shape::Boolean => "boolean",
        Shape::Integer => "integer",
        Shape::Number => "number",
        Shape::String | Shape::Choice(_) => "string",
        Shape::Path => "path",
        Shape::Table(_) => "table",
        Shape::List(inner, None) => return format!("list of {}", words(inner, true)),
        Shape::List(inner, Some(length)) => return format!("list of {length} {}", words(inner, true)),
        Shape::Either(_, shapes) => {
            let shapes: Vec<_> = shapes.iter().map(|(shape, _)| words(shape, several)).collect();
            return shapes.join(" or ");
        }
    };
    if several { format!("{word}s") } else { word.into() }
}

impl Page {
    fn section(&mut self, section: &Section) {
        let marks = "#".repeat(section.path.0.len().min(2) + 1);
        self.text += &format!("\n{marks} {}\n\n", heading(&section.path));
        self.doc(&section.doc);
        if !section.others.is_empty() {
            let others: Vec<_> = section.others.iter().map(heading).collect();
            self.text += &wrap("", 0, &format!("The same keys are in {}.", code_list(&others)));
            self.text.push('\n');
        }
        for (i, group) in section.groups.iter().enumerate() {
            if let Some(doc) = &group.doc {
                if i > 0 {
                    self.text.push('\n');
                }
                self.doc(doc);
            }
            group.entries.iter().for_each(|entry| self.entry(section, entry));
        }
    }

    fn doc(&mut self, doc: &[String]) {
        for block in blocks(doc) {
            self.text += &match block {
                Block::Paragraph(text) => wrap("", 0, &text),
                Block::Fenced(lines) => lines.join("\n") + "\n",
            };
            self.text.push('\n');
        }
    }

    fn entry(&mut self, section: &Section, entry: &Entry) {
        let field = &entry.field;
        let mut kind = words(&field.shape, false);
        let mut text = sentences(&field.doc);
        assert!(!text.is_empty(), "{}.{} has no doc comment", section.path.dotted(), field.key);
        match &entry.table {
            Some(Keys::Section(path)) => kind = link(&kind, path),
            Some(Keys::Some(path, keys)) => {
                text +=
                    &format!(" The keys are {} of {}.", code_list(keys), link(&format!("`{}`", heading(path)), path));
            }
            None => {}
        }
        let absent = match (&entry.absent, &field.shape) {
            // The defaults of its keys are in its section.
            (Absent::Optional, _) | (Absent::Default(_), Shape::Table(_)) => "optional".into(),
            (Absent::Required, _) => "required".into(),
            (Absent::Default(it), _) => format!("default `{}`", value(it)),
        };
        let also = match field.aliases.is_empty() {
            true => String::new(),
            false => format!(" (also {})", code_list(&field.aliases)),
        };
        let values = self.values(&format!("{}.{}", section.path.dotted(), field.key), &field.shape);
        if let Values::As(key) = &values {
            text += &format!(" The values are those of `{key}`.");
        }
        let line = format!("**`{}`**{also} ({kind}, {absent}): {text}", field.key);
        self.text += &wrap("- ", 2, &line);
        if let Values::These(values) = values {
            for (name, doc) in values {
                let doc = sentences(&doc);
                assert!(!doc.is_empty(), "{}: {name} has no doc comment", field.key);
                self.text += &wrap("  - ", 4, &format!("{name}: {doc}"));
            }
        }
    }

    /// The values that are named: at the first key that has them.
    fn values(&mut self, key: &str, shape: &Shape) -> Values {
        let (type_name, values) = match shape {
            Shape::List(inner, _) => return self.values(key, inner),
            Shape::Choice(choice) => {
                let values = choice.variants.iter().map(|(name, doc)| (format!("`\"{name}\"`"), doc.clone()));
                (&choice.type_name, values.collect())
            }
            Shape::Either(type_name, shapes) => {
                let values = shapes.iter().map(|(shape, doc)| (words(shape, false), doc.clone()));
                (type_name, values.collect())
            }
            _ => return Values::Any,
        };
        match self.listed.get(type_name) {
            Some(first) => Values::As(first.clone()),
            None => {
                self.listed.insert(type_name.clone(), key.into());
                Values::These(values)
            }
        }
    }
}

enum Values {
    Any,
    These(Vec<(String, Vec<String>)>),
    As(String),
}
