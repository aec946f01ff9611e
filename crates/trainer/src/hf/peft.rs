//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! | ours | PEFT's tensor | shape |
//! | --- | --- | --- |
//! | `layers.0.self_attn.q_proj`, A `[in, r]` | `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` | `[r, in]` |
//! | its B `[r, out]` | `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight` | `[out, r]` |
//!
//! Source: PEFT 0.17, `peft/tuners/lora/config.py` and `peft/utils/save_and_load.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::module::Param;
use burn::tensor::backend::Backend;
use burn_float8::lora::{Lora, LoraAdapter, LoraConfig};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::names::{Pattern, hf_module};
use super::parameters::{read, transposed};
use super::reader::HfReader;
use crate::files::read_json;
use crate::tensor_files::{NewTensor, TensorFiles, f32_bytes, write_file};
use crate::{atomic, create_folder};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Key of the linears that have adapters.
const TARGETS: &str = "target_modules";

/// All linears except the output layer.
const ALL_LINEAR: &str = "all-linear";

/// Valid numbers of a key, and their description.
type Range = (fn(f64) -> bool, &'static str);

/// Range of `r` and `rank_pattern`.
const RANK: Range = (|rank| rank >= 1.0 && rank.fract() == 0.0, "a rank is an integer of 1 or more");
/// Range of `lora_alpha` and `alpha_pattern`: α · √r is finite too.
const ALPHA: Range = (|alpha| (alpha as f32).is_finite() && alpha != 0.0, "an alpha is finite in f32, and not 0");
/// Range of `lora_dropout`.
const DROPOUT: Range = (|dropout| (0.0..1.0).contains(&dropout), "a dropout is from 0 to below 1");

/// Tensor names of an adapter's A and B.
fn names(linear: &str) -> [String; 2] {
    let name = hf_module(linear);
    ["A", "B"].map(|which| format!("base_model.model.{name}.lora_{which}.weight"))
}

/// Writes adapters to `folder`, which must be missing or empty. PEFT loads them onto `base`. After
/// an error the folder is as it was before.
///
/// # Errors
/// A folder that is not empty; files that cannot be written; a device that fails.
pub(crate) fn save<B: Backend>(lora: &Lora<B>, base: Option<&Path>, folder: &Path) -> Result<()> {
    let LoraConfig { rank, alpha, dropout, ref target_modules, .. } = lora.config;
    let targets = match &target_modules[..] {
        [all] if all == ALL_LINEAR => json!(all),
        // PEFT accepts it only as the single target. Next to other names it is replaced by the
        // linears that have adapters.
        names if names.iter().any(|name| name == ALL_LINEAR) => {
            json!(lora.adapters.iter().map(|adapter| hf_module(&adapter.name)).collect::<Vec<_>>())
        }
        names => json!(names),
    };
    // Writes whole names: PEFT's patterns are regexes, and the first match counts.
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for LoraAdapter { name, .. } in &lora.adapters {
        let (own_rank, own_alpha) = (lora.config.rank_of(name), lora.config.alpha_of(name));
        (own_rank != rank).then(|| ranks.insert(hf_module(name), json!(own_rank)));
        (own_alpha != alpha).then(|| alphas.insert(hf_module(name), json!(own_alpha)));
    }
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "target_modules": targets, "rank_pattern": ranks, "alpha_pattern": alphas, "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
        "init_lora_weights": true, "use_rslora": false, "use_dora": false, "modules_to_save": null,
    });
    create_folder(folder, |folder| -> Result<()> {
        let path = folder.join(CONFIG);
        atomic::replace_json(&path, &config).with_context(|| format!("cannot write {}", path.display()))?;
        let tensors = lora.adapters.iter().flat_map(|adapter| {
            let [a, b] = names(&adapter.name);
            [(a, adapter.a.val()), (b, adapter.b.val())].map(|(name, tensor)| {
                let tensor = tensor.transpose();
                let shape = tensor.dims().to_vec();
                NewTensor::new(name, Dtype::F32, shape, move || Ok(f32_bytes(&read(&tensor, "reading the adapters")?)))
            })
        });
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_file(&folder.join(WEIGHTS), &tensors.collect::<Vec<_>>(), Some(metadata))
    })
}

