//! Tensors of linears in FP8: codes, scales and input scales. Each is made when it is written.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use burn_float8::backend::{HostCodes, host};
use burn_float8::config::{Granularity, LinearInfo};
use burn_float8::{Float8Config, Float8State};
use safetensors::Dtype;

use super::check::Checkpoint;
use super::float8::{Float8FilesError, Float8Weight, Model, Plan, Planned, check_finite, quantize};
use super::names;
use super::parameters::{Parameter, Read};
use crate::JobError;
use crate::model::ModelConfig;
use crate::tensor_files::{NewTensor, f32_bytes};

/// Settings for writing a model in FP8.
#[derive(Clone, Copy)]
pub struct Float8Export<'a> {
    config: &'a Float8Config,
    state: Option<&'a Float8State>,
    pub(super) checkpoint: Option<&'a Checkpoint>,
}

impl<'a> Float8Export<'a> {
    /// Writes the linears that `config` has in FP8. The fprop cast of each weight makes its codes.
    pub fn new(config: &'a Float8Config) -> Self {
        Self { config, state: None, checkpoint: None }
    }

    /// Adds the state of the run that trained the model: fallbacks, and the amax histories from
    /// which delayed scaling makes scales.
    pub fn with_state(self, state: &'a Float8State) -> Self {
        Self { state: Some(state), ..self }
    }

    /// Adds the checkpoint from which the model was loaded, if the model has not changed since.
    /// Weights written in the format of that checkpoint keep its codes and scales. Requantizing
    /// their values could change them.
    pub(crate) fn with_checkpoint(self, checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint: Some(checkpoint), ..self }
    }

    /// Summary of what would be written for a model of this configuration, in a line.
    ///
    /// # Errors
    /// The errors of [`plan`].
    pub(crate) fn summary<C: ModelConfig>(&self, config: &C, folder: &Path) -> Result<String, JobError> {
        config.to_hf()?;
        Ok(plan(config, folder, self)?.to_string())
    }
}

/// Plans which linears of a model of this configuration are written in FP8 to `folder`.
///
/// # Errors
/// The errors of [`Plan::new`]; [`JobError::MoeCheckpoint`].
pub(super) fn plan<C: ModelConfig>(config: &C, folder: &Path, float8: &Float8Export<'_>) -> Result<Plan, JobError> {
    let tensors = config.hf_tensors(folder)?;
    let linears: Vec<_> = tensors.iter().filter_map(|(path, shape)| linear_info(path, shape)).collect();
    let stored =
        |linear: &str| float8.checkpoint.and_then(|checkpoint| checkpoint.float8.scheme(&names::weight_name(linear)));
    let fused = config.fused_linears();
    Plan::new(float8.config, &Model { linears: &linears, fused: &fused, state: float8.state, stored: &stored })
}

/// Linear whose weight is at `path` and has the shape of files.
pub(super) fn linear_info(path: &str, shape: &[usize]) -> Option<LinearInfo> {
    let name = names::linear(path)?.to_string();
    let [n, k] = *shape else { return None };
    Some(LinearInfo { name, k, n })
}

/// Inputs for the tensors of linears in FP8.
pub(super) struct Writer<'a> {
    plan: &'a Plan,
    /// Readers of weights, by the paths of linears.
    reads: HashMap<&'a str, &'a Read>,
    checkpoint: Option<&'a Checkpoint>,
    /// Known amaxes, by the first of the linears that share one.
    amaxes: RefCell<HashMap<&'a str, f32>>,
}

impl<'a> Writer<'a> {
    /// Creates a writer for a model with these parameters.
    pub(super) fn new(plan: &'a Plan, parameters: &'a [Parameter], checkpoint: Option<&'a Checkpoint>) -> Self {
        let reads = parameters
            .iter()
            .filter_map(|parameter| Some((names::linear(&parameter.path)?, &parameter.read)))
            .collect();
        Self { plan, reads, checkpoint, amaxes: RefCell::default() }
    }

