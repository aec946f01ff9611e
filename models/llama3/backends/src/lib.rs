//! [`Llama3`]'s [`Job`]s on each of Burn's backends: compiles all generic code for them.
//!
//! A library starts compiling when the declarations of its dependencies are known, so in parallel
//! with burn-flex; a program waits for all their code. One library serves all GPU backends: they
//! share much code, which two libraries would compile twice.

use std::io::Write;
use std::num::NonZero;

use anyhow::Result;
use llama3::Llama3;
use train::Job;
pub use train_backends::main;

/// Runs the job of a command line, see [`train_backends::start`].
///
/// # Errors
/// The errors of [`train_backends::start`].
pub fn start(
    trains: bool,
    nproc: Option<NonZero<usize>>,
    job: impl FnOnce(&mut dyn Write) -> Result<Option<Job<Llama3>>>,
) -> Result<()> {
    train_backends::start(trains, nproc, job, run)
}

/// Runs a job on its device, and writes the log to `out`.
///
/// # Errors
/// The errors of the job.
pub fn run(job: &Job<Llama3>, out: &mut dyn Write) -> Result<()> {
    train_backends::run(job, out)
}
