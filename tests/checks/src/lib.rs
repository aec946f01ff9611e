//! Comparisons of every kernel with the scalar reference, on any CubeCL runtime, and of linears with the CPU's, on any backend: each
//! case gives its worst error or says what is wrong.
//!
//! ```text
//! quantize, amax    codes, scales and maxima are the reference's, bit for bit
//! scale, encode     the same for amaxes of every kind, and for elements of every kind
//! transpose         codes and scales are the reference's, bit for bit, and those of the cast of the transpose
//! dequantize_to_f32 f32 is the reference's, bit for bit
//! dequantize_mx     bf16 is the reference's, bit for bit
//! health            counts are equal, those of known elements too; sums of squares within f32 summation
//! swiglu, rms_norm, rotary   within f32 of their definitions in f64
//! scaled_gemm       |got - want| ≤ bound · Σ |a·b|, want in f64 (see [`error_bound`](float8_kernels::GemmPath::error_bound))
//! grouped_gemm      the same in each group, and zeros where there is none
//! repeated_gemm     exact sums, 200 launches without a wait
//! golden_*          casts, scales and codes are torch's and torchao's, bit for bit; linears within what sums lose
//! linear            y, dx, dw and db of Burn's `Linear` are the CPU's: exact sums, and others within what sums lose
//! ```
//!
//! Fresh device memory is filled with NaN patterns before each case, so that an output that nobody writes is noticed.

mod agree;
mod amax;
mod case;
mod cast;
mod compare;
mod data;
mod dequantize;
mod device;
mod few_rows;
mod fused;
mod gemm;
mod golden;
mod grouped;
mod health;
mod input;
mod linear;
mod matrix;
mod oracle;
mod repeated;
mod shapes;
mod supervise;
mod transposed;
mod vectors;
mod worker;

use cubecl::prelude::*;

pub use case::{Case, Failure, Size, caught};
pub use compare::{EMULATE, FAST, PRECISE};
pub use data::{BF16, DTYPES, F16, F32};
pub use device::poison;
pub use gemm::{Gemm, Memory};
pub use golden::{Goldens, visit_goldens};
pub use grouped::{GroupSizes, GroupedGemm};
pub use linear::{visit_golden_linears, visit_linears};
pub use matrix::{Codes, HostMatrix, MX};
pub use supervise::{CaseFailure, Done, Limits, Progress, StartError, supervise};
pub use vectors::{CastVector, mx_vectors, quantize_vectors};
pub use worker::Worker;

/// Hands every case to `visit`, which runs those that it wants to.
pub fn visit<R: Runtime>(client: &ComputeClient<R>, size: Size, visit: &mut dyn FnMut(Case<'_>)) {
    let mut cases = case::Cases::new(client, size, visit);
    cast::add(&mut cases);
    dequantize::add(&mut cases);
    transposed::add(&mut cases);
    amax::add(&mut cases);
    health::add(&mut cases);
    fused::add(&mut cases);
    gemm::add(&mut cases);
    few_rows::add(&mut cases);
    agree::add(&mut cases);
    grouped::add(&mut cases);
    repeated::add(&mut cases);
}

/// Runs the cases whose names are wanted, until one fails: how many they are.
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
