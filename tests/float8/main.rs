//! Linears and ordinary Burn programs with FP8 linears, on every runtime of the machine.
mod support;

mod config;
mod decorator;
mod docs;
mod numerics;
mod programs;
mod training;
