//! [`Plan`]: the linears of a model that are written in FP8, their casts, and reasons against
//! writing them.
//!
//! ```text
//! codes, scales  as the fprop cast of the weight makes them, with one exception:
//! one scale      from the largest amax of the linears that readers run as one (q, k, v; gate, up)
//! input_scale    from delayed scaling's amax of the inputs for the next step
//! ```

use std::collections::BTreeMap;
use std::fmt;

use burn_float8::backend::{Cast, host};
use burn_float8::config::{CastConfig, FallbackTo, Format, Granularity, LinearInfo, Operand, Policy, ScalingType};
use burn_float8::report::{AmaxState, LayerState};
use burn_float8::{Float8Config, Float8LinearConfig, Float8State, Recipe};
use serde_json::Value;

use super::error::Float8FilesError;
use super::scheme::{Inputs, MX_BLOCK, Scheme};
use crate::JobError;

/// Readers with required sizes.
const TRANSFORMERS: &str = "transformers";
const VLLM: &str = "vLLM";

/// Output layer, which no reader accepts in FP8.
const OUTPUT: &str = "lm_head";

/// Properties of a model before its weights are read.
pub(crate) struct Model<'a> {
    /// Linears, by path in the module tree.
    pub(crate) linears: &'a [LinearInfo],
    /// Names of sibling linears that readers run as one.
    pub(crate) fused: &'a [&'static [&'static str]],
    /// Amax histories and fallbacks from training.
    pub(crate) state: Option<&'a Float8State>,
    /// Scheme of a linear's weight in the FP8 checkpoint from which the model was loaded, if any.
    pub(crate) stored: &'a dyn Fn(&str) -> Option<Scheme>,
}

/// Linears of a model that are written in FP8.
pub(crate) struct Plan {
    scheme: Scheme,
    linears: BTreeMap<String, Planned>,
    /// Paths of the other linears, in order.
    others: Vec<String>,
}

/// How the weight of a linear is converted to codes.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// Cast of the weight for fprop.
    pub(crate) cast: Cast,
    /// Input scale that is written.
    pub(crate) input_scale: Option<f32>,
    /// Whether codes and scales come from the checkpoint from which the model was loaded.
    pub(crate) is_stored: bool,
    /// Whether that checkpoint has codes, but they are not written.
    is_cast_anew: bool,
    /// Linears that share a tensorwise scale, this one included, with the amaxes from their
    /// histories. Empty for other granularities.
    pub(crate) sharers: Vec<(String, Option<f32>)>,
}

/// Linear that is to be in FP8, before its fused linears are considered.
struct Candidate<'a> {
    linear: &'a LinearInfo,
    scheme: Scheme,
    cast: Cast,
    input: Cast,
    weight_amax: Option<f32>,
    input_amax: Option<f32>,
}

impl Plan {
    /// Plans the linears that `config` has in FP8.
    ///
    /// # Errors
    /// [`JobError::Float8`] for a configuration that does not fit the model,
    /// [`JobError::Float8Files`] for weights that readers would refuse.
    pub(crate) fn new(config: &Float8Config, model: &Model<'_>) -> Result<Self, JobError> {
        let policies = config.resolve(model.linears)?;
        let mut candidates = Vec::with_capacity(policies.len());
        for (linear, policy) in model.linears.iter().zip(policies) {
            let state = model.state.and_then(|state| state.layers.get(&linear.name));
            candidates.push(candidate(linear, policy, state)?);
        }
        keep_inputs(&mut candidates, model);
        let scheme = one_scheme(&candidates)?;
        let mut plan = Self { scheme, linears: BTreeMap::new(), others: vec![] };
        for (linear, candidate) in model.linears.iter().zip(&candidates) {
            match candidate {
                Some(candidate) => {
                    let planned = plan_linear(candidate, model, &candidates)?;
                    plan.linears.insert(linear.name.clone(), planned);
                }
                None => plan.others.push(linear.name.clone()),
            }
        }
        Ok(plan)
    }

    /// How the weight of a linear is written; `None` in high precision.
    pub(crate) fn get(&self, linear: &str) -> Option<&Planned> {
        self.linears.get(linear)
    }

