//! Export: a model into a folder that transformers loads, read from the device tensor by tensor.

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::backend::Backend;
use clap::ValueEnum;
use safetensors::Dtype;

use super::float8_export::{self, Float8Export, Writer};
use super::parameters::{Parameter, parameters};
use super::{files, json, names};
use crate::model::ModelConfig;
use crate::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_shards};
use crate::{JobError, atomic, create_folder};

/// What is exported, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Dtype of every tensor in the files that is not in FP8.
    pub dtype: ExportDtype,
    /// Bytes of tensors in one file; more are split over several.
    pub max_shard_bytes: u64,
    /// A folder whose tokenizer files and `generation_config.json` are copied, and whose `config.json` keeps the keys that
    /// say nothing of the model's dimensions or dtype: the checkpoint that training began with, or what
    /// [`copy_assets`](super::copy_assets) kept of it.
    pub source: Option<PathBuf>,
    /// The tokens at which generation ends, for `eos_token_id` of `generation_config.json`; if there are none, that is as in the source.
    pub stop: Vec<u32>,
}

impl Default for ExportOptions {
    /// f32, as parameters are; 5 GB, as in transformers; no source.
    fn default() -> Self {
        Self { dtype: ExportDtype::F32, max_shard_bytes: 5_000_000_000, source: None, stop: vec![] }
    }
}

/// Dtype of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// What parameters have, exactly, also where they are kept in bf16.
    F32,
    /// Parameters rounded to nearest, ties to even.
    Bf16,
}

impl ExportDtype {
    /// As PyTorch calls it.
    fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => f32_bytes(values),
            Self::Bf16 => bf16_bytes(values),
        }
    }
}

/// Writes a model of this configuration, as [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf) says.
///
/// # Errors
/// The errors of [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf), and with `float8` those of
/// [`CausalLmExt::save_hf_float8`](crate::CausalLmExt::save_hf_float8).
pub(crate) fn save<B: Backend, M: Module<B>, C: ModelConfig>(
    model: &M,
    config: &C,
    folder: &Path,
    options: &ExportOptions,
    float8: Option<&Float8Export<'_>>,
) -> Result<(), JobError> {
    let ExportOptions { dtype, max_shard_bytes, ref source, ref stop } = *options;
    // Refuses a model that Hugging Face has no names for.
    config.to_hf()?;
    let plan = float8.map(|float8| float8_export::plan(config, folder, float8)).transpose()?;
    let quantization = plan.as_ref().map(|plan| plan.to_json(names::hf_module));
    let config = json::to_json(config, dtype.torch_name(), quantization, source.as_deref())?;
    create_folder(folder, |folder| {
        let path = folder.join(files::CONFIG);
        atomic::replace(&path, config.as_bytes()).map_err(|source| JobError::Write { path, source })?;
        if let Some(source) = source {
            files::copy_others(source, folder)?;
        }
        if !stop.is_empty() {
            let path = folder.join(files::GENERATION);
            let json = json::generation_json(&path, stop)?;
            atomic::replace(&path, json.as_bytes()).map_err(|source| JobError::Write { path, source })?;
        }
        let parameters = parameters(model);
        let checkpoint = float8.and_then(|float8| float8.checkpoint);
        let writer = plan.as_ref().map(|plan| Writer::new(plan, &parameters, checkpoint));
        let tensors = parameters.iter().flat_map(|parameter| {
            let float8 = writer.as_ref().and_then(|writer| writer.tensors(parameter));
            float8.unwrap_or_else(|| vec![plain(parameter, dtype)])
        });
        let tensors: Vec<_> = tensors.collect();
        write_shards(folder, &tensors, max_shard_bytes)
    })
}

/// A tensor in high precision.
fn plain(parameter: &Parameter, dtype: ExportDtype) -> NewTensor<'_, JobError> {
    NewTensor {
        name: names::hf_name(&parameter.path),
        dtype: dtype.stored(),
        shape: parameter.shape.clone(),
        bytes: Box::new(move || (parameter.read)().map(|values| dtype.encode(&values))),
    }
}
