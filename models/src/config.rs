//! [`ModelConfig`] of a [`DecoderConfig`]: presets, checks, and Hugging Face's `config.json`.

use std::path::Path;

use anyhow::bail;
use float8_shard::ParallelPlan;
use serde_json::{Map, Value, json};
use trainer::config::{require, similar};
use trainer::hf::HfReader;
use trainer::{BatchShape, LayerBytes, ModelConfig, ModelSize};

use crate::ARCHITECTURES;
use crate::architecture::{DecoderConfig, presets};
use crate::dims::{Dimensions, MoeConfig};
use crate::hf;
use crate::parallel::tensor_plan;
use crate::rope::frequencies;

/// Keys of a mixture of experts in `model.overrides`.
const EXPERTS: [&str; 2] = ["num_experts", "num_experts_per_tok"];

impl DecoderConfig {
    /// Keys of `config.json` that describe the model, without a mixture of experts.
    fn keys(&self) -> Vec<(&'static str, Value)> {
        let mut keys = hf::write(&self.dims, self.architecture);
        keys.extend((self.architecture.write)(self));
        keys
    }

    /// Dimensions of the preset `name`: `debug` or the name and size of an architecture, such as
    /// `llama3-8b`; see [`presets`].
    ///
    /// # Errors
    /// An unknown preset.
    pub fn preset(name: &str) -> anyhow::Result<Self> {
        let name = if name == "debug" { "llama3-debug" } else { name };
        let found = ARCHITECTURES.into_iter().find_map(|architecture| {
            let size = name.strip_prefix(architecture.name)?.strip_prefix('-')?;
            let index = architecture.sizes.iter().position(|known| *known == size)?;
            Some((architecture.size)(index))
        });
        found.ok_or_else(|| anyhow::anyhow!("unknown model preset `{name}`; there are {}", presets().join(", ")))
    }
}

/// Scaled rotary frequencies of `config`: `head_dim / 2` values, fastest first, in radians per
/// position.
pub fn rotary_frequencies(config: &DecoderConfig) -> Vec<f32> {
    let scale = |frequency| config.rope_scaling.map_or(frequency, |scaling| scaling.scale(frequency));
    frequencies(config.dims.rope_theta, config.dims.head_dim, scale)
}

impl ModelConfig for DecoderConfig {
    /// Checks every field and the size of the model, see [`Dimensions::validate`].
    fn validate(&self) -> anyhow::Result<()> {
        self.dims.validate()?;
        self.rope_scaling.map_or(Ok(()), |scaling| scaling.validate())
    }

    fn size(&self) -> ModelSize {
        self.dims.size()
    }

    fn layer_bytes(&self, shape: &BatchShape) -> LayerBytes {
        self.dims.layer_bytes(shape)
    }

    fn with_max_seq_len(self, max_seq_len: usize) -> Self {
        Self { dims: Dimensions { max_seq_len, ..self.dims }, ..self }
    }

    fn with_overrides(&self, overrides: &Map<String, Value>) -> anyhow::Result<Self> {
        let mut keys: Map<_, _> = self.keys().into_iter().map(|(key, value)| (key.to_string(), value)).collect();
        let moe = [self.dims.moe.map(|moe| moe.num_experts), self.dims.moe.map(|moe| moe.num_experts_per_tok)];
        keys.extend(EXPERTS.into_iter().zip(moe).map(|(key, value)| (key.to_string(), json!(value))));
        for (key, value) in overrides {
            let known: Vec<_> = keys.keys().map(String::as_str).filter(|key| *key != "model_type").collect();
            if !known.contains(&key.as_str()) {
                bail!(
                    "model.overrides: unknown key `{key}`, expected one of {}{}",
                    known.join(", "),
                    similar(key, &known)
                );
            }
            keys.insert(key.clone(), value.clone());
        }
        let json = HfReader::new(Path::new("model.overrides"), &keys);
        let mut config = Self::from_hf(&json)?;
        config.dims.moe = match [json.integer(EXPERTS[0])?, json.integer(EXPERTS[1])?] {
            [None, None] => None,
            [Some(num_experts), Some(num_experts_per_tok)] => Some(MoeConfig { num_experts, num_experts_per_tok }),
            [None, _] => return Err(json.missing(EXPERTS[0])),
            [_, None] => return Err(json.missing(EXPERTS[1])),
        };
        Ok(config)
    }

    /// Output layer and routers: they choose by small differences that FP8 may lose, and are cheap.
    /// A tied output layer is not a linear of the model and needs no filter.
    fn high_precision_linears(&self) -> Vec<&'static str> {
        let names = [(!self.dims.tie_word_embeddings, "lm_head"), (self.dims.moe.is_some(), "moe.router")];
        names.into_iter().filter(|(exists, _)| *exists).map(|(_, name)| name).collect()
    }

    fn tensor_plan(&self, ranks: usize) -> anyhow::Result<ParallelPlan> {
        let Dimensions { num_kv_heads, intermediate_size, vocab_size, moe, .. } = self.dims;
        let tensor = |holds, reason: &str| require("parallelism.tensor", ranks, holds, reason);
        tensor(moe.is_none(), "a mixture of experts has no plan of tensor parallelism")?;
        let sizes = [
            ("num_key_value_heads", num_kv_heads),
            ("intermediate_size", intermediate_size),
            ("vocab_size", vocab_size),
        ];
        for (key, size) in sizes {
            tensor(size.is_multiple_of(ranks), &format!("does not divide the model's {key}, {size}"))?;
        }
        Ok(tensor_plan(&self.dims))
    }

    fn fused_linears(&self) -> Vec<&'static [&'static str]> {
        hf::FUSED_LINEARS.to_vec()
    }

    fn from_hf(json: &HfReader<'_>) -> anyhow::Result<Self> {
        let model_type = json.string("model_type")?.ok_or_else(|| json.missing("model_type"))?;
        let known = ARCHITECTURES.map(|architecture| architecture.model_type);
        let Some(index) = known.iter().position(|known| *known == model_type) else {
            return Err(json.unsupported("model_type", &format!("{} are", known.join(", "))));
        };
        let architecture = ARCHITECTURES[index];
        let (dims, scaled) = hf::read(json, architecture)?;
        let mut config = Self { architecture, dims, rope_scaling: None };
        (architecture.read)(json, scaled, &mut config)?;
        Ok(config)
    }

    fn to_hf(&self) -> anyhow::Result<Vec<(&'static str, Value)>> {
        if let Some(moe) = self.dims.moe {
            bail!("only dense models are exported: this one has {} experts in a layer", moe.num_experts);
        }
        Ok(self.keys())
    }

    fn hf_tensors(&self, path: &Path) -> anyhow::Result<Vec<(String, Vec<usize>)>> {
        match self.dims.moe {
            Some(MoeConfig { num_experts, .. }) => bail!(
                "{}: checkpoints are read into dense models only; this one has {num_experts} experts in a layer",
                path.display()
            ),
            None => Ok(self.dims.hf_tensors()),
        }
    }
}
