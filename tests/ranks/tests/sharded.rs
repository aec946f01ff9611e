//! Runs each case on the ranks of a job: this program starts itself under `mpirun`.
mod cases;

use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use cases::{Case, Ends};

/// Time limit of a case.
const LIMIT: Duration = Duration::from_secs(if cfg!(feature = "staged") { 1800 } else { 240 });

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = &args[..]
        && flag == "--case"
    {
        let case = cases::ALL.iter().find(|case| case.name == name).expect("a case");
        (case.run)();
        return ExitCode::SUCCESS;
    }
    let is_wanted =
        |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|part| name.contains(part.as_str()));
    let mut failed = 0;
    for case in cases::ALL.iter().filter(|case| is_wanted(case.name)) {
        for ranks in case.ranks {
            let begin = Instant::now();
            let outcome = run(case, *ranks).and_then(|output| case.ends.check(&output));
            let said = if outcome.is_ok() { "ok" } else { "FAILED" };
            println!("test {} on {ranks} ranks ... {said} ({:.1} s)", case.name, begin.elapsed().as_secs_f64());
            if let Err(reason) = outcome {
                println!("{reason}");
                failed += 1;
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Output of the ranks of a case.
fn run(case: &Case, ranks: usize) -> Result<Output, String> {
    let mut child = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().expect("this program has a path"))
        .args(["--case", case.name])
        .env("RAYON_NUM_THREADS", "1")
        .envs(case.variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun is installed (apt: openmpi-bin)");
    let begin = Instant::now();
    while child.try_wait().expect("a child can be waited for").is_none() {
        if begin.elapsed() > LIMIT {
            child.kill().expect("a child can be killed");
            return Err(format!("it has not ended after {LIMIT:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().map_err(|error| error.to_string())
}

impl Ends {
    fn check(&self, output: &Output) -> Result<(), String> {
        let text = [&output.stdout[..], &output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        match self {
            Self::Well if output.status.success() => Ok(()),
            Self::Saying(words) if !output.status.success() => match words.iter().find(|word| !text.contains(**word)) {
                None => Ok(()),
                Some(word) => Err(format!("it does not say {word:?}:\n{text}")),
            },
            _ => Err(format!("{}:\n{text}", output.status)),
        }
    }
}
