//! Names: the one place that knows how module paths and Hugging Face's tensor names correspond.

use fancy_regex::{Regex, RegexBuilder};

/// The Hugging Face tensor name of the parameter at `module_path`, for example
/// `layers.0.self_attn.q_proj.weight` → `model.layers.0.self_attn.q_proj.weight`.
///
/// Module fields have Hugging Face's names already; what differs is the `model.` prefix of all but the output
/// layer, and Burn's `gamma` for a norm's weight.
pub fn hf_name(module_path: &str) -> String {
    let name = match module_path.strip_suffix(".gamma") {
        Some(norm) => format!("{norm}.weight"),
        None => module_path.to_string(),
    };
    if name.starts_with("lm_head.") { name } else { format!("model.{name}") }
}

/// Whether the parameter at `module_path` is a linear's weight, which Burn stores `[in, out]` and Hugging Face
/// `[out, in]`.
pub fn is_linear(module_path: &str) -> bool {
    module_path.ends_with("_proj.weight") || module_path == "lm_head.weight"
}

/// The linear whose weight is the parameter at `module_path`, if it is one's.
pub(crate) fn linear(module_path: &str) -> Option<&str> {
    module_path.strip_suffix(".weight").filter(|_| is_linear(module_path))
}

/// The Hugging Face tensor name of the weight of a linear, by its path in the module tree.
pub(crate) fn weight_name(linear: &str) -> String {
    hf_name(&format!("{linear}.weight"))
}

/// The Hugging Face name of a linear, by its path in the module tree.
pub(crate) fn hf_module(linear: &str) -> String {
    let mut name = weight_name(linear);
    name.truncate(name.len() - ".weight".len());
    name
}

/// Tensors that old checkpoints carry and no model needs.
pub(crate) fn is_ignored(hf_name: &str) -> bool {
    hf_name.ends_with(".rotary_emb.inv_freq")
}

/// Whether a tensor is an unused scale: of keys, values and probabilities in attention, or a bound of inputs.
pub(crate) fn is_unused_scale(hf_name: &str) -> bool {
    const OWN: [&str; 6] = ["k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "input_scale_ub"];
    let of_cache = ["k_proj.output_scale", "v_proj.output_scale"];
    let own = hf_name.rsplit('.').next().unwrap_or(hf_name);
    OWN.contains(&own) || of_cache.iter().any(|end| hf_name.ends_with(end))
}

/// A regex for names, which fails after 10,000 steps back in one: a list of hundreds must not take minutes.
pub(super) fn bounded_regex(regex: &str) -> Result<Regex, fancy_regex::Error> {
    RegexBuilder::new(regex).backtrack_limit(10_000).build()
}
