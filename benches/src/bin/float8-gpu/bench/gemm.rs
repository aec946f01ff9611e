//! TFLOP/s of the scaled GEMM and of Burn's own matmul on the same shapes.
//!
//! ```text
//! TFLOP/s = 2 · M · N · K / time
//! ```

use burn::tensor::{Distribution, Tensor};
use float8_kernels::{Format, GemmConfig, Granularity, gemm_path, scaled_gemm};
use serde::Serialize;

use super::data::{Table, sets};
use super::timing::{Timer, geometric_mean, or_dash};
use super::torch;
use crate::target::Target;

/// K and N of the linears of Llama 3 8B and 70B: q and o, k and v, gate and up, down.
const LLAMA: [[usize; 2]; 8] = [
    [4096, 4096],
    [4096, 1024],
    [4096, 14_336],
    [14_336, 4096],
    [8192, 8192],
    [8192, 1024],
    [8192, 28_672],
    [28_672, 8192],
];

/// Tokens.
const TOKENS: [usize; 3] = [2048, 8192, 16_384];

/// Shapes on which scales of rows, blocks and MX are measured too.
const SCALED: [[usize; 3]; 3] = [[4096, 4096, 4096], [8192, 4096, 4096], [8192, 14_336, 4096]];

/// M, N and K, the ones that targets name first: time may not suffice for all.
pub fn shapes(quick: bool) -> Vec<[usize; 3]> {
    if quick {
        return vec![[64, 64, 64], [128, 192, 256]];
    }
    let cubes = [4096, 8192, 2048, 1024, 16_384].map(|n| [n; 3]);
    let mut shapes = cubes.to_vec();
    for m in TOKENS {
        shapes.extend(LLAMA.map(|[k, n]| [m, n, k]));
    }
    shapes
}

/// One shape with scales of one granularity.
#[derive(Serialize)]
pub struct Row {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub scales: String,
    /// The kernel that ran.
    pub path: String,
    /// TFLOP/s with f32 accumulation every 128 of the contraction.
    pub precise: f64,
    /// TFLOP/s with the tensor core's own accumulation.
    pub fast: f64,
    /// TFLOP/s of Burn's matmul in high precision, where it was measured.
    pub high: Option<f64>,
}

/// TFLOP/s.
pub fn rate([m, n, k]: [usize; 3], seconds: f64) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64 / seconds * 1e-12
}

pub fn rows<T: Target>(timer: &mut Timer, quick: bool) -> Vec<Row> {
    let table = Table::new(Format::E4m3);
    let mut rows = vec![];
    let scaled = if quick { vec![[64, 64, 64]] } else { SCALED.to_vec() };
    let blocks = [
        [Granularity::Row, Granularity::Row],
        [Granularity::Block1x128, Granularity::Block128x128],
        [Granularity::Block1x32, Granularity::Block1x32],
    ];
    let scaled = scaled.into_iter().flat_map(|shape| blocks.map(|granularities| (shape, granularities)));
    let cases = shapes(quick).into_iter().map(|shape| (shape, [Granularity::Tensor; 2])).chain(scaled);
    for (shape @ [m, n, k], granularities) in cases {
        let [left, right] = granularities;
        let scales = if left == right { left.to_string() } else { format!("{left},{right}") };
        rows.extend(timer.case(&format!("gemm {m}x{n}x{k} {scales}"), |timer| {
            let client = T::client();
            let [precise, fast] = fp8::<T>(timer, &table, shape, granularities);
            let high = (left == Granularity::Tensor).then(|| high::<T>(timer, shape));
            // Leaves the memory to the next shape.
            client.memory_cleanup();
            let path = gemm_path(&client, granularities, GemmConfig::default()).to_string();
            Row { m, n, k, scales, path, precise, fast, high }
        }));
    }
    rows
}

fn fp8<T: Target>(
    timer: &Timer,
    table: &Table,
    shape @ [m, n, k]: [usize; 3],
    [left, right]: [Granularity; 2],
) -> [f64; 2] {
    let client = T::client();
    let out = T::compute_dtype().into();
    let sets: Vec<_> = (0..sets((m + n) * k))
        .map(|i| [table.operand(&client, [m, k], left, 2 * i), table.operand(&client, [n, k], right, 2 * i + 1)])
        .collect();
    [false, true].map(|use_fast_accum| {
        let config = GemmConfig { use_fast_accum, emulate: false };
        let seconds = timer.seconds(T::sync, |turn| {
            let [a, b] = &sets[turn % sets.len()];
            scaled_gemm(&client, a, b, None, out, config).expect("operands that fit");
        });
        rate(shape, seconds)
    })
}

fn high<T: Target>(timer: &Timer, shape @ [m, n, k]: [usize; 3]) -> f64 {
    let (device, dtype) = (Default::default(), T::compute_dtype());
    let matrix =
        |shape: [usize; 2]| Tensor::<T::Backend, 2>::random(shape, Distribution::Normal(0.0, 1.0), &device).cast(dtype);
    let sets: Vec<_> = (0..sets((m + n) * k * 2)).map(|_| [matrix([m, k]), matrix([k, n])]).collect();
    let seconds = timer.seconds(T::sync, |turn| {
        let [a, b] = sets[turn % sets.len()].clone();
        drop(a.matmul(b));
    });
    rate(shape, seconds)
}

pub fn print(rows: &[Row], torch: Option<&torch::Results>) {
    if rows.is_empty() {
        return;
    }
    println!("\nGEMM in TFLOP/s, FP8 e4m3 to the compute dtype; torch's best of all its FP8 modes");
    println!(
        "{:>6} {:>6} {:>6}  {:<15}  {:<10}  {:>8} {:>8}  {:>8} {:>6}  {:>8} {:>6}  {:>8}",
        "M", "N", "K", "scales", "path", "precise", "fast", "burn", "ratio", "torch", "ratio", "bf16"
    );
    for row in rows {
        let Row { m, n, k, scales, path, precise, fast, high } = row;
        let best = torch.and_then(|torch| torch.best(row));
        let bf16 = torch.and_then(|torch| torch.gemm(row)?.bf16);
        println!(
            "{m:>6} {n:>6} {k:>6}  {scales:<15}  {path:<10}  {precise:>8.1} {fast:>8.1}  {:>8} {:>6}  {:>8} {:>6}  {:>8}",
            or_dash(*high, 1),
            or_dash(high.map(|high| precise / high), 2),
            or_dash(best, 1),
            or_dash(best.map(|best| precise / best), 2),
            or_dash(bf16, 1),
        );
    }
    let ratios: Vec<_> = rows.iter().filter_map(|row| Some(row.precise / row.high?)).collect();
    println!("geometric mean of precise to Burn's matmul: {}", or_dash(geometric_mean(&ratios), 3));
}
