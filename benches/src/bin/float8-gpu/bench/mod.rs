//! `bench`: each part against the same work in high precision, and torch's numbers beside them; JSON, and tables last.
//!
//! Device work is timed in batches of many launches between two waits, after a warm-up, and the median of the batches
//! counts. Inputs are normal-distributed and rotate through more memory than an L2 cache holds.

mod data;
mod gemm;
mod grouped;
mod linear;
mod llama;
mod quantize;
mod timing;
mod torch;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use crate::Error;
use crate::target::Target;
use timing::Timer;

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    /// Parts to run, separated by commas; all if absent.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Small shapes: to try the program, not to measure.
    #[arg(long)]
    quick: bool,
    /// Timed batches of each case; the median counts.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Cases that would begin later than this are skipped.
    #[arg(long, default_value_t = 540)]
    limit_seconds: u64,
    /// A Python with torch, such as python3: measures torch on the same shapes first.
    #[arg(long)]
    torch: Option<String>,
    /// Writes the results as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The scaled GEMM and Burn's matmul.
    Gemm,
    /// The grouped GEMM, and a GEMM for each group.
    Grouped,
    /// Casts and amax as shares of a copy.
    Quantize,
    /// Forward and backward of one linear, casts included.
    Linear,
    /// Forward and backward of one Llama layer.
    Layer,
    /// A Llama train step.
    Step,
}

impl Args {
    fn runs(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// What was measured; parts that did not run are absent.
#[derive(Default, Serialize)]
struct Results {
    device: String,
    /// Of the high-precision work.
    compute_dtype: String,
    /// Whether Burn tuned its kernels for the shapes.
    autotune: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gemm: Vec<gemm::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    grouped: Vec<grouped::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    quantize: Vec<quantize::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    linear: Vec<linear::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layer: Vec<llama::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    step: Vec<llama::Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    torch: Option<torch::Results>,
    /// Geometric means of ratios to torch's best mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<torch::Summary>,
    /// Cases that the time did not suffice for, or that failed.
    skipped: Vec<String>,
}

/// Whether nothing failed.
pub fn run<T: Target>(args: &Args) -> Result<bool, Error> {
    let mut timer = Timer::new(args.repeat, args.limit_seconds, args.quick);
    let mut results = Results {
        device: <T::Runtime as cubecl::Runtime>::name(&T::client()).into(),
        compute_dtype: format!("{:?}", T::compute_dtype()),
        autotune: cfg!(feature = "autotune"),
        ..Results::default()
    };
    if let Some(python) = &args.torch {
        let part = |part| args.runs(part).then(|| format!("{part:?}").to_lowercase());
        let parts: Vec<_> =
            [Part::Gemm, Part::Grouped, Part::Quantize, Part::Linear].into_iter().filter_map(part).collect();
        match torch::run(python, &parts, args.quick, timer.left().min(200)) {
            Ok(torch) => results.torch = Some(torch),
            Err(error) => timer.skip("torch", &error),
        }
    }
    // The parts that targets name first: time may not suffice for all. What is known is kept after each.
    if args.runs(Part::Linear) {
        results.linear = linear::rows::<T>(&mut timer, args.quick);
        linear::print(&results.linear, results.torch.as_ref());
        save(&results, args.json.as_deref())?;
    }
    if args.runs(Part::Quantize) {
        results.quantize = quantize::rows::<T>(&mut timer, args.quick);
        quantize::print(&results.quantize, results.torch.as_ref());
        save(&results, args.json.as_deref())?;
    }
    if args.runs(Part::Step) {
        results.step = llama::steps::<T>(&mut timer, args.quick);
        llama::print(STEP, &results.step);
        save(&results, args.json.as_deref())?;
    }
    if args.runs(Part::Gemm) {
        results.gemm = gemm::rows::<T>(&mut timer, args.quick);
        gemm::print(&results.gemm, results.torch.as_ref());
        save(&results, args.json.as_deref())?;
    }
    if args.runs(Part::Grouped) {
        results.grouped = grouped::rows::<T>(&mut timer, args.quick);
        grouped::print(&results.grouped, results.torch.as_ref());
        save(&results, args.json.as_deref())?;
    }
    if args.runs(Part::Layer) {
        results.layer = llama::layers::<T>(&mut timer, args.quick);
    }
    if let Some(torch) = &results.torch {
        results.summary = Some(torch.summary(&results.gemm, &results.grouped, &results.linear));
    }
    let failed = timer.failed();
    results.skipped = timer.into_skipped();
    print(&results);
    save(&results, args.json.as_deref())?;
    Ok(!failed)
}

const STEP: &str = "Llama train step: forward, backward, AdamW";

/// Writes what is known so far, if a file is asked for.
fn save(results: &Results, path: Option<&Path>) -> Result<(), Error> {
    let Some(path) = path else { return Ok(()) };
    let json = serde_json::to_string_pretty(results).map_err(|source| Error::Json { what: "results", source })?;
    std::fs::write(path, json).map_err(|source| Error::Io { what: path.display().to_string(), source })
}

fn print(results: &Results) {
    let Results { device, compute_dtype, autotune, torch, .. } = results;
    println!("\n{device}, high precision is {compute_dtype}{}", if *autotune { ", autotuned" } else { "" });
    if let Some(torch) = torch {
        println!("torch {} on {}", torch.version, torch.device);
    }
    quantize::print(&results.quantize, torch.as_ref());
    llama::print("forward + backward of one Llama layer", &results.layer);
    llama::print(STEP, &results.step);
    linear::print(&results.linear, torch.as_ref());
    gemm::print(&results.gemm, torch.as_ref());
    grouped::print(&results.grouped, torch.as_ref());
    if let Some(summary) = &results.summary {
        summary.print();
    }
    for skipped in &results.skipped {
        println!("skipped: {skipped}");
    }
}
