//! [`HfReader`]: one object of Hugging Face's `config.json`, read key by key.

use std::path::Path;

use serde_json::{Map, Value};

use crate::JobError;

/// One JSON object and where it stands.
#[derive(Clone, Copy, Debug)]
pub struct HfReader<'a> {
    pub(super) path: &'a Path,
    /// `rope_scaling.` in that object, empty at the root.
    pub(super) prefix: &'static str,
    pub(super) map: &'a Map<String, Value>,
}

impl<'a> HfReader<'a> {
    /// The value of `key` unless absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there, and null.
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

    /// A size.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`] for a value of another type, as in the methods below.
    pub fn integer(&self, key: &str) -> Result<Option<usize>, JobError> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.read(key, "it must be a non-negative integer", convert)
    }

    /// A number.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn number(&self, key: &str) -> Result<Option<f64>, JobError> {
        self.read(key, "it must be a number", Value::as_f64)
    }

    /// True or false.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, JobError> {
        self.read(key, "it must be true or false", Value::as_bool)
    }

    /// A text.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn string(&self, key: &str) -> Result<Option<&'a str>, JobError> {
        self.read(key, "it must be a string", Value::as_str)
    }

    /// An object, whose keys stand in errors after `prefix`.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn object(&self, key: &str, prefix: &'static str) -> Result<Option<HfReader<'a>>, JobError> {
        let map = self.read(key, "it must be an object", Value::as_object)?;
        Ok(map.map(|map| HfReader { path: self.path, prefix, map }))
    }

    /// A list of texts.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, JobError> {
        let convert = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.read(key, "it must be a list of strings", convert)
    }

    /// A list of sizes.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn integers(&self, key: &str) -> Result<Option<Vec<usize>>, JobError> {
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let convert = |value: &'a Value| value.as_array()?.iter().map(size).collect();
        self.read(key, "it must be a list of non-negative integers", convert)
    }

    /// The objects in an object, whatever their names, whose keys stand in errors after `prefix`.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`].
    pub fn objects(&self, key: &str, prefix: &'static str) -> Result<Option<Vec<HfReader<'a>>>, JobError> {
        let convert = |value: &'a Value| -> Option<Vec<_>> {
            let reader = |map| HfReader { path: self.path, prefix, map };
            value.as_object()?.values().map(|value| value.as_object().map(reader)).collect()
        };
        self.read(key, "it must be an object of objects", convert)
    }

    /// Refuses every text but `wanted`, if there is one.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`], which says that only `supported` is.
    pub fn only(&self, key: &str, wanted: &str, supported: &str) -> Result<(), JobError> {
        match self.string(key)? {
            Some(value) if value != wanted => Err(self.unsupported(key, supported)),
            _ => Ok(()),
        }
    }

    /// The error of a value that the model does not have.
    pub fn unsupported(&self, key: &str, supported: &str) -> JobError {
        JobError::HfUnsupported {
            path: self.path.to_path_buf(),
            key: format!("{}{key}", self.prefix),
            value: self.map.get(key).map_or_else(String::new, Value::to_string),
            supported: supported.into(),
        }
    }

    /// The error of a key that has no default.
    pub fn missing(&self, key: &str) -> JobError {
        JobError::HfMissingKey { path: self.path.to_path_buf(), key: format!("{}{key}", self.prefix) }
    }
}
