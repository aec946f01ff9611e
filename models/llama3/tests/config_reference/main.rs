//! `docs/config.md` is made from the types of the configuration: keys, types and docs from their sources, defaults from their values.
//! Here it is compared with the file, and its keys with those that the reader of configurations knows.

mod attributes;
mod page;
mod reference;
mod source;
mod text;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, fs, path};

use burn_float8::Float8Config;
use llama3::RunConfig;
use llama3::presets::PRESETS;
use toml::value::Datetime;
use toml::{Table, Value};

use crate::reference::{Absent, Keys, Path, Reference};
use crate::source::{Shape, Sources};

fn root() -> PathBuf {
    path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn reference() -> &'static Reference {
    static REFERENCE: OnceLock<Reference> = OnceLock::new();
    REFERENCE.get_or_init(|| Reference::new(&Sources::of_workspace(&root())))
}

/// Why the reader refuses a file.
fn refusal(file: &Table) -> String {
    let text = toml::to_string(file).unwrap();
    match RunConfig::from_toml(path::Path::new("file"), &text) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    }
}

/// The keys that the reader names when it refuses one: none where `flatten` keeps it from knowing them.
fn known_keys(path: &Path) -> Option<BTreeSet<String>> {
    const NO_KEY: &str = "no_such_key";
    let refusal = refusal(&path.file(Table::from_iter([(NO_KEY.to_string(), 1.into())])));
    let (_, names) = refusal
        .split_once(&format!("unknown field `{NO_KEY}`"))
        .unwrap_or_else(|| panic!("[{}] takes any key: {refusal}", path.dotted()));
    names.contains("expected").then(|| names.split('`').skip(1).step_by(2).map(String::from).collect())
}

