//! The Rust blocks of the documentation, written by `build.rs`. Each compiles and runs.
#![allow(warnings, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/docs.rs"));
