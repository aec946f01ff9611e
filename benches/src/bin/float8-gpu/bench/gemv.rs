//! GEMMs of one and of four rows, as for generated tokens, which read every code of the weight
//! once. Measured as a share of a device copy of the same number of bytes. One row more, which uses
//! the tiles of the device's GEMM, is measured for comparison.
//!
//! ```text
//! bytes = N · K codes of the weight, and their scales
//! share = time of a copy that reads bytes / 2 and writes bytes / 2  /  time of the GEMM
//! ```

use std::cell::LazyCell;

use float8_kernels::{Format, GEMV_ROWS, GemmConfig, GemmDevice, Granularity, scaled_gemm};
use kernel_tests::Failure;
use serde_json::{Value, json};

use super::data::{Scales, Values, sets};
use super::quantize::{copy_seconds, written};
use super::timing::Clock;
use super::{Bench, Size};
use crate::target::Target;

/// N and K of the largest and the smallest linears of Llama 3 8B, and of its output layer.
const LINEARS: [[usize; 2]; 4] = [[14_336, 4096], [4096, 4096], [1024, 4096], [128_256, 4096]];

/// Numbers of rows; the last is the first that uses tiles.
const ROWS: [usize; 3] = [1, GEMV_ROWS, GEMV_ROWS + 1];

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let table = LazyCell::new(|| Values::new(Format::E4m3));
    let granularities = match bench.size {
        Size::Tiny | Size::First => vec![Granularity::Tensor],
        Size::Headline | Size::Full => Granularity::ALL.to_vec(),
    };
    for [n, k] in bench.size.of(&[[64, 256]], 2, &LINEARS) {
        for &granularity in &granularities {
            for m in ROWS {
                bench.case(&format!("gemv {m}x{n}x{k} {granularity}"), |clock| {
                    let row = measure::<T>(clock, &table, [m, n, k], granularity);
                    T::client().memory_cleanup();
                    row
                });
            }
        }
    }
}

fn measure<T: Target>(
    clock: Clock,
    table: &Values,
    [m, n, k]: [usize; 3],
    granularity: Granularity,
) -> Result<Value, Failure> {
    let (client, out) = (T::client(), T::compute_dtype().into());
    let operand = |rows, seed| table.operand(&client, [rows, k], Scales::from(granularity), seed);
    let operands: Vec<_> = (0..sets(n * k)).map(|i| [operand(m, 2 * i), operand(n, 2 * i + 1)]).collect();
    let config = GemmConfig::default();
    let [a, b] = &operands[0];
    scaled_gemm(&client, a, b, None, out, config)?;
    let seconds = clock.rotate::<T, _>(&operands, |[a, b]| {
        scaled_gemm(&client, a, b, None, out, config).expect("it took such operands before");
    });
    let bytes = written(granularity, n, k);
    let copy = copy_seconds::<T>(clock, bytes);
    let path = GemmDevice::of(&client).path(Some(m), [granularity; 2], config).to_string();
    Ok(json!({
        "shape": [m, n, k], "scales": granularity.to_string(), "path": path, "microseconds": seconds * 1e6,
        "bytes": bytes, "gb_per_s": bytes as f64 / seconds * 1e-9, "copy_microseconds": copy * 1e6,
        "share": copy / seconds,
    }))
}
