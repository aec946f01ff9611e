//! [`Float8Weight`]: codes of a linear as stored in files, read one weight at a time.
//! [`Float8Weights`]: the FP8 weights of a folder.

use std::collections::BTreeMap;

use burn_float8::Recipe;
use burn_float8::backend::{Cast, HostCodes, InvScale};
use burn_float8::config::{Format, Granularity};
use safetensors::Dtype;

use super::error::Float8FilesError;
use super::scheme::{Inputs, Quantization, Scheme};
use crate::tensor_files::StoredTensor;
use crate::{JobError, TensorFiles, TensorFilesError};

/// FP8 weight of a linear, and the scale of its inputs if the files have it.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8Weight {
    /// Codes `[out, in]`, contraction last, as read by fprop.
    pub codes: HostCodes,
    /// Scale that multiplies the codes of the linear's inputs.
    pub input_scale: Option<f32>,
}

/// Linears of a folder with FP8 weights, whose headers have been checked.
#[derive(Debug, Default)]
pub(crate) struct Float8Weights(BTreeMap<String, Entry>);

#[derive(Debug)]
struct Entry {
    dims: [usize; 2],
    scheme: Scheme,
    scale: String,
    input_scale: Option<String>,
}

impl Entry {
    fn scales(&self) -> impl Iterator<Item = &str> {
        [Some(&self.scale), self.input_scale.as_ref()].into_iter().flatten().map(String::as_str)
    }
}

impl Float8Weights {
    /// Finds the linears that hold FP8 codes. `linears` has names `X.weight` and shapes `[out,
    /// in]`. Only headers are read.
    ///
    /// # Errors
    /// [`JobError::Float8Files`], [`JobError::TensorFiles`] for a weight of another shape.
    pub(crate) fn find<'a>(
        files: &TensorFiles,
        quantization: Option<&Quantization>,
        linears: impl Iterator<Item = (&'a str, [usize; 2])>,
    ) -> Result<Self, JobError> {
        let mut found = BTreeMap::new();
        for (name, dims) in linears {
            let Some(stored) = files.get(name).filter(|stored| stored.dtype() == Dtype::F8_E4M3) else { continue };
            files.expect(name, &dims)?;
            found.insert(name.to_string(), entry(files, stored, name, dims, quantization)?);
        }
        Ok(Self(found))
    }

    /// Whether the weight `name` is in FP8.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Scheme of the weight `name` in the files.
    pub(crate) fn scheme(&self, name: &str) -> Option<Scheme> {
        self.0.get(name).map(|entry| entry.scheme)
    }

    /// Recipe that writes all of them; `None` if there are several.
    pub(crate) fn recipe(&self) -> Option<Recipe> {
        let mut recipes = self.0.values().map(|entry| entry.scheme.recipe());
        let first = recipes.next()?;
        recipes.all(|recipe| recipe == first).then_some(first)
    }

    /// Name and scheme of the first weight whose inputs are cast differently than in that recipe.
    pub(crate) fn other_inputs(&self) -> Option<(&str, Scheme)> {
        let is_other = |scheme: Scheme| !scheme.has_static_inputs() && !scheme.has_usual_inputs();
        self.0.iter().find(|(_, entry)| is_other(entry.scheme)).map(|(name, entry)| (name.as_str(), entry.scheme))
    }

    /// Names of the scales of these weights.
    pub(crate) fn scale_names(&self) -> impl Iterator<Item = &str> {
        self.0.values().flat_map(Entry::scales)
    }

    /// Names of the scales of the weight `name`.
    pub(crate) fn scales_of(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.get(name).into_iter().flat_map(Entry::scales)
    }

