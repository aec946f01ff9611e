//! [`Float8Plan`]: the linears of a model that are written in FP8, their casts, and reasons against
//! writing them.
//!
//! ```text
//! codes, scales  as the fprop cast of the weight makes them, with one exception:
//! one scale      from the largest amax of the linears that readers run as one (q, k, v; gate, up)
//! input_scale    from delayed scaling's amax of the inputs for the next step
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn_float8::backend::{Cast, host};
use burn_float8::config::{CastConfig, FallbackTo, Format, Granularity, LinearInfo, Operand, Policy, ScalingType};
use burn_float8::report::{AmaxState, LayerState};
use burn_float8::{Float8LinearConfig, Recipe};
use serde_json::Value;

use super::scheme::{Inputs, MX_BLOCK, Scheme};
use crate::hf::checkpoint::Checkpoint;
use crate::hf::float8_export::Float8Export;
use crate::hf::names::hf_module;

/// Output layer, which no reader accepts in FP8.
const OUTPUT: &str = "lm_head";

/// Linears of a model that are written in FP8.
pub(crate) struct Float8Plan<'a> {
    pub(crate) scheme: Scheme,
    pub(crate) linears: Vec<Planned>,
    /// Paths of the other linears.
    others: Vec<String>,
    /// Names of sibling linears that readers run as one.
    fused: Vec<&'static [&'static str]>,
    /// Checkpoint from which the model was loaded.
    pub(crate) checkpoint: Option<&'a Checkpoint>,
    /// Amaxes of fused linears that were computed, by the first of them.
    pub(crate) amaxes: RefCell<HashMap<String, f32>>,
}

/// A linear that is written in FP8.
pub(crate) struct Planned {
    /// Path in the module tree.
    pub(crate) name: String,
    scheme: Scheme,
    /// Scheme of its codes in the checkpoint from which the model was loaded.
    stored: Option<Scheme>,
    /// Cast of the weight for fprop.
    pub(crate) cast: Cast,
    input: Cast,
    /// Amaxes from the histories of delayed scaling.
    pub(crate) weight_amax: Option<f32>,
    input_amax: Option<f32>,
}

impl<'a> Float8Plan<'a> {
    /// Plans the linears that the export's configuration has in FP8. Readers run siblings with the
    /// names of a list in `fused` as one.
    ///
    /// # Errors
    /// A configuration that does not fit the model; weights that readers would refuse.
    pub(crate) fn new(
        export: &Float8Export<'a>,
        linears: &[LinearInfo],
        fused: Vec<&'static [&'static str]>,
    ) -> Result<Self> {
        let (mut planned, mut others) = (vec![], vec![]);
        for (linear, policy) in linears.iter().zip(export.config.resolve(linears)?) {
            match Planned::new(linear, policy, export)? {
                Some(own) => planned.push(own),
                None => others.push(linear.name.clone()),
            }
        }
        // Weights that keep their codes have the inputs named in their files. A folder has one format,
        // so other weights have the inputs of the first of them.
        let first = planned.iter().find_map(|own| own.stored.filter(|stored| stored.has_tensors_of(own.scheme)));
        for own in &mut planned {
            let kept = own.stored.into_iter().chain(first).find(|stored| stored.has_tensors_of(own.scheme));
            own.scheme = kept.unwrap_or(own.scheme);
        }
        let Some(first) = planned.first() else {
            bail!("no linear of the model is to be in FP8: choose another format, or other float8.filter_fqns");
        };
        let (name, scheme) = (&first.name, first.scheme);
        if let Some(other) = planned.iter().find(|other| other.scheme != scheme) {
            bail!(
                "{name} is written as {scheme}, and {} as {}: a folder has one format: choose one for all with --recipe, or keep the linears of \
                 one in high precision by float8.filter_fqns",
                other.name,
                other.scheme
            );
        }
        let (checkpoint, amaxes) = (export.checkpoint, RefCell::default());
        let plan = Self { scheme, linears: planned, others, fused, checkpoint, amaxes };
        for own in &plan.linears {
            if let Some(other) = plan.others.iter().find(|other| plan.is_fused(&own.name, other)) {
                bail!(
                    "{} is in FP8 and {other} in high precision, and vLLM runs them as one: quantize both, or keep both in high precision by \
                     float8.filter_fqns",
                    own.name
                );
            }
            plan.input_scale(own)?;
        }
        Ok(plan)
    }

    /// Linears that readers run as one with this one, itself included.
    pub(crate) fn fused(&self, linear: &Planned) -> impl Iterator<Item = &Planned> {
        self.linears.iter().filter(|other| other.name == linear.name || self.is_fused(&linear.name, &other.name))
    }

    /// Whether two linears are siblings, and one of the lists contains both of their names.
    fn is_fused(&self, one: &str, other: &str) -> bool {
        let (Some((parent, one)), Some((other_parent, other))) = (one.rsplit_once('.'), other.rsplit_once('.')) else {
            return false;
        };
        parent == other_parent && self.fused.iter().any(|list| list.contains(&one) && list.contains(&other))
    }

    /// Whether codes and scales come from the checkpoint from which the model was loaded.
    pub(crate) fn is_stored(&self, linear: &Planned) -> bool {
        let has_tensors = |stored: Scheme| stored.has_tensors_of(self.scheme);
        self.fused(linear).all(|other| other.stored.is_some_and(has_tensors))
    }

    /// Static scale of a linear's inputs, unless it comes from that checkpoint.
    pub(crate) fn input_scale(&self, linear: &Planned) -> Result<Option<f32>> {
        if !self.scheme.has_static_inputs() || self.is_stored(linear) {
            return Ok(None);
        }
        // They read the same tensor, and only the linear that casts it first has its history.
        let amax = self.fused(linear).filter_map(|other| other.input_amax).reduce(f32::max).with_context(|| {
            format!(
                "{}: there is no amax history of its inputs, of which their scale is made: export a run that was trained by `delayed`, or \
                 choose --recipe tensorwise",
                linear.name
            )
        })?;
        Ok(Some(host::inv_scale(amax, linear.input).get()))
    }

    /// The `quantization_config`.
    pub(crate) fn to_json(&self) -> Value {
        let mut ignored: Vec<_> = self.others.iter().map(|linear| hf_module(linear)).collect();
        // Readers also make a linear of a tied output layer.
        if !ignored.iter().any(|name| name == OUTPUT) {
            ignored.push(OUTPUT.into());
        }
        self.scheme.to_json(&ignored)
    }
}

