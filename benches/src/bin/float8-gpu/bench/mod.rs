//! `bench`: each part against the same work in high precision and against torch; writes JSON, and
//! prints tables last.
//!
//! Device work is timed in batches of many launches between two waits, after a warm-up; the median
//! batch is reported. Inputs are normally distributed and rotate through more memory than an L2
//! cache holds. Each row is a case of a worker process, and is written immediately.

mod beside;
mod data;
mod gemm;
mod gemv;
mod given;
mod grouped;
mod host;
mod linear;
mod llama;
mod quantize;
mod summary;
mod sweep;
mod timing;
mod torch;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checks::{CaseFailure, Done, Failure, Worker, supervise};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::target::Target;
use crate::{Error, LimitArgs, Outcome, worker};
use summary::Summary;
use timing::Clock;

/// Options of `bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Parts to run, separated by commas. Default: all.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Shapes to run.
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Timed batches of each case; the median is reported.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Python with torch, such as python3: also measures torch on the same shapes, first.
    #[arg(long)]
    torch: Option<String>,
    /// Skips Burn's matmul, which needs CUDA headers that our kernels do not.
    #[arg(long)]
    without_burn: bool,
    /// Writes the results as JSON to this file, after each row.
    #[arg(long)]
    json: Option<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Amount of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Small shapes and short batches. Tests the program; do not use the numbers.
    Tiny,
    /// Only the first shape, in the fewest useful recipes: a number after seconds.
    First,
    /// The shapes and recipes of the performance targets: some minutes.
    Headline,
    /// All shapes and recipes.
    Full,
}

impl Size {
    /// List for this size. `full` starts with the entries of the performance targets.
    fn of<T: Copy>(self, tiny: &[T], headline: usize, full: &[T]) -> Vec<T> {
        match self {
            Self::Tiny => tiny.to_vec(),
            Self::First => full[..1].to_vec(),
            Self::Headline => full[..headline].to_vec(),
            Self::Full => full.to_vec(),
        }
    }
}

// In order of execution: parts of the performance targets run first, as time may run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The scaled GEMM with one scale for each matrix, and Burn's matmul.
    Gemm,
    /// The scaled GEMM with scales of rows, of blocks, and of MX.
    Scaled,
    /// GEMMs of a few rows, as for generated tokens.
    Gemv,
    /// Host time of a GEMM and of a linear.
    Host,
    /// Forward and backward of one linear, casts included.
    Linear,
    /// Casts and amax as shares of a copy.
    Quantize,
    /// Attention, SwiGLU, RMSNorm and rotary positions.
    Beside,
    /// A Llama train step.
    Step,
    /// The grouped GEMM, and a GEMM for each group.
    Grouped,
    /// Forward and backward of one Llama layer.
    Layer,
    /// The GEMM with other tiles, clusters and stages than its default plan.
    Sweep,
}

impl Args {
    fn runs(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// A row of a table.
#[derive(Serialize, Deserialize)]
enum Row {
    Gemm(gemm::Row),
    Gemv(gemv::Row),
    Host(host::Row),
    Linear(linear::Row),
    Quantize(quantize::Row),
    Beside(beside::Row),
    Step(llama::Row),
    Grouped(grouped::Row),
    Layer(llama::Row),
    Sweep(sweep::Row),
    /// Reason why this device does not support a part.
    Absent(String),
}

/// Results; parts that did not run are absent.
#[derive(Default, Serialize)]
struct Results {
    /// Whether Burn tuned its kernels for the shapes.
    autotune: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gemm: Vec<gemm::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gemv: Vec<gemv::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    host: Vec<host::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    linear: Vec<linear::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    quantize: Vec<quantize::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    beside: Vec<beside::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    step: Vec<llama::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    grouped: Vec<grouped::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layer: Vec<llama::Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sweep: Vec<sweep::Row>,
    #[serde(skip_serializing_if = "torch::Results::is_empty")]
    torch: torch::Results,
    /// Geometric means of ratios to torch's best mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
    /// Reasons for parts that this device does not support.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    absent: Vec<String>,
    /// Cases without a result, and reasons.
    skipped: Vec<String>,
}

impl Results {
    fn add(&mut self, row: Row) {
        match row {
            Row::Gemm(row) => self.gemm.push(row),
            Row::Gemv(row) => self.gemv.push(row),
            Row::Host(row) => self.host.push(row),
            Row::Linear(row) => self.linear.push(row),
            Row::Quantize(row) => self.quantize.push(row),
            Row::Beside(row) => self.beside.push(row),
            Row::Step(row) => self.step.push(row),
            Row::Grouped(row) => self.grouped.push(row),
            Row::Layer(row) => self.layer.push(row),
            Row::Sweep(row) => self.sweep.push(row),
            Row::Absent(why) => self.absent.push(why),
        }
        linear::compare(&mut self.linear);
        llama::compare(&mut self.step);
        llama::compare(&mut self.layer);
    }
}

/// Passes cases to a worker.
struct Bench<'a> {
    worker: &'a mut Worker,
    clock: Clock,
    size: Size,
    /// Whether Burn's matmul is measured too.
    with_burn: bool,
}

impl Bench<'_> {
    fn case(&mut self, name: &str, measure: impl FnOnce(Clock) -> Result<Row, Failure>) {
        let clock = self.clock;
        self.worker.case(name, || measure(clock));
    }
}

