//! GEMMs that must agree bit for bit.
//!
//! The emulated path gives the same bits for all options, and rounds its outputs once.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Format, GemmConfig, GemmPath, Granularity, Operand, VectorView, gemm_path, scaled_gemm, supports,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::{EMULATE, FAST, PRECISE};
use crate::data::{BF16, DTYPES, F32, Random, from_dtype, same, to_dtype};
use crate::device::{poison, read, read_f32, upload_vector};
use crate::matrix::{Codes, HostMatrix};

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    all.add("scaled_gemm options 33x20x300 rowwise,128x128 emulated", check_options);
    let pairs = [
        [Granularity::Tensor, Granularity::Row],
        [Granularity::Block1x128, Granularity::Block128x128],
        [Granularity::Tensor, Granularity::Block1x128],
    ];
    for (dtype, pair) in DTYPES.into_iter().flat_map(|dtype| pairs.map(|pair| (dtype, pair))) {
        if supports(all.client, dtype) {
            for shape @ [m, n, k] in [[1, 1, 1], [33, 70, 150], [65, 3, 257]] {
                let name = format!("scaled_gemm rounded once {m}x{n}x{k} {},{} {dtype} emulated", pair[0], pair[1]);
                all.add(name, |client| check_rounding(client, shape, pair, dtype));
            }
        }
    }
}

fn random<R: Runtime>(
    client: &ComputeClient<R>,
    shape: [usize; 2],
    format: Format,
    granularity: Granularity,
    seed: u64,
) -> Operand {
    HostMatrix::new(Codes::Random, shape, format, granularity, seed).upload(client)
}

fn product<R: Runtime>(
    client: &ComputeClient<R>,
    [a, b]: [&Operand; 2],
    bias: Option<&VectorView>,
    config: GemmConfig,
) -> Result<Vec<f32>, Failure> {
    poison(client, &[a.rows * b.rows * 4; 2])?;
    read_f32(client, scaled_gemm(client, a, b, bias, F32, config)?)
}

/// Finds the first element that differs; NaN equals NaN.
fn compare(got: &[f32], want: &[f32]) -> Result<(), Failure> {
    match got.iter().zip(want).position(|(got, want)| !same(*got, *want)) {
        _ if got.len() != want.len() => Err(wrong!("{} elements, not {}", got.len(), want.len())),
        Some(i) => Err(wrong!("element {i} is {:e}, not {:e}", got[i], want[i])),
        None => Ok(()),
    }
}

/// Neither option changes a bit of the emulated path.
fn check_options<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    let granularities = [Granularity::Row, Granularity::Block128x128];
    let a = random(client, [33, 300], Format::E4m3, granularities[0], 51);
    let b = random(client, [20, 300], Format::E4m3, granularities[1], 52);
    let want = product(client, [&a, &b], None, EMULATE)?;
    let both = GemmConfig { use_fast_accum: true, emulate: true };
    if gemm_path(client, granularities, both) != GemmPath::Emulated {
        return Err(wrong!("fast accumulation is emulated by {}", gemm_path(client, granularities, both)));
    }
    for config in [both, PRECISE, FAST] {
        if gemm_path(client, granularities, config) == GemmPath::Emulated {
            compare(&product(client, [&a, &b], None, config)?, &want)
                .map_err(|failure| wrong!("{config:?}: {failure}"))?;
        }
    }
    Ok(0.0)
}

/// `out ← A · Bᵀ · scales + bias`, with one rounding.
///
/// The f32 result comes from a separate GEMM, so every bit of the output is known.
fn check_rounding<R: Runtime>(
    client: &ComputeClient<R>,
    [m, n, k]: [usize; 3],
    [left, right]: [Granularity; 2],
    dtype: StorageType,
) -> Result<f64, Failure> {
    let (a, b) = (random(client, [m, k], Format::E4m3, left, 61), random(client, [n, k], Format::E5m2, right, 62));
    let mut stream = Random::new(63);
    let bias = upload_vector(client, &stream.values(n), 1, BF16);
    let result = product(client, [&a, &b], Some(&bias), EMULATE)?;
    let got = scaled_gemm(client, &a, &b, Some(&bias), dtype, EMULATE)?;
    compare(&from_dtype(&read(client, got)?, dtype), &to_dtype(&result, dtype).1)?;
    Ok(0.0)
}
