//! Batches of calls between two waits.

use std::time::Instant;

/// Seconds that a batch should take: long against the wait at its end.
const BATCH: f64 = 0.03;

/// Calls in a batch at most.
const MOST: usize = 500;

/// Times calls.
#[derive(Clone, Copy)]
pub struct Clock {
    repeat: u32,
    batch: f64,
}

impl Clock {
    /// Medians of `repeat` batches, short ones if nothing is to be measured.
    pub fn new(repeat: u32, quick: bool) -> Self {
        Self { repeat, batch: if quick { BATCH / 30.0 } else { BATCH } }
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
        median((0..self.repeat).map(|_| batch(calls)).collect())
    }
}

/// The middle of some times.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
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
