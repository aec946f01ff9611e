//! [`Input`]: a matrix to cast or measure, on the device and on the host; shapes of such matrices.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::MatrixView;

use crate::case::kebab;
use crate::data::Content;
use crate::device::{Layout, upload};

/// Sizes around words of 4, padding to 16, and tiles of 64 and 128.
pub(crate) const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 5], [17, 33], [64, 64], [1, 1000], [1000, 1], [129, 257], [66, 128], [128, 132]];

/// Long rows, long columns, many tiles, and sizes of Llama.
pub(crate) const LARGE: [[usize; 2]; 9] = [
    [1, 100_003],
    [100_003, 1],
    [5, 40_000],
    [1031, 2051],
    [2048, 4096],
    [4100, 3080],
    [257, 14_336],
    [14_336, 130],
    [4096, 8192],
];

/// Shape, dtype, layout and content of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    pub(crate) shape: [usize; 2],
    pub(crate) dtype: StorageType,
    pub(crate) layout: Layout,
    pub(crate) content: Content,
}

impl Input {
    /// Values over many binades, row-major.
    pub(crate) fn new(shape: [usize; 2], dtype: StorageType) -> Self {
        Self { shape, dtype, layout: Layout::RowMajor, content: Content::Values }
    }

    /// Puts the matrix on the device. Also returns its values there.
    pub(crate) fn upload<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> (MatrixView, Vec<f32>) {
        let x = self.content.fill(self.shape, self.dtype, seed);
        upload(client, &x, self.shape, self.layout, self.dtype)
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape: [rows, cols], dtype, layout, content } = self;
        write!(f, "{rows}x{cols} {dtype} {layout} {}", kebab(content))
    }
}

/// Positions where a kernel could miss the largest element: the ends of the first and last row, and
/// the middle.
pub(crate) fn far_places([rows, cols]: [usize; 2]) -> Vec<usize> {
    let last = (rows - 1) * cols;
    let mut places = vec![0, cols - 1, rows / 2 * cols + cols / 2, last, last + cols - 1];
    places.sort_unstable();
    places.dedup();
    places
}
