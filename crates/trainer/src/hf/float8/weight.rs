//! [`StoredWeight`]: an FP8 weight in files, whose headers were checked. Codes are read one weight
//! at a time.

use anyhow::{Result, anyhow, bail, ensure};
use burn_float8::backend::{Cast, HostCodes, InvScale};
use burn_float8::config::{Format, Granularity};
use safetensors::Dtype;

use super::quantization::Quantization;
use super::scheme::Scheme;
use crate::TensorFiles;
use crate::tensor_files::{StoredTensor, missing};

/// FP8 weight of a linear in files.
#[derive(Debug)]
pub(crate) struct StoredWeight {
    dims: [usize; 2],
    pub(crate) scheme: Scheme,
    scale: String,
    /// Scale of the linear's inputs. Files may have it even if inputs are scaled dynamically.
    pub(crate) input_scale: Option<String>,
}

impl StoredWeight {
    /// Checks the headers of a weight `[out, in]` and of its scales.
    ///
    /// # Errors
    /// Codes or scales that `quantization` does not describe.
    pub(crate) fn new(
        files: &TensorFiles,
        stored: StoredTensor<'_>,
        dims: [usize; 2],
        quantization: Option<&Quantization>,
    ) -> Result<Self> {
        let (path, name) = (stored.path().display(), stored.name());
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let holds = format!("{path}: {name} holds FP8 codes");
        let Some(quantization) = quantization else {
            bail!("{holds}, and no quantization_config in config.json says how they are scaled");
        };
        let schemes = quantization.schemes(module)?;
        ensure!(!schemes.is_empty(), "{holds}, but by quantization_config {module} is not quantized");
        // Each scale has two names, which depend on the program.
        let find = |[one, other]: [&str; 2]| match [one, other].map(|own| files.get(&format!("{module}.{own}"))) {
            [Some(one), Some(other)] => {
                bail!("{}: {} and {} are two names of one scale", one.path().display(), one.name(), other.name())
            }
            [one, other] => Ok(one.or(other)),
        };
        let scale = find(["weight_scale", "weight_scale_inv"])?.ok_or_else(|| {
            anyhow!("{holds}, and its scale is not there: {module}.weight_scale or {module}.weight_scale_inv")
        })?;
        let input_scale = find(["input_scale", "activation_scale"])?;
        let granularities: Vec<_> = schemes.iter().map(|scheme| scheme.granularity).collect();
        let granularity = granularity_of(scale, dims, &granularities)?;
        if let Some(scale) = input_scale {
            granularity_of(scale, dims, &[Granularity::Tensor])?;
        }
        let scheme = *schemes.iter().find(|scheme| scheme.granularity == granularity).expect("one of them");
        let is_missing = scheme.has_static_inputs() && input_scale.is_none();
        ensure!(!is_missing, "{holds}, and the scale of its inputs is not there: {module}.input_scale");
        let input_scale = input_scale.map(|scale| scale.name().to_string());
        Ok(Self { dims, scheme, scale: scale.name().into(), input_scale })
    }

    /// Names of its scales.
    pub(crate) fn scales(&self) -> impl Iterator<Item = &str> {
        [Some(&self.scale), self.input_scale.as_ref()].into_iter().flatten().map(String::as_str)
    }

    /// Scale that multiplies the codes of the linear's inputs, if the files have one.
    ///
    /// # Errors
    /// An invalid scale; a file that cannot be read.
    pub(crate) fn input_scale(&self, files: &TensorFiles) -> Result<Option<f32>> {
        match &self.input_scale {
            Some(scale) => Ok(read_scales(files, scale, false)?.first().copied()),
            None => Ok(None),
        }
    }

