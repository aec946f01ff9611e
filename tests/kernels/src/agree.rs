//! GEMMs that must agree bit for bit.
//!
//! The emulated path gives the same bits for all options, and rounds its outputs
//! once. GEMMs of casts give the same bits from copies by rows and from transposed copies.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, GemmConfig, GemmPath, Granularity, Operand, Orientation, ScaleMode, VectorView, gemm_path, quantize,
    scaled_gemm, supports,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::cast::{casts, describe};
use crate::compare::{EMULATE, FAST, PRECISE};
use crate::data::{BF16, DTYPES, F32, Random, from_dtype, same, to_dtype, transpose};
use crate::device::{Layout, poison, read, read_f32, upload, upload_vector};
use crate::matrix::{Codes, HostMatrix};

/// M, N and K of the GEMMs of casts: more than one block along each axis, and kernels that other
/// cases compile too.
const CASTS: [usize; 3] = [130, 137, 300];

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
    let [m, n, k] = CASTS;
    for cast in casts().filter(|cast| cast.scale_mode != ScaleMode::PowerOfTwo) {
        // Tensor-core kernels that other cases compile too.
        let config = if cast.format == Format::E4m3 { PRECISE } else { EMULATE };
        let path = gemm_path(all.client, [cast.granularity; 2], config);
        let name = format!("scaled_gemm of casts {m}x{n}x{k} {} {path}", describe(cast));
        all.add(name, |client| check_casts(client, cast, config));
    }
    for granularity in Granularity::ALL {
        let path = gemm_path(all.client, [granularity; 2], PRECISE);
        let name = format!("scaled_gemm of casts {m}x{n}x{k} nan {granularity} {path}");
        all.add(name, |client| check_nan(client, granularity));
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

/// Compares `x · wᵀ` from copies by rows with copies by columns of the transposes, bit for bit. The
/// result must also be near the f64 product of x and w.
fn check_casts<R: Runtime>(client: &ComputeClient<R>, cast: Cast, config: GemmConfig) -> Result<f64, Failure> {
    let ([m, n, k], mut stream) = (CASTS, Random::new(49));
    let (x, w) = (stream.values(m * k), stream.values(n * k));
    let operand = |x: &[f32], rows: usize, orientation: Orientation| -> Result<Operand, Failure> {
        let by_rows = orientation == Orientation::Rows;
        let (x, shape) = if by_rows { (x.to_vec(), [rows, k]) } else { (transpose(x, [rows, k]), [k, rows]) };
        let done = quantize(client, &upload(client, &x, shape, Layout::RowMajor, F32), cast, orientation)?;
        let copy = if by_rows { done.rows } else { done.cols };
        copy.ok_or_else(|| wrong!("no copy: {orientation:?}"))
    };
    let [want, got] = [Orientation::Rows, Orientation::Cols].map(|orientation| -> Result<_, Failure> {
        let (x, w) = (operand(&x, m, orientation)?, operand(&w, n, orientation)?);
        product(client, [&x, &w], None, config)
    });
    let (want, got) = (want?, got?);
    compare(&got, &want).map_err(|failure| wrong!("by columns: {failure}"))?;
    // Rounding of each factor is up to 2^-4 (e4m3) or 2^-3 (e5m2).
    let step = match cast.format {
        Format::E4m3 => 0.13,
        Format::E5m2 => 0.27,
    };
    let mut worst = 0f64;
    for (i, got) in want.iter().enumerate() {
        let pairs = x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]);
        let products = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        let error = (f64::from(*got) - sum).abs() / (step * size + 0.5);
        if error.is_nan() || error > 1.0 {
            return Err(wrong!("element {i} is {got}, not {sum}"));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

/// A NaN in x gives NaN in the output rows that share its scale, and in no other row.
fn check_nan<R: Runtime>(client: &ComputeClient<R>, granularity: Granularity) -> Result<f64, Failure> {
    let [m, n, k] = CASTS;
    let mut x = Random::new(53).values(m * k);
    x[3 * k + 7] = f32::NAN;
    let cast = Cast { granularity, ..casts().find(|cast| cast.granularity == granularity).expect("a cast of each") };
    let done = quantize(client, &upload(client, &x, [m, k], Layout::RowMajor, F32), cast, Orientation::Rows)?;
    let Some(x) = done.rows else { return Err(wrong!("no copy by rows")) };
    let w = random(client, [n, k], Format::E4m3, granularity, 54);
    let is_nan = |row: usize| match granularity {
        Granularity::Tensor => true,
        Granularity::Block128x128 => row < 128,
        Granularity::Row | Granularity::Block1x128 | Granularity::Block1x32 => row == 3,
    };
    let out = product(client, [&x, &w], None, PRECISE)?;
    match out.iter().enumerate().position(|(i, out)| out.is_nan() != is_nan(i / n)) {
        Some(i) => Err(wrong!("[{}, {}] is {}", i / n, i % n, out[i])),
        None => Ok(0.0),
    }
}
