//! The scalar reference against independent definitions, one element at a time, in f64 and by
//! search.

mod casts;
mod codes;
mod gemm;
mod health;
pub(crate) mod oracle;
