//! Runs cases on the ranks of jobs: this program starts itself under `mpirun`. One job of each number of
//! ranks has all cases that run together.
mod cases;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use cases::{Case, job};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, names @ ..] = &args[..]
        && flag == "--cases"
    {
        cases::run(names);
        return ExitCode::SUCCESS;
    }
    let is_wanted =
        |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|part| name.contains(part.as_str()));
    let wanted: Vec<&Case> = cases::ALL.iter().filter(|case| is_wanted(case.name)).collect();
    let mut failed = vec![];
    for ranks in [2, 3, 4] {
        let together = wanted.iter().filter(|case| case.check.is_none() && case.ranks.contains(&ranks));
        let names: Vec<_> = together.map(|case| case.name).collect();
        let passes = || job::run(&names, ranks, true).succeeds();
        if !names.is_empty() && catch_unwind(AssertUnwindSafe(passes)).is_err() {
            failed.push(format!("a case on {ranks} ranks, after those that are ok"));
        }
    }
    for case in wanted {
        let Some(check) = case.check else { continue };
        for ranks in case.ranks {
            let begin = Instant::now();
            let passes = || check(&job::run(&[case.name], *ranks, false));
            match catch_unwind(AssertUnwindSafe(passes)) {
                Ok(()) => println!("test {} on {ranks} ranks ... ok ({:.1?})", case.name, begin.elapsed()),
                Err(_) => failed.push(format!("{} on {ranks} ranks", case.name)),
            }
        }
    }
    failed.iter().for_each(|name| println!("FAILED: {name}"));
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
