//! Transposes of codes whose scales serve both orientations, decoded values for every granularity, and
//! MX operands dequantized to bf16: every code with every scale, and padding.

use cubecl::prelude::*;
use float8_kernels::reference::{decode, dequantize_mx as want_dequantized, transpose as want_transposed};
use float8_kernels::{
    Format, Granularity, InvScale, KernelError, dequantize_mx, dequantize_to_f32, row_words, transpose,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::device::{must_be, poison, read, read_f32};
use crate::matrix::{Codes, HostMatrix, MX};

/// One row, one column, less than a tile, several tiles, and both sides of the edges of words,
/// chunks of 16, squares and tiles.
const SHAPES: [[usize; 2]; 12] = [
    [1, 1],
    [1, 1000],
    [1000, 1],
    [3, 17],
    [16, 128],
    [33, 31],
    [127, 129],
    [128, 128],
    [129, 160],
    [257, 300],
    [40, 515],
    [384, 256],
];

const LARGE: [[usize; 2]; 3] = [[4096, 14_336], [14_336, 1040], [4095, 4097]];

/// Sizes around pieces of 8, padding to 16, blocks of 32 and tiles of 128. The last one has every
/// code with every scale.
const MX_SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 17], [130, 31], [129, 160], [257, 300], EVERY];

const EVERY: [usize; 2] = [256, 8 * 256];

const MX_LARGE: [[usize; 2]; 2] = [[4096, 4096], [14_336, 1040]];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for [rows, k] in all.sizes(&SHAPES, &LARGE) {
        for (i, granularity) in Granularity::ALL.into_iter().enumerate() {
            let format = Format::ALL[(rows + i) % 2];
            if matches!(granularity, Granularity::Tensor | Granularity::Block128x128 | MX) {
                all.add(format!("transpose {rows}x{k} {format} {granularity}"), |client| {
                    check(client, [rows, k], format, granularity)
                });
            }
            all.add(format!("dequantize_to_f32 {rows}x{k} {format} {granularity}"), |client| {
                check_values(client, [rows, k], format, granularity)
            });
        }
    }
    for shape @ [rows, k] in all.sizes(&MX_SHAPES, &MX_LARGE) {
        for format in Format::ALL {
            all.add(format!("dequantize_mx {rows}x{k} {format}"), |client| check_mx(client, shape, format));
        }
    }
    all.add("transpose refused", check_refused);
}

/// Random codes with one NaN. MX scales are equal in squares of 32.
fn matrix(shape @ [rows, k]: [usize; 2], format: Format, granularity: Granularity) -> HostMatrix {
    let mut matrix = HostMatrix::new(Codes::NanCode, shape, format, granularity, 53);
    if granularity == MX {
        let blocks = k.div_ceil(32);
        let of_squares = matrix.inv_scales.clone();
        for (i, scale) in matrix.inv_scales.iter_mut().enumerate().take(rows * blocks) {
            *scale = of_squares[i / blocks / 32 * 32 * blocks + i % blocks];
        }
    }
    matrix
}

fn check<R: Runtime>(
    client: &ComputeClient<R>,
    shape @ [rows, k]: [usize; 2],
    format: Format,
    granularity: Granularity,
) -> Result<f64, Failure> {
    let host = matrix(shape, format, granularity);
    let operand = host.upload(client);
    poison(client, &[k * row_words(rows) * 4, granularity.scale_words(k, rows) * 4])?;
    let got = HostMatrix::read(client, &transpose(client, &operand)?)?;
    let (codes, inv_scales) = want_transposed(&host.view());
    got.must_be(&HostMatrix { codes, inv_scales, shape: [k, rows], format, granularity })?;
    Ok(0.0)
}

/// Decoded values of all codes; NaN equals NaN.
fn check_values<R: Runtime>(
    client: &ComputeClient<R>,
    shape @ [rows, k]: [usize; 2],
    format: Format,
    granularity: Granularity,
) -> Result<f64, Failure> {
    let mut host = HostMatrix::new(Codes::Random, shape, format, granularity, 54);
    host.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % 251) as u8 ^ (i / 251 % 256) as u8);
    let operand = host.upload(client);
    poison(client, &[rows * k * 4; 2])?;
    let got = read_f32(client, dequantize_to_f32(client, &operand)?)?;
    let value = |(i, &code): (usize, &u8)| decode(code, format) * host.inv_scale(i / k, i % k);
    must_be(&got, &host.codes.iter().enumerate().map(value).collect::<Vec<_>>(), k)?;
    Ok(0.0)
}

/// Random codes and scales.
///
/// For [`EVERY`], block `b` of row `r` has scale `r` and the 32 codes from `32 b` on, modulo 256.
fn mx_matrix(shape: [usize; 2], format: Format) -> HostMatrix {
    let mut matrix = HostMatrix::new(Codes::Random, shape, format, MX, 51);
    if shape == EVERY {
        let [_, k] = shape;
        matrix.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % k) as u8);
        let blocks = k / 32;
        let bytes = |i: usize| (i / blocks) as u8;
        matrix.inv_scales.iter_mut().enumerate().for_each(|(i, scale)| *scale = InvScale::from_e8m0(bytes(i)));
    }
    matrix
}

fn check_mx<R: Runtime>(client: &ComputeClient<R>, shape: [usize; 2], format: Format) -> Result<f64, Failure> {
    let [rows, k] = shape;
    let host = mx_matrix(shape, format);
    let operand = host.upload(client);
    let pitch = row_words(k) * 4;
    poison(client, &[rows * pitch * 2; 2])?;
    let bytes = read(client, dequantize_mx(client, &operand)?)?;
    if bytes.len() != rows * pitch * 2 {
        return Err(wrong!("{} bytes, not {}", bytes.len(), rows * pitch * 2));
    }
    let want = want_dequantized(&host.view());
    for (i, bits) in bytes.chunks_exact(2).enumerate() {
        let (row, col) = (i / pitch, i % pitch);
        let got = u16::from_le_bytes([bits[0], bits[1]]);
        let want = if col < k { want[row * k + col].to_bits() } else { 0 };
        if got != want {
            return Err(wrong!("[{row}, {col}] is {got:#x}, not {want:#x}"));
        }
    }
    Ok(0.0)
}

/// Granularities whose scales do not fit the transpose, and empty matrices.
fn check_refused<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    for granularity in [Granularity::Row, Granularity::Block1x128] {
        let operand = HostMatrix::new(Codes::Random, [40, 50], Format::E4m3, granularity, 56).upload(client);
        let refused = transpose(client, &operand).map(|_| ());
        if !matches!(&refused, Err(KernelError::UnfitGranularity { granularity: g, .. }) if *g == granularity) {
            return Err(wrong!("{granularity}: {refused:?}"));
        }
    }
    let operand = HostMatrix::new(Codes::Random, [40, 50], Format::E4m3, Granularity::Tensor, 56).upload(client);
    for (rows, k) in [(0, 50), (40, 0)] {
        let empty = float8_kernels::Operand { rows, k, ..operand.clone() };
        let want = KernelError::EmptyMatrix { rows, cols: k };
        let refused = [transpose(client, &empty).map(|_| ()), dequantize_to_f32(client, &empty).map(|_| ())];
        if refused.iter().any(|refused| refused.as_ref() != Err(&want)) {
            return Err(wrong!("[{rows}, {k}]: {refused:?}"));
        }
    }
    Ok(0.0)
}
