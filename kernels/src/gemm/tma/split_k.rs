//! Split-K: adds the sums of the splits in order and finishes like an epilogue.

use cubecl::prelude::*;

use super::maps::Target;
use crate::gemm::Gemm;
use crate::gemm::problem::{Problem, ProblemLaunch};
use crate::grid::{UNITS, fold};
use crate::version::Version;

/// Launches the kernel that adds `partials`, the sums of `splits` splits of `rows` rows each.
pub(in crate::gemm) fn combine<R: Runtime>(
    client: &ComputeClient<R>,
    gemm: &Gemm,
    partials: &Target,
    splits: usize,
    rows: usize,
) {
    let (m, n, pitch) = (gemm.a.rows, gemm.b.rows, partials.pitch);
    // SAFETY: partial sums and output have the sizes given here, and every index is below `m · n`.
    unsafe {
        gemm_combine::launch_unchecked::<R>(
            client,
            fold(client, (m * n).div_ceil(UNITS as usize) as u32),
            CubeDim::new_1d(UNITS),
            partials.array(),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n),
            (rows * pitch) as u32,
            pitch as u32,
            splits as u32,
            gemm.dtype,
            Version::of(client),
        );
    }
}

#[cube(launch_unchecked)]
fn gemm_combine<O: Float>(
    partials: &Array<f32>,
    problem: &Problem,
    out: &mut Array<O>,
    part: u32,
    pitch: u32,
    splits: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let index = ABSOLUTE_POS as u32;
    let row = index / problem.n;
    let col = index % problem.n;
    if row >= problem.m {
        terminate!();
    }
    let mut sum = 0.0f32;
    for split in 0..splits {
        sum += partials[(split * part + row * pitch + col) as usize];
    }
    problem.store::<O>(out, sum, row, col);
}
