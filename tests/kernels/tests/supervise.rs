//! Workers that fail in every way lose their current case and no other. This program is also the
//! worker.

use std::process::{Command, abort};
use std::time::{Duration, Instant};

use kernel_tests::{CaseFailure, Done, Failure, Limits, Worker, supervise};
use serde_json::{Value, json};

/// Argument of a worker that serves cases.
const WORKER: &str = "--worker";

/// Argument of a worker that cannot start.
const BROKEN: &str = "--broken";

fn serve() {
    Worker::serve(&["case".into()], |worker| {
        worker.case("case 0", || Ok(json!({ "sum": 0.1f64 + 0.2 })));
        worker.case("case 1 is wrong", || Err::<f64, _>(Failure::Wrong("3, not 4".into())));
        worker.case("not asked for", || -> Result<f64, _> { abort() });
        worker.case("case 2 panics", || -> Result<f64, _> { panic!("no memory") });
        worker.case("case 3", || Ok(std::process::id()));
        worker.case("case 4 ends the process", || -> Result<f64, _> {
            eprintln!("a last word");
            abort()
        });
        worker.case("case 5 hangs", || {
            std::thread::sleep(Duration::from_secs(3600));
            Ok(0)
        });
        worker.case("case 6 loses the device", || Err::<f64, _>(Failure::Device("an illegal address".into())));
        worker.case("case 7", || Ok(std::process::id()));
        worker.case("case 8", || {
            println!("@checks nonsense");
            Ok(std::process::id())
        });
    });
}

fn this(argument: &'static str) -> impl Fn() -> Command + Sync {
    move || {
        let mut command = Command::new(std::env::current_exe().expect("it runs"));
        command.arg(argument).env("RUST_BACKTRACE", "0");
        command
    }
}

/// Runs all cases and returns their outcomes by name.
fn run(all: Duration, jobs: usize) -> Vec<Done> {
    let mut done = vec![];
    let limits = Limits { all, case: Duration::from_secs(2), jobs };
    let started = supervise(limits, &this(WORKER), &mut |progress, row| {
        assert_eq!((progress.done, progress.of), (done.len() + 1, 9));
        done.push(row);
    });
    started.expect("a worker starts");
    done.sort_by(|a, b| a.name.cmp(&b.name));
    done
}

fn a_failure_costs_one_case() {
    for jobs in [1, 3] {
        let done = run(Duration::from_secs(60), jobs);
        let names: Vec<_> = done.iter().map(|done| done.name.split(' ').nth(1).expect("a number")).collect();
        assert_eq!(names, ["0", "1", "2", "3", "4", "5", "6", "7", "8"]);
        let passed: Vec<_> = done.iter().map(|done| done.result.is_ok()).collect();
        assert_eq!(passed, [true, false, false, true, false, false, false, true, true]);
        let text = |i: usize| done[i].result.as_ref().map_or_else(CaseFailure::to_string, Value::to_string);
        for (i, part) in [
            (0, r#"{"sum":0.30000000000000004}"#),
            (1, "3, not 4"),
            (2, "no memory"),
            (4, "its process ended: "),
            (4, "a last word"),
            (5, "killed after 2 s"),
            (6, "an illegal address"),
        ] {
            assert!(text(i).contains(part), "{i}: {}", text(i));
        }
        if jobs == 1 {
            // A new process after every loss, otherwise the same one.
            assert!(text(3) != text(7) && text(7) == text(8));
        }
    }
}

fn time_that_is_over_is_said() {
    let start = Instant::now();
    let done = run(Duration::from_secs(1), 1);
    assert!(start.elapsed() < Duration::from_secs(20));
    // The hanging case gets the rest of the time, which is below its limit. Later cases get none.
    assert!(done[5..].iter().all(|done| matches!(&done.result, Err(CaseFailure::NoTime))), "{done:?}");
}

fn a_worker_that_does_not_start_is_an_error() {
    let limits = Limits { all: Duration::from_secs(60), case: Duration::from_secs(2), jobs: 1 };
    let error = supervise(limits, &this(BROKEN), &mut |_, _| panic!("no case runs")).expect_err("it ends at once");
    assert!(error.to_string().contains("no such device"), "{error}");
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some(WORKER) => serve(),
        Some(BROKEN) => {
            eprintln!("no such device");
            std::process::exit(2);
        }
        // Cargo's test runners pass this to a test without a harness.
        Some("--list") => {}
        _ => {
            a_failure_costs_one_case();
            time_that_is_over_is_said();
            a_worker_that_does_not_start_is_an_error();
        }
    }
}
