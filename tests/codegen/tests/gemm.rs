//! The GEMMs on tensor cores, interpreted, against f64.

use checks::{Options, Size, run_with};
use codegen::device::{Execution, GenerateCuda, PaperDevice, execute};
use cubecl_core::Runtime;

/// Runs the small checks whose names hold `only`.
fn check(device: PaperDevice, only: &str) {
    let Some(_running) = execute(Execution { seed: 7 }) else { return };
    let client = GenerateCuda::client(&device);
    let options = Options { size: Size::Small, only: Some(only.into()) };
    let (mut count, mut failed) = (0, vec![]);
    run_with(&client, &options, |outcome| {
        count += 1;
        let start = std::time::Instant::now();
        let _ = start;
        match outcome.detail {
            Ok(error) => println!("ok {error:.3} {}", outcome.name),
            Err(failure) => {
                println!("FAILED {}: {failure}", outcome.name);
                failed.push(format!("{}: {failure}", outcome.name));
            }
        }
    });
    assert!(count > 0, "no check is called {only}");
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn hopper() {
    let only = std::env::var("ONLY").unwrap_or("wgmma".into());
    check(PaperDevice::new(90), &only);
}

#[test]
fn few() {
    let only = std::env::var("ONLY").unwrap_or("wgmma".into());
    check(PaperDevice { sm: 90, multiprocessors: 2 }, &only);
}
