//! Text form of the report: a table of GEMMs, and a table of statistics if any were sampled.
use core::fmt::{Display, Formatter, Result};

use super::report::{LayerReport, OperandReport, Report};
use crate::backend::SelfCheckReport;
use crate::layer::{CastHealth, GemmTotals};

/// One row per GEMM: calls in FP8 and in high precision, path, padding, bytes of both operands, and
/// their amaxes and scales.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for name in &self.untagged {
            writeln!(f, "{name} carries no layer: no configuration applies to it")?;
        }
        if self.layers.is_empty() {
            return f.write_str("no linear was converted to FP8");
        }
        let width = self.layers.iter().map(|l| l.name.len()).max().unwrap_or(0).max("layer".len());
        writeln!(
            f,
            "{:width$}  {:5}  {:>8}  {:>6}  {:>9}  {:>7}  {:>9}  {:>19}  {:>19}  note",
            "layer", "gemm", "float8", "high", "path", "padding", "bytes", "amax, scale of a", "amax, scale of b"
        )?;
        for layer in &self.layers {
            gemm_rows(f, layer, width)?;
        }
        health_rows(f, self, width)?;
        write!(f, "{}", self.totals())?;
        if self.self_check == SelfCheckReport::default() { Ok(()) } else { write!(f, "\n{}", self.self_check) }
    }
}

fn gemm_rows(f: &mut Formatter<'_>, layer: &LayerReport, width: usize) -> Result {
    let idle = layer.totals() == GemmTotals::default();
    for (gemm, calls) in layer.gemms() {
        let float8 = calls.native + calls.emulated;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        write!(
            f,
            "{:width$}  {gemm:5}  {float8:>8}  {:>6}  {:>9}  {:>7}  {:>9}",
            layer.name,
            calls.high_precision,
            or_dash(calls.path.clone()),
            or_dash(calls.padding().map(|share| format!("{:.1}%", 100.0 * share))),
            or_dash(calls.bytes().map(|bytes| bytes.to_string())),
        )?;
        for OperandReport { amax, scale, .. } in &calls.operands {
            let number = |x: Option<f32>| or_dash(x.filter(|_| float8 > 0).map(|x| format!("{x:.2e}")));
            write!(f, "  {:>9} {:>9}", number(*amax), number(*scale))?;
        }
        write!(f, "  {}", layer.policy)?;
        let reason = calls.reason.as_ref().filter(|reason| !layer.policy.contains(reason.as_str()));
        if let Some(reason) = reason {
            write!(f, "; high precision: {reason}")?;
        }
        if let Some(cost) = &calls.cost {
            write!(f, "; {cost}")?;
        }
        if layer.weight_matmuls > 0 {
            write!(f, "; {} reads by Tensor::matmul, not FP8", layer.weight_matmuls)?;
        }
        if let Some(codes) = &layer.fp8_only {
            write!(f, "; weight: {codes}, FP8-only")?;
        }
        for (operation, times) in &layer.decodes {
            write!(f, "; decoded {times} times by {operation}")?;
        }
        if let Some(sharding) = &layer.sharding {
            write!(f, "; {sharding}")?;
        }
        if let Some(fallback) = &layer.fallback {
            write!(f, "; moved after step {}: {}", fallback.step, fallback.reason)?;
        }
        writeln!(f, "{}", if idle { "; never called as a linear" } else { "" })?;
    }
    Ok(())
}

fn health_rows(f: &mut Formatter<'_>, report: &Report, width: usize) -> Result {
    let operands = || {
        report.layers.iter().flat_map(|layer| {
            layer.gemms().into_iter().flat_map(move |(gemm, report)| {
                report.operands.iter().filter_map(move |o| Some((layer, gemm, &o.role, o.health.as_ref()?)))
            })
        })
    };
    if operands().next().is_none() {
        return Ok(());
    }
    writeln!(
        f,
        "{:width$}  {:5}  {:11}  {:>6}  {:>8}  {:>9}  {:>9}  {:>10}",
        "layer", "gemm", "operand", "step", "SQNR dB", "saturated", "flushed", "non-finite"
    )?;
    for (layer, gemm, role, health) in operands() {
        let CastHealth { sqnr_db, saturated, flushed, non_finite } = health.cast;
        write!(
            f,
            "{:width$}  {gemm:5}  {role:11}  {:>6}  {:>8}  {:>8.4}%  {:>8.4}%  {non_finite:>10}",
            layer.name,
            health.step,
            decibels(sqnr_db),
            100.0 * saturated,
            100.0 * flushed,
        )?;
        for (recipe, cast) in &health.compare {
            write!(f, "  {recipe}: {} dB", decibels(cast.sqnr_db))?;
        }
        writeln!(f)?;
    }
    Ok(())
}

fn decibels(sqnr: Option<f64>) -> String {
    sqnr.map_or_else(|| "-".into(), |sqnr| format!("{sqnr:.1}"))
}
