//! [`Scheme`]: layout of FP8 weights in files. [`Quantization`]: schemes of all linears in a
//! `quantization_config`.
//!
//! ```text
//!                  scales of a weight [out, in]      quantization_config
//! Tensor           [] or [1]                         compressed-tensors `tensor`; `fp8` without blocks
//! Row              [out, 1] or [out]                 compressed-tensors `channel`
//! Block128x128     [⌈out/128⌉, ⌈in/128⌉]             `fp8` with weight_block_size;
//!                                                    compressed-tensors `block`
//! Block1x32        [out, in/32], E8M0 bytes          compressed-tensors `mxfp8-quantized`
//! ```

use std::fmt;

use burn_float8::Recipe;
use burn_float8::config::Granularity;
use serde_json::{Value, json};

use super::error::Float8FilesError;
use super::names::Names;
use crate::JobError;
use crate::hf::reader::HfReader;

/// Rows and columns of a block that shares a scale.
pub(super) const BLOCK: usize = 128;
/// Elements that share an E8M0 scale.
pub(super) const MX_BLOCK: usize = 32;

/// Layout of FP8 weights of linears in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// Granularity of the scales of a weight `[out, in]`.
    pub(crate) granularity: Granularity,
    /// How inputs are cast.
    pub(crate) inputs: Inputs,
}

/// How the inputs of linears with FP8 weights are cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// Not cast: only weights are in FP8.
    HighPrecision,
    /// With one scale per linear, which is in the files.
    Static,
    /// With scales computed from the inputs, one per tensor, row (`token`) or block.
    Dynamic(Granularity),
}

/// Schemes of a folder's linears.
#[derive(Debug)]
pub(crate) struct Quantization {
    /// With compressed-tensors, only linears in these groups may be in FP8.
    pub(super) groups: Vec<Group>,
    pub(super) ignored: Names,
    pub(super) names: ScaleNames,
    /// Key that is not used.
    pub(crate) unused: Option<String>,
}

/// Linears with one scheme.
#[derive(Debug)]
pub(super) struct Group {
    /// `None` for all linears.
    pub(super) targets: Option<Names>,
    pub(super) schemes: Schemes,
}

/// Schemes between which the shape of the scale decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schemes {
    /// The first one that matches the shape is used.
    pub(super) granularities: &'static [Granularity],
    /// `None` if the file leaves it to the reader.
    pub(super) inputs: Option<Inputs>,
}

/// Names of scales, after the name of their linear.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaleNames {
    /// Scales of codes.
    pub(super) weight: &'static [&'static str],
    /// Scales of inputs.
    pub(super) input: &'static [&'static str],
}

pub(super) const COMPRESSED_TENSORS: ScaleNames = ScaleNames { weight: &["weight_scale"], input: &["input_scale"] };
/// Names in vLLM and transformers.
pub(super) const FP8: ScaleNames =
    ScaleNames { weight: &["weight_scale_inv", "weight_scale"], input: &["input_scale", "activation_scale"] };

impl Quantization {
    /// Possible schemes of a linear's weight; `None` if it is not quantized.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn schemes(&self, module: &str) -> Result<Option<Schemes>, Float8FilesError> {
        if self.ignored.find(module)?.is_some() {
            return Ok(None);
        }
        let mut named = vec![];
        for group in self.groups.iter().rev() {
            let closeness = match &group.targets {
                Some(targets) => targets.find(module)?.map(Some),
                None => Some(None),
            };
            named.extend(closeness.map(|closeness| (closeness, group)));
        }
        // Of equally close groups, the first one is used.
        let closest = named.into_iter().max_by_key(|(closeness, _)| *closeness);
        Ok(closest.map(|(_, group)| group.schemes))
    }
}

/// `quant_method: compressed-tensors`.
pub(super) fn compressed_tensors(config: &HfReader<'_>) -> Result<Quantization, JobError> {
    let none = |key: &'static str, what: &str| match config.get(key) {
        None => Ok(()),
        Some(Value::Object(map)) if map.is_empty() => Ok(()),
        Some(_) => Err(config.unsupported(key, what)),
    };
    none("transform_config", "weights are not transformed")?;
    if let Some(sparsity) = config.object("sparsity_config")? {
        sparsity.only("format", "dense", "only dense is")?;
    }
    // FP8 weights may have either, depending on the version of the program that wrote them.
    if !matches!(config.string("quantization_status")?, None | Some("compressed" | "frozen")) {
        return Err(config.unsupported("quantization_status", "compressed and frozen are"));
    }
    let format = config.string("format")?;
    let Some(groups) = config.objects("config_groups")? else {
        return Err(config.missing("config_groups"));
    };
    let groups = groups.iter().map(|group| {
        let targets = group.strings("targets")?.ok_or_else(|| group.missing("targets"))?;
        let targets = Names::compressed_tensors(group, "targets", &targets)?;
        let (own, from) = match group.string("format")? {
            Some(own) => (Some(own), group),
            None => (format, config),
        };
        let is_mx = match own {
            None | Some("float-quantized" | "naive-quantized") => false,
            Some("mxfp8-quantized") => true,
            Some(_) => return Err(from.unsupported("format", "float-quantized and mxfp8-quantized are")),
        };
        Ok(Group { targets: Some(targets), schemes: scheme(group, is_mx)? })
    });
    let groups = groups.collect::<Result<_, JobError>>()?;
    let ignored = config.strings("ignore")?.unwrap_or_default();
    let ignored = Names::compressed_tensors(config, "ignore", &ignored)?;
    Ok(Quantization { groups, ignored, names: COMPRESSED_TENSORS, unused: None })
}