    /// Whether the files have an input scale for the linear with the weight `name`.
    pub(crate) fn has_input_scale(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|entry| entry.input_scale.is_some())
    }

    /// Input scale of the linear with the weight `name`, if the files have one.
    ///
    /// # Errors
    /// [`JobError::Float8Files`] for an invalid scale; [`JobError::TensorFiles`].
    pub(crate) fn input_scale(&self, files: &TensorFiles, name: &str) -> Result<Option<f32>, JobError> {
        match self.0.get(name).and_then(|entry| entry.input_scale.as_ref()) {
            Some(scale) => Ok(read_scales(files, scale, false)?.first().copied()),
            None => Ok(None),
        }
    }

    /// Reads the weight `name` without decoding it; `None` if it is not in FP8.
    ///
    /// # Errors
    /// [`JobError::Float8Files`] for invalid scales, codes that are NaN and values beyond f32;
    /// [`JobError::TensorFiles`].
    pub(crate) fn read(&self, files: &TensorFiles, name: &str) -> Result<Option<Float8Weight>, JobError> {
        let Some(Entry { dims, scheme, scale, .. }) = self.0.get(name) else { return Ok(None) };
        let stored = files.expect(name, dims)?;
        let codes = stored.bytes()?;
        let scales = read_scales(files, scale, true)?;
        let ([_, cols], granularity) = (*dims, scheme.granularity);
        let inv_scales = scales.into_iter().map(InvScale::new).collect();
        let input_scale = self.input_scale(files, name)?;
        if let Some(index) = codes.iter().position(|code| code & 0x7f == 0x7f) {
            let (path, code) = (stored.path().into(), codes[index]);
            return Err(Float8FilesError::NanCode {
                path,
                name: name.into(),
                row: index / cols,
                col: index % cols,
                code,
            }
            .into());
        }
        let (format, dims) = (Format::E4m3, *dims);
        let codes = HostCodes { codes, dims, format, granularity, inv_scales, transposed: false };
        if let Some(index) = codes.zero_scale() {
            return Err(scale_value(files, scale, index, 0.0).into());
        }
        if let Some((index, scale)) = codes.overflow() {
            let (path, name) = (stored.path().into(), name.into());
            let (row, col, code, scale) = (index / cols, index % cols, codes.codes[index], scale.get());
            return Err(Float8FilesError::Overflow { path, name, row, col, code, scale }.into());
        }
        Ok(Some(Float8Weight { codes, input_scale }))
    }
}

/// Quantizes the weight `name`, `[out, in]`, on the host, with a known amax or with the weight's.
///
/// # Errors
/// [`Float8FilesError::NotFinite`] for NaN and infinities. A scale made from either would destroy
/// all other values.
pub(crate) fn quantize(
    name: &str,
    values: &[f32],
    dims: [usize; 2],
    cast: Cast,
    amax: Option<f32>,
) -> Result<HostCodes, Float8FilesError> {
    check_finite(name, values)?;
    Ok(HostCodes::quantize(values, dims, cast, amax))
}

/// Refuses a weight with non-finite values, which has no codes.
pub(crate) fn check_finite(name: &str, values: &[f32]) -> Result<(), Float8FilesError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(Float8FilesError::NotFinite { name: name.into(), index, value: values[index] }),
    }
}

