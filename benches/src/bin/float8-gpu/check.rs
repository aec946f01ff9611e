//! `check`: one case per check in worker processes; prints a table of the groups last.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use checks::{
    Case, CaseFailure, Done, Goldens, Progress, Size, Worker, supervise, visit_golden_linears, visit_goldens,
    visit_linears,
};
use serde_json::{Value, json};
use test_data::Golden;

use crate::target::Target;
use crate::{Error, LimitArgs, Outcome, worker};

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

/// Interval between progress lines in a file; a terminal has one line that updates.
const PROGRESS: Duration = Duration::from_secs(10);

/// Outcomes of one group of cases.
#[derive(Default)]
struct Group {
    cases: usize,
    failures: usize,
    not_run: usize,
    worst: f64,
    seconds: f64,
}

/// Prints and counts outcomes.
struct Tally {
    groups: BTreeMap<String, Group>,
    verbose: bool,
    said: Instant,
    json: Option<(PathBuf, File)>,
}

impl Tally {
    fn new(args: &Args) -> Result<Self, Error> {
        let open = |path: &PathBuf| {
            let file = File::options().create(true).append(true).open(path);
            let file = file.map_err(|source| Error::Io { what: path.display().to_string(), source })?;
            Ok::<_, Error>((path.clone(), file))
        };
        let json = args.json.as_ref().map(open).transpose()?;
        Ok(Self { groups: BTreeMap::new(), verbose: args.verbose, said: Instant::now(), json })
    }

    fn add(&mut self, progress: Progress, done: Done) -> Result<(), Error> {
        let Done { name, seconds, result } = &done;
        let group = self.groups.entry(name.split(' ').next().unwrap_or_default().into()).or_default();
        group.cases += 1;
        group.seconds += seconds;
        match result {
            Ok(worst) => {
                let worst = worst.as_f64().unwrap_or(f64::NAN);
                group.worst = group.worst.max(worst);
                if self.verbose {
                    println!("ok    {name}: {worst:.3} ({seconds:.1} s)");
                }
            }
            Err(CaseFailure::NoTime) => group.not_run += 1,
            Err(loss) => {
                group.failures += 1;
                println!("WRONG {name}: {loss} ({seconds:.1} s)");
            }
        }
        if let Some((path, file)) = &mut self.json {
            let line = match result {
                Ok(worst) => json!({ "name": name, "seconds": seconds, "worst": worst }),
                Err(CaseFailure::NoTime) => {
                    json!({ "name": name, "seconds": seconds, "not_run": CaseFailure::NoTime.to_string() })
                }
                Err(loss) => json!({ "name": name, "seconds": seconds, "wrong": loss.to_string() }),
            };
            writeln!(file, "{line}").map_err(|source| Error::Io { what: path.display().to_string(), source })?;
        }
        self.say(progress, name);
        Ok(())
    }

    fn say(&mut self, Progress { done, of, elapsed }: Progress, name: &str) {
        let terminal = stdout().is_terminal();
        if self.verbose || (!terminal && self.said.elapsed() < PROGRESS) {
            return;
        }
        self.said = Instant::now();
        let line = format!("{done} of {of}, {} s: {name}", elapsed.as_secs());
        if terminal {
            print!("\r\x1b[2K{line}");
            // Progress output may fail.
            let _ = stdout().flush();
            if done == of {
                println!();
            }
        } else {
            println!("{line}");
        }
    }

    /// Prints the table. The outcome is also wrong if no case has a requested name.
    fn print(&self) -> Outcome {
        println!(
            "\n{:<20}  {:>6}  {:>6}  {:>7}  {:>15}  {:>8}",
            "check", "cases", "wrong", "not run", "worst / allowed", "seconds"
        );
        for (kind, Group { cases, failures, not_run, worst, seconds }) in &self.groups {
            println!("{kind:<20}  {cases:>6}  {failures:>6}  {not_run:>7}  {worst:>15.3}  {seconds:>8.1}");
        }
        let sum = |field: fn(&Group) -> usize| self.groups.values().map(field).sum::<usize>();
        let (cases, failures, not_run) =
            (sum(|group| group.cases), sum(|group| group.failures), sum(|group| group.not_run));
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
pub fn run(args: &Args) -> Result<Outcome, Error> {
    let jobs = match args.jobs {
        0 => (std::thread::available_parallelism().map_or(1, |cores| cores.get()) / 2).clamp(1, 8),
        jobs => jobs,
    };
    let mut tally = Tally::new(args)?;
    let mut failed = None;
    supervise(args.limits.of(jobs), &worker, &mut |progress, done| {
        if let Err(error) = tally.add(progress, done) {
            failed = Some(error);
        }
    })?;
    match failed {
        Some(error) => Err(error),
        None => Ok(tally.print()),
    }
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
        checks::visit(&client, size, visit);
        visit_linears::<T::Backend>(size, visit);
    });
}
