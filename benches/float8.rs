//! FP8 against the same work in high precision, measured in one run. Prints tables; writes JSON
//! with `--json FILE`.
//!
//! `cargo bench --bench float8 -- --only step,memory` runs only these parts.
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use device_select::wgpu_adapters;
use serde::Serialize;

mod attention;
mod cache;
mod gemm;
mod gemv;
mod generate;
#[path = "src/bin/float8-gpu/bench/given.rs"]
mod given;
mod grouped;
mod host;
mod limits;
mod linear;
mod memory;
mod model;
mod neighbours;
mod quantize;
mod step;
mod wide;

#[global_allocator]
static ALLOCATOR: test_data::Counting = test_data::Counting;

#[derive(Parser)]
struct Args {
    /// Parts to run, separated by commas. Default: all, except `cache` and `wide`.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Timed repetitions of each case; the median is reported.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Writes the results as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Measures only one row of the memory part and prints its bytes.
    #[arg(long, hide = true, value_name = "NAME")]
    memory_row: Option<String>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Forward and backward of one linear.
    Linear,
    /// Forward and backward of a grouped linear.
    Grouped,
    /// Time and memory of attention on the CPU, by sequence length.
    Attention,
    /// A train step of the debug Llama.
    Step,
    /// Quantize kernels on wgpu against a copy of the same bytes.
    Quantize,
    /// The emulated GEMM on wgpu against Burn's f32 matmul.
    Gemm,
    /// Peak bytes of train steps on the CPU.
    Memory,
    /// Host time of a linear on CUDA.
    Host,
    /// Bytes that a layer's linears and fused operations move on CUDA.
    Neighbours,
    /// A few rows through an FP8 weight on the CPU, against memory bandwidth.
    Gemv,
    /// Time of generated tokens on the CPU, by position.
    Generate,
    /// Effect of the KV cache's dtype on a trained model's loss. Takes minutes; runs only if named.
    Cache,
    /// A training step on the CPU by operation, against the machine's limits.
    Limits,
    /// A training step of a realistic width on the CPU. Takes minutes and 16 GiB; runs only if
    /// named.
    Wide,
}

/// Results; parts that did not run are absent.
#[derive(Default, Serialize)]
struct Results {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    linear: Vec<linear::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    grouped: Vec<grouped::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    attention: Vec<attention::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    step: Vec<step::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    quantize: Vec<quantize::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gemm: Vec<gemm::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    memory: Vec<memory::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    host: Vec<host::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    neighbours: Vec<neighbours::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gemv: Vec<gemv::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    generate: Vec<generate::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<limits::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cache: Vec<cache::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    wide: Vec<wide::Row>,
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    trainer::use_current_thread();
    if let Some(name) = &args.memory_row {
        println!("{}", memory::measure(name));
        return Ok(());
    }
    let runs = |part| args.only.is_empty() || args.only.contains(&part);
    let adapter = wgpu_adapters().unwrap_or_default().into_iter().next();
    let wgpu = adapter.map(|adapter| format!("wgpu ({})", adapter.name));
    if wgpu.is_none() {
        println!("wgpu: skipped, no adapter");
    }
    let wgpu = wgpu.as_deref();

    let mut results = Results::default();
    if runs(Part::Memory) {
        results.memory = memory::rows();
    }
    if runs(Part::Host) {
        results.host = host::rows(args.repeat);
    }
    if runs(Part::Neighbours) {
        results.neighbours = neighbours::rows();
    }
    if runs(Part::Gemv) {
        results.gemv = gemv::rows(args.repeat);
    }
    if runs(Part::Generate) {
        results.generate = generate::rows(args.repeat);
    }
    if runs(Part::Limits) {
        results.limits = limits::rows();
    }
    if runs(Part::Linear) {
        results.linear = linear::rows(wgpu, args.repeat);
    }
    if runs(Part::Grouped) {
        results.grouped = grouped::rows(wgpu, args.repeat);
    }
    if runs(Part::Attention) {
        results.attention = attention::rows(args.repeat);
    }
    if runs(Part::Step) {
        results.step = step::rows(wgpu, args.repeat);
    }
    if runs(Part::Quantize)
        && let Some(device) = wgpu
    {
        results.quantize = quantize::rows(device, args.repeat);
    }
    if runs(Part::Gemm)
        && let Some(device) = wgpu
    {
        results.gemm = gemm::rows(device, args.repeat);
    }

    if args.only.contains(&Part::Cache) {
        results.cache = cache::rows();
    }
    if args.only.contains(&Part::Wide) {
        results.wide = wide::rows();
    }

    println!("\nmedians of {}; ratios above one are slower", args.repeat);
    linear::print(&results.linear);
    grouped::print(&results.grouped);
    attention::print(&results.attention);
    step::print(&results.step);
    quantize::print(&results.quantize);
    gemm::print(&results.gemm);
    memory::print(&results.memory);
    host::print(&results.host);
    neighbours::print(&results.neighbours);
    gemv::print(&results.gemv);
    generate::print(&results.generate);
    limits::print(&results.limits);
    cache::print(&results.cache);
    wide::print(&results.wide);
    if let Some(path) = args.json {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

/// Measures a device, given its name and the number of repetitions, and adds its rows.
type Compare<Row> = fn(&str, u32, &mut Vec<Row>);

/// Rows of the CPU and, if present, of the wgpu device with this name.
fn on_devices<Row>(wgpu: Option<&str>, repeat: u32, on_cpu: Compare<Row>, on_wgpu: Compare<Row>) -> Vec<Row> {
    let mut rows = vec![];
    on_cpu("cpu", repeat, &mut rows);
    if let Some(device) = wgpu {
        on_wgpu(device, repeat, &mut rows);
    }
    rows
}

/// Median times of two alternating closures; the first two repetitions warm up.
fn medians(repeat: u32, mut first: impl FnMut() -> f64, mut second: impl FnMut() -> f64) -> [f64; 2] {
    let times = (0..repeat + 2).map(|_| (first(), second())).skip(2);
    let (first, second): (Vec<_>, Vec<_>) = times.unzip();
    [median(first), median(second)]
}

/// Median.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
