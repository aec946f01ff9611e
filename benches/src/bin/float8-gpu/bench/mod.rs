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
mod grouped;
mod host;
mod linear;
mod quantize;
mod results;
mod step;
mod sweep;
mod timing;
mod torch;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use kernel_tests::{CaseFailure, Done, Failure, Worker, supervise};
use serde_json::Value;

use crate::target::Target;
use crate::{LimitArgs, Outcome, worker};
use results::Results;
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
    /// The GEMM with other tiles, clusters and stages than its default plan.
    Sweep,
}

impl Part {
    /// Name of the part, and of its table.
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

impl Args {
    fn parts(&self) -> impl Iterator<Item = Part> {
        let runs = |part: &Part| self.only.is_empty() || self.only.contains(part);
        Part::value_variants().iter().copied().filter(runs)
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
    /// A row of the table that the first word of `name` names.
    fn case(&mut self, name: &str, measure: impl FnOnce(Clock) -> Result<Value, Failure>) {
        let clock = self.clock;
        self.worker.case(name, || measure(clock));
    }
}

/// Runs cases for [`run`] in a worker process.
pub fn serve<T: Target>(args: &Args) {
    let clock = Clock::new(args.repeat, args.size == Size::Tiny);
    Worker::serve(&[], |worker| {
        let mut bench = Bench { worker, clock, size: args.size, with_burn: !args.without_burn };
        for part in args.parts() {
            match part {
                Part::Gemm => gemm::cases::<T>(&mut bench),
                Part::Scaled => gemm::scaled::<T>(&mut bench),
                Part::Gemv => gemv::cases::<T>(&mut bench),
                Part::Host => host::cases::<T>(&mut bench),
                Part::Linear => linear::cases::<T>(&mut bench),
                Part::Quantize => quantize::cases::<T>(&mut bench),
                Part::Beside => beside::cases::<T>(&mut bench),
                Part::Step => step::cases::<T>(&mut bench),
                Part::Grouped => grouped::cases::<T>(&mut bench),
                Part::Sweep => sweep::cases::<T>(&mut bench),
            }
        }
    });
}

/// Measures all cases.
///
/// # Errors
/// No device; a file that cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let mut results = Results::default();
    let mut failed = false;
    if let Some(python) = &args.torch {
        // Torch may use half of the time.
        let limit = Duration::from_secs(args.limits.limit_seconds / 2);
        let list = |shapes: Vec<[usize; 3]>| {
            shapes.iter().map(|[a, b, c]| format!("{a}x{b}x{c}")).collect::<Vec<_>>().join(",")
        };
        let groups: Vec<_> = grouped::shapes(args.size).into_iter().map(grouped::Shape::argument).collect();
        let arguments = [
            ("--only", args.parts().map(Part::name).collect::<Vec<_>>().join(",")),
            ("--gemm", list(gemm::shapes(args.size))),
            ("--linear", list(linear::shapes(args.size))),
            ("--grouped", groups.join(",")),
            ("--beside", beside::attention_shapes(args.size)),
        ];
        let arguments = arguments.map(|(name, value)| [name.to_string(), value]);
        if let Err(error) = torch::run(python, &arguments, limit, &mut results.torch) {
            println!("torch: {error:#}");
            results.skipped.push(format!("torch: {error:#}"));
        }
        save(&results, args.json.as_deref())?;
    }
    let mut limits = args.limits.of(1);
    limits.all = limits.all.saturating_sub(start.elapsed());
    let mut saved = Ok(());
    supervise(limits, &worker, &mut |progress, done| {
        let Done { name, seconds, result } = done;
        println!("{} of {}, {} s: {name} ({seconds:.1} s)", progress.done, progress.of, progress.elapsed.as_secs());
        match result {
            Ok(row) => results.add(&name, row),
            Err(failure) => {
                failed |= !matches!(failure, CaseFailure::NoTime);
                println!("{name}: {failure}");
                results.skipped.push(format!("{name}: {failure}"));
            }
        }
        if let Err(error) = save(&results, args.json.as_deref()) {
            saved = Err(error);
        }
    })?;
    saved?;
    results.print();
    Ok(Outcome::of(failed, results.skipped.is_empty()))
}

/// Writes the results so far, if a file is given.
fn save(results: &Results, path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, serde_json::to_string_pretty(results)?).with_context(|| path.display().to_string())
}
