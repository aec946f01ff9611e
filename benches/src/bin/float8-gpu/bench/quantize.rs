//! Bandwidth of amax and of the casts, as a share of a device copy of the same number of bytes.
//!
//! ```text
//! bytes = 2 · R · C  (x in bf16, read once)  +  codes and scales of each copy written
//! share = time of a copy that reads bytes / 2 and writes bytes / 2  /  time of the cast
//! ```

use std::cell::LazyCell;

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, ScaleMode, amax, quantize, quantize_with_amax, row_words,
};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::data::{Table, fill, sets};
use super::timing::{Clock, or_dash};
use super::{Bench, torch};
use crate::target::Target;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const UNITS: u32 = 256;
/// Words that a unit loads and stores at once.
const VECTOR: usize = 4;

/// One kernel, or several that form a cast.
#[derive(Serialize, Deserialize)]
pub struct Row {
    rows: usize,
    cols: usize,
    /// `amax`, `cast`, or the granularity of a cast.
    what: String,
    /// Outputs: x by rows, or both orientations.
    orientation: String,
    /// Bytes read and written.
    bytes: u64,
    microseconds: f64,
    copy_microseconds: f64,
    /// copy / this.
    share: f64,
    /// GB/s of the copy, reads and writes.
    copy_gb_per_s: f64,
}

#[cube(launch_unchecked)]
fn copy<N: Size>(source: &Array<Vector<u32, N>>, target: &mut Array<Vector<u32, N>>) {
    target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
}

/// Bytes of codes and scales of an operand `[rows, k]`.
pub(super) fn written(granularity: Granularity, rows: usize, k: usize) -> usize {
    4 * (rows * row_words(k) + granularity.scale_words(rows, k))
}

/// Median seconds of a copy that moves `bytes`, half of them read.
pub(super) fn copy_seconds<T: Target>(clock: Clock, bytes: usize) -> f64 {
    let client = T::client();
    // Folded, as the cubes of a large copy exceed one dimension of a grid.
    let cubes = (bytes / 2).div_ceil(UNITS as usize * VECTOR * 4).max(1);
    let grid = [cubes.min(32_768), cubes.div_ceil(32_768)];
    let words = grid[0] * grid[1] * UNITS as usize * VECTOR;
    let buffers: Vec<_> = (0..sets(bytes).max(2))
        .map(|_| (client.create_from_slice(&vec![0x5a; 4 * words]), client.empty(4 * words)))
        .collect();
    clock.seconds::<T>(|turn| {
        let (source, target) = &buffers[turn % buffers.len()];
        // SAFETY: every unit copies one vector of the `words` that both buffers hold.
        unsafe {
            copy::launch_unchecked::<T::Runtime>(
                &client,
                CubeCount::Static(grid[0] as u32, grid[1] as u32, 1),
                CubeDim::new_1d(UNITS),
                VECTOR,
                ArrayArg::from_raw_parts(source.clone(), words),
                ArrayArg::from_raw_parts(target.clone(), words),
            );
        }
    })
}

/// Measured operation.
#[derive(Clone, Copy)]
enum Work {
    Amax,
    /// Cast with one scale that is known beforehand.
    Cast,
    /// Amaxes, scales and codes. `x` counts once, although one scale, and rowwise scales of the
    /// transpose, need two reads.
    Quantize(Granularity),
}

impl Work {
    fn name(self) -> String {
        match self {
            Self::Amax => "amax".into(),
            Self::Cast => "cast".into(),
            Self::Quantize(granularity) => granularity.to_string(),
        }
    }

