//! Program `float8`: trains, resumes, evaluates, runs and exports the [decoders](models) on each of
//! Burn's backends.
//!
//! A library starts compiling when the declarations of its dependencies are known, so in parallel
//! with burn-flex; a program waits for all their code. One library serves all GPU backends: they
//! share much code, which two libraries would compile twice.

use std::io::Write;
use std::process::ExitCode;

use models::Decoders;
use trainer::Job;
use trainer::cli::Command;

/// Runs the command that `parse` reads from the arguments; a program's `main` should do nothing
/// else.
pub fn main(parse: fn() -> Command) -> ExitCode {
    trainer::backends::main(|| {
        let command = parse();
        trainer::backends::start(command.trains(), command.nproc(), |out| command.job(out), run)
    })
}

/// Runs a job on its device, and writes the log to `out`.
///
/// # Errors
/// The errors of the job.
pub fn run(job: &Job<Decoders>, out: &mut dyn Write) -> anyhow::Result<()> {
    trainer::backends::run(job, out)
}
