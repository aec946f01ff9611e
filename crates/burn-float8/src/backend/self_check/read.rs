//! Device memory on the host: some rows of a matrix, or all of it piece by piece.
use std::collections::BTreeMap;
use std::ops::Range;

use burn_backend::DType;
use burn_std::{bf16, f16};
use cubecl::client::ComputeClient;
use cubecl::future::block_on;
use cubecl::prelude::Runtime;
use cubecl::server::Handle;
use float8_kernels::reference::{HostOperand, decode};
use float8_kernels::{InvScale, MatrixView, Operand, row_words};

use crate::backend::operand::read_scales;

/// Bytes that are read at a time of a matrix that is read whole.
const PIECE: u64 = 64 << 20;

/// What parts of a piece of memory begin at and end at multiples of, whatever the device.
const ALIGN: u64 = 16;

/// Bytes of device memory, the handle's first being 0. All parts are read at once.
pub(super) fn bytes<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[(&Handle, Range<u64>)],
) -> Result<Vec<Vec<u8>>, String> {
    let aligned = |(handle, range): &(&Handle, Range<u64>)| {
        let start = range.start / ALIGN * ALIGN;
        (start, range.end.next_multiple_of(ALIGN).min(handle.size_in_used()))
    };
    let handles = parts.iter().map(|part| {
        let ((start, end), handle) = (aligned(part), part.0.clone());
        let rest = handle.size_in_used() - end;
        handle.offset_start(start).offset_end(rest)
    });
    let read = block_on(client.read_async(handles.collect())).map_err(|error| error.to_string())?;
    let cut = |(part, bytes): (&(&Handle, Range<u64>), &[u8])| {
        let (start, _) = aligned(part);
        bytes[(part.1.start - start) as usize..(part.1.end - start) as usize].to_vec()
    };
    Ok(parts.iter().zip(read.iter().map(|bytes| &bytes[..])).map(cut).collect())
}

/// All of it.
pub(super) fn whole(handle: &Handle) -> (&Handle, Range<u64>) {
    (handle, 0..handle.size_in_used())
}

/// The f32 of f32, f16 or bf16.
pub(super) fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = || bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    match dtype {
        DType::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        DType::BF16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    }
}

/// Some rows of an operand.
pub(super) struct Rows {
    /// By row.
    pub(super) codes: BTreeMap<usize, Vec<u8>>,
    /// Inverse scales of the whole operand, row-major.
    pub(super) inv_scales: Vec<InvScale>,
}

/// The parts of memory that [`Rows::new`] takes, in this order: the scales, then the codes of each row.
pub(super) fn parts_of<'a>(operand: &'a Operand, rows: &[usize]) -> Vec<(&'a Handle, Range<u64>)> {
    let pitch = 4 * row_words(operand.k) as u64;
    let codes = rows.iter().map(|&row| {
        let start = row as u64 * pitch;
        (&operand.codes, start..start + operand.k as u64)
    });
    let words = operand.granularity.scale_words(operand.rows, operand.k) as u64;
    [(&operand.inv_scale, 0..4 * words)].into_iter().chain(codes).collect()
}

impl Rows {
    pub(super) fn new(operand: &Operand, rows: &[usize], read: &mut impl Iterator<Item = Vec<u8>>) -> Self {
        let scales = read.next().expect("the scales");
        let inv_scales = read_scales(&scales, operand.granularity, operand.rows, operand.k);
        Self { codes: rows.iter().copied().zip(read).collect(), inv_scales }
    }

    /// The values of the codes of a row, exact.
    pub(super) fn values(&self, operand: &Operand, row: usize) -> Vec<f64> {
        let codes = &self.codes[&row];
        let host = HostOperand {
            codes: &[],
            rows: operand.rows,
            k: operand.k,
            format: operand.format,
            granularity: operand.granularity,
            inv_scales: &self.inv_scales,
        };
        let value = |col: usize| f64::from(decode(codes[col], operand.format)) * f64::from(host.inv_scale(row, col));
        (0..operand.k).map(value).collect()
    }
}

/// Calls `f` with the first row and the values `[_, cols]` of some rows after the other, until all of a strided matrix is read.
pub(super) fn each_piece<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    dtype: DType,
    mut f: impl FnMut(usize, &[f32]),
) -> Result<(), String> {
    let ([rows, cols], [row_stride, col_stride]) = (x.shape, x.strides);
    let size = dtype.size() as u64;
    // Whichever way it lies, so that a piece of memory is read once: the rows of the transpose where columns are further apart.
    let (outer, inner, outer_stride, inner_stride, transposed) = if col_stride > row_stride && rows > 1 {
        (cols, rows, col_stride, row_stride, true)
    } else {
        (rows, cols, row_stride, col_stride, false)
    };
    let span = ((inner - 1) * inner_stride + 1) as u64 * size;
    let at_once = (PIECE / (outer_stride.max(1) as u64 * size)).clamp(1, outer as u64) as usize;
    let mut all = transposed.then(|| vec![0.0; rows * cols]);
    for first in (0..outer).step_by(at_once) {
        let count = at_once.min(outer - first);
        let start = (first * outer_stride) as u64 * size;
        let end = start + ((count - 1) * outer_stride) as u64 * size + span;
        let memory = floats(&bytes(client, &[(&x.handle, start..end)])?.remove(0), dtype);
        let line = |i: usize| (0..inner).map(move |j| i * outer_stride + j * inner_stride);
        match &mut all {
            None => {
                let values: Vec<f32> = (0..count).flat_map(line).map(|at| memory[at]).collect();
                f(first, &values);
            }
            Some(all) => {
                for i in 0..count {
                    line(i).enumerate().for_each(|(row, at)| all[row * cols + first + i] = memory[at]);
                }
            }
        }
    }
    if let Some(all) = all {
        f(0, &all);
    }
    Ok(())
}
