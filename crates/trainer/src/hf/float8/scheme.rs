//! [`Scheme`]: layout of FP8 weights in files.
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
use burn_float8::backend::Cast;
use burn_float8::config::{Format, Granularity};
use serde_json::{Value, json};

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

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} weights", self.granularity)?;
        match self.inputs {
            _ if self.has_usual_inputs() => Ok(()),
            Inputs::HighPrecision => f.write_str(" with inputs in high precision"),
            Inputs::Static => f.write_str(" with static inputs"),
            Inputs::Dynamic(granularity) => write!(f, " with {granularity} inputs"),
        }
    }
}

impl Scheme {
    /// Scheme of our recipes for weights of this granularity.
    pub(super) fn usual(granularity: Granularity) -> Self {
        let inputs = match granularity {
            Granularity::Block128x128 => Granularity::Block1x128,
            other => other,
        };
        Self { granularity, inputs: Inputs::Dynamic(inputs) }
    }

    /// Whether files of both schemes have the same codes, scales and input scales.
    pub(super) fn has_tensors_of(self, other: Self) -> bool {
        self.granularity == other.granularity && self.has_static_inputs() == other.has_static_inputs()
    }

    /// Whether a cast gives weights in this scheme.
    pub(crate) fn is_cast_by(self, cast: Cast) -> bool {
        (cast.format, cast.granularity) == (Format::E4m3, self.granularity)
    }

    /// Whether the files have an input scale for each linear.
    pub(crate) fn has_static_inputs(self) -> bool {
        self.inputs == Inputs::Static
    }

    /// Whether inputs are cast as in our recipe for such weights, with dynamic scales.
    pub(crate) fn has_usual_inputs(self) -> bool {
        self == Self::usual(self.granularity)
    }

    /// Whether it is written as `quant_method: fp8`, which supports no other inputs.
    fn is_fp8(self) -> bool {
        self.granularity == Granularity::Block128x128 && self.has_usual_inputs()
    }

    /// Valid shapes of the scale of a weight `[out, in]`. The first one is written.
    pub(crate) fn scale_shapes(granularity: Granularity, [out, d_in]: [usize; 2]) -> Vec<Vec<usize>> {
        match granularity {
            Granularity::Tensor => vec![vec![1], vec![]],
            Granularity::Row => vec![vec![out, 1], vec![out]],
            _ => vec![granularity.scale_dims(out, d_in).to_vec()],
        }
    }

    /// Name of the scale tensor, after the name of its linear.
    pub(crate) fn scale_name(self) -> &'static str {
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
        let is_mx = self.granularity == Granularity::Block1x32;
        let inputs = match self.inputs {
            Inputs::HighPrecision => Value::Null,
            Inputs::Static => arguments(Granularity::Tensor, false),
            Inputs::Dynamic(granularity) => arguments(granularity, true),
        };
        json!({
            "quant_method": "compressed-tensors", "format": if is_mx { "mxfp8-quantized" } else { "float-quantized" },
            "quantization_status": "compressed", "kv_cache_scheme": null, "ignore": ignored,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": arguments(self.granularity, false), "input_activations": inputs,
                "output_activations": null,
            }},
        })
    }
}

/// How compressed-tensors describes weights, which are not dynamic, or inputs.
fn arguments(granularity: Granularity, is_dynamic: bool) -> Value {
    let mut json = match granularity {
        Granularity::Tensor => json!({"strategy": "tensor"}),
        Granularity::Row => json!({"strategy": if is_dynamic { "token" } else { "channel" }}),
        Granularity::Block128x128 => json!({"strategy": "block", "block_structure": [BLOCK, BLOCK]}),
        Granularity::Block1x128 => json!({"strategy": "group", "group_size": BLOCK}),
        Granularity::Block1x32 => json!({"strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}),
    };
    for (key, value) in [("num_bits", json!(8)), ("type", json!("float")), ("symmetric", json!(true))] {
        json[key] = value;
    }
    json["dynamic"] = json!(is_dynamic);
    json
}
