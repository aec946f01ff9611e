//! The conformance suite: one set of cases, on every runtime of the machine.
mod support;

mod config;
mod decorator;
mod numerics;
mod training;