/// Checks the headers of a weight and of its scales.
fn entry(
    files: &TensorFiles,
    stored: StoredTensor<'_>,
    name: &str,
    dims: [usize; 2],
    quantization: Option<&Quantization>,
) -> Result<Entry, Float8FilesError> {
    let (path, name) = (stored.path().to_path_buf(), name.to_string());
    let module = name.strip_suffix(".weight").unwrap_or(&name).to_string();
    let Some(quantization) = quantization else { return Err(Float8FilesError::NoConfig { path, name }) };
    let Some(schemes) = quantization.schemes(&module)? else {
        return Err(Float8FilesError::NotQuantized { path, name, module });
    };
    let find = |names: &[&str]| -> Result<Option<String>, Float8FilesError> {
        let mut there = names.iter().map(|own| format!("{module}.{own}")).filter(|name| files.get(name).is_some());
        match (there.next(), there.next()) {
            (Some(one), Some(other)) => {
                let path = files.get(&one).map_or(path.clone(), |stored| stored.path().into());
                Err(Float8FilesError::ScaleTwice { path, one, other })
            }
            (one, _) => Ok(one),
        }
    };
    let missing = |own: &[&str]| {
        let scale = format!("{module}.{}", own.first().unwrap_or(&"weight_scale"));
        Float8FilesError::ScaleMissing { path: path.clone(), name: name.clone(), scale }
    };
    let names = quantization.names;
    let scale = find(names.weight)?.ok_or_else(|| missing(names.weight))?;
    let input_scale = find(names.input)?;
    if schemes.inputs == Some(Inputs::Static) && input_scale.is_none() {
        return Err(missing(names.input));
    }
    let granularity = scale_granularity(files, &scale, dims, schemes.granularities)?;
    if let Some(scale) = &input_scale {
        scale_granularity(files, scale, dims, &[Granularity::Tensor])?;
    }
    // An input scale of dynamically scaled inputs is kept, but not used.
    let scheme = Scheme { granularity, inputs: schemes.inputs.unwrap_or(Inputs::beside(granularity)) };
    Ok(Entry { dims, scheme, scale, input_scale })
}

/// Granularity of a scale tensor, from its shape and dtype.
fn scale_granularity(
    files: &TensorFiles,
    scale: &str,
    dims: [usize; 2],
    granularities: &[Granularity],
) -> Result<Granularity, Float8FilesError> {
    let stored = files.get(scale).expect("it was found");
    let (path, name) = (stored.path().to_path_buf(), scale.to_string());
    let shapes = |granularity: &Granularity| Scheme::scale_shapes(*granularity, dims);
    let fits = |granularity: &&Granularity| shapes(granularity).iter().any(|shape| shape == stored.shape());
    let Some(granularity) = granularities.iter().find(fits) else {
        let (found, expected) = (stored.shape().to_vec(), granularities.iter().flat_map(shapes).collect());
        return Err(Float8FilesError::ScaleShape { path, name, found, weight: dims, expected });
    };
    let is_mx = *granularity == Granularity::Block1x32;
    let expected = if is_mx { "U8 and F8_E8M0" } else { "F32, BF16, F16 and F8_E8M0" };
    let is_read = match stored.dtype() {
        Dtype::F8_E8M0 => true,
        Dtype::U8 => is_mx,
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => !is_mx,
        _ => false,
    };
    if !is_read {
        let dtype = format!("{:?}", stored.dtype());
        return Err(Float8FilesError::ScaleDtype { path, name, dtype, expected });
    }
    Ok(*granularity)
}

/// Reads scales, row-major. Each is positive and finite, or 0 if `may_be_zero`.
fn read_scales(files: &TensorFiles, name: &str, may_be_zero: bool) -> Result<Vec<f32>, JobError> {
    let missing = || TensorFilesError::Missing { name: name.into(), shape: vec![], path: files.path().into() };
    let stored = files.get(name).ok_or_else(missing)?;
    let scales: Vec<f32> = match stored.dtype() {
        Dtype::U8 | Dtype::F8_E8M0 => stored.bytes()?.into_iter().map(|byte| InvScale::from_e8m0(byte).get()).collect(),
        _ => stored.to_f32()?,
    };
    // NaN is not positive.
    let is_scale = |scale: &f32| *scale > 0.0 && *scale < f32::INFINITY || may_be_zero && *scale == 0.0;
    match scales.iter().position(|scale| !is_scale(scale)) {
        Some(index) => Err(scale_value(files, name, index, scales[index]).into()),
        None => Ok(scales),
    }
}

/// Error of an invalid scale.
fn scale_value(files: &TensorFiles, name: &str, index: usize, value: f32) -> Float8FilesError {
    let path = files.get(name).map_or(files.path(), |stored| stored.path()).into();
    Float8FilesError::ScaleValue { path, name: name.into(), index, value }
}
