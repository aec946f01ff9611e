//! [`report`]: execution of each linear of a model.
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn_backend::tensor::Device;
use float8_kernels::{GEMV_ROWS, reference};
use serde::{Deserialize, Serialize};

use super::walk::{FoundLinear, linears};
use crate::backend::{Float8Backend, GemmConfig, GemmPath, OperandSize, SelfCheckReport};
use crate::config::{Policy, Untagged, shortened};
use crate::error::Float8Error;
use crate::layer::{
    Fallback, GemmTotals, LastOperand, Layer, OperandHealth, Tag, UNTAGGED_NAME, UntaggedRule, non_finite,
    untagged_rule, was_applied,
};
use crate::stack::Float8Stack;
use crate::step::DeviceState;
use crate::tensor::{ShardingReport, source_of};
use crate::terms::{Gemm, Role};

/// Last cast of one operand of one GEMM of one linear.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OperandReport {
    /// `input`, `weight` or `grad_output`.
    pub role: Cow<'static, str>,
    /// Size, padding and bytes.
    pub size: Option<OperandSize>,
    /// Its max |x|.
    #[serde(with = "non_finite")]
    pub amax: Option<f32>,
    /// Scale of its largest element: the scale of its tensor, or the smallest of its rows or
    /// blocks. `code = x · scale`; compressed-tensors and vLLM store the inverse.
    #[serde(with = "non_finite")]
    pub scale: Option<f32>,
    /// Statistics of the last sampled step.
    pub health: Option<OperandHealth>,
}

/// Calls of one GEMM of one linear since the layer was tagged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GemmReport {
    /// Calls on FP8 tensor cores, or with few rows by [`GemmPath::Gemv`].
    pub native: u64,
    /// Calls with FP8 numerics but without FP8 tensor cores.
    pub emulated: u64,
    /// Calls in the tensors' own dtype.
    pub high_precision: u64,
    /// Path of the last FP8 call. Without one, the kernel of high-precision calls if Burn's has not
    /// computed them.
    pub path: Option<String>,
    /// Cost of this path, if the device runs other recipes faster.
    pub cost: Option<Cow<'static, str>>,
    /// Operands: x and w in fprop, dy and w in dgrad, x and dy in wgrad.
    pub operands: [OperandReport; 2],
    /// Reason of the last high-precision call.
    pub reason: Option<String>,
    /// Reason of the last unrequested high-precision call.
    pub unrequested: Option<String>,
}

impl GemmReport {
    /// Share of padding in the codes of the last FP8 call: `padded_k / k - 1`.
    pub fn padding(&self) -> Option<f64> {
        self.operands[0].size.map(|a| a.padded_k as f64 / a.k as f64 - 1.0)
    }

    /// Bytes of codes and scales of both operands of the last FP8 call.
    pub fn bytes(&self) -> Option<u64> {
        let [a, b] = &self.operands;
        Some(a.size?.bytes + b.size?.bytes)
    }
}

/// Execution of one linear.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Path in the module tree.
    pub name: String,
    /// Recipe, or reason for high precision.
    pub policy: String,
    /// Whether its policy is FP8.
    pub is_float8: bool,
    /// y = x · w
    pub fprop: GemmReport,
    /// dx = dy · wᵀ
    pub dgrad: GemmReport,
    /// dw = xᵀ · dy
    pub wgrad: GemmReport,
    /// Casts of x, w and dy by this layer. A copy shared with another layer counts for the layer
    /// that made it.
    pub casts: [u64; 3],
    /// Live FP8 copies made for this layer.
    pub live_copies: u64,
    /// Bytes of their codes and scales.
    pub live_bytes: u64,
    /// Calls of `Tensor::matmul` on the weight in high precision.
    pub weight_matmuls: u64,
    /// Format and granularity of an [FP8-only weight](crate::weights).
    pub fp8_only: Option<String>,
    /// Number of decodes of such a weight by operation.
    pub decodes: BTreeMap<Cow<'static, str>, u64>,
    /// Fallback of the layer, if statistics moved it.
    pub fallback: Option<Fallback>,
    /// Rows of its weight in this process, if the weight is sharded.
    pub sharding: Option<ShardingReport>,
}

/// Every linear of a model in the order of the module tree, then the device's untagged linears if
/// they had calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The linears.
    pub layers: Vec<LayerReport>,
    /// Linears of the model that lost their tags, unless a configuration allows it. Causes: a
    /// record without FP8 layers was loaded, or weights were quantized or rebuilt from data.
    pub untagged: Vec<String>,
    /// Self-check results of the model's devices. Empty for CPUs.
    pub self_check: SelfCheckReport,
    /// Fastest algorithm of the backend's attention: `mma` on tensor cores, for f16 and bf16; `tiles`
    /// of queries and keys in a kernel; or `blocks` of queries by Burn's matmuls.
    pub attention: Cow<'static, str>,
}

