//! Forward and backward of one linear.
use std::time::Instant;

use burn::backend::{Autodiff, Flex, Wgpu};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, Tensor};
use burn_float8::Float8;
use serde::Serialize;

use crate::{medians, on_devices};

/// One shape on one device.
#[derive(Serialize)]
pub struct Row {
    device: String,
    m: usize,
    k: usize,
    n: usize,
    /// Median milliseconds.
    plain_ms: f64,
    float8_ms: f64,
    /// float8 / plain.
    ratio: f64,
}

/// Returns a closure that measures forward and backward in milliseconds, the casts of x and w
/// included.
fn timed<B: AutodiffBackend>([m, k, n]: [usize; 3]) -> impl FnMut() -> f64 {
    let device = B::Device::default();
    let linear: Linear<B> = LinearConfig::new(k, n).with_bias(false).init(&device);
    let x = Tensor::<B, 2>::random([m, k], Distribution::Normal(0.0, 1.0), &device);
    move || {
        // New tensors of the same values, so that no cast is reused from the last repetition.
        let mut linear = linear.clone();
        linear.weight = linear.weight.map(|w| (w * 1.0).detach().require_grad());
        let x = (x.clone() * 1.0).detach().require_grad();
        B::sync(&device).expect("the device runs");
        let start = Instant::now();
        let grads = linear.forward(x.clone()).sum().backward();
        let (dx, dw) = (x.grad(&grads).expect("tracked"), linear.weight.grad(&grads).expect("tracked"));
        B::sync(&device).expect("the device runs");
        let time = start.elapsed().as_secs_f64() * 1e3;
        drop((dx, dw));
        time
    }
}

fn compare<Plain: AutodiffBackend, Fp8: AutodiffBackend>(device: &str, repeat: u32, rows: &mut Vec<Row>) {
    for [m, k, n] in [[1024, 256, 256], [1024, 256, 1024], [512, 1024, 1024]] {
        let [plain_ms, float8_ms] = medians(repeat, timed::<Plain>([m, k, n]), timed::<Fp8>([m, k, n]));
        rows.push(Row { device: device.into(), m, k, n, plain_ms, float8_ms, ratio: float8_ms / plain_ms });
    }
}

/// Rows of the CPU and, if present, of the wgpu device with this name.
pub fn rows(wgpu: Option<&str>, repeat: u32) -> Vec<Row> {
    let cpu = compare::<Autodiff<Flex>, Float8<Autodiff<Flex>>>;
    on_devices(wgpu, repeat, cpu, compare::<Autodiff<Wgpu>, Float8<Autodiff<Wgpu>>>)
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\nlinear, forward + backward, tensorwise");
    println!("{:>6} {:>6} {:>6}  {:>10}  {:>10}  {:>6}  device", "M", "K", "N", "plain ms", "float8 ms", "ratio");
    for Row { device, m, k, n, plain_ms, float8_ms, ratio } in rows {
        println!("{m:>6} {k:>6} {n:>6}  {plain_ms:>10.2}  {float8_ms:>10.2}  {ratio:>6.2}  {device}");
    }
}
