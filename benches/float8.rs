//! Times FP8 linears against the same work on the plain backend, in one run: a table, and JSON with `--json FILE`.
use std::path::PathBuf;
use std::time::Instant;

use burn::backend::{Autodiff, Flex, Wgpu};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, Tensor};
use burn_float8::Float8;
use burn_float8::device::wgpu_adapters;
use clap::Parser;
use serde::Serialize;

#[derive(Parser)]
struct Args {
    /// Timed repetitions of each case; the median counts.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Writes the results as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One case: forward and backward of one linear.
#[derive(Serialize)]
struct Row {
    device: String,
    m: usize,
    k: usize,
    n: usize,
    /// Median milliseconds.
    plain_ms: f64,
    float8_ms: f64,
    /// float8 / plain; above one is slower.
    ratio: f64,
}

/// Median milliseconds of forward and backward of one linear, the weight's cast included.
fn linear<B: AutodiffBackend>([m, k, n]: [usize; 3], repeat: u32) -> f64 {
    let device = B::Device::default();
    let linear: Linear<B> = LinearConfig::new(k, n).with_bias(false).init(&device);
    let x = Tensor::<B, 2>::random([m, k], Distribution::Normal(0.0, 1.0), &device);
    let mut times: Vec<_> = (0..repeat + 2)
        .map(|_| {
            // New tensors of the same values: no cast is carried over from the last repetition.
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
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare<Plain: AutodiffBackend, Fp8: AutodiffBackend>(device: &str, repeat: u32, rows: &mut Vec<Row>) {
    for [m, k, n] in [[1024, 256, 256], [1024, 256, 1024], [512, 1024, 1024]] {
        let (plain_ms, float8_ms) = (linear::<Plain>([m, k, n], repeat), linear::<Fp8>([m, k, n], repeat));
        rows.push(Row { device: device.into(), m, k, n, plain_ms, float8_ms, ratio: float8_ms / plain_ms });
    }
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let mut rows = vec![];
    compare::<Autodiff<Flex>, Autodiff<Float8<Flex>>>("cpu", args.repeat, &mut rows);
    match wgpu_adapters().unwrap_or_default().first() {
        Some(adapter) => {
            let device = format!("wgpu ({})", adapter.name);
            compare::<Autodiff<Wgpu>, Autodiff<Float8<Wgpu>>>(&device, args.repeat, &mut rows);
        }
        None => println!("wgpu: skipped, no adapter"),
    }
    println!("linear forward + backward, median of {}", args.repeat);
    println!("{:>6} {:>6} {:>6}  {:>10}  {:>10}  {:>6}  device", "M", "K", "N", "plain ms", "float8 ms", "ratio");
    for Row { device, m, k, n, plain_ms, float8_ms, ratio } in &rows {
        println!("{m:>6} {k:>6} {n:>6}  {plain_ms:>10.2}  {float8_ms:>10.2}  {ratio:>6.2}  {device}");
    }
    if let Some(path) = args.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}