/// Returns the execution of each linear of `model` since it was tagged. If the device's untagged
/// linears had calls, the last row counts them. That row covers all models on the device, since a
/// configuration was last applied there. Slicing a weight or rebuilding it from data drops its tag.
/// Waits for the device to read amaxes and statistics.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_float8::{Float8, Float8Config, report};
///
/// type B = Float8<Autodiff<Flex>>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(64, 32).init(&device);
/// let (model, _) = Float8Config::tensorwise().apply(model).unwrap();
/// model.forward(Tensor::<B, 2>::ones([8, 64], &device)).mean().backward();
/// let report = report(&model);
/// println!("{report}"); // a row for each GEMM
/// let linear = &report.layers[0];
/// let calls = [&linear.fprop, &linear.dgrad, &linear.wgrad].map(|gemm| gemm.emulated);
/// assert_eq!(calls, [1, 0, 1]); // x needs no gradient
/// report.verify().unwrap();
/// # }
/// ```
pub fn report<B: Float8Stack, M: Module<B>>(model: &M) -> Report {
    let found = linears::<B, M>(model, None);
    let layers: Vec<_> = found.iter().filter_map(|linear| Some(linear.tag.as_ref()?.layer.clone())).collect();
    let places: Vec<_> = found.iter().filter_map(|linear| linear.tag.as_ref().map(|_| linear.device.clone())).collect();
    let codes: Vec<_> = found.iter().filter(|linear| linear.tag.is_some()).map(FoundLinear::codes).collect();
    let (mut of_devices, mut untagged): (Vec<(Arc<Layer>, _)>, _) = (vec![], vec![]);
    for FoundLinear { info, device, tag, .. } in found {
        let of_device = B::untagged_layer(&device);
        if !of_devices.iter().any(|(l, _)| Arc::ptr_eq(l, &of_device)) {
            of_devices.push((of_device, device.clone()));
        }
        match tag {
            Some(Tag { layer, .. }) if layer.applied().config.statistics.is_some() => {
                DeviceState::<B::Inner>::of(&layer, &device).lock().samples.read();
            }
            None => {
                let was_applied = was_applied::<B::Inner>(&device, &info);
                if is_lost(&info.name, untagged_rule::<B::Inner>(&device), was_applied, &layers) {
                    untagged.push(info.name);
                }
            }
            _ => {}
        }
    }
    let self_checks: Vec<_> =
        of_devices.iter().map(|(_, device)| (device.clone(), B::Inner::fp8_self_check(device, true))).collect();
    let of = |device: &B::Device| &self_checks.iter().find(|(of, _)| of == device).expect("one for each device").1;
    of_devices.retain(|(l, _)| Gemm::ALL.iter().any(|g| l.calls(*g).totals() != GemmTotals::default()));
    let rows = layers.into_iter().zip(places).chain(of_devices);
    let rows = rows.zip(codes.into_iter().chain(core::iter::repeat(None)));
    let layers = rows
        .map(|((layer, device), fp8_only)| LayerReport {
            fp8_only,
            ..LayerReport::new::<B::Inner>(&layer, &device, of(&device))
        })
        .collect();
    let self_check =
        self_checks.iter().map(|(_, found)| found.clone()).reduce(SelfCheckReport::and).unwrap_or_default();
    let attention = model.devices().first().map_or("", |device| B::Inner::fp8_facts(device).attention).into();
    Report { layers, untagged, self_check, attention }
}

/// Whether an untagged linear is an error in a model with these layers.
///
/// It is not an error if a configuration sets the rule for untagged linears. It is also allowed if
/// no configuration was applied to the model and its linears use the device's default.
fn is_lost(name: &str, rule: Option<UntaggedRule>, was_applied: bool, layers: &[Arc<Layer>]) -> bool {
    let is_alone = layers.is_empty() && !was_applied;
    match rule {
        _ if layers.iter().any(|layer| layer.applied().was_quantized(name)) => false,
        Some(UntaggedRule { is_configured: true, .. }) => false,
        Some(UntaggedRule { choice: Untagged::Default, .. }) | None => !is_alone,
        Some(_) => true,
    }
}

