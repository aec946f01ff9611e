//! JSON Schema of a configuration. Editors use it to complete and check TOML, and
//! `docs/reference/configuration.md` is generated from it.

use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::Value;

/// JSON Schema with every key of a configuration: its type, default and documentation for files.
pub fn schema<C: JsonSchema>() -> Value {
    let mut schema = SchemaGenerator::default().into_root_schema_for::<C>();
    RecursiveTransform(as_in_files).transform(&mut schema);
    schema.to_value()
}

/// Removes null from types and defaults, since TOML has no null. Removes a table's default, since
/// its keys have their own.
fn as_in_files(schema: &mut Schema) {
    let Some(schema) = schema.as_object_mut() else { return };
    if matches!(schema.get("default"), Some(Value::Null | Value::Object(_))) {
        schema.remove("default");
    }
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &mut types[..] {
            let only = only.take();
            schema.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(any)) = schema.get_mut("anyOf") {
        any.retain(|one| one["type"] != "null");
        if let [Value::Object(only)] = &mut any[..] {
            let only = std::mem::take(only);
            schema.remove("anyOf");
            schema.extend(only);
        }
    }
    if let Some(Value::String(description)) = schema.get_mut("description") {
        *description = of_files(description);
    }
}

/// Doc comment for files: paragraphs, each on one line, and TOML or text blocks. Everything from
/// the first Rust example on is dropped.
fn of_files(doc: &str) -> String {
    let mut parts = vec![String::new()];
    let mut lines = doc.lines();
    while let Some(line) = lines.next() {
        match line.strip_prefix("```") {
            Some("toml" | "text") => {
                let block = lines.by_ref().take_while(|line| *line != "```");
                parts.push([line].into_iter().chain(block).chain(["```"]).collect::<Vec<_>>().join("\n"));
                parts.push(String::new());
            }
            Some(_) => break,
            None if line.is_empty() => parts.push(String::new()),
            None => {
                let paragraph = parts.last_mut().expect("it has one");
                *paragraph += if paragraph.is_empty() { "" } else { " " };
                *paragraph += line;
            }
        }
    }
    let parts = parts.iter().filter(|part| !part.is_empty());
    let parts = parts.map(|part| if part.starts_with("```") { part.clone() } else { without_rust_links(part) });
    parts.collect::<Vec<_>>().join("\n\n")
}

/// Replaces `[a](b)` by `a` unless `b` is a URL, and `[a]` by `a` if `a` is code.
fn without_rust_links(text: &str) -> String {
    let link = r"\[(?<text>(?:`[^`]*`|[^\[\]`])*)\](?:\((?<to>(?:[^()]|\(\))*)\))?|`[^`]*`";
    let link = regex::Regex::new(link).expect("the expression is valid");
    let is_code = |text: &str| text.starts_with('`') && text.ends_with('`') && text.matches('`').count() == 2;
    let plain = |found: &regex::Captures<'_>| {
        let (whole, text, to) = (&found[0], found.name("text"), found.name("to"));
        match (text, to) {
            (Some(_), Some(to)) if to.as_str().starts_with("http") => whole.to_string(),
            (Some(text), Some(_)) => text.as_str().to_string(),
            (Some(text), None) if is_code(text.as_str()) => text.as_str().to_string(),
            _ => whole.to_string(),
        }
    };
    link.replace_all(text, plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_items_become_their_text() {
        for (text, expected) in [
            ("see [`Schedule`], [`at`](Schedule::at) and [it](crate::it())", "see `Schedule`, `at` and it"),
            ("in [0, 1), `[float8]` or `[K, N]`", "in [0, 1), `[float8]` or `[K, N]`"),
            ("[the paper](https://arxiv.org/abs/1)", "[the paper](https://arxiv.org/abs/1)"),
            ("[`a[0]`](x) and [0, 1] of `b", "`a[0]` and [0, 1] of `b"),
        ] {
            assert_eq!(without_rust_links(text), expected);
        }
    }

    #[test]
    fn an_example_in_rust_ends_a_doc() {
        let doc = "One\ntwo.\n\n```toml\n[a]\n```\n\nThree.\n```\nfn main() {}\n```\nFour.";
        assert_eq!(of_files(doc), "One two.\n\n```toml\n[a]\n```\n\nThree.");
    }
}
