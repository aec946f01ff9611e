//! [`report`]: what each linear of a model really did.
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use serde::Serialize;

use crate::apply::Path;
use crate::backend::Float8Ops;
use crate::layer::{Gemm, Layer, Policy, Role};

/// Calls of one GEMM of one linear since the layer was tagged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GemmReport {
    /// Calls on FP8 tensor cores.
    pub native: u64,
    /// Calls in FP8 numerics without FP8 tensor cores.
    pub emulated: u64,
    /// Calls in the tensors' own precision.
    pub high_precision: u64,
    /// How the last FP8 call was computed.
    pub path: Option<String>,
    /// Why the last high-precision call was one.
    pub reason: Option<String>,
}

/// One linear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerReport {
    /// Its path in the module tree.
    pub name: String,
    /// Its recipe, or why it is in high precision.
    pub policy: String,
    /// y = x · w
    pub fprop: GemmReport,
    /// dx = dy · wᵀ
    pub dgrad: GemmReport,
    /// dw = xᵀ · dy
    pub wgrad: GemmReport,
    /// Passes that cast x, w and dy on behalf of this layer; copies shared with another layer count there.
    pub casts: [u64; 3],
    /// FP8 copies alive now that were made on behalf of this layer.
    pub live_copies: u64,
}

/// Every linear of a model, in the order of the module tree, then the device's untagged linears if there were calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The linears.
    pub layers: Vec<LayerReport>,
}

/// GEMM calls by path, summed over a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GemmTotals {
    /// On FP8 tensor cores.
    pub native: u64,
    /// In FP8 numerics without FP8 tensor cores.
    pub emulated: u64,
    /// In the tensors' own precision.
    pub high_precision: u64,
}

impl core::iter::Sum for GemmTotals {
    fn sum<I: Iterator<Item = Self>>(totals: I) -> Self {
        totals.fold(Self::default(), |sum, t| Self {
            native: sum.native + t.native,
            emulated: sum.emulated + t.emulated,
            high_precision: sum.high_precision + t.high_precision,
        })
    }
}

impl core::fmt::Display for GemmTotals {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { native, emulated, high_precision } = self;
        write!(f, "GEMMs: {native} in FP8, {emulated} in FP8 emulated, {high_precision} in high precision")
    }
}

/// What each linear of `model` did since it was tagged. The last row, where there is one, stands for linears of any
/// model on the same device whose weights carry no tag.
pub fn report<B: Float8Ops, M: Module<B>>(model: &M) -> Report {
    struct Layers {
        path: Path,
        found: Vec<Arc<Layer>>,
        untagged: Vec<Arc<Layer>>,
    }
    impl<B: Float8Ops> ModuleVisitor<B> for Layers {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.path.linear_weight(D).is_none() {
                return;
            }
            let weight = param.val();
            let untagged = B::untagged_layer(&weight.device());
            if !self.untagged.iter().any(|l| Arc::ptr_eq(l, &untagged)) {
                self.untagged.push(untagged);
            }
            self.found.extend(B::layer(&weight.into_primitive().tensor()));
        }
    }
    let mut layers = Layers { path: Path::default(), found: vec![], untagged: vec![] };
    Module::<B>::visit(model, &mut layers);
    layers.untagged.retain(|l| Gemm::ALL.iter().any(|g| l.calls(*g) != [0; 3]));
    Report { layers: layers.found.iter().chain(&layers.untagged).map(|l| LayerReport::new(l)).collect() }
}

impl LayerReport {
    fn new(layer: &Layer) -> Self {
        let gemm = |gemm| {
            let [native, emulated, high_precision] = layer.calls(gemm);
            let (path, reason) = layer.last(gemm);
            let (path, reason) = (path.map(|p| p.to_string()), reason.map(|r| r.to_string()));
            GemmReport { native, emulated, high_precision, path, reason }
        };
        Self {
            name: layer.name().into(),
            policy: match layer.policy() {
                Policy::Float8(recipe) => recipe.to_string(),
                Policy::HighPrecision(reason) => format!("high precision: {reason}"),
            },
            fprop: gemm(Gemm::Fprop),
            dgrad: gemm(Gemm::Dgrad),
            wgrad: gemm(Gemm::Wgrad),
            casts: Role::ALL.map(|role| layer.casts(role)),
            live_copies: layer.live_copies(),
        }
    }

    /// Calls of all three GEMMs.
    pub fn totals(&self) -> GemmTotals {
        let totals =
            |g: &GemmReport| GemmTotals { native: g.native, emulated: g.emulated, high_precision: g.high_precision };
        [&self.fprop, &self.dgrad, &self.wgrad].into_iter().map(totals).sum()
    }
}

impl Report {
    /// Calls of all GEMMs of all linears.
    pub fn totals(&self) -> GemmTotals {
        self.layers.iter().map(LayerReport::totals).sum()
    }
}

/// A table: one row a linear, with calls as native/emulated/high precision for each GEMM.
impl core::fmt::Display for Report {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let width = self.layers.iter().map(|l| l.name.len()).max().unwrap_or(0).max("layer".len());
        writeln!(f, "{:width$}  {:>16}  {:>16}  {:>16}  policy", "layer", "fprop", "dgrad", "wgrad")?;
        for layer in &self.layers {
            write!(f, "{:width$}", layer.name)?;
            for gemm in [&layer.fprop, &layer.dgrad, &layer.wgrad] {
                let calls = format!("{}/{}/{}", gemm.native, gemm.emulated, gemm.high_precision);
                write!(f, "  {calls:>16}")?;
            }
            let idle = if layer.totals() == GemmTotals::default() { " (never called as a linear)" } else { "" };
            writeln!(f, "  {}{idle}", layer.policy)?;
        }
        write!(f, "{}", self.totals())
    }
}
