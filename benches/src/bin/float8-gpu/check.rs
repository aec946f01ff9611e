//! `check`: one case per check in worker processes; prints a table of the groups last.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::table::Table;
use kernel_tests::{
    Case, CaseFailure, Done, Goldens, Progress, Size, Worker, supervise, visit_golden_linears, visit_goldens,
    visit_linears,
};
use serde::Serialize;
use serde_json::{Value, json};
use test_data::Golden;

use crate::target::Target;
use crate::{LimitArgs, Outcome, worker};

/// Embedded results of torch and torchao.
static CASTS: Goldens = Goldens {
    cast: Golden::embedded(include_bytes!("../../../../tests/goldens/cast.safetensors")),
    quantize: Golden::embedded(include_bytes!("../../../../tests/goldens/quantize.safetensors")),
    mx: Golden::embedded(include_bytes!("../../../../tests/goldens/mx.safetensors")),
};
static LINEARS: Golden = Golden::embedded(include_bytes!("../../../../tests/goldens/linear.safetensors"));

/// Options of `check`.
#[derive(clap::Args)]
pub struct Args {
    /// Runs only cases whose name contains this text. Repeat the option for several texts.
    ///
    /// Names start with golden_, quantize, scale, encode, dequantize_mx, amax, health, scaled_gemm,
    /// grouped_gemm, repeated_gemm or linear. Commas are part of names.
    #[arg(long)]
    only: Vec<String>,
    /// Checks only small matrices.
    #[arg(long)]
    quick: bool,
    /// Prints every case.
    #[arg(long)]
    verbose: bool,
    /// Number of parallel workers, each with its own CUDA context. 0 means half of the machine's
    /// cores, at most 8.
    ///
    /// Several are faster, because compiling kernels takes longer than running them.
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Appends each result to this file as a line of JSON, immediately.
    #[arg(long)]
    json: Option<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Interval between progress lines.
const PROGRESS: Duration = Duration::from_secs(10);

/// Outcomes of one group of cases.
#[derive(Default, Serialize)]
struct Group {
    check: String,
    cases: usize,
    wrong: usize,
    not_run: usize,
    worst_to_allowed: f64,
    seconds: f64,
}

/// Prints and counts outcomes.
struct Tally {
    groups: BTreeMap<String, Group>,
    verbose: bool,
    said: Instant,
    json: Option<File>,
}

impl Tally {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let open = |path: &PathBuf| {
            let file = File::options().create(true).append(true).open(path);
            file.with_context(|| path.display().to_string())
        };
        let json = args.json.as_ref().map(open).transpose()?;
        Ok(Self { groups: BTreeMap::new(), verbose: args.verbose, said: Instant::now(), json })
    }

    fn add(&mut self, progress: Progress, done: Done) -> anyhow::Result<()> {
        let Done { name, seconds, result } = &done;
        let kind = name.split(' ').next().unwrap_or_default();
        let group = self.groups.entry(kind.into()).or_insert_with(|| Group { check: kind.into(), ..Group::default() });
        group.cases += 1;
        group.seconds += seconds;
        let (key, value) = match result {
            Ok(worst) => {
                let number = worst.as_f64().unwrap_or(f64::NAN);
                group.worst_to_allowed = group.worst_to_allowed.max(number);
                if self.verbose {
                    println!("ok    {name}: {number:.3} ({seconds:.1} s)");
                }
                ("worst", worst.clone())
            }
            Err(loss @ CaseFailure::NoTime) => {
                group.not_run += 1;
                ("not_run", loss.to_string().into())
            }
            Err(loss) => {
                group.wrong += 1;
                println!("WRONG {name}: {loss} ({seconds:.1} s)");
                ("wrong", loss.to_string().into())
            }
        };
        if let Some(file) = &mut self.json {
            writeln!(file, "{}", json!({ "name": name, "seconds": seconds, key: value })).context("the results")?;
        }
        self.say(progress, name);
        Ok(())
    }

    fn say(&mut self, Progress { done, of, elapsed }: Progress, name: &str) {
        if !self.verbose && self.said.elapsed() >= PROGRESS {
            self.said = Instant::now();
            println!("{done} of {of}, {} s: {name}", elapsed.as_secs());
        }
    }

    /// Prints the table. The outcome is also wrong if no case has a requested name.
    fn print(&self) -> Outcome {
        let rows: Vec<_> = self.groups.values().map(|group| json!(group)).collect();
        print!("{}", Table::of("checks", &rows));
        let sum = |field: fn(&Group) -> usize| self.groups.values().map(field).sum::<usize>();
        let (cases, failures, not_run) =
            (sum(|group| group.cases), sum(|group| group.wrong), sum(|group| group.not_run));
        match (cases, not_run) {
            (0, _) => println!("no case has this name"),
            (_, 0) => println!("{failures} of {cases} wrong"),
            _ => println!("{failures} of {cases} wrong, and the time did not suffice for {not_run}"),
        }
        Outcome::of(cases == 0 || failures > 0, not_run == 0)
    }
}

/// Runs all checks.
///
/// # Errors
/// No device; a file that cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let jobs = match args.jobs {
        0 => (std::thread::available_parallelism().map_or(1, |cores| cores.get()) / 2).clamp(1, 8),
        jobs => jobs,
    };
    let mut tally = Tally::new(args)?;
    let mut written = Ok(());
    supervise(args.limits.of(jobs), &worker, &mut |progress, done| {
        if let Err(error) = tally.add(progress, done) {
            written = Err(error);
        }
    })?;
    written.map(|()| tally.print())
}

/// Runs cases for [`run`] in a worker process.
pub fn serve<T: Target>(args: &Args) {
    let client = T::client();
    let size = if args.quick { Size::Small } else { Size::Full };
    Worker::serve(&args.only, |worker| {
        let visit = &mut |case: Case<'_>| {
            let name = case.name.clone();
            worker.case(&name, || case.run().map(Value::from));
        };
        visit_goldens(&client, &CASTS, visit);
        visit_golden_linears::<T::Backend>(&LINEARS, visit);
        kernel_tests::visit(&client, size, visit);
        visit_linears::<T::Backend>(size, visit);
    });
}
