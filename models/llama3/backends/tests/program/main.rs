//! The program `llama3`, as a user runs it.

mod commands;
mod docs;
mod profile;
#[cfg(unix)]
mod runs;
mod support;
