//! Quantize kernels on wgpu against a device copy of the same number of bytes.
//!
//! ```text
//! bytes = 4 · R · C  (x, read once)  +  codes and scales of each copy written
//! ratio = time of the cast / time of a copy that reads bytes / 2 and writes bytes / 2
//! ```
use std::time::Instant;

use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, ScaleCalculationMode, ScaleMode, quantize, row_words,
};

use crate::medians;
use crate::table::{Table, mib, number};

/// Granularities with their scale modes.
pub(crate) const CASTS: [(Granularity, ScaleMode); 5] = [
    (Granularity::Tensor, ScaleMode::F32),
    (Granularity::Row, ScaleMode::F32),
    (Granularity::Block1x128, ScaleMode::F32),
    (Granularity::Block128x128, ScaleMode::F32),
    (Granularity::Block1x32, ScaleMode::E8m0(ScaleCalculationMode::Rceil)),
];

const ROWS: usize = 4096;
const COLS: usize = 1024;
/// Launches between two waits.
const LAUNCHES: u32 = 4;
const UNITS: u32 = 256;
/// Words that a unit loads and stores at once.
const VECTOR: usize = 4;

#[cube(launch_unchecked)]
fn copy<N: Size>(source: &Array<Vector<u32, N>>, target: &mut Array<Vector<u32, N>>) {
    target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
}

type Client = ComputeClient<WgpuRuntime>;

/// Milliseconds of one launch.
pub(crate) fn time(client: &Client, mut launch: impl FnMut()) -> f64 {
    let sync = || cubecl::future::block_on(client.sync()).expect("the device runs");
    sync();
    let start = Instant::now();
    (0..LAUNCHES).for_each(|_| launch());
    sync();
    start.elapsed().as_secs_f64() * 1e3 / f64::from(LAUNCHES)
}

/// The cast to e4m3 of an entry of [`CASTS`].
pub(crate) fn cast((granularity, scale_mode): (Granularity, ScaleMode)) -> Cast {
    Cast { format: Format::E4m3, granularity, scale_mode }
}

/// A dense f32 matrix of values in [-4, 4).
pub(crate) fn matrix(client: &Client, [rows, cols]: [usize; 2]) -> MatrixView {
    let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 2_654_435_761) % 8191) as f32 / 1024.0 - 4.0).collect();
    MatrixView {
        handle: client.create_from_slice(f32::as_bytes(&values)),
        shape: [rows, cols],
        strides: [cols, 1],
        dtype: f32::as_type_native_unchecked().storage_type(),
    }
}

/// Bytes of codes and scales of an operand `[rows, k]`.
fn written(granularity: Granularity, rows: usize, k: usize) -> usize {
    4 * (rows * row_words(k) + granularity.scale_words(rows, k))
}

/// Table of the default wgpu device, named `device`.
pub fn table(device: &str, repeat: u32) -> Table {
    let client = WgpuRuntime::client(&WgpuDevice::default());
    let x = matrix(&client, [ROWS, COLS]);
    let title = format!("quantize f32 [{ROWS}, {COLS}] to e4m3 on {device}, against a copy of the same bytes");
    let mut table = Table::new(title, &["scales", "orientation", "MiB", "quantize ms", "copy ms", "ratio"]);
    for scales in CASTS {
        let (granularity, cast) = (scales.0, cast(scales));
        for (name, orientation) in [("rows", Orientation::Rows), ("both", Orientation::Both)] {
            let transposed = if orientation.cols() { written(granularity, COLS, ROWS) } else { 0 };
            let bytes = 4 * ROWS * COLS + written(granularity, ROWS, COLS) + transposed;
            let cubes = (bytes / 2).div_ceil(UNITS as usize * VECTOR * 4);
            let words = cubes * UNITS as usize * VECTOR;
            let (source, target) = (client.create_from_slice(&vec![1; 4 * words]), client.empty(4 * words));
            let mut copied = || {
                // SAFETY: every unit copies one vector of the `words` that both buffers hold.
                unsafe {
                    copy::launch_unchecked::<WgpuRuntime>(
                        &client,
                        CubeCount::Static(cubes as u32, 1, 1),
                        CubeDim::new_1d(UNITS),
                        VECTOR,
                        ArrayArg::from_raw_parts(source.clone(), words),
                        ArrayArg::from_raw_parts(target.clone(), words),
                    );
                }
            };
            let mut quantized = || {
                quantize(&client, &x, cast, orientation).expect("a matrix that the kernels take");
            };
            let [quantize_ms, copy_ms] =
                medians(repeat, || time(&client, &mut quantized), || time(&client, &mut copied));
            let [quantize, copy, ratio] = [quantize_ms, copy_ms, quantize_ms / copy_ms].map(number);
            table.row([granularity.into(), name.into(), mib(bytes), quantize, copy, ratio]);
        }
    }
    table
}
