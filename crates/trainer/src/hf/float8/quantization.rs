//! [`Quantization`]: schemes of a folder's linears, from the `quantization_config` of each program
//! that writes FP8. Any other quantization is refused by [`refuse`].
//!
//! ```text
//! quant_method          scales
//! compressed-tensors    tensor, channel, block, mxfp8
//! fp8                   tensor, or 128×128
//! fbgemm_fp8            row
//! modelopt              by quant_algo: tensor, row, mxfp8
//! ```

use anyhow::{Error, Result};
use burn_float8::config::Granularity;
use serde_json::{Value, json};

use super::scheme::{BLOCK, Inputs, MX_BLOCK, Scheme};
use crate::hf::names::Pattern;
use crate::hf::reader::HfReader;

/// Schemes of a folder's linears.
#[derive(Debug)]
pub(crate) struct Quantization {
    /// Linears, and the schemes between which the shape of their scale decides.
    groups: Vec<(Names, Vec<Scheme>)>,
    ignored: Names,
    /// Key that is not used.
    pub(crate) unused: Option<String>,
}

/// Values of `quant_method`.
const METHODS: [&str; 4] = ["compressed-tensors", "fp8", "fbgemm_fp8", "modelopt"];

/// Error of a quantization that is not read. Names the key that differs, and its valid values.
fn refuse(config: &HfReader<'_>, key: &str, read: &[&str]) -> Error {
    let may = if read.is_empty() { "must be absent".into() } else { format!("may be {}", read.join(" or ")) };
    let advice = "take the folder in high precision, or in an FP8 format of docs/guide/inference.md";
    config.unsupported(key, &format!("it {may}: {advice}"))
}

/// Refuses the first key with a value that is not in its list. `null` means a missing key.
fn allow(config: &HfReader<'_>, values: Value) -> Result<()> {
    let Value::Object(values) = values else { return Ok(()) };
    for (key, list) in values {
        let list = list.as_array().cloned().unwrap_or_default();
        if !list.contains(config.get(&key).unwrap_or(&Value::Null)) {
            let read: Vec<_> = list.iter().filter(|value| !value.is_null()).map(Value::to_string).collect();
            return Err(refuse(config, &key, &read.iter().map(String::as_str).collect::<Vec<_>>()));
        }
    }
    Ok(())
}

impl Quantization {
    /// Reads the object that describes quantized weights.
    ///
    /// # Errors
    /// A quantization that is not read, named by its key; a pattern that is no regex.
    pub(crate) fn read(config: &HfReader<'_>) -> Result<Self> {
        match config.string("quant_method")? {
            Some("compressed-tensors" | "compressed_tensors") => compressed_tensors(config),
            Some("fp8") => fp8(config),
            Some("fbgemm_fp8") => fbgemm(config),
            Some("modelopt") => modelopt(config),
            Some(_) => Err(refuse(config, "quant_method", &METHODS)),
            // ModelOpt's own file, and the older key of compressed-tensors.
            None if config.get("quant_algo").is_some() => modelopt(config),
            None if config.get("config_groups").is_some() => compressed_tensors(config),
            None => Err(config.missing("quant_method")),
        }
    }

    /// All linears except the ignored ones in one of these schemes.
    fn of_all(schemes: Vec<Scheme>, ignored: Names) -> Self {
        Self { groups: vec![(Names::all(), schemes)], ignored, unused: None }
    }

    /// Possible schemes of a linear's weight; none if it is not quantized.
    ///
    /// # Errors
    /// A pattern that backtracks too often.
    pub(super) fn schemes(&self, module: &str) -> Result<&[Scheme]> {
        if self.ignored.find(module)?.is_some() {
            return Ok(&[]);
        }
        let mut closest: (Option<Closeness>, &[Scheme]) = (None, &[]);
        for (targets, schemes) in &self.groups {
            let closeness = targets.find(module)?;
            // Of equally close groups, the first one is used.
            if closeness > closest.0 {
                closest = (closeness, schemes);
            }
        }
        Ok(closest.1)
    }
}

