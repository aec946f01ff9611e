//! The program `llama3`, as a user runs it.

mod commands;
#[cfg(unix)]
mod runs;
mod support;
