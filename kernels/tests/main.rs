//! Tests without comparisons of kernels: the scalar reference against independent definitions,
//! scales against formulas, and errors. `tests/kernels` compares kernels with the reference.

mod common;
mod errors;
mod mx;
mod plan;
mod reference;
mod scales;
