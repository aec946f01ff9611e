//! Each case runs on the ranks of a job that this program starts: it calls itself by `mpirun`.
mod cases;

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// No case takes so long.
const LIMIT: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = &args[..]
        && flag == "--case"
    {
        let (_, _, case) = cases::ALL.iter().find(|(known, ..)| known == name).expect("a case");
        case();
        return ExitCode::SUCCESS;
    }
    let wanted = |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|part| name.contains(part.as_str()));
    let mut failed = 0;
    for (name, ranks, _) in cases::ALL {
        for ranks in ranks.iter().filter(|_| wanted(name)) {
            let begin = Instant::now();
            let is_right = run(name, *ranks);
            let outcome = if is_right { "ok" } else { "FAILED" };
            println!("test {name} on {ranks} ranks ... {outcome} ({:.1} s)", begin.elapsed().as_secs_f64());
            failed += usize::from(!is_right);
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(name: &str, ranks: usize) -> bool {
    let mut child = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().expect("this program has a path"))
        .args(["--case", name])
        .env("RAYON_NUM_THREADS", "1")
        .spawn()
        .expect("mpirun is installed (apt: openmpi-bin)");
    let begin = Instant::now();
    loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => return status.success(),
            None if begin.elapsed() > LIMIT => {
                child.kill().expect("a child can be killed");
                return false;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
