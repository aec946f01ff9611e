//! The conformance suite: one set of cases, run over every runtime that the machine has.
mod support;

mod decorator;
mod dtypes;
mod errors;
mod fused;
mod golden_cast;
mod golden_linear;
mod golden_llama;
mod golden_quantize;
mod golden_trajectory;
mod gradients;
mod nonfinite;
mod shapes;