/// `quant_method: compressed-tensors`.
fn compressed_tensors(config: &HfReader<'_>) -> Result<Quantization> {
    // FP8 weights may have either status, depending on the version of the program that wrote them.
    let status = json!([null, "compressed", "frozen"]);
    let formats = json!([null, "float-quantized", "naive-quantized", "mxfp8-quantized"]);
    allow(config, json!({"transform_config": [null, {}], "quantization_status": status, "format": formats}))?;
    if let Some(sparsity) = config.object("sparsity_config")? {
        allow(&sparsity, json!({"format": [null, "dense"]}))?;
    }
    let groups = config.objects("config_groups")?.ok_or_else(|| config.missing("config_groups"))?;
    let groups = groups.iter().map(|group| {
        group.get("targets").ok_or_else(|| group.missing("targets"))?;
        let targets = Names::new(group, &["targets"], Words::CompressedTensors)?;
        allow(group, json!({"format": formats, "output_activations": [null]}))?;
        Ok((targets, vec![scheme(group)?]))
    });
    let groups = groups.collect::<Result<_>>()?;
    Ok(Quantization { groups, ignored: Names::new(config, &["ignore"], Words::CompressedTensors)?, unused: None })
}

/// Scheme of a group of `config_groups`. Only static scales of inputs are in the files.
fn scheme(group: &HfReader<'_>) -> Result<Scheme> {
    let weights = group.object("weights")?.ok_or_else(|| group.missing("weights"))?;
    allow(
        &weights,
        json!({"num_bits": [8], "type": ["float"], "symmetric": [null, true], "dynamic": [null, false], "actorder": [null]}),
    )?;
    let granularity = match weights.string("strategy")? {
        Some("tensor") => Granularity::Tensor,
        Some("channel") => Granularity::Row,
        Some("block") => {
            allow(&weights, json!({"block_structure": [[BLOCK, BLOCK]]}))?;
            Granularity::Block128x128
        }
        // The dtype of scales tells whether the format is `mxfp8-quantized`.
        Some("group") => {
            allow(&weights, json!({"group_size": [MX_BLOCK]}))?;
            Granularity::Block1x32
        }
        _ => return Err(refuse(&weights, "strategy", &["tensor", "channel", "block", "group"])),
    };
    let Some(inputs) = group.object("input_activations")? else {
        return Ok(Scheme { granularity, inputs: Inputs::HighPrecision });
    };
    allow(
        &inputs,
        json!({"num_bits": [null, 8], "type": [null, "float"], "symmetric": [null, true], "dynamic": [null, true, false]}),
    )?;
    let is_dynamic = inputs.boolean("dynamic")?.unwrap_or(false);
    let inputs = match (is_dynamic, inputs.string("strategy")?, inputs.integer("group_size")?) {
        (false, None | Some("tensor"), _) if granularity == Granularity::Tensor => Inputs::Static,
        (false, None | Some("tensor"), _) => return Err(refuse(&inputs, "dynamic", &["true"])),
        (true, None, None) | (true, Some("tensor"), _) => Inputs::Dynamic(Granularity::Tensor),
        (true, Some("token"), _) => Inputs::Dynamic(Granularity::Row),
        (true, None | Some("group"), Some(BLOCK)) => Inputs::Dynamic(Granularity::Block1x128),
        (true, None | Some("group"), Some(MX_BLOCK)) => Inputs::Dynamic(Granularity::Block1x32),
        (true, None | Some("group"), _) => return Err(refuse(&inputs, "group_size", &["32", "128"])),
        _ => return Err(refuse(&inputs, "strategy", &["tensor", "token", "group"])),
    };
    Ok(Scheme { granularity, inputs })
}

/// `quant_method: fp8`.
fn fp8(config: &HfReader<'_>) -> Result<Quantization> {
    const SIZE: &str = "weight_block_size";
    allow(
        config,
        json!({
            "fmt": [null, "e4m3", "float8_e4m3fn"], "activation_scheme": [null, "dynamic", "static"], SIZE: [null, [BLOCK, BLOCK]],
            // Scales are then powers of two. Their dtype is in the files.
            "scale_fmt": [null, "ue8m0"], "modules_to_convert": [null, []],
        }),
    )?;
    let granularities: &[_] = match config.get(SIZE) {
        Some(_) => &[Granularity::Block128x128],
        None if config.is_null(SIZE) => &[Granularity::Tensor],
        // In this case transformers assumes blocks, and vLLM tensors.
        None => &[Granularity::Tensor, Granularity::Block128x128],
    };
    let scheme = |&granularity| match config.string("activation_scheme") {
        Ok(Some("static")) => Scheme { granularity, inputs: Inputs::Static },
        _ => Scheme::usual(granularity),
    };
    let ignored = Names::new(config, &["modules_to_not_convert", "ignored_layers"], Words::Fp8)?;
    Ok(Quantization::of_all(granularities.iter().map(scheme).collect(), ignored))
}

