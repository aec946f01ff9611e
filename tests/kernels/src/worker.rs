//! The worker's side: sends the names of its cases, then runs the cases whose numbers it receives,
//! one after the other.
//!
//! ```text
//! worker → supervisor    a line of standard output that begins with MARK, with JSON: first the names
//!                        of all cases, in order, then a CaseEnd for each number
//! supervisor → worker    a line of standard input: the next case's number, in increasing order
//! ```
//!
//! A worker ends after a panic or a device error: a CUDA context with a failed kernel fails in
//! every later call.

use std::io::{Write, stdin, stdout};
use std::process::exit;

use burn_float8::backend::device_error;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::case::{Failure, caught};

/// Prefix of output lines that are events.
pub(crate) const MARK: &str = "@checks ";

/// End of a case.
#[derive(Serialize, Deserialize)]
pub(crate) struct CaseEnd {
    /// Value of the case, or its failure.
    pub(crate) result: Result<Value, String>,
    /// Whether the worker ends because its device may be unusable.
    pub(crate) last: bool,
}

fn send(event: &impl Serialize) {
    let line = serde_json::to_string(event).expect("strings and numbers");
    // The supervisor is gone: no process reads a report.
    if writeln!(stdout(), "{MARK}{line}").and_then(|()| stdout().flush()).is_err() {
        exit(1);
    }
}

/// Sees every case in order and runs the requested ones.
pub struct Worker {
    only: Vec<String>,
    /// Names so far; `None` after they were sent.
    names: Option<Vec<String>>,
    /// Number of the next case in order.
    next: usize,
    /// Number of the case to run.
    turn: usize,
}

impl Worker {
    /// Serves a supervisor until it has no more cases.
    ///
    /// `walk` calls [`case`](Self::case) for every case, in the same order each time: first to
    /// collect the names, then to run the cases. If `only` is not empty, cases whose names contain
    /// none of its strings are skipped.
    pub fn serve(only: &[String], walk: impl Fn(&mut Self)) {
        let mut worker = Self { only: only.to_vec(), names: Some(vec![]), next: 0, turn: 0 };
        walk(&mut worker);
        send(&worker.names.take());
        worker.turn = turn();
        walk(&mut worker);
    }

    /// Runs this case if its number was requested.
    pub fn case<V: Serialize>(&mut self, name: &str, run: impl FnOnce() -> Result<V, Failure>) {
        if !self.only.is_empty() && !self.only.iter().any(|only| name.contains(only.as_str())) {
            return;
        }
        if let Some(names) = &mut self.names {
            names.push(name.into());
            return;
        }
        self.next += 1;
        if self.next <= self.turn {
            return;
        }
        // The first call watches the devices' threads, where launches panic.
        device_error();
        let result =
            caught(run).and_then(|value| device_error().map_or(Ok(value), |error| Err(Failure::Device(error))));
        let last = matches!(result, Err(Failure::Panicked(_) | Failure::Device(_)));
        let result = result.map_err(|failure| failure.to_string());
        let result = result.and_then(|value| serde_json::to_value(value).map_err(|error| error.to_string()));
        send(&CaseEnd { result, last });
        if last {
            // Not by returning: destructors would wait for the device.
            exit(0);
        }
        self.turn = turn();
    }
}

/// Reads the number of the next case. Ends the process if there is none.
fn turn() -> usize {
    let mut line = String::new();
    match stdin().read_line(&mut line).ok().and_then(|_| line.trim().parse().ok()) {
        Some(turn) => turn,
        None => exit(0),
    }
}
