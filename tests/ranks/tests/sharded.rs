//! Runs cases on the ranks of jobs: this program starts itself under `mpirun`. One job of each number of
//! ranks has all cases that succeed.
mod cases;

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use cases::{Case, Failure};

/// Time limit of a job.
const LIMIT: Duration = Duration::from_secs(if cfg!(feature = "staged") { 3600 } else { 600 });

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
    let (failing, well): (Vec<_>, Vec<_>) =
        cases::ALL.iter().filter(|case| is_wanted(case.name)).partition(|case| case.failure.is_some());
    let together = [2, 3, 4].map(|ranks| {
        let cases: Vec<&Case> = well.iter().filter(|case| case.ranks.contains(&ranks)).copied().collect();
        if cases.is_empty() { Ok(()) } else { run(&cases, ranks, None) }
    });
    let alone =
        failing.iter().flat_map(|case| case.ranks.iter().map(|ranks| run(&[case], *ranks, case.failure.as_ref())));
    let outcomes: Vec<_> = together.into_iter().chain(alone).collect();
    outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).for_each(|reason| println!("FAILED: {reason}"));
    if outcomes.iter().all(Result::is_ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a job. One that succeeds prints as it runs.
fn run(cases: &[&Case], ranks: usize, failure: Option<&Failure>) -> Result<(), String> {
    let output = || if failure.is_some() { Stdio::piped() } else { Stdio::inherit() };
    let mut child = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().expect("this program has a path"))
        .arg("--cases")
        .args(cases.iter().map(|case| case.name))
        .env("RAYON_NUM_THREADS", "1")
        .envs(failure.map(|failure| ("FLOAT8_COMM_TIMEOUT", failure.timeout)))
        .stdout(output())
        .stderr(output())
        .spawn()
        .expect("mpirun is installed (apt: openmpi-bin)");
    let (name, begin) = (cases[0].name, Instant::now());
    while child.try_wait().expect("a child can be waited for").is_none() {
        if begin.elapsed() > LIMIT {
            child.kill().expect("a child can be killed");
            return Err(format!("{name} on {ranks} ranks has not ended after {LIMIT:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("a child can be waited for");
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    match failure {
        None if output.status.success() => Ok(()),
        None => Err(format!("a case on {ranks} ranks, after those that are ok: {}", output.status)),
        Some(_) if output.status.success() => Err(format!("{name} on {ranks} ranks has succeeded")),
        Some(failure) => match failure.words.iter().find(|word| !text.contains(**word)) {
            None => {
                println!("test {name} on {ranks} ranks ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
                Ok(())
            }
            Some(word) => Err(format!("{name} on {ranks} ranks does not say {word:?}:\n{text}")),
        },
    }
}
