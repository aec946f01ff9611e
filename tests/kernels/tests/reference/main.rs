//! Tests without comparisons of kernels: the scalar reference against independent definitions, one
//! element at a time, scales against formulas, and plans.

mod casts;
mod codes;
mod health;
mod oracle;
mod plan;
mod scales;