/// Scheme of a group of `config_groups`.
fn scheme(group: &HfReader<'_>, is_mx: bool) -> Result<Schemes, JobError> {
    if group.get("output_activations").is_some() {
        return Err(group.unsupported("output_activations", "outputs are not quantized"));
    }
    let Some(weights) = group.object("weights")? else { return Err(group.missing("weights")) };
    weights.integer("num_bits")?.ok_or_else(|| weights.missing("num_bits"))?;
    weights.string("type")?.ok_or_else(|| weights.missing("type"))?;
    check_codes(&weights)?;
    if weights.boolean("dynamic")? == Some(true) {
        return Err(weights.unsupported("dynamic", "weights have their scales in the files"));
    }
    if weights.get("actorder").is_some() {
        return Err(weights.unsupported("actorder", "columns lie in order"));
    }
    let granularities: &[_] = match weights.string("strategy")? {
        Some("tensor") if !is_mx => &[Granularity::Tensor],
        Some("channel") if !is_mx => &[Granularity::Row],
        Some("block") if !is_mx => match weights.integers("block_structure")?.as_deref() {
            Some([BLOCK, BLOCK]) => &[Granularity::Block128x128],
            _ => return Err(weights.unsupported("block_structure", "only [128, 128] is")),
        },
        Some("group") if is_mx => match weights.integer("group_size")? {
            Some(MX_BLOCK) => &[Granularity::Block1x32],
            _ => return Err(weights.unsupported("group_size", "only 32 is")),
        },
        _ if is_mx => return Err(weights.unsupported("strategy", "of mxfp8-quantized weights only group is")),
        _ => return Err(weights.unsupported("strategy", "of float-quantized weights tensor, channel and block are")),
    };
    let inputs = match group.object("input_activations")? {
        Some(inputs) => read_inputs(&inputs, granularities)?,
        None => Inputs::HighPrecision,
    };
    Ok(Schemes { granularities, inputs: Some(inputs) })
}

/// Refuses weights or inputs that are not FP8 without zero points.
fn check_codes(quantized: &HfReader<'_>) -> Result<(), JobError> {
    if quantized.integer("num_bits")?.is_some_and(|bits| bits != 8) {
        return Err(quantized.unsupported("num_bits", "only 8 is"));
    }
    quantized.only("type", "float", "only float is")?;
    match quantized.boolean("symmetric")? {
        Some(false) => Err(quantized.unsupported("symmetric", "codes have no zero point")),
        _ => Ok(()),
    }
}

/// Reads `input_activations`. Only static scales are in the files.
fn read_inputs(inputs: &HfReader<'_>, granularities: &[Granularity]) -> Result<Inputs, JobError> {
    check_codes(inputs)?;
    if inputs.boolean("dynamic")? != Some(true) {
        inputs.only("strategy", "tensor", "of static scales of inputs only tensor is")?;
        return match granularities {
            [Granularity::Tensor] => Ok(Inputs::Static),
            _ => {
                Err(inputs.unsupported("dynamic", "static scales of inputs are, if the strategy of weights is tensor"))
            }
        };
    }
    let group = inputs.integer("group_size")?;
    match (inputs.string("strategy")?, group) {
        (None, None) | (Some("tensor"), _) => Ok(Inputs::Dynamic(Granularity::Tensor)),
        (Some("token"), _) => Ok(Inputs::Dynamic(Granularity::Row)),
        (None | Some("group"), Some(BLOCK)) => Ok(Inputs::Dynamic(Granularity::Block1x128)),
        (None | Some("group"), Some(MX_BLOCK)) => Ok(Inputs::Dynamic(Granularity::Block1x32)),
        (None, Some(_)) | (Some("group"), _) => {
            Err(inputs.unsupported("group_size", "of groups of inputs 32 and 128 are"))
        }
        _ => Err(inputs.unsupported("strategy", "of dynamic scales of inputs tensor, token and group are")),
    }
}

