//! Tensors of linears in FP8: codes, scales and input scales. Each is made when it is written.

use anyhow::Result;
use burn_float8::backend::{HostCodes, host};
use burn_float8::config::Granularity;
use burn_float8::{Float8Config, Float8State};
use safetensors::Dtype;

use super::checkpoint::{Checkpoint, linears};
use super::float8::{Float8Plan, Planned, Scheme, check_finite, quantize};
use super::names;
use super::parameters::Parameter;
use crate::model::ModelConfig;
use crate::tensor_files::{NewTensor, f32_bytes};

/// Settings for writing a model in FP8.
#[derive(Clone, Copy)]
pub struct Float8Export<'a> {
    pub(super) config: &'a Float8Config,
    pub(super) state: Option<&'a Float8State>,
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
    /// A configuration that does not fit the model; weights that readers would refuse.
    pub(crate) fn summary<C: ModelConfig>(&self, config: &C) -> Result<String> {
        config.to_hf()?;
        Ok(self.plan(config)?.to_string())
    }

    /// Plans which linears of a model of this configuration are written in FP8.
    pub(super) fn plan<C: ModelConfig>(&self, config: &C) -> Result<Float8Plan<'_>> {
        Float8Plan::new(self, &linears(&config.hf_tensors("".as_ref())?), config.fused_linears())
    }
}

impl Float8Plan<'_> {
    /// Tensors of one of all `parameters` in FP8; `None` if it stays in high precision.
    pub(super) fn tensors<'t>(
        &'t self,
        weight: &'t Parameter,
        parameters: &'t [Parameter],
    ) -> Option<Vec<NewTensor<'t>>> {
        let linear = names::linear(&weight.path)?;
        let planned = self.linears.iter().find(|planned| planned.name == linear)?;
        let dims = <[usize; 2]>::try_from(&weight.shape[..]).ok()?;
        let scheme = self.scheme;
        let stored = self.checkpoint.filter(|_| self.is_stored(planned));
        let stored = stored.and_then(|checkpoint| Some((checkpoint, checkpoint.stored(linear)?)));
        let name = names::hf_name(&weight.path);
        let codes = {
            let name = name.clone();
            move || match stored {
                Some((checkpoint, stored)) => stored.read(&checkpoint.files, &name),
                None => {
                    // Before the weight is read, since it reads others.
                    let amax = self.amax(planned, parameters)?;
                    quantize(&name, &(weight.read)()?, dims, planned.cast, amax)
                }
            }
        };
        let (scale_codes, module) = (codes.clone(), names::hf_module(linear));
        let dtype = if scheme.granularity == Granularity::Block1x32 { Dtype::U8 } else { Dtype::F32 };
        let shape = Scheme::scale_shapes(scheme.granularity, dims).swap_remove(0);
        let scale_name = format!("{module}.{}", scheme.scale_name());
        let mut tensors = vec![
            NewTensor::new(name, Dtype::F8_E4M3, weight.shape.clone(), move || Ok(codes()?.codes)),
            NewTensor::new(scale_name, dtype, shape, move || Ok(scale_bytes(&scale_codes()?))),
        ];
        // A checkpoint may have an input scale even if inputs are scaled dynamically.
        if stored.map_or(scheme.has_static_inputs(), |(_, stored)| stored.input_scale.is_some()) {
            let scale = move || match stored {
                Some((checkpoint, stored)) => stored.input_scale(&checkpoint.files),
                None => self.input_scale(planned),
            };
            let bytes = move || Ok(f32_bytes(scale()?.as_slice()));
            tensors.push(NewTensor::new(format!("{module}.input_scale"), Dtype::F32, vec![1], bytes));
        }
        Some(tensors)
    }

    /// Largest amax of the linears that share a tensorwise scale with this one. Each weight is read
    /// once. `None` if the cast can find the amax itself.
    fn amax(&self, planned: &Planned, parameters: &[Parameter]) -> Result<Option<f32>> {
        let fused: Vec<_> = self.fused(planned).collect();
        if self.scheme.granularity != Granularity::Tensor || fused.len() == 1 {
            return Ok(planned.weight_amax);
        }
        if let Some(amax) = self.amaxes.borrow().get(&fused[0].name) {
            return Ok(Some(*amax));
        }
        let mut largest = 0.0_f32;
        for own in &fused {
            let weight = parameters.iter().find(|parameter| names::linear(&parameter.path) == Some(&own.name));
            largest = largest.max(match (own.weight_amax, weight) {
                (Some(amax), _) => amax,
                (None, Some(weight)) => {
                    let values = (weight.read)()?;
                    check_finite(&names::weight_name(&own.name), &values)?;
                    host::amax(&values)
                }
                (None, None) => 0.0,
            });
        }
        self.amaxes.borrow_mut().insert(fused[0].name.clone(), largest);
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
