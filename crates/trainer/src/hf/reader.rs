//! [`HfReader`]: reads an object of Hugging Face's `config.json` key by key.

use std::path::Path;

use anyhow::{Error, Result, anyhow};
use serde::Deserialize;
use serde_json::{Map, Value};

/// JSON object, and its place in a file.
#[derive(Clone, Copy, Debug)]
pub struct HfReader<'a> {
    pub(super) path: &'a Path,
    /// Keys that lead to the object, outermost first; the rest is empty.
    parents: [&'static str; 4],
    map: &'a Map<String, Value>,
}

impl<'a> HfReader<'a> {
    /// Reads the whole file `path`.
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, parents: [""; 4], map }
    }

    /// Reader of an object in this one, under these keys.
    fn child(&self, keys: &[&'static str], map: &'a Map<String, Value>) -> Self {
        let mut parents = self.parents;
        parents.iter_mut().filter(|parent| parent.is_empty()).zip(keys).for_each(|(parent, key)| *parent = key);
        Self { parents, map, ..*self }
    }

    /// Key as errors name it, with its parents and dots.
    pub(super) fn full(&self, key: &str) -> String {
        let parents = self.parents.into_iter().filter(|parent| !parent.is_empty());
        parents.chain([key]).collect::<Vec<_>>().join(".")
    }

    /// Refuses the first key that is not one of `known`, unless its value is null, false or empty.
    ///
    /// # Errors
    /// Such a key, with the text `supported`.
    pub fn only_keys(&self, known: &[&str], supported: &str) -> Result<()> {
        self.others(known).next().map_or(Ok(()), |key| Err(self.unsupported(key, supported)))
    }

    /// Keys that are not in `known`, and whose values are not null, false or empty.
    pub fn others(&self, known: &[&str]) -> impl Iterator<Item = &'a str> {
        let is_other = |(key, value): &(&String, &Value)| !known.contains(&key.as_str()) && !is_off(value);
        self.map.iter().filter(is_other).map(|(key, _)| key.as_str())
    }

    /// Value of `key`, unless it is missing or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` exists and is null.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    fn read<T: Deserialize<'a>>(&self, key: &str, expected: &str) -> Result<Option<T>> {
        let read = |value| T::deserialize(value).map_err(|_| self.unsupported(key, &format!("it must be {expected}")));
        self.get(key).map(read).transpose()
    }

    /// Reads a size.
    ///
    /// # Errors
    /// A value of another type, as in the methods below.
    pub fn integer(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a non-negative integer")
    }

    /// Reads a number.
    ///
    /// # Errors
    /// Another type.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number")
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// Another type.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false")
    }

    /// Reads a string.
    ///
    /// # Errors
    /// Another type.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string")
    }

    /// Reads a list of strings.
    ///
    /// # Errors
    /// Another type.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.read(key, "a list of strings")
    }

    /// Reads an object.
    ///
    /// # Errors
    /// Another type.
    pub fn object(&self, key: &'static str) -> Result<Option<HfReader<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(self.child(&[key], map))),
            Some(_) => Err(self.unsupported(key, "it must be an object")),
        }
    }

    /// Reads an object of objects with any names.
    ///
    /// # Errors
    /// Another type.
    pub fn objects(&self, key: &'static str) -> Result<Option<Vec<HfReader<'a>>>> {
        let Some(all) = self.object(key)? else { return Ok(None) };
        let child = |value: &'a Value| value.as_object().map(|map| self.child(&[key, "*"], map));
        let children = all.map.values().map(child).collect::<Option<_>>();
        children.map(Some).ok_or_else(|| self.unsupported(key, "it must be an object of objects"))
    }

    /// Refuses every string except `wanted`. A missing key is valid.
    ///
    /// # Errors
    /// Another value, with the text `supported`.
    pub fn only(&self, key: &str, wanted: &str, supported: &str) -> Result<()> {
        match self.string(key)? {
            Some(value) if value != wanted => Err(self.unsupported(key, supported)),
            _ => Ok(()),
        }
    }

    /// Error of a value, or of a missing key, that the model does not support.
    pub fn unsupported(&self, key: &str, supported: &str) -> Error {
        let (path, name) = (self.path.display(), self.full(key));
        match self.map.get(key) {
            Some(value) => anyhow!("{path}: {name} = {value} is not supported; {supported}"),
            None => anyhow!("{path}: {name} is missing; {supported}"),
        }
    }

    /// Error of a missing key that has no default.
    pub fn missing(&self, key: &str) -> Error {
        anyhow!("{}: {} is missing", self.path.display(), self.full(key))
    }
}

/// Whether a value turns a feature off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}
