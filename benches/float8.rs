//! FP8 against the same work in high precision, measured in one run. Prints tables; writes JSON
//! with `--json FILE`.
//!
//! `cargo bench --bench float8 -- --only step,memory` runs only these parts.
use std::path::PathBuf;

use benches::median;
use clap::{Parser, ValueEnum};
use serde_json::{Map, Value};

mod attention;
mod cache;
mod generate;
mod host;
mod linear;
mod memory;
mod model;
mod neighbours;
mod step;

#[global_allocator]
static ALLOCATOR: test_data::Counting = test_data::Counting;

#[derive(Parser)]
struct Args {
    /// Parts to run, separated by commas. Default: all, except `cache`.
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
    /// Bytes that a layer moves on CUDA.
    Neighbours,
    /// Time of generated tokens on the CPU, by position.
    Generate,
    /// Forward and backward of one linear on the CPU.
    Linear,
    /// Time and memory of attention on the CPU, by sequence length.
    Attention,
    /// A train step of the debug Llama on the CPU.
    Step,
    /// Effect of the KV cache's dtype on a trained model's loss. Takes minutes; runs only if named.
    Cache,
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    trainer::use_current_thread();
    if let Some(name) = &args.memory_row {
        println!("{}", memory::measure(name));
        return Ok(());
    }
    let runs = |part: &&Part| if args.only.is_empty() { **part != Part::Cache } else { args.only.contains(part) };
    let mut results = Map::new();
    println!("medians of {}; ratios above one are slower", args.repeat);
    for part in Part::value_variants().iter().filter(runs) {
        let table = match part {
            Part::Memory => memory::table(),
            Part::Host => host::table(args.repeat),
            Part::Neighbours => neighbours::table(),
            Part::Generate => generate::table(args.repeat),
            Part::Linear => linear::table(args.repeat),
            Part::Attention => attention::table(args.repeat),
            Part::Step => step::table(args.repeat),
            Part::Cache => cache::table(),
        };
        print!("{table}");
        let name = part.to_possible_value().expect("no part is skipped").get_name().to_string();
        results.insert(name, Value::Array(table.rows));
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

/// Mebibytes.
fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