    /// Name of a weight's scales, after the name of its linear.
    pub(crate) fn scale_name(&self) -> &'static str {
        self.scheme.scale_name()
    }

    /// Shape of the scales of a weight `[out, in]`.
    pub(crate) fn scale_shape(&self, dims: [usize; 2]) -> Vec<usize> {
        Scheme::scale_shapes(self.scheme.granularity, dims).swap_remove(0)
    }

    /// Whether each linear has an input scale.
    pub(crate) fn has_input_scales(&self) -> bool {
        self.scheme.has_static_inputs()
    }

    /// The `quantization_config`, with the names of linears from `hf_name`.
    pub(crate) fn to_json(&self, hf_name: impl Fn(&str) -> String) -> Value {
        let mut ignored: Vec<_> = self.others.iter().map(|linear| hf_name(linear)).collect();
        // Readers also make a linear of a tied output layer.
        if !ignored.iter().any(|name| name == OUTPUT) {
            ignored.push(OUTPUT.into());
        }
        self.scheme.to_json(&ignored)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (written, all) = (self.linears.len(), self.linears.len() + self.others.len());
        write!(f, "FP8: {written} of {all} linears, {}", self.scheme)?;
        let count = |is: fn(&Planned) -> bool| self.linears.values().filter(|planned| is(planned)).count();
        let counts = [
            (count(|planned| planned.is_stored), "keep their codes"),
            (count(|planned| planned.is_cast_anew), "are decoded and cast anew"),
        ];
        for (count, what) in counts.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "; {count} {what}")?;
        }
        for (i, linear) in self.others.iter().enumerate() {
            write!(f, "{}{linear}", if i == 0 { "; in high precision: " } else { ", " })?;
        }
        Ok(())
    }
}

/// Format of a linear by its policy and its fallback in training; `None` in high precision.
fn candidate<'a>(
    linear: &'a LinearInfo,
    policy: Policy,
    state: Option<&LayerState>,
) -> Result<Option<Candidate<'a>>, Float8FilesError> {
    let fallback = state.and_then(|state| state.fallback.as_ref()).map(|fallback| fallback.to);
    let config = match (policy, fallback) {
        (Policy::HighPrecision(_), _) | (_, Some(FallbackTo::HighPrecision)) => return Ok(None),
        (Policy::Float8(_), Some(FallbackTo::Rowwise)) => Float8LinearConfig::new(Recipe::Rowwise),
        (Policy::Float8(config), None) => config,
    };
    let casts = config.casts();
    if casts[Operand::WEIGHT_T].is_disabled() {
        return Ok(None);
    }
    if linear.name == OUTPUT {
        return Err(Float8FilesError::OutputLayer { layer: linear.name.clone() });
    }
    let scheme = scheme(linear, [casts[Operand::WEIGHT_T], casts[Operand::INPUT]])?;
    check_size(linear, scheme.granularity)?;
    let next = |cast: CastConfig, history: fn(&LayerState) -> &Option<AmaxState>| {
        let state = state.filter(|_| cast.scaling_type == ScalingType::Delayed)?;
        let scaling = state.delayed_scaling.unwrap_or(config.delayed_scaling());
        history(state).as_ref()?.next_scaling_amax(scaling)
    };
    let (weight_amax, input_amax) =
        (next(casts[Operand::WEIGHT_T], |state| &state.weight), next(casts[Operand::INPUT], |state| &state.input));
    let (cast, input) = (config.kernel_cast(Operand::WEIGHT_T), config.kernel_cast(Operand::INPUT));
    Ok(Some(Candidate { linear, scheme, cast, input, weight_amax, input_amax }))
}

/// File format of these casts of weight and input.
fn scheme(linear: &LinearInfo, [weight, input]: [CastConfig; 2]) -> Result<Scheme, Float8FilesError> {
    let refuse = |what| Err(Float8FilesError::NoFormat { layer: linear.name.clone(), what });
    for (name, cast) in [("weights", weight), ("inputs", input)] {
        if cast.target_dtype != Format::E4m3 {
            return refuse(format!("{name} in {}", cast.target_dtype));
        }
    }
    let (weight, is_static) = (weight.scaling_granularity, input.scaling_type == ScalingType::Delayed);
    if weight == Granularity::Block1x128 {
        return refuse(format!("{weight} weights"));
    }
    let found = input.scaling_granularity;
    if Inputs::Dynamic(found) != Inputs::beside(weight) {
        return refuse(format!("{weight} weights with {found} inputs"));
    }
    Ok(Scheme { granularity: weight, inputs: if is_static { Inputs::Static } else { Inputs::beside(weight) } })
}