impl Inputs {
    /// How our recipes cast inputs for weights of this granularity, unless input scales are static.
    pub(crate) fn beside(weights: Granularity) -> Self {
        Self::Dynamic(match weights {
            Granularity::Block128x128 => Granularity::Block1x128,
            other => other,
        })
    }

    /// Value of `input_activations`.
    fn to_json(self) -> Value {
        let inputs = |more: Value| merged(json!({"num_bits": 8, "type": "float", "symmetric": true}), more);
        let group = |size: usize| inputs(json!({"strategy": "group", "group_size": size, "dynamic": true}));
        match self {
            Self::HighPrecision => Value::Null,
            Self::Static => inputs(json!({"strategy": "tensor", "dynamic": false})),
            Self::Dynamic(Granularity::Tensor) => inputs(json!({"strategy": "tensor", "dynamic": true})),
            Self::Dynamic(Granularity::Row) => inputs(json!({"strategy": "token", "dynamic": true})),
            Self::Dynamic(Granularity::Block1x128 | Granularity::Block128x128) => group(BLOCK),
            Self::Dynamic(Granularity::Block1x32) => merged(group(MX_BLOCK), json!({"scale_dtype": "torch.uint8"})),
        }
    }
}

impl fmt::Display for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HighPrecision => f.write_str("inputs in high precision"),
            Self::Static => f.write_str("static inputs"),
            Self::Dynamic(granularity) => write!(f, "{granularity} inputs"),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { granularity, inputs } = self;
        match self.has_usual_inputs() {
            true => write!(f, "{granularity} weights"),
            false => write!(f, "{granularity} weights with {inputs}"),
        }
    }
}

impl Scheme {
    /// Whether files of both schemes have the same codes, scales and input scales.
    pub(crate) fn has_tensors_of(self, other: Self) -> bool {
        self.granularity == other.granularity && self.has_static_inputs() == other.has_static_inputs()
    }

    /// Whether the files have an input scale for each linear.
    pub(crate) fn has_static_inputs(self) -> bool {
        self.inputs == Inputs::Static
    }

    /// Whether inputs are cast as in our recipe for such weights, with dynamic scales.
    pub(crate) fn has_usual_inputs(self) -> bool {
        self.inputs == Inputs::beside(self.granularity)
    }

    /// Whether it is written as `quant_method: fp8`, which supports no other inputs.
    fn is_fp8(self) -> bool {
        self.granularity == Granularity::Block128x128 && self.has_usual_inputs()
    }

    /// Valid shapes of the scale of a weight `[out, in]`. The first one is written.
    pub(super) fn scale_shapes(granularity: Granularity, [out, d_in]: [usize; 2]) -> Vec<Vec<usize>> {
        match granularity {
            Granularity::Tensor => vec![vec![1], vec![]],
            Granularity::Row => vec![vec![out, 1], vec![out]],
            _ => vec![granularity.scale_dims(out, d_in).to_vec()],
        }
    }

    /// Name of the scale tensor, after the name of its linear.
    pub(super) fn scale_name(self) -> &'static str {
        if self.is_fp8() { "weight_scale_inv" } else { "weight_scale" }
    }

    /// Recipe that writes this scheme.
    pub(crate) fn recipe(self) -> Recipe {
        match self.granularity {
            Granularity::Tensor if self.has_static_inputs() => Recipe::Delayed,
            Granularity::Tensor => Recipe::Tensorwise,
            Granularity::Row => Recipe::Rowwise,
            Granularity::Block1x128 | Granularity::Block128x128 => Recipe::Blockwise,
            Granularity::Block1x32 => Recipe::Mxfp8,
        }
    }

    /// The `quantization_config` of a folder in which all linears except the ignored ones have this
    /// scheme.
    pub(super) fn to_json(self, ignored: &[String]) -> Value {
        if self.is_fp8() {
            return json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ignored,
            });
        }
        let (format, weights) = match self.granularity {
            Granularity::Block1x32 => {
                ("mxfp8-quantized", json!({"strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}))
            }
            Granularity::Block128x128 | Granularity::Block1x128 => {
                ("float-quantized", json!({"strategy": "block", "block_structure": [BLOCK, BLOCK]}))
            }
            Granularity::Row => ("float-quantized", json!({"strategy": "channel"})),
            Granularity::Tensor => ("float-quantized", json!({"strategy": "tensor"})),
        };
        let weights = merged(json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false}), weights);
        json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "kv_cache_scheme": null, "ignore": ignored,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": self.inputs.to_json(), "output_activations": null,
            }},
        })
    }
}

fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}
