//! Hugging Face's `config.json`: read in the `rope_theta` + `rope_scaling` form and the newer `rope_parameters` form, written
//! in the former, which every version of transformers reads.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};
use train::TensorFiles;

use super::files::CONFIG;
use crate::Error;
use crate::config::{LlamaConfig, RopeScaling};
use crate::names::hf_name;

impl LlamaConfig {
    /// Reads `dir/config.json`. Keys that are absent or null have transformers' defaults.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::HfMissingKey`], [`Error::HfUnsupported`] for a feature that this
    /// model does not have, [`Error::ModelConfig`].
    pub fn from_hf_dir(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let path = dir.as_ref().join(CONFIG);
        let config = Reader { path: &path, prefix: "", map: &object(&path)? }.llama()?;
        config.validate()?;
        Ok(config)
    }
}

/// Whether the weights in a folder are bf16: what its `config.json` says, or else the embedding.
///
/// # Errors
/// [`Error::Io`], [`Error::Json`], [`Error::HfUnsupported`], [`Error::TensorFiles`].
pub(crate) fn is_bf16(folder: &Path) -> Result<bool, Error> {
    let path = folder.join(CONFIG);
    let reader = Reader { path: &path, prefix: "", map: &object(&path)? };
    // The newer name and the older one.
    let newer = reader.string("dtype")?;
    if let Some(said) = newer.or(reader.string("torch_dtype")?) {
        return Ok(said == "bfloat16");
    }
    let files = TensorFiles::open_folder(folder)?;
    Ok(files.get(&hf_name("embed_tokens.weight")).is_some_and(|embedding| embedding.dtype() == Dtype::BF16))
}

/// The `config.json` of a dense model whose weights have this dtype. What the one in the folder `source`, if there is one,
/// says besides is kept.
///
/// # Errors
/// [`Error::Io`] for a folder that is not there; those of [`LlamaConfig::from_hf_dir`].
pub(super) fn to_json(config: &LlamaConfig, torch_dtype: &str, source: Option<&Path>) -> Result<String, Error> {
    let mut json = source.map_or(Ok(Map::new()), source_object)?;
    // The form of rope that is not written.
    json.remove("rope_parameters");
    let rope_scaling = config.rope_scaling.map(|scaling| {
        json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        })
    });
    for (key, value) in [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("model_type", json!("llama")),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("vocab_size", json!(config.vocab_size)),
        ("hidden_size", json!(config.hidden_size)),
        ("intermediate_size", json!(config.intermediate_size)),
        ("num_hidden_layers", json!(config.num_layers)),
        ("num_attention_heads", json!(config.num_heads)),
        ("num_key_value_heads", json!(config.num_kv_heads)),
        ("head_dim", json!(config.head_dim)),
        ("rms_norm_eps", json!(config.rms_norm_eps)),
        ("rope_theta", json!(config.rope_theta)),
        ("rope_scaling", json!(rope_scaling)),
        ("max_position_embeddings", json!(config.max_seq_len)),
        ("tie_word_embeddings", json!(config.tie_word_embeddings)),
        // The newer name and the older one.
        ("dtype", json!(torch_dtype)),
        ("torch_dtype", json!(torch_dtype)),
    ] {
        json.insert(key.into(), value);
    }
    let mut json = Value::from(json);
    // Whatever the features of serde_json that a build has.
    json.sort_all_objects();
    Ok(format!("{json:#}\n"))
}

/// The `generation_config.json` at `path`, or a new one, that ends at `stop`.
///
/// # Errors
/// [`Error::Io`], [`Error::Json`].
pub(super) fn generation_json(path: &Path, stop: &[u32]) -> Result<String, Error> {
    let mut json = if path.exists() { object(path)? } else { Map::new() };
    json.insert("eos_token_id".into(), json!(stop));
    let mut json = Value::from(json);
    json.sort_all_objects();
    Ok(format!("{json:#}\n"))
}

fn source_object(folder: &Path) -> Result<Map<String, Value>, Error> {
    fs::read_dir(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
    let path = folder.join(CONFIG);
    if !path.exists() {
        return Ok(Map::new());
    }
    let json = object(&path)?;
    // Refuses a model that is no Llama, whose other keys would be wrong.
    Reader { path: &path, prefix: "", map: &json }.llama()?;
    Ok(json)
}

fn object(path: &Path) -> Result<Map<String, Value>, Error> {
    let text = train::files::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| Error::Json { path: path.into(), source })
}