/// Keys that are read, and keys that do not change what a saved adapter computes. All other keys
/// must be off.
const KNOWN: [&str; 20] = [
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
    // How the adapter was made, and how it is run.
    "auto_mapping",
    "eva_config",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Reads the configuration of an adapter in a folder. Names of linears replace PEFT's regexes.
///
/// # Errors
/// A file that cannot be read; a key that is missing; an unsupported kind of adapter; a number out
/// of its range; a regex that cannot be matched; a target without tensors; a tensor with another
/// rank.
pub(crate) fn read_config(folder: &Path) -> Result<LoraConfig> {
    let path = folder.join(CONFIG);
    let map = read_json(&path)?;
    let json = HfReader::new(&path, &map);
    json.only_keys(&KNOWN, "plain LoRA is, without other parts")?;
    json.string("peft_type")?.ok_or_else(|| json.missing("peft_type"))?;
    json.only("peft_type", "LORA", "plain LoRA is")?;
    json.only("bias", "none", "adapters have no bias")?;
    // Other initializations change the base model's weights whenever PEFT loads the adapter.
    let keep_base = [json!(true), json!(false), json!("gaussian"), json!("orthogonal"), json!("eva")];
    if json.get("init_lora_weights").is_some_and(|init| !keep_base.contains(init)) {
        let supported = "an initialization that leaves the base model as it is";
        return Err(json.unsupported("init_lora_weights", supported));
    }
    let rank = within(&json, "r", RANK)?.ok_or_else(|| json.missing("r"))? as usize;
    let alpha = within(&json, "lora_alpha", ALPHA)?.ok_or_else(|| json.missing("lora_alpha"))?;
    let dropout = within(&json, "lora_dropout", DROPOUT)?.unwrap_or(0.0);
    let is_rslora = json.boolean("use_rslora")?.unwrap_or(false);
    // α / √r instead of α / r.
    let effective = |rank: usize, alpha: f64| if is_rslora { alpha * (rank as f64).sqrt() } else { alpha };
    let [ranks, alphas] = [patterns(&json, "rank_pattern", RANK)?, patterns(&json, "alpha_pattern", ALPHA)?];
    let files = TensorFiles::open_file(folder.join(WEIGHTS))?;
    let module = |tensor| Some(str::strip_prefix(tensor, "base_model.model.")?.rsplit_once(".lora_")?.0);
    let mut modules: Vec<&str> = files.names().filter_map(module).collect();
    modules.dedup();
    let target_modules: Vec<&str> = match json.get(TARGETS) {
        None => return Err(json.missing(TARGETS)),
        Some(Value::String(all)) if all.eq_ignore_ascii_case(ALL_LINEAR) => vec![ALL_LINEAR],
        Some(Value::String(pattern)) => {
            let pattern = Pattern::new(&json, TARGETS, pattern, &format!("^(?:{pattern})$"))?;
            let matching = modules.iter().map(|module| Ok(pattern.matches(module)?.then_some(*module)));
            matching.filter_map(Result::transpose).collect::<Result<_>>()?
        }
        Some(_) => json.strings(TARGETS)?.unwrap_or_default(),
    };
    if target_modules.is_empty() {
        return Err(json.unsupported(TARGETS, &format!("it must match a linear of {WEIGHTS}")));
    }
    let target_modules: Vec<String> = target_modules.into_iter().map(|name| own_name(name).into()).collect();
    let has_none = |target: &&String| {
        let alone = LoraConfig { target_modules: vec![target.to_string()], ..LoraConfig::default() };
        !modules.iter().any(|module| alone.targets(own_name(module)))
    };
    if let Some(target) = target_modules.iter().find(has_none) {
        return Err(json.unsupported(TARGETS, &format!("{WEIGHTS} has no tensor of {target}")));
    }
    let alpha_of_all = effective(rank, alpha);
    let mut config = LoraConfig { rank, alpha: alpha_of_all, dropout, target_modules, ..LoraConfig::default() };
    for module in modules {
        let name = own_name(module);
        // Loading reports a tensor without a target.
        if !config.targets(name) {
            continue;
        }
        let own_rank = of_patterns(&ranks, module, &json, "rank_pattern")?.map_or(rank, |rank| rank as usize);
        let own_alpha = effective(own_rank, of_patterns(&alphas, module, &json, "alpha_pattern")?.unwrap_or(alpha));
        let [a, _] = names(name);
        if let Some(stored) = files.get(&a) {
            files.expect(&a, &[own_rank, stored.shape().last().copied().unwrap_or(0)])?;
        }
        (own_rank != rank).then(|| config.rank_pattern.insert(name.into(), own_rank));
        (own_alpha != alpha_of_all).then(|| config.alpha_pattern.insert(name.into(), own_alpha));
    }
    Ok(config)
}

/// Folder of the adapter's base model, as named in its configuration.
///
/// # Errors
/// The errors of reading it; no existing folder.
pub(crate) fn base(folder: &Path) -> Result<PathBuf> {
    const KEY: &str = "base_model_name_or_path";
    let path = folder.join(CONFIG);
    let map = read_json(&path)?;
    let json = HfReader::new(&path, &map);
    let base = json.string(KEY)?.ok_or_else(|| json.missing(KEY))?;
    ensure!(
        Path::new(base).is_dir(),
        "{}: {KEY} = {base:?} is no folder here: --set model.hf_path=FOLDER names one",
        path.display()
    );
    Ok(base.into())
}

/// Whether a folder has an adapter.
pub(crate) fn is_adapter(folder: &Path) -> bool {
    folder.join(CONFIG).exists()
}

/// Path in the module tree of a Hugging Face linear.
fn own_name(module: &str) -> &str {
    module.strip_prefix("model.").unwrap_or(module)
}

/// Reads a number within a range.
fn within(json: &HfReader<'_>, key: &str, (holds, words): Range) -> Result<Option<f64>> {
    match json.number(key)? {
        Some(number) if !holds(number) => Err(json.unsupported(key, words)),
        number => Ok(number),
    }
}

/// Numbers of linears, by regexes for the ends of their names.
fn patterns(json: &HfReader<'_>, key: &'static str, range: Range) -> Result<Vec<(Pattern, f64)>> {
    let Some(object) = json.object(key)? else { return Ok(vec![]) };
    let entry = |name: &str| {
        let number = within(&object, name, range)?.ok_or_else(|| object.unsupported(name, range.1))?;
        Ok((Pattern::new(&object, name, name, &format!(r"^(?:.*\.)?(?:{name})$"))?, number))
    };
    object.others(&[]).map(entry).collect()
}

/// Number that the patterns give a linear. PEFT takes the first match. The order of keys is not
/// known here, so all matches must agree.
fn of_patterns(patterns: &[(Pattern, f64)], module: &str, json: &HfReader<'_>, key: &str) -> Result<Option<f64>> {
    let mut said = None;
    for (pattern, number) in patterns {
        if pattern.matches(module)? && said.replace(*number).is_some_and(|other| other != *number) {
            return Err(json.unsupported(key, &format!("one number for {module} is, and it has several")));
        }
    }
    Ok(said)
}

/// Replaces the values of `lora`, which has the folder's configuration, with the adapters in a
/// folder.
///
/// # Errors
/// A tensor that is missing, has another shape, or belongs to no linear.
pub(crate) fn load<B: Backend>(mut lora: Lora<B>, folder: &Path) -> Result<Lora<B>> {
    let files = TensorFiles::open_file(folder.join(WEIGHTS))?;
    let known: Vec<String> = lora.adapters.iter().flat_map(|adapter| names(&adapter.name)).collect();
    for tensor in files.names() {
        let path = files.path().display();
        ensure!(
            known.iter().any(|known| known == tensor),
            "{path}: {tensor} belongs to no adapter of lora.target_modules"
        );
    }
    for LoraAdapter { name, a, b } in &mut lora.adapters {
        for (param, name) in [a, b].into_iter().zip(names(name)) {
            let ([rows, cols], device) = (param.val().dims(), param.val().device());
            let values = files.expect(&name, &[cols, rows])?.to_f32()?;
            *param = Param::initialized(param.id, transposed::<B>(values, [cols, rows], &device).require_grad());
        }
    }
    Ok(lora)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output layer has no prefix `model`.
    #[test]
    fn names_are_pefts() {
        assert_eq!(names("lm_head")[0], "base_model.model.lm_head.lora_A.weight");
        assert_eq!(
            names("layers.3.self_attn.q_proj")[1],
            "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
        );
    }
}
