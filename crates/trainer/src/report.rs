//! Reports of a run's linears.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use burn::module::Module;
use burn_float8::report::{GemmTotals, UNTAGGED_NAME};
use burn_float8::{Float8Stack, Report, report};

use crate::atomic;

/// Report of the model's linears.
pub fn report_of<B: Float8Stack, M: Module<B>>(model: &M) -> Report {
    let mut report = report::<B, _>(model);
    // Every linear of a converted model has a tag. Untagged calls belong to other models of the
    // process.
    report.layers.retain(|layer| layer.name != UNTAGGED_NAME);
    report
}

/// GEMM calls, as in [`Monitor::calls`](burn_float8::Monitor::calls).
pub(crate) type Calls = BTreeMap<String, [GemmTotals; 3]>;

/// Adds the calls between two snapshots to `calls`.
pub(crate) fn add_calls(calls: &mut Calls, before: &Calls, after: Calls) {
    for (layer, after) in after {
        let before = before.get(&layer).copied().unwrap_or_default();
        for (sum, (before, after)) in calls.entry(layer).or_default().iter_mut().zip(before.into_iter().zip(after)) {
            sum.native += after.native - before.native;
            sum.emulated += after.emulated - before.emulated;
            sum.high_precision += after.high_precision - before.high_precision;
        }
    }
}

/// Subtracts these calls from the report of a model.
pub(crate) fn without_calls(mut report: Report, calls: &Calls) -> Report {
    for layer in &mut report.layers {
        let Some(calls) = calls.get(&layer.name) else { continue };
        for (calls, gemm) in calls.iter().zip([&mut layer.fprop, &mut layer.dgrad, &mut layer.wgrad]) {
            // After a failed self-check, the report counts native calls as emulated.
            let native = calls.native.min(gemm.native);
            gemm.native -= native;
            gemm.emulated -= calls.emulated + calls.native - native;
            gemm.high_precision -= calls.high_precision;
        }
    }
    report
}

/// Checks that a report can be written to the path, before hours of training.
///
/// # Errors
/// The path cannot be written.
pub fn check_report_path(path: &Path) -> Result<()> {
    atomic::check(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the report as pretty JSON, atomically.
///
/// # Errors
/// The path cannot be written.
pub fn write_report(report: &Report, path: &Path) -> Result<()> {
    atomic::replace_json(path, report).with_context(|| format!("cannot write {}", path.display()))
}
