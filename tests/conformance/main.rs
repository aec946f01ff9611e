//! The conformance suite: one set of cases, run over every runtime that the machine has.
mod support;

mod config;
mod decorator;
mod numerics;
mod training;
