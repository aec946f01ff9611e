//! Hugging Face's `config.json`: reads it as a model's configuration, and writes it with the other
//! keys of a source.

use anyhow::Context;
use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::files::CONFIG;
use super::float8::Quantization;
use super::names::hf_name;
use super::reader::HfReader;
use crate::model::ModelConfig;
use crate::{JobError, TensorFiles};

/// Files and keys that describe quantized weights. The first one found is used: the usual key, the
/// key of older versions of compressed-tensors, and ModelOpt's own file.
const QUANTIZATION: [(&str, &str); 3] =
    [(CONFIG, "quantization_config"), (CONFIG, "compression_config"), ("hf_quant_config.json", "quantization")];

/// Reads `dir/config.json`. Missing or null keys have transformers' defaults.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfMissingKey`], [`JobError::ModelConfig`].
/// [`JobError::HfUnsupported`] for a feature that this model lacks, and for unsupported quantized
/// weights.
pub fn read_config<C: ModelConfig>(dir: impl AsRef<Path>) -> Result<C, JobError> {
    let path = dir.as_ref().join(CONFIG);
    let config = C::from_hf(&HfReader::new(&path, &object(&path)?))?;
    config.validate()?;
    quantization(dir.as_ref())?;
    Ok(config)
}

/// Schemes of quantized weights in the folder `dir`; `None` if they are not quantized.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfUnsupported`], [`JobError::HfMissingKey`],
/// [`JobError::Float8Files`].
pub(super) fn quantization(dir: &Path) -> Result<Option<Quantization>, JobError> {
    for (file, key) in QUANTIZATION {
        let path = dir.join(file);
        let map = if path.exists() { object(&path)? } else { Map::new() };
        // ModelOpt's file may describe only a key-value cache.
        if let Some(config) = HfReader::new(&path, &map).object(key)?.filter(|config| !config.is_null("quant_algo")) {
            return Quantization::read(&config).map(Some);
        }
    }
    Ok(None)
}

/// Whether the weights in a folder are bf16, according to its `config.json`, or else to the
/// embedding.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfUnsupported`], [`JobError::TensorFiles`].
pub(crate) fn is_bf16(folder: &Path) -> Result<bool, JobError> {
    let path = folder.join(CONFIG);
    let map = object(&path)?;
    let reader = HfReader::new(&path, &map);
    // Newer and older name of the key.
    let newer = reader.string("dtype")?;
    if let Some(said) = newer.or(reader.string("torch_dtype")?) {
        return Ok(said == "bfloat16");
    }
    let files = TensorFiles::open_folder(folder)?;
    Ok(files.get(&hf_name("embed_tokens.weight")).is_some_and(|embedding| embedding.dtype() == Dtype::BF16))
}

/// Makes the `config.json` of a model whose weights have this dtype or quantization. Keeps the
/// other keys of the `config.json` in the folder `source`, if there is one.
///
/// # Errors
/// [`JobError::MoeExport`]; [`JobError::Io`] for a missing folder; the errors of [`read_config`].
pub(super) fn to_json<C: ModelConfig>(
    config: &C,
    torch_dtype: &str,
    quantization: Option<Value>,
    source: Option<&Path>,
) -> Result<String, JobError> {
    let keys = config.to_hf()?;
    let mut json = source.map_or(Ok(Map::new()), source_object::<C>)?;
    // The other form of the rope settings, which is not written.
    json.remove("rope_parameters");
    // Newer and older name of the key.
    let dtypes = ["dtype", "torch_dtype"].map(|key| (key, json!(torch_dtype)));
    // The source's quantization, since its weights are decoded.
    QUANTIZATION.iter().for_each(|(_, key)| drop(json.remove(*key)));
    json.extend(quantization.map(|quantization| ("quantization_config".to_string(), quantization)));
    json.extend(keys.into_iter().chain(dtypes).map(|(key, value)| (key.to_string(), value)));
    let mut json = Value::from(json);
    // Independent of the features of serde_json in a build.
    json.sort_all_objects();
    Ok(format!("{json:#}\n"))
}

/// The `generation_config.json` at `path`, or a new one, with `stop` as the tokens that end
/// generation.
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
    fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let path = folder.join(CONFIG);
    if !path.exists() {
        return Ok(Map::new());
    }
    let json = object(&path)?;
    // Refuses another kind of model, whose other keys would be wrong.
    C::from_hf(&HfReader::new(&path, &json))?;
    Ok(json)
}

pub(crate) fn object(path: &Path) -> Result<Map<String, Value>, JobError> {
    let text = crate::files::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not valid", path.display()))
}
