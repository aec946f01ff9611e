//! torch on the same shapes, measured by an embedded Python script.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};

const SCRIPT: &str = include_str!("../../../../torch_baseline.py");

/// Runs the script with `arguments`, which select parts and shapes, for at most `limit`. Adds each
/// line to `results`: objects to the list of their name.
///
/// # Errors
/// The script does not start, fails, prints invalid results, or is killed at its limit. Earlier
/// results are kept.
pub fn run(
    python: &str,
    arguments: &[[String; 2]],
    limit: Duration,
    results: &mut Map<String, Value>,
) -> anyhow::Result<()> {
    println!("torch baseline ...");
    let mut child = Command::new(python)
        .args(["-u", "-c", SCRIPT])
        .args(arguments.as_flattened())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| python.to_string())?;
    let (sender, lines) = channel();
    let output = child.stdout.take().expect("piped");
    std::thread::spawn(move || BufReader::new(output).lines().try_for_each(|line| sender.send(line)));
    let end = Instant::now() + limit;
    let mut result = Ok(());
    while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        match serde_json::from_str::<Map<String, Value>>(&line?) {
            Ok(line) => {
                for (name, value) in line {
                    match results.entry(name).or_insert_with(|| json!([])) {
                        Value::Array(rows) if value.is_object() => rows.push(value),
                        other => *other = value,
                    }
                }
            }
            Err(error) => result = Err(error),
        }
    }
    if Instant::now() >= end {
        // It may have just exited.
        let _ = child.kill();
        bail!("killed after {} s", limit.as_secs());
    }
    let status = child.wait()?;
    ensure!(status.success(), "{status}");
    result.context("its results")
}
