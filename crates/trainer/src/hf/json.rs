//! Hugging Face's `config.json`: reads it as a model's configuration, and writes it with the other
//! keys of a source.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::files::CONFIG;
use super::float8::Quantization;
use super::names::hf_name;
use super::reader::HfReader;
use crate::TensorFiles;
use crate::files::{read_json, read_object};
use crate::model::ModelConfig;

/// Files and keys that describe quantized weights. The first one found is used: the usual key, the
/// key of older versions of compressed-tensors, and ModelOpt's own file.
const QUANTIZATION: [(&str, &str); 3] =
    [(CONFIG, "quantization_config"), (CONFIG, "compression_config"), ("hf_quant_config.json", "quantization")];

/// Reads `dir/config.json`. Missing or null keys have transformers' defaults.
///
/// # Errors
/// A file that cannot be read; a key that is missing or has a value that the model does not
/// support; dimensions that are not valid; quantized weights that are not read.
pub fn read_config<C: ModelConfig>(dir: impl AsRef<Path>) -> Result<C> {
    let path = dir.as_ref().join(CONFIG);
    let config = C::from_hf(&HfReader::new(&path, &read_json(&path)?))?;
    config.validate()?;
    quantization(dir.as_ref())?;
    Ok(config)
}

/// Schemes of quantized weights in the folder `dir`; `None` if they are not quantized.
///
/// # Errors
/// A file that cannot be read; a quantization that is not read.
pub(super) fn quantization(dir: &Path) -> Result<Option<Quantization>> {
    for (file, key) in QUANTIZATION {
        let path = dir.join(file);
        let map = read_object(&path)?;
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
/// A file that cannot be read.
pub(crate) fn is_bf16(folder: &Path) -> Result<bool> {
    let path = folder.join(CONFIG);
    let map = read_json(&path)?;
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
/// A mixture of experts; a missing folder; the errors of [`read_config`].
pub(super) fn to_json<C: ModelConfig>(
    config: &C,
    torch_dtype: &str,
    quantization: Option<Value>,
    source: Option<&Path>,
) -> Result<String> {
    let keys = config.to_hf()?;
    let mut json = Map::new();
    if let Some(folder) = source {
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let path = folder.join(CONFIG);
        json = read_object(&path)?;
        // Refuses another kind of model, whose other keys would be wrong.
        if path.exists() {
            C::from_hf(&HfReader::new(&path, &json))?;
        }
    }
    // The other form of the rope settings, which is not written.
    json.remove("rope_parameters");
    // Newer and older name of the key.
    let dtypes = ["dtype", "torch_dtype"].map(|key| (key, json!(torch_dtype)));
    // The source's quantization, since its weights are decoded.
    QUANTIZATION.iter().for_each(|(_, key)| drop(json.remove(*key)));
    json.extend(quantization.map(|quantization| ("quantization_config".to_string(), quantization)));
    json.extend(keys.into_iter().chain(dtypes).map(|(key, value)| (key.to_string(), value)));
    Ok(text(json))
}

/// The `generation_config.json` at `path`, or a new one, with `stop` as the tokens that end
/// generation.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn generation_json(path: &Path, stop: &[u32]) -> Result<String> {
    let mut json = read_object(path)?;
    json.insert("eos_token_id".into(), json!(stop));
    Ok(text(json))
}

/// Text of an object, with sorted keys. Their order depends on features of serde_json otherwise.
fn text(json: Map<String, Value>) -> String {
    let mut json = Value::from(json);
    json.sort_all_objects();
    format!("{json:#}\n")
}
