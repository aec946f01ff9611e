//! Adds up the parts of a split contraction, in order, and finishes as an epilogue does.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::Gemm;
use super::bias::{Bias, BiasLaunch};
use crate::Granularity;
use crate::grid::{UNITS, fold};
use crate::scale::sum_factor;
use crate::version::{VERSION, Version};

/// Launches the kernel on `partials`, f32 `[splits, rows, pitch]`.
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    gemm: &Gemm,
    partials: &Handle,
    splits: usize,
    [rows, pitch]: [usize; 2],
) {
    let (m, n) = (gemm.m(), gemm.n());
    // SAFETY: partial sums and output have the sizes given here, and every index is below `m · n`.
    unsafe {
        gemm_combine::launch_unchecked::<R>(
            client,
            fold(client, (m * n).div_ceil(UNITS as usize) as u32),
            CubeDim::new_1d(UNITS),
            ArrayArg::from_raw_parts(partials.clone(), splits * rows * pitch),
            gemm.a.scales_array(),
            gemm.b.scales_array(),
            BiasLaunch::of(gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n),
            m as u32,
            n as u32,
            (rows * pitch) as u32,
            pitch as u32,
            splits as u32,
            [gemm.a.granularity, gemm.b.granularity],
            gemm.accumulate,
            gemm.dtype,
            VERSION,
        );
    }
}

#[cube(launch_unchecked)]
fn gemm_combine<O: Float>(
    partials: &Array<f32>,
    inv_scale_a: &Array<u32>,
    inv_scale_b: &Array<u32>,
    bias: &Bias,
    out: &mut Array<O>,
    m: u32,
    n: u32,
    part: u32,
    pitch: u32,
    splits: u32,
    #[comptime] granularities: [Granularity; 2],
    #[comptime] accumulate: bool,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let index = ABSOLUTE_POS as u32;
    let row = index / n;
    let col = index % n;
    if row >= m {
        terminate!();
    }
    let mut sum = 0.0f32;
    for split in 0..splits {
        sum += partials[(split * part + row * pitch + col) as usize];
    }
    if comptime!(!Granularity::any_blocks(granularities)) {
        let scale_a = sum_factor(inv_scale_a, row, 0u32, 1u32, comptime!(granularities[0]));
        let scale_b = sum_factor(inv_scale_b, col, 0u32, 1u32, comptime!(granularities[1]));
        sum *= scale_a * scale_b;
    }
    sum += bias.at(col);
    if comptime!(accumulate) {
        sum += f32::cast_from(out[index as usize]);
    }
    out[index as usize] = O::cast_from(sum);
}
