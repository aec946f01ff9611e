//! Forward and backward of a grouped linear, against a matmul for each group.
use std::time::Instant;

use burn::backend::{Autodiff, Flex, Wgpu};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, Int, Tensor};
use burn_float8::{Float8, backend::grouped_matmul, grouped_linear};
use serde::Serialize;

use crate::{medians, on_devices};

/// Rows of each of eight experts.
const GROUPS: [(&str, [usize; 8]); 2] = [("balanced", [128; 8]), ("skewed", [375, 257, 156, 100, 64, 42, 30, 0])];

/// One shape on one device.
#[derive(Serialize)]
pub struct Row {
    device: String,
    m: usize,
    k: usize,
    n: usize,
    /// Distribution of the group sizes.
    spread: String,
    /// Median milliseconds of a matmul for each group.
    plain_ms: f64,
    float8_ms: f64,
    /// float8 / plain.
    ratio: f64,
}

/// Function that computes y.
type Product<B> = fn(Tensor<B, 2>, Tensor<B, 3>, Tensor<B, 1, Int>) -> Tensor<B, 2>;

/// Returns a closure that measures forward and backward in milliseconds, the casts of x and w
/// included.
fn timed<B: AutodiffBackend>(product: Product<B>, sizes: [usize; 8], [k, n]: [usize; 2]) -> impl FnMut() -> f64 {
    let device = B::Device::default();
    let ends: Vec<i32> = (1..=sizes.len()).map(|g| sizes[..g].iter().sum::<usize>() as i32).collect();
    let ends = Tensor::<B, 1, Int>::from_ints(ends.as_slice(), &device);
    let x = Tensor::<B, 2>::random([sizes.iter().sum(), k], Distribution::Normal(0.0, 1.0), &device);
    let w = Tensor::<B, 3>::random([sizes.len(), k, n], Distribution::Normal(0.0, 0.02), &device);
    move || {
        // New tensors of the same values, so that no cast is reused from the last repetition.
        let x = (x.clone() * 1.0).detach().require_grad();
        let w = (w.clone() * 1.0).detach().require_grad();
        B::sync(&device).expect("the device runs");
        let start = Instant::now();
        let grads = product(x.clone(), w.clone(), ends.clone()).sum().backward();
        let (dx, dw) = (x.grad(&grads).expect("tracked"), w.grad(&grads).expect("tracked"));
        B::sync(&device).expect("the device runs");
        let time = start.elapsed().as_secs_f64() * 1e3;
        drop((dx, dw));
        time
    }
}

fn compare<Plain: AutodiffBackend, Fp8: AutodiffBackend>(
    device: &str,
    float8: Product<Fp8>,
    repeat: u32,
    rows: &mut Vec<Row>,
) {
    for (spread, sizes) in GROUPS {
        for [k, n] in [[256, 512], [512, 256]] {
            let plain = timed::<Plain>(grouped_matmul, sizes, [k, n]);
            let [plain_ms, float8_ms] = medians(repeat, plain, timed::<Fp8>(float8, sizes, [k, n]));
            let (m, ratio) = (sizes.iter().sum(), float8_ms / plain_ms);
            rows.push(Row { device: device.into(), m, k, n, spread: spread.into(), plain_ms, float8_ms, ratio });
        }
    }
}

/// Rows of the CPU and, if present, of the wgpu device with this name.
pub fn rows(wgpu: Option<&str>, repeat: u32) -> Vec<Row> {
    let cpu = |device: &str, repeat, rows: &mut _| {
        compare::<Autodiff<Flex>, Float8<Autodiff<Flex>>>(device, grouped_linear, repeat, rows);
    };
    on_devices(wgpu, repeat, cpu, |device, repeat, rows| {
        compare::<Autodiff<Wgpu>, Float8<Autodiff<Wgpu>>>(device, grouped_linear, repeat, rows);
    })
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\ngrouped linear of eight experts, forward + backward, tensorwise; plain: a matmul for each");
    println!(
        "{:>6} {:>6} {:>6}  {:<8}  {:>10}  {:>10}  {:>6}  device",
        "M", "K", "N", "sizes", "plain ms", "float8 ms", "ratio"
    );
    for Row { device, m, k, n, spread, plain_ms, float8_ms, ratio } in rows {
        println!("{m:>6} {k:>6} {n:>6}  {spread:<8}  {plain_ms:>10.2}  {float8_ms:>10.2}  {ratio:>6.2}  {device}");
    }
}