    /// Tensors of a parameter in FP8; `None` if it stays in high precision.
    pub(super) fn tensors<'w>(&'w self, weight: &'w Parameter) -> Option<Vec<NewTensor<'w, JobError>>> {
        let linear = names::linear(&weight.path)?;
        let planned = self.plan.get(linear)?;
        let dims = <[usize; 2]>::try_from(&weight.shape[..]).ok()?;
        let name = names::hf_name(&weight.path);
        let module = names::hf_module(linear);
        let is_mx = planned.cast.granularity == Granularity::Block1x32;
        let codes = move || self.codes(weight, planned, dims);
        let mut tensors = vec![
            NewTensor {
                name,
                dtype: Dtype::F8_E4M3,
                shape: weight.shape.clone(),
                bytes: Box::new(move || Ok(codes()?.codes)),
            },
            NewTensor {
                name: format!("{module}.{}", self.plan.scale_name()),
                dtype: if is_mx { Dtype::U8 } else { Dtype::F32 },
                shape: self.plan.scale_shape(dims),
                bytes: Box::new(move || Ok(scale_bytes(&codes()?))),
            },
        ];
        if self.plan.has_input_scales() || planned.is_stored && self.has_stored_input_scale(weight) {
            tensors.push(NewTensor {
                name: format!("{module}.input_scale"),
                dtype: Dtype::F32,
                shape: vec![1],
                bytes: Box::new(move || Ok(f32_bytes(&[self.input_scale(weight, planned)?]))),
            });
        }
        Some(tensors)
    }

    /// Codes and scales of a weight `[out, in]`.
    fn codes(&self, weight: &Parameter, planned: &'a Planned, dims: [usize; 2]) -> Result<HostCodes, JobError> {
        if let Some(codes) = self.stored(weight, planned)? {
            return Ok(codes.codes);
        }
        let amax = self.amax(planned)?;
        let values = (weight.read)()?;
        Ok(quantize(&names::hf_name(&weight.path), &values, dims, planned.cast, amax)?)
    }

    /// Weight as stored in the checkpoint from which the model was loaded, if it is written
    /// unchanged.
    fn stored(&self, weight: &Parameter, planned: &Planned) -> Result<Option<Float8Weight>, JobError> {
        match self.checkpoint.filter(|_| planned.is_stored) {
            Some(checkpoint) => checkpoint.float8_weight(&names::hf_name(&weight.path)),
            None => Ok(None),
        }
    }

    /// Whether the checkpoint has an input scale of this linear. It may have one even if inputs are
    /// scaled dynamically.
    fn has_stored_input_scale(&self, weight: &Parameter) -> bool {
        self.checkpoint.is_some_and(|checkpoint| checkpoint.float8.has_input_scale(&names::hf_name(&weight.path)))
    }

    /// Scale of a linear's inputs.
    fn input_scale(&self, weight: &Parameter, planned: &Planned) -> Result<f32, JobError> {
        let missing = || Float8FilesError::NoHistory { layer: weight.path.clone() };
        match planned.input_scale {
            Some(scale) => Ok(scale),
            None => Ok(self.stored(weight, planned)?.and_then(|stored| stored.input_scale).ok_or_else(missing)?),
        }
    }

    /// Largest amax of the linears that share a tensorwise scale with this one. Each weight is read
    /// once. `None` if the cast can find the amax itself.
    fn amax(&self, planned: &'a Planned) -> Result<Option<f32>, JobError> {
        let first = match &planned.sharers[..] {
            // The cast finds the amax itself.
            [] | [(_, None)] => return Ok(None),
            [(first, _), ..] => first,
        };
        if let Some(amax) = self.amaxes.borrow().get(first.as_str()) {
            return Ok(Some(*amax));
        }
        let mut largest = 0.0_f32;
        for (linear, known) in &planned.sharers {
            largest = largest.max(match (known, self.reads.get(linear.as_str())) {
                (Some(amax), _) => *amax,
                (None, Some(read)) => {
                    let values = read()?;
                    check_finite(&names::weight_name(linear), &values)?;
                    host::amax(&values)
                }
                (None, None) => 0.0,
            });
        }
        self.amaxes.borrow_mut().insert(first, largest);
        Ok(Some(largest))
    }
}

/// Bytes of scales in the format of files.
fn scale_bytes(codes: &HostCodes) -> Vec<u8> {
    let scales = &codes.inv_scales;
    if codes.granularity != Granularity::Block1x32 {
        return f32_bytes(&scales.iter().map(|scale| scale.get()).collect::<Vec<_>>());
    }
    scales.iter().map(|scale| scale.to_e8m0().expect("a finite scale of MX is a power of two")).collect()
}
