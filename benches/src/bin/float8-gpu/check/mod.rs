//! `check`: everything that can be wrong, each as one outcome; a table of the groups comes last.

mod goldens;
mod linears;

use std::collections::BTreeMap;
use std::time::Instant;

use checks::{Options, Outcome, Size};

use crate::Error;
use crate::target::Target;

/// What to check.
#[derive(clap::Args)]
pub struct Args {
    /// Only cases whose name contains this; names begin with golden_, quantize, amax, health, scaled_gemm, grouped_gemm or
    /// linear.
    #[arg(long)]
    only: Option<String>,
    /// Small matrices only.
    #[arg(long)]
    quick: bool,
    /// Lists every case.
    #[arg(long)]
    verbose: bool,
}

/// Outcomes of one kind.
#[derive(Default)]
struct Group {
    cases: usize,
    failures: usize,
    worst: f64,
    seconds: f64,
}

/// Prints outcomes as they come, and keeps count.
struct Tally {
    groups: BTreeMap<String, Group>,
    last: Instant,
    verbose: bool,
}

impl Tally {
    fn add(&mut self, Outcome { name, detail }: Outcome) {
        let kind = name.split(' ').next().unwrap_or_default().to_string();
        let group = self.groups.entry(kind).or_default();
        group.cases += 1;
        group.seconds += self.last.elapsed().as_secs_f64();
        self.last = Instant::now();
        match detail {
            Ok(worst) => {
                group.worst = group.worst.max(worst);
                if self.verbose {
                    println!("ok    {name}: {worst:.3}");
                }
            }
            Err(failure) => {
                group.failures += 1;
                println!("WRONG {name}: {failure}");
            }
        }
    }

    /// Whether something ran and all of it is right.
    fn print(&self) -> bool {
        println!("\n{:<20}  {:>6}  {:>6}  {:>15}  {:>8}", "check", "cases", "wrong", "worst / allowed", "seconds");
        for (kind, Group { cases, failures, worst, seconds }) in &self.groups {
            println!("{kind:<20}  {cases:>6}  {failures:>6}  {worst:>15.3}  {seconds:>8.1}");
        }
        let cases: usize = self.groups.values().map(|group| group.cases).sum();
        let failures: usize = self.groups.values().map(|group| group.failures).sum();
        println!(
            "{}",
            if cases == 0 { "no case has this name".into() } else { format!("{failures} of {cases} wrong") }
        );
        cases > 0 && failures == 0
    }
}

/// Whether all is right.
pub fn run<T: Target>(args: &Args) -> Result<bool, Error> {
    let client = T::client();
    let mut tally = Tally { groups: BTreeMap::new(), last: Instant::now(), verbose: args.verbose };
    let size = if args.quick { Size::Small } else { Size::Full };
    let options = Options { size, only: args.only.clone() };
    let wanted = |name: &str| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    goldens::run::<T>(&client, &wanted, &mut |outcome| tally.add(outcome));
    linears::run::<T>(args.quick, &wanted, &mut |outcome| tally.add(outcome));
    checks::run_with(&client, &options, |outcome| tally.add(outcome));
    Ok(tally.print())
}

/// Runs a case that is asked for; a panic below is its failure.
fn case(
    name: String,
    wanted: &dyn Fn(&str) -> bool,
    each: &mut dyn FnMut(Outcome),
    check: impl FnOnce() -> Result<f64, checks::Failure>,
) {
    if wanted(&name) {
        each(Outcome::of(name, check));
    }
}

/// ‖a − b‖ / ‖b‖ in f64; NaN if the lengths differ.
fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}