/// Gives weights that keep their codes the inputs named in their files. A folder has one format, so
/// other weights get the inputs of the first of them.
fn keep_inputs(candidates: &mut [Option<Candidate<'_>>], model: &Model<'_>) {
    let stored =
        |own: &Candidate<'_>| (model.stored)(&own.linear.name).filter(|stored| stored.has_tensors_of(own.scheme));
    let first = candidates.iter().flatten().find_map(stored);
    for candidate in candidates.iter_mut().flatten() {
        let follows = first.filter(|first| first.has_tensors_of(candidate.scheme));
        candidate.scheme = stored(candidate).or(follows).unwrap_or(candidate.scheme);
    }
}

/// Refuses sizes that readers cannot handle.
fn check_size(linear: &LinearInfo, granularity: Granularity) -> Result<(), Float8FilesError> {
    let LinearInfo { name, k, n } = linear;
    let (multiple, axes, reader, format): (_, &[_], _, _) = match granularity {
        // transformers finds the blocks by division, and vLLM joins the rows of fused parts.
        Granularity::Block128x128 => (128, &[("out", *n), ("in", *k)], TRANSFORMERS, "blockwise"),
        Granularity::Block1x32 => (MX_BLOCK, &[("in", *k)], VLLM, "mxfp8"),
        _ => return Ok(()),
    };
    match axes.iter().find(|(_, size)| !size.is_multiple_of(multiple)) {
        Some(&(axis, size)) => {
            Err(Float8FilesError::Ragged { layer: name.clone(), axis, size, multiple, reader, format })
        }
        None => Ok(()),
    }
}

/// Common scheme of all candidates.
fn one_scheme(candidates: &[Option<Candidate<'_>>]) -> Result<Scheme, Float8FilesError> {
    let mut all = candidates.iter().flatten();
    let first = all.next().ok_or(Float8FilesError::Nothing)?;
    match all.find(|other| other.scheme != first.scheme) {
        Some(other) => Err(Float8FilesError::Mixed {
            layer: first.linear.name.clone(),
            format: first.scheme.to_string(),
            other: other.linear.name.clone(),
            other_format: other.scheme.to_string(),
        }),
        None => Ok(first.scheme),
    }
}

/// Plans a linear together with the linears that readers run as one with it.
fn plan_linear(
    own: &Candidate<'_>,
    model: &Model<'_>,
    candidates: &[Option<Candidate<'_>>],
) -> Result<Planned, Float8FilesError> {
    let name = &own.linear.name;
    let mut fused = vec![];
    for (linear, candidate) in model.linears.iter().zip(candidates) {
        if linear.name != *name && !is_fused(model.fused, name, &linear.name) {
            continue;
        }
        match candidate {
            Some(candidate) => fused.push(candidate),
            None => return Err(Float8FilesError::Fused { layer: name.clone(), other: linear.name.clone() }),
        }
    }
    let stored = |other: &Candidate<'_>| (model.stored)(&other.linear.name);
    let is_stored = fused.iter().all(|other| stored(other).is_some_and(|stored| stored.has_tensors_of(own.scheme)));
    // They read the same tensor, and only the linear that casts it first has its history.
    let input_amax = fused.iter().filter_map(|other| other.input_amax).reduce(f32::max);
    let input_scale = match (own.scheme.has_static_inputs() && !is_stored, input_amax) {
        (true, None) => return Err(Float8FilesError::NoHistory { layer: name.clone() }),
        (true, Some(amax)) => Some(host::inv_scale(amax, own.input).get()),
        (false, _) => None,
    };
    let sharers = match own.scheme.granularity {
        Granularity::Tensor => fused.iter().map(|other| (other.linear.name.clone(), other.weight_amax)).collect(),
        _ => vec![],
    };
    let is_cast_anew = !is_stored && stored(own).is_some();
    Ok(Planned { cast: own.cast, input_scale, is_stored, is_cast_anew, sharers })
}

/// Whether two linears are siblings, and one of the lists contains both of their names.
fn is_fused(lists: &[&[&str]], one: &str, other: &str) -> bool {
    let (Some((parent, one)), Some((other_parent, other))) = (one.rsplit_once('.'), other.rsplit_once('.')) else {
        return false;
    };
    parent == other_parent && lists.iter().any(|list| list.contains(&one) && list.contains(&other))
}
