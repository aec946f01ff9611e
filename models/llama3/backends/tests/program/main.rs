//! The program `llama3`, as a user runs it.

mod commands;
mod docs;
#[cfg(unix)]
mod runs;
mod support;
