//! Batches of calls between two waits, and the time that is left.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Seconds that a batch should take: long against the wait at its end.
const BATCH: f64 = 0.03;

/// Calls in a batch at most.
const MOST: usize = 500;

/// Measures, until the time is over.
pub struct Timer {
    repeat: u32,
    end: Instant,
    batch: f64,
    failed: bool,
    skipped: Vec<String>,
}

impl Timer {
    /// Medians of `repeat` batches; no case begins after `limit` seconds.
    pub fn new(repeat: u32, limit: u64, quick: bool) -> Self {
        let batch = if quick { BATCH / 30.0 } else { BATCH };
        Self { repeat, end: Instant::now() + Duration::from_secs(limit), batch, failed: false, skipped: vec![] }
    }

    /// Seconds left.
    pub fn left(&self) -> u64 {
        self.end.saturating_duration_since(Instant::now()).as_secs()
    }

    /// Runs a case if there is time for it. One that panics, for want of memory say, is noted and the others go on.
    pub fn case<V>(&mut self, name: &str, case: impl FnOnce(&Self) -> V) -> Option<V> {
        if self.left() == 0 {
            self.skipped.push(format!("{name}: no time left"));
            return None;
        }
        match catch_unwind(AssertUnwindSafe(|| case(self))) {
            Ok(value) => {
                println!("{name}: done, {} s left", self.left());
                Some(value)
            }
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_string();
                self.skip(name, &text);
                None
            }
        }
    }

    /// Notes what failed.
    pub fn skip(&mut self, name: &str, why: &dyn Display) {
        self.failed = true;
        self.skipped.push(format!("{name}: {why}"));
        println!("{name}: {why}");
    }

    /// Whether a case failed, other than for want of time.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// What was skipped and why.
    pub fn into_skipped(self) -> Vec<String> {
        self.skipped
    }

    /// Median seconds of a call. `call` gets the number of the call, to rotate inputs by; `sync` waits for the device.
    pub fn seconds(&self, sync: impl Fn(), mut call: impl FnMut(usize)) -> f64 {
        let mut turn = 0;
        let mut batch = |calls: usize| {
            sync();
            let start = Instant::now();
            for _ in 0..calls {
                call(turn);
                turn += 1;
            }
            sync();
            start.elapsed().as_secs_f64() / calls as f64
        };
        // The first call compiles; the next ones fill the memory pools.
        batch(1);
        batch(2);
        let calls = ((self.batch / batch(2)) as usize).clamp(1, MOST);
        if calls > 2 {
            batch(calls);
        }
        let mut times: Vec<_> = (0..self.repeat).map(|_| batch(calls)).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }
}

/// Geometric mean; none of nothing.
pub fn geometric_mean(ratios: &[f64]) -> Option<f64> {
    let sum: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    (!ratios.is_empty()).then(|| (sum / ratios.len() as f64).exp())
}

/// A number of a table, or a dash.
pub fn or_dash(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"))
}
