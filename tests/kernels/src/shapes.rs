//! Shapes of matrices to cast and measure.

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