/// Runs cases for [`run`] in a worker process.
pub fn serve<T: Target>(args: &Args) {
    let clock = Clock::new(args.repeat, args.size == Size::Tiny);
    Worker::serve(&[], |worker| {
        let mut bench = Bench { worker, clock, size: args.size, with_burn: !args.without_burn };
        for part in Part::value_variants().iter().filter(|part| args.runs(**part)) {
            match part {
                Part::Gemm => gemm::cases::<T>(&mut bench),
                Part::Scaled => gemm::scaled::<T>(&mut bench),
                Part::Gemv => gemv::cases::<T>(&mut bench),
                Part::Host => host::cases::<T>(&mut bench),
                Part::Linear => linear::cases::<T>(&mut bench),
                Part::Quantize => quantize::cases::<T>(&mut bench),
                Part::Beside => beside::cases::<T>(&mut bench),
                Part::Step => llama::steps::<T>(&mut bench),
                Part::Grouped => grouped::cases::<T>(&mut bench),
                Part::Layer => llama::layers::<T>(&mut bench),
                Part::Sweep => sweep::cases::<T>(&mut bench),
            }
        }
    });
}

/// Measures all cases.
///
/// # Errors
/// No device; a file that cannot be written.
pub fn run(args: &Args) -> Result<Outcome, Error> {
    let start = Instant::now();
    let mut results = Results { autotune: cfg!(feature = "autotune"), ..Results::default() };
    let mut failed = false;
    if let Some(python) = &args.torch {
        // Torch may use half of the time.
        let limit = Duration::from_secs(args.limits.limit_seconds / 2);
        let parts = Part::value_variants().iter().filter(|part| args.runs(**part));
        let parts: Vec<_> = parts.map(|part| format!("{part:?}").to_lowercase()).collect();
        let list = |shapes: Vec<[usize; 3]>| {
            shapes.iter().map(|[a, b, c]| format!("{a}x{b}x{c}")).collect::<Vec<_>>().join(",")
        };
        let groups: Vec<_> = grouped::shapes(args.size).into_iter().map(grouped::Shape::argument).collect();
        let arguments = [
            ("--only", parts.join(",")),
            ("--gemm", list(gemm::shapes(args.size))),
            ("--linear", list(linear::shapes(args.size))),
            ("--grouped", groups.join(",")),
            ("--beside", beside::attention_shapes(args.size).join(",")),
        ];
        let arguments = arguments.map(|(name, value)| [name.to_string(), value]);
        if let Err(error) = results.torch.run(python, &arguments, limit) {
            println!("torch: {error}");
            results.skipped.push(format!("torch: {error}"));
        }
        save(&results, args.json.as_deref())?;
    }
    let mut limits = args.limits.of(1);
    limits.all = limits.all.saturating_sub(start.elapsed());
    let mut wrong = None;
    supervise(limits, &worker, &mut |progress, done| {
        let Done { name, seconds, result } = done;
        println!("{} of {}, {} s: {name} ({seconds:.1} s)", progress.done, progress.of, progress.elapsed.as_secs());
        match result.and_then(|row| serde_json::from_value(row).map_err(|error| CaseFailure::Failed(error.to_string())))
        {
            Ok(row) => results.add(row),
            Err(failure) => {
                failed |= !matches!(failure, CaseFailure::NoTime);
                println!("{name}: {failure}");
                results.skipped.push(format!("{name}: {failure}"));
            }
        }
        if let Err(error) = save(&results, args.json.as_deref()) {
            wrong = Some(error);
        }
    })?;
    if let Some(error) = wrong {
        return Err(error);
    }
    if !results.torch.is_empty() {
        results.summary = Some(Summary::new(&results.torch, &results.gemm, &results.grouped, &results.linear));
    }
    print(&results);
    save(&results, args.json.as_deref())?;
    Ok(Outcome::of(failed, results.skipped.is_empty()))
}

/// Writes the results so far, if a file is given.
fn save(results: &Results, path: Option<&Path>) -> Result<(), Error> {
    let Some(path) = path else { return Ok(()) };
    let json = serde_json::to_string_pretty(results).map_err(|source| Error::Json { what: "results", source })?;
    std::fs::write(path, json).map_err(|source| Error::Io { what: path.display().to_string(), source })
}

/// Prints the title of a table that includes Burn's kernels.
fn headed(title: &str) {
    println!("\n{title}; Burn's kernels are {}", if cfg!(feature = "autotune") { "tuned" } else { "untuned" });
}

fn print(results: &Results) {
    let torch = &results.torch;
    println!();
    if let Some(torch) = &torch.versions {
        println!("torch {} on {}", torch.version, torch.device);
    }
    quantize::print(&results.quantize, torch);
    beside::print(&results.beside, torch);
    llama::print("forward + backward of one Llama layer", &results.layer);
    llama::print("Llama train step: forward, backward, AdamW", &results.step);
    linear::print(&results.linear, torch);
    host::print(&results.host);
    gemm::print(&results.gemm, torch);
    gemv::print(&results.gemv);
    grouped::print(&results.grouped, torch);
    sweep::print(&results.sweep);
    if let Some(summary) = &results.summary {
        summary.print();
    }
    for absent in &results.absent {
        println!("not on this device: {absent}");
    }
    for skipped in &results.skipped {
        println!("skipped: {skipped}");
    }
}
