//! Transposes of codes whose scales serve both orientations, decoded values for every granularity, and
//! MX operands dequantized to bf16: every code with every scale, and padding.

use cubecl::prelude::*;
use float8_kernels::reference::{dequantize_mx as want_dequantized, transpose as want_transposed};
use float8_kernels::{Format, Granularity, InvScale, dequantize_mx, dequantize_to_f32, row_words, transpose};

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
    for shape @ [rows, k] in all.sizes(&SHAPES, &LARGE) {
        for (i, granularity) in Granularity::ALL.into_iter().enumerate() {
            let format = Format::ALL[(rows + i) % 2];
            let matrix = move |codes| HostMatrix::new(codes, shape, format, granularity, 53);
            if matches!(granularity, Granularity::Tensor | Granularity::Block128x128 | MX) {
                let name = format!("transpose {rows}x{k} {format} {granularity}");
                all.add(name, |client| check_transpose(client, matrix(Codes::NanCode)));
            }
            let name = format!("dequantize_to_f32 {rows}x{k} {format} {granularity}");
            all.add(name, |client| check_values(client, matrix(Codes::Random)));
        }
    }
    for shape @ [rows, k] in all.sizes(&MX_SHAPES, &MX_LARGE) {
        for format in Format::ALL {
            let name = format!("dequantize_mx {rows}x{k} {format}");
            all.add(name, |client| check_mx(client, HostMatrix::new(Codes::Random, shape, format, MX, 51)));
        }
    }
}

/// MX scales become equal in squares of 32.
fn check_transpose<R: Runtime>(client: &ComputeClient<R>, mut host: HostMatrix) -> Result<f64, Failure> {
    let HostMatrix { shape: [rows, k], format, granularity, .. } = host;
    if granularity == MX {
        let (blocks, of_squares) = (k.div_ceil(32), host.inv_scales.clone());
        for (i, scale) in host.inv_scales.iter_mut().enumerate() {
            *scale = of_squares[i / blocks / 32 * 32 * blocks + i % blocks];
        }
    }
    let operand = host.upload(client);
    poison(client, &[k * row_words(rows) * 4, granularity.scale_words(k, rows) * 4])?;
    let got = HostMatrix::read(client, &transpose(client, &operand)?)?;
    let (codes, inv_scales) = want_transposed(&host.view());
    got.must_be(&HostMatrix { codes, inv_scales, shape: [k, rows], format, granularity })?;
    Ok(0.0)
}

/// Decoded values of all codes; NaN equals NaN.
fn check_values<R: Runtime>(client: &ComputeClient<R>, mut host: HostMatrix) -> Result<f64, Failure> {
    let [rows, k] = host.shape;
    host.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % 251) as u8 ^ (i / 251 % 256) as u8);
    let operand = host.upload(client);
    poison(client, &[rows * k * 4; 2])?;
    must_be(&read_f32(client, dequantize_to_f32(client, &operand)?)?, &host.values(), k)?;
    Ok(0.0)
}

/// In a matrix of [`EVERY`], block `b` of row `r` has scale `r` and the 32 codes from `32 b` on, modulo
/// 256.
fn check_mx<R: Runtime>(client: &ComputeClient<R>, mut host: HostMatrix) -> Result<f64, Failure> {
    let [rows, k] = host.shape;
    if host.shape == EVERY {
        host.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % k) as u8);
        let scales = host.inv_scales.iter_mut().enumerate();
        scales.for_each(|(i, scale)| *scale = InvScale::from_e8m0((i / (k / 32)) as u8));
    }
    let operand = host.upload(client);
    let pitch = row_words(k) * 4;
    poison(client, &[rows * pitch * 2; 2])?;
    let bytes = read(client, dequantize_mx(client, &operand)?)?;
    let got: Vec<_> = bytes.as_chunks().0.iter().map(|bits| u16::from_le_bytes(*bits)).collect();
    let mut want = vec![0; rows * pitch];
    for (padded, row) in want.chunks_exact_mut(pitch).zip(want_dequantized(&host.view()).chunks_exact(k)) {
        padded.iter_mut().zip(row).for_each(|(bits, value)| *bits = value.to_bits());
    }
    let differs = |i: &usize| got.get(*i) != want.get(*i);
    match (0..got.len().max(want.len())).find(differs) {
        Some(i) => Err(wrong!("[{}, {}] is {:x?}, not {:x?}", i / pitch, i % pitch, got.get(i), want.get(i))),
        None => Ok(0.0),
    }
}
