//! [`Llama3`]'s [`Job`]s on each of Burn's backends: all that generic code, compiled for them.
//!
//! A library is compiled as soon as the declarations of what it uses are known, so beside burn-flex; a program waits for
//! all their code. One library for all: the GPU backends share a lot of it, which two would compile twice.

use std::io::Write;
use std::num::NonZero;

use llama3::Llama3;
use train::{Job, JobError};
pub use train_backends::main;

/// Does the job of a command line, as [`train_backends::start`] says.
///
/// # Errors
/// The errors of [`train_backends::start`].
pub fn start(
    trains: bool,
    nproc: Option<NonZero<usize>>,
    job: impl FnOnce(&mut dyn Write) -> Result<Option<Job<Llama3>>, JobError>,
) -> Result<(), JobError> {
    train_backends::start(trains, nproc, job, run)
}

/// Does what is asked for on the device that it asks for, and writes the log to `out`.
///
/// # Errors
/// Any [`JobError`].
pub fn run(job: &Job<Llama3>, out: &mut dyn Write) -> Result<(), JobError> {
    train_backends::run(job, out)
}
