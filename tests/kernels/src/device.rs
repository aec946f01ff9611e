//! Matrices to and from a device, with NaN around the elements of a view.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::{MatrixView, VectorView};

use crate::Failure;
use crate::case::{kebab, wrong};
use crate::data::{same, to_dtype};

/// Waits for the device and returns its error.
pub(crate) fn sync<R: Runtime>(client: &ComputeClient<R>) -> Result<(), Failure> {
    cubecl::future::block_on(client.sync()).map_err(|error| Failure::Device(format!("{error:?}")))
}

/// Reads all bytes of `handle` after all earlier work.
pub(crate) fn read<R: Runtime>(client: &ComputeClient<R>, handle: Handle) -> Result<Vec<u8>, Failure> {
    sync(client)?;
    match client.read_one(handle) {
        Ok(bytes) => Ok(bytes.to_vec()),
        Err(error) => Err(Failure::Device(format!("{error:?}"))),
    }
}

pub(crate) fn read_f32<R: Runtime>(client: &ComputeClient<R>, handle: Handle) -> Result<Vec<f32>, Failure> {
    Ok(read(client, handle)?.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect())
}

/// Checks that both have the same floats, bit for bit; NaN equals NaN. Elements are named by row and
/// column, for rows of `width`.
pub(crate) fn must_be(got: &[f32], want: &[f32], width: usize) -> Result<(), Failure> {
    if got.len() != want.len() {
        return Err(wrong!("{} values, not {}", got.len(), want.len()));
    }
    let differ = |i: &usize| !same(got[*i], want[*i]);
    match (0..got.len()).find(differ) {
        Some(i) => {
            let (at, differ) = ([i / width, i % width], (0..got.len()).filter(differ).count());
            Err(wrong!("{at:?} is {:?}, not {:?}; {differ} differ", got[i], want[i]))
        }
        None => Ok(()),
    }
}

pub(crate) fn upload_f32<R: Runtime>(client: &ComputeClient<R>, x: &[f32]) -> Handle {
    client.create_from_slice(f32::as_bytes(x))
}

/// Fills memory with 0xff and frees it, one allocation for each size in `bytes`.
///
/// The next allocations of these sizes hold NaN in every float format, if the runtime's pool
/// reuses this memory.
///
/// # Errors
/// The error of the device.
pub fn poison<R: Runtime>(client: &ComputeClient<R>, bytes: &[usize]) -> Result<(), Failure> {
    let held: Vec<_> = bytes.iter().map(|&bytes| client.create_from_slice(&vec![0xff; bytes.max(4)])).collect();
    sync(client)?;
    drop(held);
    Ok(())
}

/// Layout of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    RowMajor,
    ColumnMajor,
    /// Rows padded by 3 elements.
    Pitched,
    /// Rows padded to a multiple of 64 elements.
    AlignedPitch,
    /// Every third column of a wider matrix.
    Gapped,
    /// Row-major, at an offset of 259 elements in an allocation.
    Offset,
    /// These strides, at an offset in elements.
    Strided {
        offset: usize,
        strides: [usize; 2],
    },
}

impl Layout {
    /// Layouts in which every element has its own place.
    pub(crate) const ALL: [Layout; 6] =
        [Layout::RowMajor, Layout::ColumnMajor, Layout::Pitched, Layout::AlignedPitch, Layout::Gapped, Layout::Offset];

    /// Layouts whose rows, columns or elements share memory, as in a broadcast.
    pub(crate) fn repeated() -> [Self; 3] {
        [[0, 1], [1, 0], [0, 0]].map(|strides| Layout::Strided { offset: 0, strides })
    }

    /// Offset of element (0, 0), and the strides.
    fn geometry(self, [rows, cols]: [usize; 2]) -> (usize, [usize; 2]) {
        match self {
            Layout::RowMajor => (0, [cols, 1]),
            Layout::ColumnMajor => (0, [1, rows]),
            Layout::Pitched => (0, [cols + 3, 1]),
            Layout::AlignedPitch => (0, [cols.next_multiple_of(64), 1]),
            Layout::Gapped => (0, [cols * 3, 3]),
            Layout::Offset => (256 + 3, [cols, 1]),
            Layout::Strided { offset, strides } => (offset, strides),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Strided { offset, strides: [row, col] } => write!(f, "strided {offset}+{row},{col}"),
            layout => f.write_str(&kebab(layout)),
        }
    }
}

/// Puts row-major `x`, of `rows · cols` elements, on the device. Memory outside the view is NaN.
///
/// Also returns the values of the view, rounded to `dtype`. Elements that share memory have the
/// value of the last one.
pub(crate) fn upload<R: Runtime>(
    client: &ComputeClient<R>,
    x: &[f32],
    shape @ [rows, cols]: [usize; 2],
    layout: Layout,
    dtype: StorageType,
) -> (MatrixView, Vec<f32>) {
    let (offset, strides) = layout.geometry(shape);
    let at = |r: usize, c: usize| offset + r * strides[0] + c * strides[1];
    let mut memory = vec![f32::NAN; at(rows - 1, cols - 1) + 1];
    for (r, row) in x.chunks_exact(cols).enumerate() {
        for (c, &x) in row.iter().enumerate() {
            memory[at(r, c)] = x;
        }
    }
    let (bytes, rounded) = to_dtype(&memory, dtype);
    let mut handle = client.create_from_slice(&bytes);
    if offset > 0 {
        handle = handle.offset_start((offset * dtype.size()) as u64);
    }
    let values = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| rounded[at(r, c)]).collect();
    (MatrixView { handle, shape, strides, dtype }, values)
}

/// Puts `x` on the device, `stride` elements apart, with NaN between.
pub(crate) fn upload_vector<R: Runtime>(
    client: &ComputeClient<R>,
    x: &[f32],
    stride: usize,
    dtype: StorageType,
) -> VectorView {
    let mut memory = vec![f32::NAN; (x.len() - 1) * stride + 1];
    for (place, &x) in memory.iter_mut().step_by(stride).zip(x) {
        *place = x;
    }
    let handle = client.create_from_slice(&to_dtype(&memory, dtype).0);
    VectorView { handle, len: x.len(), stride, dtype }
}