    /// Granularity of the output.
    fn granularity(self) -> Option<Granularity> {
        match self {
            Self::Amax => None,
            Self::Cast => Some(Granularity::Tensor),
            Self::Quantize(granularity) => Some(granularity),
        }
    }
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let table =
        LazyCell::new(|| -> Vec<bf16> { Table::new(Format::E4m3).values.into_iter().map(bf16::from_f32).collect() });
    let shapes = bench.size.of(&[[128, 256]], 1, &[[8192, 4096], [8192, 14_336], [16_384, 8192], [4096, 4096]]);
    for shape @ [height, width] in shapes {
        let orientations = [("rows", Orientation::Rows), ("both", Orientation::Both)];
        let mut cases = vec![(Work::Amax, "", Orientation::Rows)];
        cases.extend(orientations.map(|(name, wanted)| (Work::Cast, name, wanted)));
        for granularity in Granularity::ALL {
            cases.extend(orientations.map(|(name, wanted)| (Work::Quantize(granularity), name, wanted)));
        }
        if bench.size == super::Size::First {
            let first = [Granularity::Tensor, Granularity::Row, Granularity::Block1x128].map(Some);
            cases.retain(|(work, ..)| matches!(work, Work::Quantize(_)) && first.contains(&work.granularity()));
        }
        let inputs = LazyCell::new(|| -> Vec<MatrixView> {
            let client = T::client();
            let mut values = vec![bf16::ZERO; height * width];
            let matrix = |i: usize| {
                fill(&table, &mut values, i * 104_729);
                let handle = client.create_from_slice(bf16::as_bytes(&values));
                MatrixView { handle, shape, strides: [width, 1], dtype: BF16 }
            };
            (0..sets(2 * height * width).max(2)).map(matrix).collect()
        });
        for (work, orientation, wanted) in cases {
            let what = work.name();
            let name = format!("quantize {height}x{width} {what} {orientation}");
            bench.case(&name, |clock| {
                let client = T::client();
                let granularity = work.granularity();
                let out = granularity.map_or(4, |granularity| {
                    let transposed = if wanted.cols() { written(granularity, width, height) } else { 0 };
                    written(granularity, height, width) + transposed
                });
                let bytes = 2 * height * width + out;
                let given = client.create_from_slice(&4f32.to_le_bytes());
                let seconds = clock.seconds::<T>(|turn| {
                    let x = &inputs[turn % inputs.len()];
                    let cast = |granularity| {
                        let is_mx = granularity == Granularity::Block1x32;
                        let scale_mode = if is_mx { ScaleMode::E8m0(Default::default()) } else { ScaleMode::F32 };
                        Cast { format: Format::E4m3, granularity, scale_mode }
                    };
                    match work {
                        Work::Amax => drop(amax(&client, x).expect("a valid view")),
                        Work::Cast => {
                            let cast = cast(Granularity::Tensor);
                            drop(quantize_with_amax(&client, x, &given, false, cast, wanted).expect("a valid view"));
                        }
                        Work::Quantize(granularity) => {
                            drop(quantize(&client, x, cast(granularity), wanted).expect("a valid view"));
                        }
                    }
                });
                let copied = copy_seconds::<T>(clock, bytes);
                Ok(super::Row::Quantize(Row {
                    rows: height,
                    cols: width,
                    what,
                    orientation: orientation.into(),
                    bytes: bytes as u64,
                    microseconds: seconds * 1e6,
                    copy_microseconds: copied * 1e6,
                    share: copied / seconds,
                    copy_gb_per_s: bytes as f64 / copied * 1e-9,
                }))
            });
        }
    }
}

pub fn print(rows: &[Row], torch: &torch::Results) {
    if rows.is_empty() {
        return;
    }
    println!("\ncasts of bf16 to e4m3, as shares of a copy of the same bytes");
    println!(
        "{:>6} {:>6}  {:<10}  {:<5}  {:>8}  {:>9}  {:>9}  {:>6}",
        "rows", "cols", "scales", "what", "MiB", "us", "copy us", "share"
    );
    for Row { rows, cols, what, orientation, bytes, microseconds, copy_microseconds, share, .. } in rows {
        let mib = *bytes as f64 / f64::from(1 << 20);
        println!(
            "{rows:>6} {cols:>6}  {what:<10}  {orientation:<5}  {mib:>8.2}  {microseconds:>9.1}  \
             {copy_microseconds:>9.1}  {share:>6.2}"
        );
    }
    let best = rows.iter().map(|row| row.copy_gb_per_s).fold(0.0, f64::max);
    println!("copy: {best:.0} GB/s at most; torch's {}", or_dash(torch.copy_gb_per_s, 0));
}
