//! What needs no comparison of kernels: the scalar reference against definitions of its own, scales against formulas, and errors.
//! Kernels are compared with the reference in the crate `checks`.

mod common;
mod errors;
mod mx;
mod plan;
mod reference;
mod scales;
