//! What a run leaves behind about its linears: the report as a file, and the error that strict mode makes of it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn_float8::{Float8Stack, Report, UNTAGGED_NAME, report};

use crate::Error;
use crate::model::Llama;

/// The report of this model's linears.
pub(crate) fn report_of<B: Float8Stack>(model: &Llama<B>) -> Report {
    let mut report = report::<B, _>(model);
    // Every linear of a converted Llama has a tag: calls without one are those of other models of the process.
    report.layers.retain(|layer| layer.name != UNTAGGED_NAME);
    report
}

/// Refuses a path that no file can be written to, before hours of training.
pub(crate) fn check_destination(path: &Path) -> Result<(), Error> {
    let fail = |source: io::Error| Error::Write { path: path.into(), source };
    if path.is_dir() || path.file_name().is_none() {
        return Err(fail(io::ErrorKind::IsADirectory.into()));
    }
    // A name beside it, as the report will be written.
    let beside = beside(path);
    fs::File::create(&beside).and_then(|_| fs::remove_file(&beside)).map_err(fail)
}

/// Writes pretty JSON: whoever reads `path` finds the whole report or what was there before.
pub(crate) fn write(report: &Report, path: &Path) -> Result<(), Error> {
    let beside = beside(path);
    let written = || -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(report)?;
        text.push(b'\n');
        let mut file = fs::File::create(&beside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    written().map_err(|source| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&beside);
        Error::Write { path: path.into(), source }
    })
}

/// A hidden name in the same folder, so on the same file system.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}
