//! JSON output files of a run.

use std::path::Path;

use serde::Serialize;

use crate::TrainError;
use crate::atomic;

/// Checks that a file can be written to the path, before hours of training.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn check(path: &Path) -> Result<(), TrainError> {
    atomic::create(path).map(drop).map_err(|source| TrainError::Write { path: path.into(), source })
}

/// Writes pretty JSON atomically.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<(), TrainError> {
    atomic::replace_json(path, value).map_err(|source| TrainError::Write { path: path.into(), source })
}
