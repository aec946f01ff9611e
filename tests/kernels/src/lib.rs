//! Checks of every kernel against the scalar reference on any CubeCL runtime, and of linears
//! against the CPU on any backend.
//!
//! Each case returns its worst error or a failure.
//!
//! ```text
//! quantize, amax    codes, scales and maxima are the reference's, bit for bit
//! scale, encode     the same for amaxes and for elements of every kind
//! transpose         codes and scales are the reference's, bit for bit, and equal the codes and
//!                   scales of a cast of the transpose
//! dequantize_to_f32 f32 is the reference's, bit for bit
//! dequantize_mx     bf16 is the reference's, bit for bit
//! health            counts are equal, for known elements too; sums of squares within f32 summation
//! swiglu, rms_norm, rotary   within f32 of their definitions in f64
//! attention         forward and gradients within bounds of their definition in f64, element by element
//! adamw             parameter and moments likewise; stochastic rounding by its keys
//! scaled_gemm       |got - want| ≤ bound · Σ |a·b|, want in f64 (see GemmPath::error_bound)
//! matmul_halves     exact sums, bit for bit
//! grouped_gemm      the same in each group, and zeros outside the groups
//! repeated_gemm     exact sums, 200 launches without a wait
//! golden_*          casts, scales and codes are torch's and torchao's, bit for bit;
//!                   linears within summation error
//! linear            y, dx, dw and db of Burn's `Linear` are the CPU's: exact sums, and others
//!                   within summation error
//! ```
//!
//! Device memory is filled with NaN patterns before each case, so that an element without a write
//! is noticed.

mod amax;
mod attention;
mod case;
mod cast;
mod codes;
mod compare;
mod data;
mod device;
mod fused;
mod gemm;
mod golden;
mod health;
mod input;
mod linear;
mod matrix;
mod oracle;
mod supervise;
mod variants;
mod vectors;
mod worker;

use cubecl::prelude::*;

pub use case::{Case, Failure, Size, caught};
pub use cast::{casts, encoder_inputs};
pub use compare::{EMULATE, FAST, PRECISE};
pub use data::{BF16, DTYPES, F16, F32};
pub use device::poison;
pub use gemm::{Gemm, GroupSizes, GroupsCase, Memory};
pub use golden::visit_goldens;
pub use linear::{visit_golden_linears, visit_linears};
pub use matrix::{Codes, HostMatrix, MX};
pub use oracle::{Element, Factor, products};
pub use supervise::{CaseFailure, Done, Limits, Progress, StartError, supervise};
pub use vectors::{CastVector, Goldens};
pub use worker::Worker;

/// Passes every case to `visit`, which decides what to run.
pub fn visit<R: Runtime>(client: &ComputeClient<R>, size: Size, visit: &mut dyn FnMut(Case<'_>)) {
    let mut cases = case::Cases::new(client, size, visit);
    cast::add(&mut cases);
    codes::add(&mut cases);
    amax::add(&mut cases);
    health::add(&mut cases);
    fused::add(&mut cases);
    attention::add(&mut cases);
    variants::add(&mut cases);
    gemm::add(&mut cases);
}

/// Runs the cases whose names pass `wanted`, until one fails. Returns their number.
///
/// # Errors
/// The failure, with the name of its case.
pub fn run<R: Runtime>(client: &ComputeClient<R>, size: Size, wanted: impl Fn(&str) -> bool) -> Result<usize, Failure> {
    let mut done = Ok(0);
    visit(client, size, &mut |case| {
        let name = case.name.clone();
        if let (Ok(count), true) = (&mut done, wanted(&name)) {
            *count += 1;
            if let Err(failure) = case.run() {
                done = Err(Failure::Wrong(format!("{name}: {failure}")));
            }
        }
    });
    done
}
