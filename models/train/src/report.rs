//! What a run leaves behind about its linears.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::Module;
use burn_float8::{Float8Stack, Report, report, report::UNTAGGED_NAME};

use crate::{TrainError, json_file};

/// The report of this model's linears.
pub fn report_of<B: Float8Stack, M: Module<B>>(model: &M) -> Report {
    let mut report = report::<B, _>(model);
    // Every linear of a converted model has a tag: calls without one are those of other models of the process.
    report.layers.retain(|layer| layer.name != UNTAGGED_NAME);
    report
}

/// Calls of GEMMs between two reports of a model.
#[derive(Debug, Default)]
pub(crate) struct Calls(BTreeMap<String, [[u64; 3]; 3]>);

impl Calls {
    /// Adds those that were made from one report to the next.
    pub(crate) fn add(&mut self, before: &Report, after: &Report) {
        for (before, after) in before.layers.iter().zip(&after.layers) {
            let all = self.0.entry(after.name.clone()).or_default();
            for (calls, ((_, before), (_, after))) in all.iter_mut().zip(before.gemms().into_iter().zip(after.gemms()))
            {
                // A failed self-check makes emulated calls of native ones.
                calls[0] += after.native.saturating_sub(before.native);
                calls[1] += after.emulated.saturating_sub(before.emulated);
                calls[2] += after.high_precision.saturating_sub(before.high_precision);
            }
        }
    }

    /// The report of a model without these.
    pub(crate) fn left_out_of(&self, mut report: Report) -> Report {
        for layer in &mut report.layers {
            let Some(all) = self.0.get(&layer.name) else { continue };
            for (calls, gemm) in all.iter().zip([&mut layer.fprop, &mut layer.dgrad, &mut layer.wgrad]) {
                gemm.native = gemm.native.saturating_sub(calls[0]);
                gemm.emulated = gemm.emulated.saturating_sub(calls[1]);
                gemm.high_precision = gemm.high_precision.saturating_sub(calls[2]);
            }
        }
        report
    }
}

/// Refuses a path that no report can be written to, before hours of training.
///
/// # Errors
/// [`TrainError::Write`].
pub fn check_report_path(path: &Path) -> Result<(), TrainError> {
    json_file::check(path)
}

/// Writes pretty JSON: whoever reads `path` finds the whole report or what was there before.
///
/// # Errors
/// [`TrainError::Write`].
pub fn write_report(report: &Report, path: &Path) -> Result<(), TrainError> {
    json_file::write(path, report)
}
