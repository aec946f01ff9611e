//! The emulated GEMM on wgpu against Burn's f32 matmul of the same shape.
use burn::tensor::{Distribution, Tensor};
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use float8_kernels::{GemmConfig, Operand, Orientation, quantize, scaled_gemm};
use serde::Serialize;

use crate::medians;
use crate::quantize::{CASTS, cast, matrix, time};

/// Burn's backend without fusion, which runs a matmul immediately even if its result is unused.
type Plain = CubeBackend<WgpuRuntime, f32, i32, u32>;

/// M, N and K.
const SHAPES: [[usize; 3]; 3] = [[512, 1024, 1024], [1024, 256, 256], [16, 1024, 1024]];

/// One product.
#[derive(Serialize)]
pub struct Row {
    device: String,
    granularity: String,
    m: usize,
    n: usize,
    k: usize,
    /// Median milliseconds.
    emulated_ms: f64,
    matmul_ms: f64,
    /// emulated / matmul.
    ratio: f64,
}

/// Rows of the default wgpu device, named `device`. Both operands have the scales of one entry of
/// [`CASTS`].
pub fn rows(device: &str, repeat: u32) -> Vec<Row> {
    let client = WgpuRuntime::client(&WgpuDevice::default());
    let random = |shape: [usize; 2]| Tensor::<Plain, 2>::random(shape, Distribution::Default, &WgpuDevice::default());
    let dtype = f32::as_type_native_unchecked().storage_type();
    let mut rows = vec![];
    for [m, n, k] in SHAPES {
        let (x, w) = (random([m, k]), random([k, n]));
        for scales in CASTS {
            let operand = |rows| -> Operand {
                let done = quantize(&client, &matrix(&client, [rows, k]), cast(scales), Orientation::Rows);
                done.expect("a matrix that the kernels take").rows.expect("asked for")
            };
            let (a, b) = (operand(m), operand(n));
            let mut emulated = || {
                let config = GemmConfig { emulate: true, ..GemmConfig::default() };
                scaled_gemm(&client, &a, &b, None, dtype, config).expect("operands that fit");
            };
            let mut plain = || drop(x.clone().matmul(w.clone()));
            let [emulated_ms, matmul_ms] =
                medians(repeat, || time(&client, &mut emulated), || time(&client, &mut plain));
            let (device, granularity) = (device.into(), scales.0.to_string());
            rows.push(Row { device, granularity, m, n, k, emulated_ms, matmul_ms, ratio: emulated_ms / matmul_ms });
        }
    }
    rows
}

pub fn print(rows: &[Row]) {
    let Some(Row { device, .. }) = rows.first() else { return };
    println!("\nemulated GEMM to f32 on {device}, against Burn's matmul of f32");
    println!(
        "{:<10}  {:>6} {:>6} {:>6}  {:>11}  {:>9}  {:>6}",
        "scales", "M", "N", "K", "emulated ms", "matmul ms", "ratio"
    );
    for Row { granularity, m, n, k, emulated_ms, matmul_ms, ratio, .. } in rows {
        println!("{granularity:<10}  {m:>6} {n:>6} {k:>6}  {emulated_ms:>11.2}  {matmul_ms:>9.2}  {ratio:>6.2}");
    }
}
