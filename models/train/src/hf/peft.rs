//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! | ours | PEFT's tensor | shape |
//! | --- | --- | --- |
//! | `layers.0.self_attn.q_proj`, A `[in, r]` | `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` | `[r, in]` |
//! | its B `[r, out]` | `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight` | `[out, r]` |
//!
//! Source: PEFT 0.17, `peft/tuners/lora/config.py` and `peft/utils/save_and_load.py`.

use std::collections::HashMap;
use std::path::Path;

use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::lora::{Lora, LoraAdapter, LoraConfig};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::json::object;
use super::names::hf_module;
use super::parameters::read;
use crate::tensor_files::{NewTensor, TensorFiles, f32_bytes, write_file};
use crate::{JobError, atomic, create_folder};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// All linears but the output layer.
const ALL_LINEAR: &str = "all-linear";

/// The names of an adapter's A and B.
fn names(linear: &str) -> [String; 2] {
    let name = hf_module(linear);
    ["A", "B"].map(|which| format!("base_model.model.{name}.lora_{which}.weight"))
}

/// Writes adapters to `folder`, which must not exist, or be empty; `base` is what PEFT is to load them onto. It is there whole or, after an error,
/// as before.
///
/// # Errors
/// [`JobError::Folder`], [`JobError::Write`], [`JobError::TensorFiles`], [`TrainError::Execution`].
pub(crate) fn save<B: Backend>(lora: &Lora<B>, base: Option<&Path>, folder: &Path) -> Result<(), JobError> {
    let LoraConfig { rank, alpha, dropout, ref target_modules } = lora.config;
    let targets = match &target_modules[..] {
        [all] if all == ALL_LINEAR => json!(all),
        // PEFT knows it alone: beside others it stands for the linears that have an adapter.
        names if names.iter().any(|name| name == ALL_LINEAR) => {
            json!(lora.adapters.iter().map(|adapter| hf_module(&adapter.name)).collect::<Vec<_>>())
        }
        names => json!(names),
    };
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "target_modules": targets, "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
        "init_lora_weights": true, "use_rslora": false, "use_dora": false, "modules_to_save": null,
    });
    create_folder(folder, |folder| {
        let path = folder.join(CONFIG);
        atomic::replace_json(&path, &config).map_err(|source| JobError::Write { path, source })?;
        let tensors = lora.adapters.iter().flat_map(|adapter| {
            let [a, b] = names(&adapter.name);
            [(a, adapter.a.val()), (b, adapter.b.val())].map(|(name, tensor)| {
                let tensor = tensor.transpose();
                NewTensor {
                    name,
                    dtype: Dtype::F32,
                    shape: tensor.dims().to_vec(),
                    bytes: Box::new(move || Ok(f32_bytes(&read(&tensor, "reading the adapters")?))),
                }
            })
        });
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_file(&folder.join(WEIGHTS), &tensors.collect::<Vec<_>>(), Some(metadata))
    })
}