    /// Reads the codes `[out, in]` of the weight `name`, contraction last, as read by fprop.
    ///
    /// # Errors
    /// Invalid scales, codes that are NaN, values beyond f32; a file that cannot be read.
    pub(crate) fn read(&self, files: &TensorFiles, name: &str) -> Result<HostCodes> {
        let stored = files.expect(name, &self.dims)?;
        let (path, codes, cols) = (stored.path().display(), stored.bytes()?, self.dims[1]);
        let scales = read_scales(files, &self.scale, true)?;
        if let Some(index) = codes.iter().position(|code| code & 0x7f == 0x7f) {
            let (code, row, col) = (codes[index], index / cols, index % cols);
            bail!("{path}: {name} has the code {code:#04x}, which is NaN, in row {row}, column {col}");
        }
        let codes = HostCodes {
            codes,
            dims: self.dims,
            format: Format::E4m3,
            granularity: self.scheme.granularity,
            inv_scales: scales.into_iter().map(InvScale::new).collect(),
            transposed: false,
        };
        if let Some(index) = codes.zero_scale() {
            return Err(scale_value(files, &self.scale, index, 0.0));
        }
        if let Some((index, scale)) = codes.overflow() {
            let (code, scale, row, col) = (codes.codes[index], scale.get(), index / cols, index % cols);
            bail!(
                "{path}: {name} is beyond f32 in row {row}, column {col}: the code {code:#04x} with the scale {scale:e}"
            );
        }
        Ok(codes)
    }
}

/// Quantizes the weight `name`, `[out, in]`, on the host, with a known amax or with the weight's.
///
/// # Errors
/// NaN and infinities. A scale made from either would destroy all other values.
pub(crate) fn quantize(
    name: &str,
    values: &[f32],
    dims: [usize; 2],
    cast: Cast,
    amax: Option<f32>,
) -> Result<HostCodes> {
    check_finite(name, values)?;
    Ok(HostCodes::quantize(values, dims, cast, amax))
}

/// Refuses a weight with non-finite values, which has no codes.
pub(crate) fn check_finite(name: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => bail!("{name} is {} at element {index}: it has no FP8 codes", values[index]),
    }
}

/// Granularity of a scale tensor, from its shape and dtype.
fn granularity_of(scale: StoredTensor<'_>, dims: [usize; 2], granularities: &[Granularity]) -> Result<Granularity> {
    let (path, name, found) = (scale.path().display(), scale.name(), scale.shape());
    let shapes = |granularity: &Granularity| Scheme::scale_shapes(*granularity, dims);
    let fits = |granularity: &&Granularity| shapes(granularity).iter().any(|shape| shape == found);
    let Some(granularity) = granularities.iter().find(fits) else {
        let valid: Vec<_> = granularities.iter().flat_map(shapes).map(|shape| format!("{shape:?}")).collect();
        bail!("{path}: {name} has shape {found:?}, for a weight {dims:?} it must be {}", valid.join(" or "));
    };
    let (is_read, valid) = match *granularity {
        Granularity::Block1x32 => (matches!(scale.dtype(), Dtype::U8 | Dtype::F8_E8M0), "U8 and F8_E8M0"),
        _ => {
            let is_read = matches!(scale.dtype(), Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8_E8M0);
            (is_read, "F32, BF16, F16 and F8_E8M0")
        }
    };
    ensure!(is_read, "{path}: {name} has dtype {:?}; {valid} are read", scale.dtype());
    Ok(*granularity)
}

/// Reads scales, row-major. Each is positive and finite, or 0 if `may_be_zero`.
fn read_scales(files: &TensorFiles, name: &str, may_be_zero: bool) -> Result<Vec<f32>> {
    let stored = files.get(name).ok_or_else(|| missing(files.path(), name, &[]))?;
    let scales: Vec<f32> = match stored.dtype() {
        Dtype::U8 | Dtype::F8_E8M0 => stored.bytes()?.into_iter().map(|byte| InvScale::from_e8m0(byte).get()).collect(),
        _ => stored.to_f32()?,
    };
    // NaN is not positive.
    let is_scale = |scale: &f32| *scale > 0.0 && *scale < f32::INFINITY || may_be_zero && *scale == 0.0;
    match scales.iter().position(|scale| !is_scale(scale)) {
        Some(index) => Err(scale_value(files, name, index, scales[index])),
        None => Ok(scales),
    }
}

/// Error of an invalid scale.
fn scale_value(files: &TensorFiles, name: &str, index: usize, value: f32) -> anyhow::Error {
    let path = files.get(name).map_or(files.path(), |stored| stored.path()).display();
    anyhow!("{path}: {name} has {value} at {index}, and scales of codes that are not all 0 are positive and finite")
}
