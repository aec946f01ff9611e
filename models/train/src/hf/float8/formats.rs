//! [`Quantization::read`]: the quantization of a folder, in the format of each program that writes
//! FP8.
//!
//! ```text
//! quant_method          scales                              names
//! compressed-tensors    tensor, channel, block, mxfp8       weight_scale, input_scale
//! fp8                   tensor, or 128×128                  weight_scale_inv or weight_scale,
//!                                                           input_scale or activation_scale
//! fbgemm_fp8            row                                 weight_scale
//! modelopt              by quant_algo: tensor, row, mxfp8   weight_scale, input_scale
//! quark                 tensor, row                         weight_scale, input_scale
//! ```

use burn_float8::config::Granularity;

use super::names::Names;
use super::scheme::{BLOCK, COMPRESSED_TENSORS, FP8, Group, Inputs, Quantization, Schemes, compressed_tensors};
use crate::JobError;
use crate::hf::reader::HfReader;

/// Supported formats, and advice for others.
const READ: &str = "of FP8 weights those of compressed-tensors, fp8, fbgemm_fp8, modelopt and quark are: take the folder in high \
                    precision, or in FP8 of one of these";

impl Quantization {
    /// Reads the object that describes quantized weights.
    ///
    /// # Errors
    /// [`JobError::HfUnsupported`], [`JobError::HfMissingKey`]; [`JobError::Float8Files`] for
    /// patterns.
    pub(crate) fn read(config: &HfReader<'_>) -> Result<Self, JobError> {
        match config.string("quant_method")? {
            Some("compressed-tensors" | "compressed_tensors") => compressed_tensors(config),
            Some("fp8") => fp8(config),
            Some("fbgemm_fp8") => fbgemm(config),
            Some("modelopt") => modelopt(config),
            Some("quark") => quark(config),
            Some(_) => Err(config.unsupported("quant_method", READ)),
            // ModelOpt's own file, and the older key of compressed-tensors.
            None if config.get("quant_algo").is_some() => modelopt(config),
            None if config.get("config_groups").is_some() => compressed_tensors(config),
            None => Err(config.missing("quant_method")),
        }
    }

    /// All linears except the ignored ones in one scheme, with the names of compressed-tensors.
    fn of_all(granularity: &'static [Granularity], inputs: Inputs, ignored: Names) -> Self {
        let schemes = Schemes { granularities: granularity, inputs: Some(inputs) };
        Self { groups: vec![Group { targets: None, schemes }], ignored, names: COMPRESSED_TENSORS, unused: None }
    }
}

/// `quant_method: fp8`.
fn fp8(config: &HfReader<'_>) -> Result<Quantization, JobError> {
    if !matches!(config.string("fmt")?, None | Some("e4m3" | "float8_e4m3fn")) {
        return Err(config.unsupported("fmt", "e4m3 and float8_e4m3fn are"));
    }
    // The scales are then powers of two. Their dtype is in the files.
    config.only("scale_fmt", "ue8m0", "only ue8m0 is")?;
    let inputs = match config.string("activation_scheme")? {
        None | Some("dynamic") => None,
        Some("static") => Some(Inputs::Static),
        Some(_) => return Err(config.unsupported("activation_scheme", "dynamic and static are")),
    };
    let granularities: &[_] = match config.integers("weight_block_size")?.as_deref() {
        Some([BLOCK, BLOCK]) => &[Granularity::Block128x128],
        Some(_) => return Err(config.unsupported("weight_block_size", "only [128, 128] is")),
        None if config.is_null("weight_block_size") => &[Granularity::Tensor],
        // In this case transformers assumes blocks, and vLLM tensors.
        None => &[Granularity::Tensor, Granularity::Block128x128],
    };
    let mut ignored = config.strings("modules_to_not_convert")?.unwrap_or_default();
    ignored.extend(config.strings("ignored_layers")?.unwrap_or_default());
    if config.strings("modules_to_convert")?.is_some_and(|modules| !modules.is_empty()) {
        return Err(config.unsupported("modules_to_convert", "only linears are read in FP8"));
    }
    let ignored = Names::fp8(config, "modules_to_not_convert", &ignored)?;
    let groups = vec![Group { targets: None, schemes: Schemes { granularities, inputs } }];
    Ok(Quantization { groups, ignored, names: FP8, unused: None })
}

