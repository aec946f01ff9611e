//! One GEMM many times without a wait between launches. This shows a race that one launch in a
//! hundred loses.
//!
//! Matrices of -1, 0 and 1 give exact sums. Each plain launch must give the emulated kernel's bits.
//! The sum of `TIMES` outputs must be `TIMES` times these values: at most 4096 · 4 · 200 quarters,
//! below 2^24.

use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::{GemmArgs, Granularity, scaled_gemm};

use super::Gemm;
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::EMULATE;
use crate::data::F32;
use crate::device::{must_be, read_f32, upload_f32};
use crate::matrix::Codes;

/// Number of launches of each kind.
const TIMES: usize = 200;

/// M, N and K: one tile, and enough tiles for clusters on every SM.
const SHAPES: [[usize; 3]; 2] = [[64, 64, 64], [257, 130, 32]];
const LARGE: [[usize; 3]; 2] = [[1024, 1024, 1024], [4096, 4096, 4096]];

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for granularities @ [left, right] in
        [[Granularity::Tensor; 2], [Granularity::Block1x128, Granularity::Block128x128]]
    {
        for shape @ [m, n, k] in all.sizes(&SHAPES, &LARGE) {
            let gemm = Gemm { granularities, codes: Codes::Exact, ..Gemm::new(shape) };
            for gemm in gemm.configs(all.client).filter(|gemm| gemm.config != EMULATE) {
                let fast = if gemm.config.use_fast_accum { " fast" } else { "" };
                let path = gemm.path(all.client);
                let name = format!("repeated_gemm {m}x{n}x{k} {left},{right} {path}{fast}");
                all.add(name, |client| check(client, gemm));
            }
        }
    }
}

fn check<R: Runtime>(client: &ComputeClient<R>, gemm: Gemm) -> Result<f64, Failure> {
    let [m, n, _] = gemm.shape;
    let [a, b] = gemm.matrices().map(|matrix| matrix.upload(client));
    let want = read_f32(client, scaled_gemm(client, &a, &b, None, F32, EMULATE)?)?;
    let [sum, each] = [0.0, f32::NAN].map(|value| upload_f32(client, &vec![value; m * n]));
    let args = GemmArgs { a: &a, b: &b, bias: None, groups: None, dtype: F32, config: gemm.config };
    for _ in 0..TIMES {
        args.run_into(client, None, &each)?;
        add_to(client, &sum, &each, m * n);
    }
    for (what, output, times) in [("the last", each, 1.0), ("the sum", sum, TIMES as f32)] {
        // Zeros of both signs are equal.
        let got: Vec<_> = read_f32(client, output)?.into_iter().map(|x| x + 0.0).collect();
        let want: Vec<_> = want.iter().map(|x| x * times + 0.0).collect();
        must_be(&got, &want, n).map_err(|failure| wrong!("{what} of {TIMES}: {failure}"))?;
    }
    Ok(0.0)
}

/// Adds `len` values to `sum`.
fn add_to<R: Runtime>(client: &ComputeClient<R>, sum: &Handle, values: &Handle, len: usize) {
    const WIDTH: usize = 1 << 15;
    let cubes = len.div_ceil(256);
    let count = CubeCount::Static(cubes.min(WIDTH) as u32, cubes.div_ceil(WIDTH) as u32, 1);
    // SAFETY: both handles have `len` values.
    let [sum, values] = [sum, values].map(|handle| unsafe { ArrayArg::from_raw_parts(handle.clone(), len) });
    // SAFETY: the kernel compares its index with the length.
    unsafe { add_values::launch_unchecked::<R>(client, count, CubeDim::new_1d(256), sum, values) };
}

#[cube(launch_unchecked)]
fn add_values(sum: &mut Array<f32>, values: &Array<f32>) {
    if ABSOLUTE_POS < sum.len() {
        sum[ABSOLUTE_POS] += values[ABSOLUTE_POS];
    }
}