/// One JSON object and where it stands.
struct Reader<'a> {
    path: &'a Path,
    /// `rope_scaling.` in that object, empty at the root.
    prefix: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Reader<'a> {
    fn llama(&self) -> Result<LlamaConfig, Error> {
        if self.string("model_type")?.is_none() {
            return Err(self.missing("model_type"));
        }
        self.only("model_type", "llama", "only llama is")?;
        self.only("hidden_act", "silu", "only silu is")?;
        for key in ["attention_bias", "mlp_bias"] {
            if self.boolean(key)?.unwrap_or(false) {
                return Err(self.unsupported(key, "linears have no bias"));
            }
        }
        if self.get("quantization_config").is_some() {
            return Err(self.unsupported("quantization_config", "only F32, F16 and BF16 weights are read"));
        }

        let hidden_size = self.integer("hidden_size")?.unwrap_or(4096);
        let num_heads = self.integer("num_attention_heads")?.unwrap_or(32);
        let head_dim = match self.integer("head_dim")? {
            Some(head_dim) => head_dim,
            None => hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        let (rope_theta, rope_scaling) = self.rope()?;
        Ok(LlamaConfig {
            vocab_size: self.integer("vocab_size")?.unwrap_or(32_000),
            hidden_size,
            intermediate_size: self.integer("intermediate_size")?.unwrap_or(11_008),
            num_layers: self.integer("num_hidden_layers")?.unwrap_or(32),
            num_heads,
            num_kv_heads: self.integer("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim,
            rms_norm_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            max_seq_len: self.integer("max_position_embeddings")?.unwrap_or(2048),
            tie_word_embeddings: self.boolean("tie_word_embeddings")?.unwrap_or(false),
            moe: None,
        })
    }

    /// theta and scaling. `rope_parameters` holds both; before it, `rope_theta` stood beside `rope_scaling`.
    fn rope(&self) -> Result<(f64, Option<RopeScaling>), Error> {
        const DEFAULT_THETA: f64 = 10_000.0;
        let outer_theta = self.number("rope_theta")?;
        self.whole_heads()?;
        let inner = match self.object("rope_parameters", "rope_parameters.")? {
            Some(inner) => Some(inner),
            None => self.object("rope_scaling", "rope_scaling.")?,
        };
        let Some(inner) = inner else { return Ok((outer_theta.unwrap_or(DEFAULT_THETA), None)) };
        let theta = inner.number("rope_theta")?.or(outer_theta).unwrap_or(DEFAULT_THETA);
        inner.whole_heads()?;
        // `type` is the older name of `rope_type`.
        let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
        match inner.string(key)? {
            None | Some("default") => Ok((theta, None)),
            Some("llama3") => Ok((theta, Some(inner.llama3_scaling()?))),
            Some(_) => Err(inner.unsupported(key, "default and llama3 are")),
        }
    }

    /// `partial_rotary_factor` stands beside `rope_theta`, in either form.
    fn whole_heads(&self) -> Result<(), Error> {
        let key = "partial_rotary_factor";
        match self.number(key)? {
            None | Some(1.0) => Ok(()),
            Some(_) => Err(self.unsupported(key, "all of a head is rotated")),
        }
    }

    fn llama3_scaling(&self) -> Result<RopeScaling, Error> {
        let number = |key| self.number(key)?.ok_or_else(|| self.missing(key));
        let length = "original_max_position_embeddings";
        Ok(RopeScaling {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: self.integer(length)?.ok_or_else(|| self.missing(length))?,
        })
    }

    /// The value of `key` unless absent or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(&self, key: &str, expected: &str, convert: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.unsupported(key, expected))
    }

    fn integer(&self, key: &str) -> Result<Option<usize>, Error> {
        let convert = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.read(key, "it must be a non-negative integer", convert)
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.read(key, "it must be a number", Value::as_f64)
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read(key, "it must be true or false", Value::as_bool)
    }

    fn string(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.read(key, "it must be a string", Value::as_str)
    }

    fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Reader<'a>>, Error> {
        let map = self.read(key, "it must be an object", Value::as_object)?;
        Ok(map.map(|map| Reader { path: self.path, prefix, map }))
    }

    fn only(&self, key: &str, wanted: &str, supported: &str) -> Result<(), Error> {
        match self.string(key)? {
            Some(value) if value != wanted => Err(self.unsupported(key, supported)),
            _ => Ok(()),
        }
    }

    fn unsupported(&self, key: &str, supported: &str) -> Error {
        Error::HfUnsupported {
            path: self.path.to_path_buf(),
            key: format!("{}{key}", self.prefix),
            value: self.map.get(key).map_or_else(String::new, Value::to_string),
            supported: supported.into(),
        }
    }

    fn missing(&self, key: &str) -> Error {
        Error::HfMissingKey { path: self.path.to_path_buf(), key: format!("{}{key}", self.prefix) }
    }
}