/// `quant_method: fbgemm_fp8`, whose upper bound of inputs is not used.
fn fbgemm(config: &HfReader<'_>) -> Result<Quantization> {
    const BOUND: &str = "activation_scale_ub";
    let ignored = Names::new(config, &["modules_to_not_convert"], Words::Fp8)?;
    let unused = config.get(BOUND).map(|_| config.full(BOUND));
    Ok(Quantization { unused, ..Quantization::of_all(vec![Scheme::usual(Granularity::Row)], ignored) })
}

/// NVIDIA ModelOpt, in `config.json` or in a separate file.
fn modelopt(config: &HfReader<'_>) -> Result<Quantization> {
    let scheme = match config.string("quant_algo")? {
        Some("FP8") => Scheme { granularity: Granularity::Tensor, inputs: Inputs::Static },
        Some("FP8_PER_CHANNEL_PER_TOKEN") => Scheme::usual(Granularity::Row),
        Some("MXFP8") => Scheme::usual(Granularity::Block1x32),
        Some(_) => return Err(refuse(config, "quant_algo", &["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"])),
        None => return Err(config.missing("quant_algo")),
    };
    Ok(Quantization::of_all(vec![scheme], Names::new(config, &["ignore", "exclude_modules"], Words::Globs)?))
}

/// Names and patterns of modules. `None` matches every linear.
#[derive(Debug)]
struct Names(Vec<(Closeness, Option<Pattern>)>);

/// How closely a list names a module; larger is closer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Closeness {
    /// By its class.
    Class,
    /// By a pattern.
    Pattern,
    /// By its name.
    Exact,
}

/// Kinds of lists.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Words {
    /// Names, the class of all linears, and patterns after `re:` that match at the beginning of a
    /// name.
    CompressedTensors,
    /// As in transformers, patterns that match the beginning of a name up to the end of one of its
    /// parts, or the end of a name. vLLM's exact names match too, and patterns after `re:`.
    Fp8,
    /// Names of linears and of modules that contain linears. `*` matches anything.
    Globs,
}

impl Names {
    /// Every linear.
    fn all() -> Self {
        Self(vec![(Closeness::Class, None)])
    }

    /// Reads lists. A missing one is empty.
    fn new(config: &HfReader<'_>, keys: &[&'static str], words: Words) -> Result<Self> {
        let mut names = vec![];
        for key in keys {
            for name in config.strings(key)?.unwrap_or_default() {
                let (closeness, regex) = match (words, name.strip_prefix("re:")) {
                    (Words::Globs, _) => {
                        let parts: Vec<_> = name.split('*').map(fancy_regex::escape).collect();
                        (Closeness::Pattern, format!(r"^{}(?:\.|$)", parts.join(".*")))
                    }
                    (_, Some(pattern)) => (Closeness::Pattern, format!("^(?:{pattern})")),
                    (Words::Fp8, None) => {
                        let end = fancy_regex::escape(name);
                        (Closeness::Pattern, format!(r"{end}$|^(?:{name})(?:(?<=\.)|(?=\.|$))"))
                    }
                    (Words::CompressedTensors, None) if name == "Linear" => {
                        names.push((Closeness::Class, None));
                        continue;
                    }
                    (Words::CompressedTensors, None) => (Closeness::Exact, format!("^{}$", fancy_regex::escape(name))),
                };
                names.push((closeness, Some(Pattern::new(config, key, name, &regex)?)));
            }
        }
        Ok(Self(names))
    }

    /// How closely the linear `module` is named; `None` if it is not.
    fn find(&self, module: &str) -> Result<Option<Closeness>> {
        let mut closest = None;
        for (closeness, pattern) in &self.0 {
            let is_match = pattern.as_ref().map_or(Ok(true), |pattern| pattern.matches(module))?;
            closest = closest.max(is_match.then_some(*closeness));
        }
        Ok(closest)
    }
}
