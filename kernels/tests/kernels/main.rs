//! The kernels on a real device against the scalar reference, and the reference against oracles of its own.

mod amax;
mod cast;
mod common;
mod errors;
mod gemm;
mod gemm_into;
mod given_amax;
mod grouped;
mod health;
mod mx;
mod oracle;
mod properties;
mod quantize;
mod reference;
mod scale;
