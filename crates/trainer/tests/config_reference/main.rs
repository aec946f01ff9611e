//! `docs/reference/configuration.md` is generated from the JSON Schema of the configuration, and
//! `command-line.md` from clap's definitions. These tests compare them with the files, and the
//! schema's keys with the parser's.

mod command_line;
mod page;
mod reference;

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::{env, fs, path};

use clap::Parser;
use models::ARCHITECTURES;
use models::{Decoders, RunConfig};
use toml::value::Datetime;
use toml::{Table, Value};
use trainer::cli::Command;

use crate::reference::{Path, Reference};

fn root() -> path::PathBuf {
    path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Output of `float8 config schema`.
fn reference() -> Reference<'static> {
    static SCHEMA: OnceLock<serde_json::Value> = OnceLock::new();
    Reference::new(SCHEMA.get_or_init(|| {
        let mut printed = vec![];
        let job = Command::parse_from(["float8", "config", "schema"]).job::<Decoders>(&mut printed).unwrap();
        assert!(job.is_none(), "no model");
        serde_json::from_slice(&printed).unwrap()
    }))
}

/// Error of parsing a file; empty if it is valid.
fn refusal(file: &Table) -> String {
    let text = toml::to_string(file).unwrap();
    match RunConfig::from_toml(path::Path::new("file"), &text) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    }
}

/// Keys listed in the parser's error for an unknown key; `None` if `flatten` hides them.
fn known_keys(path: &Path) -> Option<BTreeSet<String>> {
    const NO_KEY: &str = "no_such_key";
    let refusal = refusal(&path.file(Table::from_iter([(NO_KEY.to_string(), 1.into())])));
    let (_, names) = refusal
        .split_once(&format!("unknown field `{NO_KEY}`"))
        .unwrap_or_else(|| panic!("[{}] takes any key: {refusal}", path.dotted()));
    names.contains("expected").then(|| names.split('`').skip(1).step_by(2).map(String::from).collect())
}

#[test]
fn the_pages_are_generated() {
    let bless = env::var_os("FLOAT8_BLESS").is_some_and(|value| value == "1");
    for (name, page) in [("configuration", page::page(&reference())), ("command-line", command_line::page())] {
        let name = format!("docs/reference/{name}.md");
        let file = root().join(&name);
        if bless {
            fs::write(&file, &page).unwrap();
        }
        let written = fs::read_to_string(&file).unwrap_or_default();
        let first = page.lines().zip(written.lines()).position(|(new, old)| new != old);
        let first = first.unwrap_or_else(|| page.lines().count().min(written.lines().count()));
        assert!(
            page == written,
            "{name} differs from the types, from line {} on:\n  {}\nTo renew it, run this test with FLOAT8_BLESS=1: \
             `FLOAT8_BLESS=1 cargo test -p trainer --test config_reference`",
            first + 1,
            page.lines().nth(first).unwrap_or("(the page ends)"),
        );
    }
}

#[test]
fn every_key_that_the_reader_knows_is_there() {
    let reference = reference();
    let mut tables = 0;
    for section in &reference.sections {
        let keys: BTreeSet<String> = section.keys().map(|(key, _)| key.clone()).collect();
        assert_eq!(section.schema["additionalProperties"], false, "[{}]", section.path.dotted());
        for path in section.paths() {
            tables += 1;
            match known_keys(path) {
                Some(known) => assert_eq!(keys, known, "[{}]", path.dotted()),
                None => assert_eq!(path.dotted(), "float8"),
            }
            for key in &keys {
                let wrong = "1979-05-27".parse::<Datetime>().unwrap();
                let refusal = refusal(&path.file(Table::from_iter([(key.clone(), wrong.into())])));
                assert!(!refusal.is_empty(), "{}.{key} takes a date", path.dotted());
                assert!(!refusal.contains(&format!("unknown field `{key}`")), "{}.{key}: {refusal}", path.dotted());
            }
        }
    }
    assert!(tables > 15, "only {tables} tables");
}

/// Tables that every configuration has, with the defaults of the page.
fn defaults(reference: &Reference<'_>, path: &Path) -> Table {
    let section = reference.sections.iter().find(|section| section.path == *path).unwrap();
    let mut table = Table::new();
    for (key, schema) in section.keys() {
        if let Some(default) = schema.get("default") {
            table.insert(key.clone(), Value::try_from(default).unwrap());
        } else if path.0.is_empty() && !["lora", "profile"].contains(&key.as_str()) {
            table.insert(key.clone(), defaults(reference, &path.with(key, false)).into());
        }
    }
    table
}

#[test]
fn a_file_of_all_defaults_is_the_default() {
    let written = toml::to_string(&defaults(&reference(), &Path::default())).unwrap();
    assert!(written.lines().count() > 50, "{written}");
    assert_eq!(RunConfig::from_toml(path::Path::new("file"), &written).unwrap(), RunConfig::default());
}

#[test]
fn every_key_is_in_the_commented_file() {
    let file = fs::read_to_string(root().join("configs/llama3_debug.toml")).unwrap();
    let words: BTreeSet<_> = file.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    for section in &reference().sections {
        for (key, _) in section.keys() {
            assert!(words.contains(key.as_str()), "configs/llama3_debug.toml lacks {}.{key}", section.path.dotted());
        }
    }
}

/// Architectures and presets, which doc comments list by hand.
#[test]
fn names_in_docs_are_complete() {
    let page = page::page(&reference());
    let presets = ARCHITECTURES.into_iter().flat_map(|of| of.sizes.iter().copied().chain([of.name]));
    for name in presets {
        assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("`\"{name}\"`")), "{name}");
    }
}
