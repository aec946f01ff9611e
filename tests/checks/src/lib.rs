//! Comparisons of every kernel with the scalar reference, on any CubeCL runtime: each case gives its worst error or says
//! what is wrong, and none stops the others.
//!
//! ```text
//! quantize, amax    codes, scales and maxima are the reference's, bit for bit
//! dequantize_mx     bf16 is the reference's, bit for bit
//! health            counts are equal, sums of squares within f32 summation
//! scaled_gemm       |got - want| ≤ bound · Σ |a·b|, want in f64 (see [`Bound`])
//! grouped_gemm      the same in each group, and zeros where there is none
//! ```
//!
//! Fresh device memory is filled with NaN patterns before each case, so that an output that nobody writes is noticed.

mod case;
mod cast;
mod compare;
mod data;
mod dequantize;
mod device;
mod gemm;
mod grouped;
mod matrix;
mod oracle;
mod statistics;

use cubecl::prelude::*;

pub use case::{Failure, Options, Outcome, Size};
pub use compare::Bound;
pub use device::poison;

/// Runs the cases that `options` name, one after the other.
pub fn run<R: Runtime>(client: &ComputeClient<R>, options: &Options) -> Vec<Outcome> {
    let mut outcomes = vec![];
    run_with(client, options, |outcome| outcomes.push(outcome));
    outcomes
}

/// The same, with each outcome as soon as it is known.
pub fn run_with<R: Runtime>(client: &ComputeClient<R>, options: &Options, mut each: impl FnMut(Outcome)) {
    let mut runner = case::Runner::new(client, options, &mut each);
    cast::run(&mut runner);
    dequantize::run(&mut runner);
    statistics::run(&mut runner);
    gemm::run(&mut runner);
    grouped::run(&mut runner);
}
