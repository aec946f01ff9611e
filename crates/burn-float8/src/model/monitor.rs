//! [`Monitor`]: cheap per-step observation of a model's linears in training.
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;

use super::walk::linears;
use crate::layer::{GemmCalls, GemmTotals, Layer, OperandHealth, ReadAmax};
use crate::stack::Float8Stack;
use crate::step::DeviceState;
use crate::terms::{Gemm, Operand};

/// Linears of a model with an applied configuration, in the order of the module tree. Clones of the
/// model and the models its optimizer returns share them, so one monitor serves a whole run.
pub struct Monitor<B: Float8Stack> {
    layers: Vec<(B::Device, Arc<Layer>)>,
}

/// Statistics of one operand of one linear.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledOperand {
    /// The linear's path in the module tree.
    pub layer: String,
    /// `input`, `weight` or `grad_output`, with the suffix `_t` if a GEMM reads the transpose.
    pub operand: &'static str,
    /// The statistics of the last sampled step.
    pub health: OperandHealth,
}

/// Amaxes of all operands of a model's last FP8 GEMMs, still on the device.
#[derive(Clone, Debug)]
pub struct Amaxes {
    layers: Vec<LayerAmaxes>,
}

/// Amaxes of one linear's operands.
#[derive(Clone)]
struct LayerAmaxes {
    layer: Arc<Layer>,
    /// Indexed by GEMM.
    operands: [Option<[Arc<dyn ReadAmax>; 2]>; 3],
}

/// An operand with a non-finite amax.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteOperand {
    /// The linear's path in the module tree.
    pub layer: String,
    /// GEMM that read it.
    pub gemm: Gemm,
    /// `input`, `weight` or `grad_output`.
    pub role: &'static str,
    /// Its max |x|: inf or NaN.
    pub amax: f32,
}

impl core::fmt::Display for NonFiniteOperand {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { layer, gemm, role, amax } = self;
        write!(f, "amax = {amax} of the {role} of {layer} in {gemm}")
    }
}

impl core::fmt::Debug for LayerAmaxes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.layer.fmt(f)
    }
}

impl<B: Float8Stack> Monitor<B> {
    /// Finds the linears of a model. Empty if no configuration was applied.
    pub fn new<M: Module<B>>(model: &M) -> Self {
        let layers = linears::<B, M>(model, None).into_iter();
        Self { layers: layers.filter_map(|found| Some((found.device, found.tag?.layer))).collect() }
    }

    /// Calls of fprop, dgrad and wgrad so far, by the linear's path in the module tree. Nothing is
    /// read from the device.
    pub fn calls(&self) -> BTreeMap<String, [GemmTotals; 3]> {
        let calls = |layer: &Layer| Gemm::ALL.map(|gemm| layer.calls(gemm).totals());
        self.layers.iter().map(|(_, layer)| (layer.name().into(), calls(layer))).collect()
    }

    /// GEMM calls so far by path: FP8 paths (`wgmma`, `emulated`, ..), and `high_precision`.
    /// Nothing is read from the device.
    pub fn gemm_calls(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for (_, layer) in &self.layers {
            for gemm in Gemm::ALL {
                let GemmCalls { float8, high_precision, .. } = layer.calls(gemm);
                let float8 = float8.into_iter().map(|(path, calls)| (path.to_string(), calls));
                for (path, calls) in float8.chain([("high_precision".into(), high_precision)]) {
                    if calls > 0 {
                        *all.entry(path).or_default() += calls;
                    }
                }
            }
        }
        all
    }

    /// Statistics of the last sampled step, if the configuration samples any. Waits for the device
    /// to read them.
    pub fn health(&self) -> Vec<SampledOperand> {
        let mut all = vec![];
        for (device, layer) in &self.layers {
            if layer.applied().config.statistics.is_none() {
                continue;
            }
            DeviceState::<B::Inner>::of(layer, device).lock().samples.read();
            for operand in Operand::ALL {
                if let Some(health) = layer.sampled(operand) {
                    all.push(SampledOperand { layer: layer.name().into(), operand: operand.name(), health });
                }
            }
        }
        all
    }

    /// Amaxes of the last GEMMs, to be read later. Does not wait.
    pub fn amaxes(&self) -> Amaxes {
        let operands =
            |layer: &Layer, gemm| layer.calls(gemm).last.map(|(_, operands)| operands.map(|operand| operand.amaxes));
        let layers = self.layers.iter();
        Amaxes {
            layers: layers
                .map(|(_, layer)| LayerAmaxes {
                    layer: layer.clone(),
                    operands: Gemm::ALL.map(|gemm| operands(layer, gemm)),
                })
                .collect(),
        }
    }
}

impl Amaxes {
    /// First non-finite operand, in the order of a step's computation: forward from the first layer
    /// to the last, then backward from the last to the first. Waits for the device to read amaxes.
    pub fn first_non_finite(&self) -> Option<NonFiniteOperand> {
        let find = |of: &LayerAmaxes, gemm: Gemm| {
            let operands = of.operands[gemm as usize].as_ref()?;
            let amaxes = operands.iter().map(|operand| operand.read()).map(|(own, scaling)| own.unwrap_or(scaling));
            let (operand, amax) = gemm.operands().into_iter().zip(amaxes).find(|(_, amax)| !amax.is_finite())?;
            Some(NonFiniteOperand { layer: of.layer.name().into(), gemm, role: operand.role.name(), amax })
        };
        let forward = self.layers.iter().find_map(|of| find(of, Gemm::Fprop));
        let backward = |of| find(of, Gemm::Dgrad).or_else(|| find(of, Gemm::Wgrad));
        forward.or_else(|| self.layers.iter().rev().find_map(backward))
    }
}
