//! Hugging Face's `config.json`: read key by key, and written with what a source's says besides.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::files::CONFIG;
use super::names::hf_name;
use crate::model::ModelConfig;
use crate::{JobError, TensorFiles};

/// Reads `dir/config.json`. Keys that are absent or null have transformers' defaults.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfMissingKey`], [`JobError::HfUnsupported`] for a feature that this
/// model does not have, [`JobError::ModelConfig`].
pub fn read_config<C: ModelConfig>(dir: impl AsRef<Path>) -> Result<C, JobError> {
    let path = dir.as_ref().join(CONFIG);
    let config = C::from_hf(&HfReader { path: &path, prefix: "", map: &object(&path)? })?;
    config.validate()?;
    Ok(config)
}

/// Whether the weights in a folder are bf16: what its `config.json` says, or else the embedding.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfUnsupported`], [`JobError::TensorFiles`].
pub(crate) fn is_bf16(folder: &Path) -> Result<bool, JobError> {
    let path = folder.join(CONFIG);
    let reader = HfReader { path: &path, prefix: "", map: &object(&path)? };
    // The newer name and the older one.
    let newer = reader.string("dtype")?;
    if let Some(said) = newer.or(reader.string("torch_dtype")?) {
        return Ok(said == "bfloat16");
    }
    let files = TensorFiles::open_folder(folder)?;
    Ok(files.get(&hf_name("embed_tokens.weight")).is_some_and(|embedding| embedding.dtype() == Dtype::BF16))
}

/// The `config.json` of a model whose weights have this dtype. What the one in the folder `source`, if there is one, says besides is
/// kept.
///
/// # Errors
/// [`JobError::MoeExport`]; [`JobError::Io`] for a folder that is not there; those of [`read_config`].
pub(super) fn to_json<C: ModelConfig>(
    config: &C,
    torch_dtype: &str,
    source: Option<&Path>,
) -> Result<String, JobError> {
    let keys = config.to_hf()?;
    let mut json = source.map_or(Ok(Map::new()), source_object::<C>)?;
    // The form of rope that is not written.
    json.remove("rope_parameters");
    // The newer name and the older one.
    let dtypes = ["dtype", "torch_dtype"].map(|key| (key, json!(torch_dtype)));
    json.extend(keys.into_iter().chain(dtypes).map(|(key, value)| (key.to_string(), value)));
    let mut json = Value::from(json);
    // Whatever the features of serde_json that a build has.
    json.sort_all_objects();
    Ok(format!("{json:#}\n"))
}

/// The `generation_config.json` at `path`, or a new one, that ends at `stop`.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`].
pub(super) fn generation_json(path: &Path, stop: &[u32]) -> Result<String, JobError> {
    let mut json = if path.exists() { object(path)? } else { Map::new() };
    json.insert("eos_token_id".into(), json!(stop));
    let mut json = Value::from(json);
    json.sort_all_objects();
    Ok(format!("{json:#}\n"))
}

fn source_object<C: ModelConfig>(folder: &Path) -> Result<Map<String, Value>, JobError> {
    fs::read_dir(folder).map_err(|source| JobError::Io { path: folder.into(), source })?;
    let path = folder.join(CONFIG);
    if !path.exists() {
        return Ok(Map::new());
    }
    let json = object(&path)?;
    // Refuses another kind of model, whose other keys would be wrong.
    C::from_hf(&HfReader { path: &path, prefix: "", map: &json })?;
    Ok(json)
}

pub(super) fn object(path: &Path) -> Result<Map<String, Value>, JobError> {
    let text = crate::files::read_to_string(path).map_err(|source| JobError::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| JobError::Json { path: path.into(), source })
}

/// One JSON object and where it stands.
#[derive(Clone, Copy, Debug)]
pub struct HfReader<'a> {
    path: &'a Path,
    /// `rope_scaling.` in that object, empty at the root.
    prefix: &'static str,
    map: &'a Map<String, Value>,
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
