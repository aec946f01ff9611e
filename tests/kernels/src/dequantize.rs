//! MX operands dequantized to bf16: every code with every scale, and padding.

use cubecl::prelude::*;
use float8_kernels::reference;
use float8_kernels::{Format, InvScale, dequantize_mx, row_words};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::device::{poison, read};
use crate::matrix::{Codes, HostMatrix, MX};

/// Sizes around pieces of 8, padding to 16, blocks of 32 and tiles of 128. The last one has every
/// code with every scale.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 17], [130, 31], [129, 160], [257, 300], EVERY];

const EVERY: [usize; 2] = [256, 8 * 256];

const LARGE: [[usize; 2]; 2] = [[4096, 4096], [14_336, 1040]];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for shape in all.sizes(&SHAPES, &LARGE) {
        for format in Format::ALL {
            let [rows, k] = shape;
            all.add(format!("dequantize_mx {rows}x{k} {format}"), |client| check(client, shape, format));
        }
    }
}

/// Random codes and scales.
///
/// For [`EVERY`], block `b` of row `r` has scale `r` and the 32 codes from `32 b` on, modulo 256.
fn matrix(shape: [usize; 2], format: Format) -> HostMatrix {
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

fn check<R: Runtime>(client: &ComputeClient<R>, shape: [usize; 2], format: Format) -> Result<f64, Failure> {
    let [rows, k] = shape;
    let host = matrix(shape, format);
    let operand = host.upload(client);
    let pitch = row_words(k) * 4;
    poison(client, &[rows * pitch * 2; 2])?;
    let bytes = read(client, dequantize_mx(client, &operand)?)?;
    if bytes.len() != rows * pitch * 2 {
        return Err(wrong!("{} bytes, not {}", bytes.len(), rows * pitch * 2));
    }
    let want = reference::dequantize_mx(&host.view());
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
