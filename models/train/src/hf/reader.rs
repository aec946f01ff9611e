//! [`HfReader`]: reads an object of Hugging Face's `config.json` key by key.

use std::path::Path;

use anyhow::anyhow;
use serde_json::{Map, Value};

use crate::JobError;

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
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
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
    /// [`JobError::HfUnsupported`], with the text `supported`.
    pub fn only_keys(&self, known: &[&str], supported: &str) -> Result<(), JobError> {
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

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, JobError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.unsupported(key, expected))
    }

    /// Reads a size.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`] for a value of another type, as in the methods below.
    pub fn integer(&self, key: &str) -> Result<Option<usize>, JobError> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.read(key, "it must be a non-negative integer", convert)
    }

    /// Reads a number.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn number(&self, key: &str) -> Result<Option<f64>, JobError> {
        self.read(key, "it must be a number", Value::as_f64)
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, JobError> {
        self.read(key, "it must be true or false", Value::as_bool)
    }

    /// Reads a string.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn string(&self, key: &str) -> Result<Option<&'a str>, JobError> {
        self.read(key, "it must be a string", Value::as_str)
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn object(&self, key: &'static str) -> Result<Option<HfReader<'a>>, JobError> {
        let map = self.read(key, "it must be an object", Value::as_object)?;
        Ok(map.map(|map| self.child(&[key], map)))
    }

    /// Reads a list of strings.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, JobError> {
        let convert = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.read(key, "it must be a list of strings", convert)
    }

    /// Reads a list of sizes.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn integers(&self, key: &str) -> Result<Option<Vec<usize>>, JobError> {
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let convert = |value: &'a Value| value.as_array()?.iter().map(size).collect();
        self.read(key, "it must be a list of non-negative integers", convert)
    }

    /// Reads an object of objects with any names.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn objects(&self, key: &'static str) -> Result<Option<Vec<HfReader<'a>>>, JobError> {
        let convert = |value: &'a Value| -> Option<Vec<_>> {
            let reader = |map| self.child(&[key, "*"], map);
            value.as_object()?.values().map(|value| value.as_object().map(reader)).collect()
        };
        self.read(key, "it must be an object of objects", convert)
    }

    /// Refuses every string except `wanted`. A missing key is valid.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`], with the text `supported`.
    pub fn only(&self, key: &str, wanted: &str, supported: &str) -> Result<(), JobError> {
        match self.string(key)? {
            Some(value) if value != wanted => Err(self.unsupported(key, supported)),
            _ => Ok(()),
        }
    }

    /// Error of a value that the model does not support.
    pub fn unsupported(&self, key: &str, supported: &str) -> JobError {
        let value = self.map.get(key).map_or_else(String::new, Value::to_string);
        anyhow!("{}: {} = {value} is not supported; {supported}", self.path.display(), self.full(key))
    }

    /// Error of a missing key that has no default.
    pub fn missing(&self, key: &str) -> JobError {
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