impl LayerReport {
    fn new<B: Float8Backend>(layer: &Layer, device: &Device<B>, self_check: &SelfCheckReport) -> Self {
        let gemm = |gemm: Gemm| {
            let calls = layer.calls(gemm);
            let GemmTotals { mut native, mut emulated, high_precision } = calls.totals();
            let (path, operands) = calls.last.unzip();
            let granularities =
                operands.as_ref().map(|operands: &[LastOperand; 2]| operands.each_ref().map(|o| o.cast.granularity));
            let cost = path.and_then(GemmPath::cost).map(Cow::from);
            let rows = operands.as_ref().map_or(0, |[a, _]| a.size.rows);
            let path = path.zip(granularities).map(|(path, granularities)| {
                let mut lost = self_check.lost_paths(granularities);
                if rows > GEMV_ROWS {
                    lost.retain(|lost| *lost != GemmPath::Gemv.to_string());
                }
                if lost.is_empty() {
                    return path.to_string();
                }
                let config = GemmConfig { emulate: path == GemmPath::Emulated, ..Default::default() };
                // Other paths have many rows, or groups.
                let rows = (path == GemmPath::Gemv).then_some(rows);
                let now = B::fp8_facts(device).gemm_path(rows, granularities, config);
                if now == GemmPath::Gemv {
                    return path.to_string();
                }
                let path = now;
                // A call counts under the path from before its kernel was judged. After a failure,
                // all earlier calls of the path count under the path that is left.
                if !path.is_native() {
                    (native, emulated) = (0, native + emulated);
                }
                format!("{path} (self-check of {} failed)", lost.join(", "))
            });
            let path = path.or_else(|| {
                let kernel = calls.high_precision_kernel?;
                let is_left = B::fp8_facts(device).gemm.is_some_and(|gemm| gemm.has_half_gemm());
                Some(if is_left { kernel.into() } else { format!("burn (self-check of {kernel} failed)") })
            });
            let [reason, unrequested] = [calls.reason, calls.unrequested].map(|r| r.map(|r| r.to_string()));
            let operands = [0, 1].map(|i| {
                let operand = gemm.operands()[i];
                let last = operands.as_ref().map(|operands| &operands[i]);
                let (amax, scale) = last.map_or((None, None), |last| {
                    let (observed, scaling) = last.amaxes.read();
                    let scale = reference::amax_to_scale(scaling, last.cast.format, last.cast.scale_mode);
                    (observed, Some(scale.get()))
                });
                let (role, size, health) =
                    (operand.role.name().into(), last.map(|last| last.size), layer.sampled(operand));
                OperandReport { role, size, amax, scale, health }
            });
            GemmReport { native, emulated, high_precision, path, cost, operands, reason, unrequested }
        };
        let policy = layer.active();
        Self {
            name: layer.name().into(),
            policy: policy.to_string(),
            is_float8: matches!(policy.as_ref(), Policy::Float8(_)),
            fprop: gemm(Gemm::Fprop),
            dgrad: gemm(Gemm::Dgrad),
            wgrad: gemm(Gemm::Wgrad),
            casts: Role::ALL.map(|role| layer.casts(role)),
            live_copies: layer.live_copies(),
            live_bytes: layer.live_bytes(),
            weight_matmuls: layer.weight_matmuls(),
            fp8_only: None,
            decodes: layer.decodes().into_iter().map(|(operation, times)| (operation.into(), times)).collect(),
            fallback: layer.fallback(),
            sharding: source_of::<B>(layer).map(|source| source.layout().report),
        }
    }

    /// The three GEMMs.
    pub fn gemms(&self) -> [(Gemm, &GemmReport); 3] {
        [(Gemm::Fprop, &self.fprop), (Gemm::Dgrad, &self.dgrad), (Gemm::Wgrad, &self.wgrad)]
    }

    /// Calls of all three GEMMs.
    pub fn totals(&self) -> GemmTotals {
        let totals =
            |g: &GemmReport| GemmTotals { native: g.native, emulated: g.emulated, high_precision: g.high_precision };
        self.gemms().into_iter().map(|(_, g)| totals(g)).sum()
    }
}

impl Report {
    /// Calls of all GEMMs of all linears.
    pub fn totals(&self) -> GemmTotals {
        self.layers.iter().map(LayerReport::totals).sum()
    }

    /// Checks that every linear with an FP8 policy ran in FP8. At the end of a run this also finds
    /// layers that were never called, which `strict` cannot.
    ///
    /// # Errors
    ///
    /// [`Float8Error::SelfCheck`] if a kernel was wrong, [`Float8Error::Lost`] if results are lost.
    /// For the first layer that did not run in FP8:
    /// [`UnrequestedHighPrecision`](Float8Error::UnrequestedHighPrecision) or
    /// [`NeverCalled`](Float8Error::NeverCalled). [`UntaggedLinears`](Float8Error::UntaggedLinears)
    /// if [`untagged`](Self::untagged) is not empty.
    pub fn verify(&self) -> Result<(), Float8Error> {
        self.self_check.fault().map_or(Ok(()), Err)?;
        // This row also counts linears of other models.
        let layers = || self.layers.iter().filter(|layer| layer.name != UNTAGGED_NAME);
        for layer in layers() {
            for (gemm, calls) in layer.gemms() {
                if let Some(reason) = calls.unrequested.clone() {
                    return Err(Float8Error::UnrequestedHighPrecision { layer: layer.name.clone(), gemm, reason });
                }
            }
        }
        if !self.untagged.is_empty() {
            let names = shortened(self.untagged.iter().map(String::as_str));
            return Err(Float8Error::UntaggedLinears { linears: self.untagged.len(), names });
        }
        for layer in layers() {
            if layer.is_float8 && layer.totals() == GemmTotals::default() {
                let (layer, weight_matmuls) = (layer.name.clone(), layer.weight_matmuls);
                return Err(Float8Error::NeverCalled { layer, weight_matmuls });
            }
        }
        Ok(())
    }
}
