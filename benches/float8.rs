//! FP8 against the same work in high precision, measured in one run. Prints tables; writes JSON
//! with `--json FILE`.
//!
//! `cargo bench --bench float8 -- --only step,memory` runs only these parts.
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use device_select::wgpu_adapters;
use serde_json::{Map, Value};

use table::Table;

mod attention;
mod cache;
mod gemm;
mod gemv;
mod generate;
#[path = "src/bin/float8-gpu/bench/given.rs"]
mod given;
mod host;
mod limits;
mod linear;
mod memory;
mod model;
mod neighbours;
mod quantize;
mod step;
mod table;
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

/// Parts, in the order of their execution.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
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
    /// A training step on the CPU by operation, against the machine's limits.
    Limits,
    /// Forward and backward of one linear on the CPU.
    Linear,
    /// Time and memory of attention on the CPU, by sequence length.
    Attention,
    /// A train step of the debug Llama on the CPU.
    Step,
    /// Quantize kernels on wgpu against a copy of the same bytes.
    Quantize,
    /// The emulated GEMM on wgpu against Burn's f32 matmul.
    Gemm,
    /// Effect of the KV cache's dtype on a trained model's loss. Takes minutes; runs only if named.
    Cache,
    /// A training step on the CPU of a realistic width. Takes minutes and 16 GiB; runs only if
    /// named.
    Wide,
}

impl Part {
    /// Measures the part; None without its device.
    fn table(self, repeat: u32, wgpu: Option<&str>) -> Option<Table> {
        Some(match self {
            Self::Memory => memory::table(),
            Self::Host => host::table(repeat),
            Self::Neighbours => neighbours::table(),
            Self::Gemv => gemv::table(repeat),
            Self::Generate => generate::table(repeat),
            Self::Limits => limits::table(),
            Self::Linear => linear::table(repeat),
            Self::Attention => attention::table(repeat),
            Self::Step => step::table(repeat),
            Self::Quantize => quantize::table(wgpu?, repeat),
            Self::Gemm => gemm::table(wgpu?, repeat),
            Self::Cache => cache::table(),
            Self::Wide => wide::table(),
        })
    }
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    trainer::use_current_thread();
    if let Some(name) = &args.memory_row {
        println!("{}", memory::measure(name));
        return Ok(());
    }
    let adapter = wgpu_adapters().unwrap_or_default().into_iter().next();
    let wgpu = adapter.map(|adapter| format!("wgpu ({})", adapter.name));
    if wgpu.is_none() {
        println!("wgpu: skipped, no adapter");
    }
    let by_default = |part: &Part| args.only.is_empty() && !matches!(part, Part::Cache | Part::Wide);
    let mut results = Map::new();
    println!("medians of {}; ratios above one are slower", args.repeat);
    for part in Part::value_variants().iter().filter(|part| by_default(part) || args.only.contains(part)) {
        if let Some(table) = part.table(args.repeat, wgpu.as_deref()) {
            print!("{table}");
            let name = part.to_possible_value().expect("no part is skipped").get_name().to_string();
            results.insert(name, table.json());
        }
    }
    if let Some(path) = args.json {
        std::fs::write(path, serde_json::to_string_pretty(&Value::Object(results))?)?;
    }
    Ok(())
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
