//! The conformance suite: one set of cases, run over every runtime that the machine has.
mod support;

mod config;
mod cuda_offline;
mod decorator;
mod delayed;
mod dtypes;
mod errors;
mod fused;
mod golden_cast;
mod golden_linear;
mod golden_llama;
mod golden_quantize;
mod golden_trajectory;
mod gradients;
mod grouped;
mod health;
mod mx;
mod nonfinite;
mod properties;
mod recipes;
mod saved;
mod schedule;
mod shapes;