/// Settings of PEFT's that change what an adapter computes, or what is saved with it, and are off in plain LoRA.
const OFF: [&str; 12] = [
    "alora_invocation_tokens",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// The configuration of an adapter in a folder.
///
/// # Errors
/// [`JobError::Io`], [`JobError::Json`], [`JobError::HfMissingKey`], [`JobError::HfUnsupported`] for a kind of adapter that is not LoRA as
/// this crate has it.
pub(crate) fn read_config(folder: &Path) -> Result<LoraConfig, JobError> {
    let path = folder.join(CONFIG);
    let map = object(&path)?;
    let unsupported = |key: &str, value: &Value, supported: &str| JobError::HfUnsupported {
        path: path.clone(),
        key: key.into(),
        value: value.to_string(),
        supported: supported.into(),
    };
    let value = |key: &str| map.get(key).unwrap_or(&Value::Null);
    let kind = [
        ("peft_type", value("peft_type") == "LORA"),
        ("bias", [&json!("none"), &Value::Null].contains(&value("bias"))),
    ];
    // The others change the base model's weights, each time that PEFT loads the adapter.
    let keep_base = [json!(true), json!(false), json!("gaussian"), json!("orthogonal"), json!("eva"), Value::Null];
    let init = value("init_lora_weights");
    if !keep_base.contains(init) {
        return Err(unsupported("init_lora_weights", init, "an initialization that leaves the base model as it is"));
    }
    let off = OFF.map(|key| (key, [&json!(false), &Value::Null].contains(&value(key))));
    let patterns = ["rank_pattern", "alpha_pattern"].map(|key| (key, value(key).as_object().is_none_or(Map::is_empty)));
    if let Some((key, _)) = kind.into_iter().chain(off).chain(patterns).find(|(_, fits)| !fits) {
        return Err(unsupported(key, value(key), "plain LoRA, with one rank and one alpha for all adapters"));
    }
    let missing = |key: &'static str| JobError::HfMissingKey { path: path.clone(), key: key.into() };
    let rank = map.get("r").and_then(Value::as_u64).ok_or_else(|| missing("r"))? as usize;
    let alpha = map.get("lora_alpha").and_then(Value::as_f64).ok_or_else(|| missing("lora_alpha"))?;
    // α / √r in place of α / r.
    let is_rslora = map.get("use_rslora").and_then(Value::as_bool).unwrap_or(false);
    let alpha = if is_rslora { alpha * (rank as f64).sqrt() } else { alpha };
    let dropout = map.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
    let targets = map.get("target_modules").ok_or_else(|| missing("target_modules"))?;
    let target_modules = match targets {
        Value::String(all) if all == ALL_LINEAR => vec![all.clone()],
        Value::Array(names) if names.iter().all(Value::is_string) => {
            names.iter().filter_map(Value::as_str).map(String::from).collect()
        }
        other => return Err(unsupported("target_modules", other, "a list of names, or \"all-linear\"")),
    };
    Ok(LoraConfig { rank, alpha, dropout, target_modules })
}

/// Adapters that a folder has, in the place of the values of these, which have its configuration.
///
/// # Errors
/// [`JobError::TensorFiles`] for a tensor that is missing or has another shape, [`JobError::UnknownAdapter`] for one that no linear has.
pub(crate) fn load<B: Backend>(mut lora: Lora<B>, folder: &Path) -> Result<Lora<B>, JobError> {
    let files = TensorFiles::open_file(folder.join(WEIGHTS))?;
    let known: Vec<String> = lora.adapters.iter().flat_map(|adapter| names(&adapter.name)).collect();
    if let Some(name) = files.names().find(|name| !known.iter().any(|known| known == name)) {
        return Err(JobError::UnknownAdapter { path: folder.join(WEIGHTS), tensor: name.into() });
    }
    for LoraAdapter { name, a, b } in &mut lora.adapters {
        let [of_a, of_b] = names(name);
        *a = replaced(a, &of_a, &files)?;
        *b = replaced(b, &of_b, &files)?;
    }
    Ok(lora)
}

fn replaced<B: Backend>(
    param: &Param<Tensor<B, 2>>,
    name: &str,
    files: &TensorFiles,
) -> Result<Param<Tensor<B, 2>>, JobError> {
    let [rows, cols] = param.val().dims();
    let values = files.expect(name, &[cols, rows])?.to_f32()?;
    let stored = Tensor::<B, 2>::from_data(TensorData::new(values, [cols, rows]), (&param.val().device(), DType::F32));
    // Through one dimension, so that elements move and not only the strides.
    let tensor = stored.transpose().reshape([rows * cols]).reshape([rows, cols]);
    Ok(Param::initialized(param.id, tensor.require_grad()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output layer is none of `model`'s.
    #[test]
    fn names_are_pefts() {
        assert_eq!(names("lm_head")[0], "base_model.model.lm_head.lora_A.weight");
        assert_eq!(
            names("layers.3.self_attn.q_proj")[1],
            "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
        );
    }
}