impl fmt::Display for Float8Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (written, all) = (self.linears.len(), self.linears.len() + self.others.len());
        write!(f, "FP8: {written} of {all} linears, {}", self.scheme)?;
        let stored = self.linears.iter().filter(|own| self.is_stored(own)).count();
        let anew = self.linears.iter().filter(|own| own.stored.is_some()).count() - stored;
        for (count, what) in [(stored, "keep their codes"), (anew, "are decoded and requantized")] {
            if count > 0 {
                write!(f, "; {count} {what}")?;
            }
        }
        match self.others.is_empty() {
            true => Ok(()),
            false => write!(f, "; in high precision: {}", self.others.join(", ")),
        }
    }
}

impl Planned {
    /// Format of a linear by its policy and its fallback in training; `None` in high precision.
    fn new(linear: &LinearInfo, policy: Policy, export: &Float8Export<'_>) -> Result<Option<Self>> {
        let LinearInfo { name, k, n } = linear;
        let state = export.state.and_then(|state| state.layers.get(name));
        let fallback = state.and_then(|state| state.fallback.as_ref()).map(|fallback| fallback.to);
        let config = match (policy, fallback) {
            (Policy::HighPrecision(_), _) | (_, Some(FallbackTo::HighPrecision)) => return Ok(None),
            (Policy::Float8(_), Some(FallbackTo::Rowwise)) => Float8LinearConfig::new(Recipe::Rowwise),
            (Policy::Float8(config), None) => config,
        };
        let (weight, input) = (config.casts()[Operand::WEIGHT_T], config.casts()[Operand::INPUT]);
        if weight.is_disabled() {
            return Ok(None);
        }
        ensure!(
            name != OUTPUT,
            "{name}: vLLM reads output layers in high precision only: name it in float8.filter_fqns"
        );
        let scheme = scheme(weight, input).map_err(|found| {
            anyhow!(
                "{name}: no format of files has {found}: choose --recipe rowwise, or keep the linear, and those that vLLM joins with it, in high \
                 precision by float8.filter_fqns"
            )
        })?;
        // transformers finds the blocks by division, and vLLM joins the rows of fused parts.
        let (multiple, axes, reader, format): (_, &[_], _, _) = match scheme.granularity {
            Granularity::Block128x128 => (128, &[("out", *n), ("in", *k)], "transformers", "blockwise"),
            Granularity::Block1x32 => (MX_BLOCK, &[("in", *k)], "vLLM", "mxfp8"),
            _ => (1, &[], "", ""),
        };
        if let Some((axis, size)) = axes.iter().find(|(_, size)| !size.is_multiple_of(multiple)) {
            bail!(
                "{name}: {axis} = {size} is no multiple of {multiple}, as {reader} wants it of {format} weights: choose --recipe rowwise, or keep the \
                 linear, and those that vLLM joins with it (q, k and v; gate and up), in high precision by float8.filter_fqns"
            );
        }
        let next = |cast: CastConfig, history: fn(&LayerState) -> &Option<AmaxState>| {
            let state = state.filter(|_| cast.scaling_type == ScalingType::Delayed)?;
            let scaling = state.delayed_scaling.unwrap_or(config.delayed_scaling());
            history(state).as_ref()?.next_scaling_amax(scaling)
        };
        Ok(Some(Self {
            name: name.clone(),
            scheme,
            stored: export.checkpoint.and_then(|checkpoint| checkpoint.scheme(name)),
            cast: config.kernel_cast(Operand::WEIGHT_T),
            input: config.kernel_cast(Operand::INPUT),
            weight_amax: next(weight, |state| &state.weight),
            input_amax: next(input, |state| &state.input),
        }))
    }
}

/// File format of these casts of weight and input, or what no format has.
fn scheme(weight: CastConfig, input: CastConfig) -> Result<Scheme, String> {
    for (name, cast) in [("weights", weight), ("inputs", input)] {
        if cast.target_dtype != Format::E4m3 {
            return Err(format!("{name} in {}", cast.target_dtype));
        }
    }
    let (granularity, found) = (weight.scaling_granularity, input.scaling_granularity);
    let usual = Scheme::usual(granularity);
    if granularity == Granularity::Block1x128 {
        return Err(format!("{granularity} weights"));
    }
    if usual.inputs != Inputs::Dynamic(found) {
        return Err(format!("{granularity} weights with {found} inputs"));
    }
    Ok(if input.scaling_type == ScalingType::Delayed { Scheme { inputs: Inputs::Static, ..usual } } else { usual })
}
