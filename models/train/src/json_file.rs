//! JSON files that a run leaves behind.

use std::path::Path;

use serde::Serialize;

use crate::TrainError;
use crate::atomic;

/// Refuses a path that no file can be written to, before hours of training.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn check(path: &Path) -> Result<(), TrainError> {
    atomic::create(path).map(drop).map_err(|source| TrainError::Write { path: path.into(), source })
}

/// Writes pretty JSON: whoever reads `path` finds all of it, or what was there before.
///
/// # Errors
/// [`TrainError::Write`].
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<(), TrainError> {
    atomic::replace_json(path, value).map_err(|source| TrainError::Write { path: path.into(), source })
}
