//! The reference: tables in the order of the page, their keys, and what holds where a key is absent.

use std::collections::BTreeMap;

use burn_float8::{PrecisionSchedule, config::DelayedScaling};
use llama3::RunConfig;
use serde::Serialize;
use toml::{Table as Toml, Value};
use train::config::ProfileSection;
use train::data::DataSource;

use crate::source::{Field, Shape, Sources, Table};

/// A table of a file.
pub struct Section {
    pub path: Path,
    /// Other tables with the same keys.
    pub others: Vec<Path>,
    pub doc: Vec<String>,
    pub groups: Vec<Entries>,
}

/// The keys that come from one struct.
pub struct Entries {
    /// The doc comment of a struct that is flattened into the section's.
    pub doc: Option<Vec<String>>,
    pub entries: Vec<Entry>,
}

/// A key.
pub struct Entry {
    pub field: Field,
    pub absent: Absent,
    /// The section of a table, or of the tables in a list.
    pub table: Option<Keys>,
}

/// What holds where a key is absent.
pub enum Absent {
    /// What its doc says.
    Optional,
    /// An error.
    Required,
    Default(Value),
}

/// Where the keys of a table are.
#[derive(Clone)]
pub enum Keys {
    /// In a section of their own.
    Section(Path),
    /// These of that section.
    Some(Path, Vec<String>),
}

/// Where a table is: its keys from the file's root on, and whether it is one of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
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

    /// A file that has nothing but `table` there.
    pub fn file(&self, table: Toml) -> Toml {
        self.0.iter().rev().fold(table, |inner, (key, is_list)| {
            let inner = Value::Table(inner);
            let value = if *is_list { Value::Array(vec![inner]) } else { inner };
            Toml::from_iter([(key.clone(), value)])
        })
    }
}

impl Section {
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.groups.iter().flat_map(|group| &group.entries)
    }

    /// All tables with these keys.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.path].into_iter().chain(&self.others)
    }
}

/// What is known of the default of a table's type.
enum Defaults {
    /// Written out, but for what is left out as its type's default.
    Written(Toml),
    /// Derived: that of each field's type.
    Derived,
    /// It has none.
    None,
}

/// The defaults of types that write out their own.
fn written(type_name: &str) -> Option<Toml> {
    fn table(value: impl Serialize) -> Option<Toml> {
        Some(Toml::try_from(value).unwrap())
    }
    match type_name {
        "llama3::RunConfig" => table(RunConfig::default()),
        "train::ProfileSection" => table(ProfileSection::default()),
        "train::DataSource" => table(DataSource::default()),
        "burn_float8::DelayedScaling" => table(DelayedScaling::default()),
        "burn_float8::PrecisionSchedule" => table(PrecisionSchedule::default()),
        _ => None,
    }
}

fn defaults(table: &Table, inherited: Option<&Value>) -> Defaults {
    let inherited = inherited.map(|value| value.as_table().unwrap().clone());
    match inherited.or_else(|| written(&table.type_name)) {
        Some(defaults) => Defaults::Written(defaults),
        None if !table.has_default => Defaults::None,
        None if table.derives_default => Defaults::Derived,
        None => panic!("{} writes out its default: add it to `written` in reference.rs", table.type_name),
    }
}

/// The default of a type.
fn of_type(shape: &Shape, key: &str) -> Value {
    match shape {
        Shape::Boolean => false.into(),
        Shape::Integer => 0.into(),
        Shape::Number => 0.0.into(),
        Shape::String | Shape::Path => "".into(),
        Shape::List(_, None) => Value::Array(vec![]),
        Shape::Choice(choice) => choice.default.clone().unwrap_or_else(|| panic!("{key}: no #[default]")).into(),
        Shape::Table(_) => Value::Table(Toml::new()),
        Shape::Either(..) | Shape::List(..) => panic!("{key}: what is the default of its type?"),
    }
}

fn absent(field: &Field, defaults: &Defaults) -> Absent {
    let key = &field.key;
    let written = match defaults {
        Defaults::Written(table) => table.get(key),
        _ => None,
    };
    match (written, defaults) {
        (Some(value), _) => Absent::Default(value.clone()),
        (None, _) if field.optional => Absent::Optional,
        (None, Defaults::Derived) => Absent::Default(of_type(&field.shape, key)),
        (None, _) if field.may_be_default => Absent::Default(of_type(&field.shape, key)),
        (None, Defaults::None) => Absent::Required,
        (None, Defaults::Written(_)) => panic!("{key} is not in the default, nor may it be left out"),
    }
}

/// All tables of a configuration.
pub struct Reference {
    pub sections: Vec<Section>,
    /// For each type that has been read its section and its keys.
    read: BTreeMap<String, Keys>,
}

impl Reference {
    pub fn new(sources: &Sources) -> Self {
        let mut reference = Self { sections: vec![], read: BTreeMap::new() };
        let root = sources.table("llama3", "RunConfig");
        reference.add(Path::default(), &root, None);
        reference
    }

    /// The keys of `table` at `path`; those of the tables within follow.
    fn add(&mut self, path: Path, table: &Table, inherited: Option<&Value>) -> Keys {
        if let Some(keys) = self.read.get(&table.type_name).cloned() {
            assert!(inherited.is_none(), "{}: the same keys as elsewhere, but other defaults?", path.dotted());
            if let Keys::Section(at) = &keys {
                self.sections.iter_mut().find(|section| section.path == *at).unwrap().others.push(path);
            }
            return keys;
        }
        let names = |fields: &[Field]| fields.iter().map(|field| field.key.clone()).collect();
        for group in &table.groups {
            let keys = match group.type_name == table.type_name {
                true => Keys::Section(path.clone()),
                false => Keys::Some(path.clone(), names(&group.fields)),
            };
            self.read.insert(group.type_name.clone(), keys);
        }
        let defaults = defaults(table, inherited);
        let at = self.sections.len();
        let groups = vec![];
        self.sections.push(Section { path: path.clone(), others: vec![], doc: table.doc.clone(), groups });
        for group in &table.groups {
            let entries = group.fields.iter().map(|field| {
                let absent = absent(field, &defaults);
                let (inner, is_list) = match &field.shape {
                    Shape::Table(inner) => (Some(inner), false),
                    Shape::List(inner, _) => match &**inner {
                        Shape::Table(inner) => (Some(inner), true),
                        _ => (None, true),
                    },
                    _ => (None, false),
                };
                let inherited = match &absent {
                    Absent::Default(value) => value.as_table().filter(|table| !table.is_empty()).map(|_| value),
                    _ => None,
                };
                let table = inner.map(|inner| self.add(path.with(&field.key, is_list), inner, inherited));
                Entry { field: field.clone(), absent, table }
            });
            let entries = entries.collect();
            let is_own = group.type_name == table.type_name;
            self.sections[at].groups.push(Entries { doc: (!is_own).then(|| group.doc.clone()), entries });
        }
        Keys::Section(path)
    }
}
