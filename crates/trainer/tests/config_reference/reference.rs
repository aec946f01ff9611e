//! Tables of a configuration in the order of the page, from its JSON Schema.

use serde_json::{Map, Value};
use toml::{Table as Toml, Value as TomlValue};

/// Path of a table: its keys from the root, each with whether it is a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Path(pub Vec<(String, bool)>);

impl Path {
    pub fn with(&self, key: &str, is_list: bool) -> Self {
        Self([&self.0[..], &[(key.into(), is_list)]].concat())
    }

    /// `a.b`.
    pub fn dotted(&self) -> String {
        let keys: Vec<_> = self.0.iter().map(|(key, _)| key.as_str()).collect();
        keys.join(".")
    }

    /// File that contains only `table` at this path.
    pub fn file(&self, table: Toml) -> Toml {
        self.0.iter().rev().fold(table, |inner, (key, is_list)| {
            let inner = TomlValue::Table(inner);
            let value = if *is_list { TomlValue::Array(vec![inner]) } else { inner };
            Toml::from_iter([(key.clone(), value)])
        })
    }
}

/// Table of a file.
pub struct Section<'a> {
    pub path: Path,
    /// Other tables with the same keys.
    pub others: Vec<Path>,
    pub schema: &'a Value,
}

impl Section<'_> {
    /// All tables with these keys.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.path].into_iter().chain(&self.others)
    }

    /// Keys of the table, without torchtitan's names.
    pub fn keys(&self) -> impl Iterator<Item = (&String, &Value)> {
        properties(self.schema).into_iter().flatten().filter(|(_, key)| key["deprecated"] != true)
    }
}

/// Tables of a configuration, the root first.
pub struct Reference<'a> {
    root: &'a Value,
    pub sections: Vec<Section<'a>>,
}

impl<'a> Reference<'a> {
    pub fn new(root: &'a Value) -> Self {
        let mut reference = Self { root, sections: vec![] };
        reference.add(Path::default(), root);
        reference
    }

    fn add(&mut self, path: Path, table: &'a Value) {
        let is_same = |section: &&mut Section<'_>| std::ptr::eq(section.schema, table);
        if let Some(section) = self.sections.iter_mut().find(is_same) {
            section.others.push(path);
            return;
        }
        self.sections.push(Section { path: path.clone(), others: vec![], schema: table });
        for (key, value) in properties(table).into_iter().flatten() {
            if let Some((inner, is_list)) = self.table(value)
                && self.part_of(inner).is_none()
            {
                self.add(path.with(key, is_list), inner);
            }
        }
    }

    /// Resolves a schema's reference, if it is one.
    pub fn resolve(&self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(to) => self.root.pointer(to.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }

    /// Table of a value, or of the elements of a list, with whether it is a list.
    pub fn table(&self, value: &'a Value) -> Option<(&'a Value, bool)> {
        let (inner, is_list) = match value.get("items") {
            Some(items) => (self.resolve(items), true),
            None => (self.resolve(value), false),
        };
        properties(inner).map(|_| (inner, is_list))
    }

    /// Section of a table.
    pub fn section(&self, table: &Value) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| std::ptr::eq(section.schema, table))
    }

    /// Section that has all keys of a table, and others.
    pub fn part_of(&self, table: &Value) -> Option<&Section<'a>> {
        let own = properties(table)?;
        let has_all = |section: &&Section<'_>| {
            let all = properties(section.schema).unwrap();
            own.len() < all.len() && own.iter().all(|(key, value)| all.get(key) == Some(value))
        };
        self.sections.iter().find(has_all)
    }
}

fn properties(table: &Value) -> Option<&Map<String, Value>> {
    table["properties"].as_object()
}
