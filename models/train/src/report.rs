//! What a run leaves behind about its linears.

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