#[test]
fn the_page_is_that_of_the_types() {
    let file = root().join("docs/config.md");
    let page = page::page(reference());
    if env::var_os("FLOAT8_BLESS").is_some_and(|value| value == "1") {
        fs::write(&file, &page).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let first = page.lines().zip(written.lines()).position(|(new, old)| new != old);
    let first = first.unwrap_or_else(|| page.lines().count().min(written.lines().count()));
    assert!(
        page == written,
        "docs/config.md is not what the types say, from line {} on:\n  {}\nTo renew it, run this test with FLOAT8_BLESS=1: \
         `FLOAT8_BLESS=1 cargo test -p llama3 --test config_reference`",
        first + 1,
        page.lines().nth(first).unwrap_or("(the page ends)"),
    );
}

#[test]
fn every_key_that_the_reader_knows_is_there() {
    let (mut tables, mut lists) = (0, 0);
    for section in &reference().sections {
        let keys = section.entries().flat_map(|entry| [&entry.field.key].into_iter().chain(&entry.field.aliases));
        let keys: BTreeSet<String> = keys.cloned().collect();
        for path in section.paths() {
            tables += 1;
            match known_keys(path) {
                Some(known) => assert_eq!(keys, known, "[{}]", path.dotted()),
                None => assert!(section.groups.len() > 1, "[{}]", path.dotted()),
            }
            for key in &keys {
                let wrong = "1979-05-27".parse::<Datetime>().unwrap();
                let refusal = refusal(&path.file(Table::from_iter([(key.clone(), wrong.into())])));
                assert!(!refusal.is_empty(), "{}.{key} takes a date", path.dotted());
                assert!(!refusal.contains(&format!("unknown field `{key}`")), "{}.{key}: {refusal}", path.dotted());
            }
        }
        for entry in section.entries() {
            if let Some(Keys::Some(_, keys)) = &entry.table {
                lists += 1;
                let path = section.path.with(&entry.field.key, matches!(entry.field.shape, Shape::List(..)));
                assert_eq!(Some(keys.iter().cloned().collect()), known_keys(&path), "[{}]", path.dotted());
            }
        }
    }
    assert!(tables > 15 && lists > 0, "only {tables} tables, {lists} of them with keys of another");
}

/// `flatten` keeps the reader from saying which keys `[float8]` has, but not `Debug`.
#[test]
fn every_field_of_float8_config_is_there() {
    let debug = format!("{:#?}", Float8Config::default());
    let names = debug.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    let names: Vec<_> = names.map(|(name, _)| name).filter(|name| !name.starts_with(' ')).collect();
    assert!(names.len() > 8, "{debug}");
    let path = Path(vec![("float8".into(), false)]);
    let section = reference().sections.iter().find(|section| section.path == path).unwrap();
    for name in names {
        let is_there = section.entries().any(|entry| entry.field.key == name);
        let file = path.file(Table::from_iter([(name.to_string(), "no".into())]));
        assert_ne!(is_there, refusal(&file).contains(&format!("unknown field `{name}`")), "float8.{name}");
    }
}

/// The tables that every configuration has, with the defaults that the page gives.
fn defaults(reference: &Reference, path: &Path) -> Table {
    let section = reference.sections.iter().find(|section| section.path == *path).unwrap();
    let mut table = Table::new();
    for entry in section.entries() {
        let Absent::Default(value) = &entry.absent else { continue };
        let value = match (&entry.table, &entry.field.shape) {
            (Some(Keys::Section(at)), Shape::Table(_)) => Value::Table(defaults(reference, at)),
            _ => toml::from_str::<Table>(&format!("it = {}", page::value(value))).unwrap().remove("it").unwrap(),
        };
        table.insert(entry.field.key.clone(), value);
    }
    table
}

#[test]
fn a_file_of_all_defaults_is_the_default() {
    let written = toml::to_string(&defaults(reference(), &Path::default())).unwrap();
    assert!(written.lines().count() > 50, "{written}");
    assert_eq!(RunConfig::from_toml(path::Path::new("file"), &written).unwrap(), RunConfig::default());
}

#[test]
fn every_key_of_the_default_is_there() {
    fn check(reference: &Reference, path: &Path, table: &Table) -> usize {
        let section = reference.sections.iter().find(|section| section.path == *path).unwrap();
        let mut keys = 0;
        for (key, value) in table {
            assert!(section.entries().any(|entry| entry.field.key == *key), "{}.{key}", path.dotted());
            keys += 1 + value.as_table().map_or(0, |inner| check(reference, &path.with(key, false), inner));
        }
        keys
    }
    let default: Table = toml::from_str(&RunConfig::default().to_toml().unwrap()).unwrap();
    assert!(check(reference(), &Path::default(), &default) > 30);
}

#[test]
fn every_key_is_in_the_commented_file() {
    let file = fs::read_to_string(root().join("configs/llama3_debug.toml")).unwrap();
    let words: BTreeSet<_> = file.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    for section in &reference().sections {
        for entry in section.entries() {
            let key = entry.field.key.as_str();
            assert!(words.contains(key), "configs/llama3_debug.toml lacks {}.{key}", section.path.dotted());
        }
    }
}

/// Names that a doc comment lists by hand: presets, and torchtitan's, which the reader of `[float8]` has as literals.
#[test]
fn names_in_docs_are_complete() {
    let page = page::page(reference());
    let sources = Sources::of_workspace(&root());
    let float8 = sources.text_with("train", "Float8Section");
    let code = float8.lines().filter(|line| !line.trim_start().starts_with("//"));
    let literals = code.flat_map(|line| line.split('"').skip(1).step_by(2));
    let is_name = |text: &&str| text.contains('_') && text.bytes().all(|b| b == b'_' || b.is_ascii_alphanumeric());
    let names: Vec<_> = literals.filter(is_name).collect();
    assert!(names.len() >= 4, "{names:?}");
    for name in names.into_iter().chain(PRESETS) {
        assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("`\"{name}\"`")), "{name}");
    }
}

#[test]
fn links_lead_to_sections_and_lines_are_short() {
    let page = page::page(reference());
    let anchor = |line: &str| line.trim_start_matches('#').trim().replace(['[', ']', '.'], "");
    let anchors: BTreeSet<_> = page.lines().filter(|line| line.starts_with("##")).map(anchor).collect();
    let links: Vec<_> = page.split("](#").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() > 10, "{links:?}");
    for link in links {
        assert!(anchors.contains(link), "#{link}");
    }
    for line in page.lines() {
        assert!(line.chars().count() <= 130, "{line}");
    }
}