/// `quant_method: fbgemm_fp8`, whose upper bound of inputs is not used.
fn fbgemm(config: &HfReader<'_>) -> Result<Quantization, JobError> {
    const BOUND: &str = "activation_scale_ub";
    let ignored = config.strings("modules_to_not_convert")?.unwrap_or_default();
    let ignored = Names::fp8(config, "modules_to_not_convert", &ignored)?;
    let unused = config.get(BOUND).map(|_| config.full(BOUND));
    let rows = Quantization::of_all(&[Granularity::Row], Inputs::Dynamic(Granularity::Row), ignored);
    Ok(Quantization { unused, ..rows })
}

/// NVIDIA ModelOpt, in `config.json` or in a separate file.
fn modelopt(config: &HfReader<'_>) -> Result<Quantization, JobError> {
    let (granularity, inputs): (&[_], _) = match config.string("quant_algo")? {
        Some("FP8") => (&[Granularity::Tensor], Inputs::Static),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => (&[Granularity::Row], Inputs::Dynamic(Granularity::Row)),
        Some("MXFP8") => (&[Granularity::Block1x32], Inputs::Dynamic(Granularity::Block1x32)),
        Some(_) => {
            let reason =
                "FP8, FP8_PER_CHANNEL_PER_TOKEN and MXFP8 are: take the folder in high precision, or in one of these";
            return Err(config.unsupported("quant_algo", reason));
        }
        None => return Err(config.missing("quant_algo")),
    };
    let key = if config.get("ignore").is_some() { "ignore" } else { "exclude_modules" };
    let ignored = Names::globs(config, key, &config.strings(key)?.unwrap_or_default())?;
    Ok(Quantization::of_all(granularity, inputs, ignored))
}

/// AMD Quark, with one scheme for all layers. Schemes of outputs apply to key-value caches.
fn quark(config: &HfReader<'_>) -> Result<Quantization, JobError> {
    let Some(all) = config.object("global_quant_config")? else { return Err(config.missing("global_quant_config")) };
    for key in ["layer_quant_config", "layer_type_quant_config"] {
        let is_other = |layer: &HfReader<'_>| ["weight", "input_tensors"].iter().any(|of| layer.get(of) != all.get(of));
        if config.objects(key)?.unwrap_or_default().iter().any(is_other) {
            return Err(config.unsupported(key, "layers are that have the scheme of global_quant_config"));
        }
    }
    let Some(weight) = all.object("weight")? else { return Err(all.missing("weight")) };
    let inputs = all.object("input_tensors")?;
    for quantized in [Some(weight), inputs].into_iter().flatten() {
        quantized.only("dtype", "fp8_e4m3", "only fp8_e4m3 is: take the folder in high precision, or in FP8")?;
    }
    let granularity: &[_] = match weight.string("qscheme")? {
        Some("per_tensor") => &[Granularity::Tensor],
        Some("per_channel") => &[Granularity::Row],
        _ => return Err(weight.unsupported("qscheme", "per_tensor and per_channel are")),
    };
    let inputs = match inputs {
        None => Inputs::HighPrecision,
        Some(inputs) if inputs.get("qscheme") != weight.get("qscheme") => {
            return Err(inputs.unsupported("qscheme", "inputs are that have the qscheme of weights"));
        }
        Some(inputs) if inputs.boolean("is_dynamic")? == Some(true) => Inputs::Dynamic(granularity[0]),
        Some(_) if granularity == [Granularity::Tensor] => Inputs::Static,
        Some(inputs) => return Err(inputs.unsupported("is_dynamic", "static scales are, if qscheme is per_tensor")),
    };
    let ignored = Names::globs(config, "exclude", &config.strings("exclude")?.unwrap_or_default())?;
    Ok(Quantization::of_all(granularity, inputs, ignored))
}
