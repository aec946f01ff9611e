//! The program `llama3`, as a user runs it.

mod commands;
mod docs;
mod old_runs;
mod profile;
#[cfg(all(unix, feature = "mpi"))]
mod ranks;
#[cfg(unix)]
mod runs;
mod support;
