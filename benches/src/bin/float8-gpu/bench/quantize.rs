//! Bandwidth of amax, of the casts and of AdamW, as a share of a device copy of the same number of
//! bytes.
//!
//! ```text
//! bytes = 2 · R · C  (x in bf16, read once)  +  codes and scales of each copy written
//! bytes = 14 · R · C of AdamW in bf16: parameter and moments read and written, the gradient read
//! share = time of a copy that reads bytes / 2 and writes bytes / 2  /  time of the cast
//! ```

use std::cell::LazyCell;

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use float8_kernels::adamw::{AdamWArgs, AdamWStep, adamw};
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, ScaleMode, amax, quantize, quantize_with_amax, row_words,
    supports,
};
use half::bf16;
use serde_json::{Value, json};

use super::Bench;
use super::data::{Values, fill, sets};
use super::timing::Clock;
use crate::target::Target;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const UNITS: u32 = 256;
/// Words that a unit loads and stores at once.
const VECTOR: usize = 4;

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
    clock.rotate::<T, _>(&buffers, |(source, target)| {
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

/// The amax without a granularity; a cast, whose one scale may be known beforehand; by rows, or in
/// both orientations.
type Work = (Option<Granularity>, bool, Orientation);

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let table =
        LazyCell::new(|| -> Vec<bf16> { Values::new(Format::E4m3).values.into_iter().map(bf16::from_f32).collect() });
    let shapes = bench.size.of(&[[128, 256]], 1, &[[8192, 4096], [8192, 14_336], [16_384, 8192], [4096, 4096]]);
    for shape @ [height, width] in shapes {
        let both = |granularity, known| [Orientation::Rows, Orientation::Both].map(|o| (Some(granularity), known, o));
        let of_scales = |granularity: Granularity| both(granularity, false);
        let first = [Granularity::Tensor, Granularity::Row, Granularity::Block1x128];
        let cases: Vec<Work> = match bench.size {
            super::Size::First => first.into_iter().flat_map(of_scales).collect(),
            _ => {
                let others = both(Granularity::Tensor, true).into_iter();
                let others = [(None, false, Orientation::Rows)].into_iter().chain(others);
                others.chain(Granularity::ALL.into_iter().flat_map(of_scales)).collect()
            }
        };
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
        for (granularity, known, wanted) in cases {
            let what = match granularity {
                None => "amax".to_string(),
                Some(_) if known => "cast".into(),
                Some(granularity) => granularity.to_string(),
            };
            let orientation = granularity.map(|_| if wanted.cols() { "both" } else { "rows" });
            bench.case(&format!("quantize {height}x{width} {what} {}", orientation.unwrap_or_default()), |clock| {
                let client = T::client();
                let out = granularity.map_or(4, |granularity| {
                    let transposed = if wanted.cols() { written(granularity, width, height) } else { 0 };
                    written(granularity, height, width) + transposed
                });
                let bytes = 2 * height * width + out;
                let given = client.create_from_slice(&4f32.to_le_bytes());
                let seconds = clock.rotate::<T, _>(&inputs, |x| {
                    let Some(granularity) = granularity else { return drop(amax(&client, x).expect("a valid view")) };
                    let is_mx = granularity == Granularity::Block1x32;
                    let scale_mode = if is_mx { ScaleMode::E8m0(Default::default()) } else { ScaleMode::F32 };
                    let cast = Cast { format: Format::E4m3, granularity, scale_mode };
                    // Counts one read of `x`. Tensorwise scales, and rowwise scales of the transpose, need two.
                    if known {
                        drop(quantize_with_amax(&client, x, &given, false, cast, wanted).expect("a valid view"));
                    } else {
                        drop(quantize(&client, x, cast, wanted).expect("a valid view"));
                    }
                });
                Ok(row::<T>(clock, shape, &what, orientation, bytes, seconds))
            });
        }
        bench.case(&format!("quantize {height}x{width} adamw"), |clock| {
            let client = T::client();
            let dtype = if supports(&client, BF16) { BF16 } else { F32 };
            let (len, strides) = (height * width * dtype.size(), [width, 1]);
            let zeros = || MatrixView { handle: client.create_from_slice(&vec![0; len]), shape, strides, dtype };
            let tensors = (0..sets(7 * len).max(2))
                .map(|_| AdamWArgs { param: zeros(), moments: [zeros(), zeros()], grad: zeros() })
                .collect::<Vec<_>>();
            let (betas, decay, rounding) = ([0.9, 0.95], Some(0.9999), [const { None }; 3]);
            let step = AdamWStep { lr: 1e-3, betas, epsilon: 1e-8, decay, time: 2, rounding };
            let seconds = clock.rotate::<T, _>(&tensors, |tensors| {
                drop(adamw(&client, &step, tensors, &shape, true).expect("tensors of one shape"));
            });
            Ok(row::<T>(clock, shape, "adamw", None, 7 * len, seconds))
        });
    }
}

fn row<T: Target>(
    clock: Clock,
    shape: [usize; 2],
    what: &str,
    orientation: Option<&str>,
    bytes: usize,
    seconds: f64,
) -> Value {
    let copied = copy_seconds::<T>(clock, bytes);
    json!({
        "shape": shape, "what": what, "orientation": orientation, "bytes": bytes,
        "microseconds": seconds * 1e6, "copy_microseconds": copied * 1e6, "share": copied / seconds,
        "copy_gb_per_s": bytes as f64 / copied * 1e-9,
    })
}
