//! Names: the only place that maps module paths to Hugging Face's tensor names.

use anyhow::{Result, anyhow};
use fancy_regex::{Regex, RegexBuilder};

use super::reader::HfReader;

/// Hugging Face tensor name of the parameter at `module_path`, for example
/// `layers.0.self_attn.q_proj.weight` → `model.layers.0.self_attn.q_proj.weight`.
///
/// Module fields already have Hugging Face's names. Two things differ: the prefix `model.` of
/// everything except the output layer, and Burn's `gamma` for the weight of a norm.
pub fn hf_name(module_path: &str) -> String {
    hf_module(&module_path.strip_suffix(".gamma").map_or(module_path.into(), |norm| format!("{norm}.weight")))
}

/// Whether the parameter at `module_path` is the weight of a linear. Burn stores it as `[in, out]`,
/// Hugging Face as `[out, in]`.
pub fn is_linear(module_path: &str) -> bool {
    module_path.ends_with("_proj.weight") || module_path == "lm_head.weight"
}

/// Linear whose weight is at `module_path`; `None` for other parameters.
pub(crate) fn linear(module_path: &str) -> Option<&str> {
    module_path.strip_suffix(".weight").filter(|_| is_linear(module_path))
}

/// Hugging Face tensor name of a linear's weight, from the linear's path in the module tree.
pub(crate) fn weight_name(linear: &str) -> String {
    format!("{}.weight", hf_module(linear))
}

/// Hugging Face name of the module at a path in the module tree.
pub(crate) fn hf_module(path: &str) -> String {
    if path.split('.').next() == Some("lm_head") { path.into() } else { format!("model.{path}") }
}

/// Tensors in old checkpoints that no model needs.
pub(crate) fn is_ignored(hf_name: &str) -> bool {
    hf_name.ends_with(".rotary_emb.inv_freq")
}

/// Whether a tensor is an unused scale: of keys, values and probabilities in attention, or an upper
/// bound of inputs.
pub(crate) fn is_unused_scale(hf_name: &str) -> bool {
    const OWN: [&str; 6] = ["k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "input_scale_ub"];
    let of_cache = ["k_proj.output_scale", "v_proj.output_scale"];
    let own = hf_name.rsplit('.').next().unwrap_or(hf_name);
    OWN.contains(&own) || of_cache.iter().any(|end| hf_name.ends_with(end))
}

/// Regex for names of linears in a file.
#[derive(Debug)]
pub(super) struct Pattern {
    regex: Regex,
    /// File, key and pattern, for errors.
    place: String,
}

impl Pattern {
    /// Compiles `regex`, made from `pattern` under `key`. It may take 10,000 backtracking steps, so
    /// that matching hundreds of names cannot take minutes.
    ///
    /// # Errors
    /// No regex.
    pub(super) fn new(json: &HfReader<'_>, key: &str, pattern: &str, regex: &str) -> Result<Self> {
        let place = format!("{}: {}: the pattern {pattern:?} cannot be matched", json.path.display(), json.full(key));
        match RegexBuilder::new(regex).backtrack_limit(10_000).build() {
            Ok(regex) => Ok(Self { regex, place }),
            Err(error) => Err(anyhow!("{place}: {error}")),
        }
    }

    /// Whether the linear `module` matches.
    ///
    /// # Errors
    /// Too many backtracking steps.
    pub(super) fn matches(&self, module: &str) -> Result<bool> {
        self.regex.is_match(module).map_err(|error| anyhow!("{} with {module}: {error}", self.place))
    }
}
