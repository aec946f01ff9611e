//! One GEMM many times without a wait between launches. This shows a race that one launch in a
//! hundred loses.
//!
//! Matrices of -1, 0 and 1 give exact sums. Each plain launch must give the emulated kernel's bits.
//! `TIMES` launches that add to one output must give `TIMES` times these values: at most 4096 · 4 ·
//! 200 quarters, below 2^24.

use cubecl::prelude::*;
use float8_kernels::{Format, GemmConfig, GemmPath, Granularity, Output, gemm_path, scaled_gemm, scaled_gemm_into};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::{EMULATE, FAST, PRECISE};
use crate::data::F32;
use crate::device::{read_f32, upload_f32};
use crate::matrix::{Codes, HostMatrix};

/// Number of launches of each kind.
const TIMES: usize = 200;

/// M, N and K: one tile, and enough tiles for clusters on every SM.
const SHAPES: [[usize; 3]; 2] = [[64, 64, 64], [257, 130, 32]];
const LARGE: [[usize; 3]; 2] = [[1024, 1024, 1024], [4096, 4096, 4096]];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    let granularities = [[Granularity::Tensor; 2], [Granularity::Block1x128, Granularity::Block128x128]];
    for (granularities @ [left, right], config) in
        granularities.into_iter().flat_map(|pair| [(pair, PRECISE), (pair, FAST)])
    {
        let path = gemm_path(all.client, granularities, config);
        // The emulated kernel has no fast accumulation.
        if path == GemmPath::Emulated && config == FAST {
            continue;
        }
        let fast = if config == FAST { " fast" } else { "" };
        for shape @ [m, n, k] in all.sizes(&SHAPES, &LARGE) {
            let name = format!("repeated_gemm {m}x{n}x{k} {left},{right} {path}{fast}");
            all.add(name, |client| check(client, shape, granularities, config));
        }
    }
}

fn check<R: Runtime>(
    client: &ComputeClient<R>,
    [m, n, k]: [usize; 3],
    [left, right]: [Granularity; 2],
    config: GemmConfig,
) -> Result<f64, Failure> {
    let operand = |rows, granularity, seed| {
        HostMatrix::new(Codes::Exact, [rows, k], Format::E4m3, granularity, seed).upload(client)
    };
    let (a, b) = (operand(m, left, 41), operand(n, right, 42));
    let want = read_f32(client, scaled_gemm(client, &a, &b, None, F32, EMULATE)?)?;
    let sum = Output { handle: upload_f32(client, &vec![0.0; m * n]), dtype: F32, accumulate: true };
    let each = Output { handle: upload_f32(client, &vec![f32::NAN; m * n]), dtype: F32, accumulate: false };
    for _ in 0..TIMES {
        scaled_gemm_into(client, &a, &b, None, &sum, config)?;
        scaled_gemm_into(client, &a, &b, None, &each, config)?;
    }
    for (what, output, times) in [("the last", each, 1.0), ("the sum", sum, TIMES as f32)] {
        let got = read_f32(client, output.handle)?;
        let differ = got.iter().zip(&want).filter(|(got, want)| **got != **want * times).count();
        if let Some(place) = got.iter().zip(&want).position(|(got, want)| *got != *want * times) {
            let [row, col] = [place / n, place % n];
            let (got, want) = (got[place], want[place] * times);
            return Err(wrong!("{what} of {TIMES}: [{row}, {col}] is {got:e}, not {want:e}; {differ} differ"));
        }
    }
    Ok(0.0)
}
