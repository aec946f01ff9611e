//! JSON output files of a run.

use anyhow::Context;
use std::path::Path;

use serde::Serialize;

use crate::TrainError;
use crate::atomic;

/// Checks that a file can be written to the path, before hours of training.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn check(path: &Path) -> Result<(), TrainError> {
    atomic::create(path).map(drop).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes pretty JSON atomically.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<(), TrainError> {
    atomic::replace_json(path, value).with_context(|| format!("cannot write {}", path.display()))
}
