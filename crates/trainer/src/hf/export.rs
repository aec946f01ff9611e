//! Exports a model into a folder that transformers loads. Tensors are read from the device one by
//! one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_float8::lora::Lora;
use clap::ValueEnum;
use safetensors::Dtype;

use super::checkpoint::{Checkpoint, RepeatedHead};
use super::float8::Float8Plan;
use super::float8_export::Float8Export;
use super::parameters::{Parameter, parameters, read};
use super::{files, json, names};
use crate::model::ModelConfig;
use crate::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_shards};
use crate::{atomic, create_folder};

/// Options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Dtype of all tensors that are not in FP8.
    pub dtype: ExportDtype,
    /// Maximum bytes of tensors per file. Larger models are split into several files.
    pub max_shard_bytes: u64,
    /// Folder that supplies tokenizer files, `generation_config.json`, and the keys of
    /// `config.json` unrelated to the model's dimensions or dtype. It is the checkpoint that
    /// training began with, or the assets that [`copy_assets`](super::copy_assets) kept of it.
    pub source: Option<PathBuf>,
    /// Tokens that end generation, for `eos_token_id` of `generation_config.json`. If empty, that
    /// file stays as in the source.
    pub stop: Vec<u32>,
}

impl Default for ExportOptions {
    /// f32, the dtype of parameters; 5 GB, as in transformers; no source.
    fn default() -> Self {
        Self { dtype: ExportDtype::F32, max_shard_bytes: 5_000_000_000, source: None, stop: vec![] }
    }
}

/// Format of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// Exactly like the parameters.
    F32,
    /// Rounded to nearest, ties to even.
    Bf16,
    /// Linears in FP8, everything else in bf16.
    Fp8,
}

/// Converts values to bytes in files.
type Encode = fn(&[f32]) -> Vec<u8>;

impl ExportDtype {
    /// Name of the dtype in PyTorch, dtype in files, and conversion to it.
    fn format(self) -> (&'static str, Dtype, Encode) {
        match self {
            Self::F32 => ("float32", Dtype::F32, f32_bytes),
            Self::Bf16 | Self::Fp8 => ("bfloat16", Dtype::BF16, bf16_bytes),
        }
    }
}

/// Writes a model with this configuration, see
/// [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf).
///
/// # Errors
/// The errors of [`CausalLmExt::save_hf`](crate::CausalLmExt::save_hf). With `float8`, also the
/// errors of [`CausalLmExt::save_hf_float8`](crate::CausalLmExt::save_hf_float8).
pub(crate) fn save<B: Backend, M: Module<B>, C: ModelConfig>(
    model: &M,
    config: &C,
    folder: &Path,
    options: &ExportOptions,
    float8: Option<&Float8Export<'_>>,
) -> Result<()> {
    let ExportOptions { dtype, max_shard_bytes, ref source, ref stop } = *options;
    // Refuses a model that Hugging Face has no names for.
    config.to_hf()?;
    let plan = float8.map(|float8| float8.plan(config)).transpose()?;
    let quantization = plan.as_ref().map(Float8Plan::to_json);
    let config = json::to_json(config, dtype.format().0, quantization, source.as_deref())?;
    create_folder(folder, |folder| -> Result<()> {
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            atomic::replace(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
        };
        write(files::CONFIG, &config)?;
        if let Some(source) = source {
            files::copy_others(source, folder)?;
        }
        if !stop.is_empty() {
            write(files::GENERATION, &json::generation_json(&folder.join(files::GENERATION), stop)?)?;
        }
        let parameters = parameters(model);
        let tensors = parameters.iter().flat_map(|parameter| {
            let float8 = plan.as_ref().and_then(|plan| plan.tensors(parameter, &parameters));
            float8.unwrap_or_else(|| vec![plain(parameter, dtype)])
        });
        write_shards(folder, &tensors.collect::<Vec<_>>(), max_shard_bytes)
    })
}

/// Tensor in high precision.
fn plain(parameter: &Parameter, dtype: ExportDtype) -> NewTensor<'_> {
    let (_, dtype, encode) = dtype.format();
    let bytes = move || (parameter.read)().map(|values| encode(&values));
    NewTensor::new(names::hf_name(&parameter.path), dtype, parameter.shape.clone(), bytes)
}

/// Share of the adapters' weight change that remains in files. `model` has the merged weights w' =
/// w + Δ, Δ = α/r · A·B. `folder` has them rounded, q:
///
/// ```text
/// Σ Δ · (q − w) / Σ Δ² = 1 + Σ Δ · (q − w') / Σ Δ²
/// ```
///
/// It is 1 where rounding errors cancel, and 0 where each weight is rounded to its value without
/// adapters. `None` if the adapters change nothing.
///
/// # Errors
/// The errors of reading the folder and the device.
pub(crate) fn share_left<B: Backend, M: Module<B>, C: ModelConfig>(
    lora: &Lora<B>,
    model: &M,
    config: &C,
    folder: &Path,
) -> Result<Option<f64>> {
    let files = Checkpoint::open(folder, config, RepeatedHead::IsLeftOut)?;
    let (mut squares, mut lost) = (0.0, 0.0);
    for parameter in parameters(model) {
        let adapter = |linear: &str| lora.adapters.iter().find(|adapter| adapter.name == linear);
        let Some(adapter) = names::linear(&parameter.path).and_then(adapter) else { continue };
        let Ok(dims) = <[usize; 2]>::try_from(&parameter.shape[..]) else { continue };
        let scale = lora.config.scale_of(&adapter.name);
        let change = adapter.a.val().matmul(adapter.b.val()).mul_scalar(scale).transpose();
        let change = read(&change, "reading the adapters")?;
        let (merged, rounded) = ((parameter.read)()?, files.linear_f32(&names::hf_name(&parameter.path), dims)?);
        for ((change, merged), rounded) in change.into_iter().zip(merged).zip(rounded) {
            squares += f64::from(change).powi(2);
            lost += f64::from(change) * (f64::from(rounded) - f64::from(merged));
        }
    }
    Ok((squares > 0.0).then(|| 1.0 + lost / squares))
}
