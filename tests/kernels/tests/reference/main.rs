//! Tests without comparisons of kernels: the scalar reference against independent definitions, one
//! element at a time, scales against formulas, plans, and errors.

mod casts;
mod codes;
mod errors;
mod health;
mod mx;
mod oracle;
mod plan;
mod scales;
