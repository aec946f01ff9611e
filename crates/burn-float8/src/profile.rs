//! Host time of casts, GEMMs and the functions of [`nn`](crate::nn), forward and backward, summed
//! by name between [`start`] and [`stop`]. Not part of the public API.
//!
//! The time is the duration of the call. On backends that compute synchronously (`Flex`, `NdArray`)
//! it is the time of the work, on others the time of queueing it. Nested work counts only for the
//! outer work. Operations of the wrapped backend are not timed.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use float8_kernels::Format;
use parking_lot::Mutex;

use crate::terms::{Gemm, Role};

/// A kind of timed work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Work {
    /// Cast of an operand of a linear to FP8, including its amax.
    Cast {
        /// Role of the operand.
        role: Role,
        /// Target format.
        format: Format,
    },
    /// GEMM of FP8 operands.
    ScaledGemm(Gemm),
    /// A GEMM in high precision (`linear`, `float_matmul`, `grouped_matmul`), a function of
    /// [`nn`](crate::nn) (`attention`), or another operation of [`Float8`](crate::Float8):
    /// `amax_history` (delayed scaling), `statistics`, `group_padding`, `float_cast` (of a GEMM's
    /// input).
    Operation(&'static str),
}

impl core::fmt::Display for Work {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Cast { role, format } => write!(f, "cast {} {format}", role.name()),
            Self::ScaledGemm(gemm) => write!(f, "scaled_gemm {gemm}"),
            Self::Operation(name) => f.write_str(name),
        }
    }
}

/// Sum over all calls of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The kind of work.
    pub work: Work,
    /// Number of calls.
    pub calls: u64,
    /// Total time over all threads.
    pub time: Duration,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static SUMS: LazyLock<Mutex<HashMap<Work, (u64, Duration)>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// Whether this thread is inside timed work.
    static IS_TIMED: Cell<bool> = const { Cell::new(false) };
}

/// Starts timing on all threads of the process, with empty sums.
pub fn start() {
    SUMS.lock().clear();
    IS_ON.store(true, Relaxed);
}

/// Stops timing. Returns the sums since [`start`], longest first.
pub fn stop() -> Vec<Entry> {
    IS_ON.store(false, Relaxed);
    let sums = core::mem::take(&mut *SUMS.lock());
    let mut entries: Vec<_> = sums.into_iter().map(|(work, (calls, time))| Entry { work, calls, time }).collect();
    entries.sort_by_key(|entry| core::cmp::Reverse(entry.time));
    entries
}

/// Measures time until it is dropped.
#[must_use]
#[doc(hidden)]
pub struct Timer(Option<(Work, Instant)>);

/// Times `work`, unless timing is off or this thread is inside timed work.
pub(crate) fn time(work: Work) -> Timer {
    if !IS_ON.load(Relaxed) || IS_TIMED.replace(true) {
        return Timer(None);
    }
    Timer(Some((work, Instant::now())))
}

/// [`time`] for an operation with this name.
#[doc(hidden)]
pub fn operation(name: &'static str) -> Timer {
    time(Work::Operation(name))
}

impl Drop for Timer {
    fn drop(&mut self) {
        let Some((work, since)) = self.0.take() else { return };
        let time = since.elapsed();
        IS_TIMED.set(false);
        // Discards calls that outlive `stop`, so that they do not count for the next `start`.
        if IS_ON.load(Relaxed) {
            let mut sums = SUMS.lock();
            let (calls, sum) = sums.entry(work).or_default();
            *calls += 1;
            *sum += time;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    /// The only test of this binary that enables timing. Other tests may run concurrently with
    /// other names.
    #[test]
    fn what_is_timed_inside_of_another_counts_once() {
        let (outer, inner) = ("outer of a test", "inner of a test");
        let nested = || {
            let _outer = operation(outer);
            sleep(Duration::from_millis(2));
            let _inner = operation(inner);
            sleep(Duration::from_millis(2));
        };
        nested();
        start();
        nested();
        nested();
        drop(operation(inner));
        let panics = std::panic::catch_unwind(|| {
            let _outer = operation(outer);
            panic!("in an operation")
        });
        assert!(panics.is_err());
        nested();
        let entries = stop();
        nested();
        let of = |name| entries.iter().find(|entry| entry.work == Work::Operation(name)).unwrap();
        assert_eq!((of(outer).calls, of(inner).calls), (4, 1));
        assert!(of(outer).time >= Duration::from_millis(12) && of(outer).time > of(inner).time, "{entries:?}");
        assert!(entries.iter().is_sorted_by(|a, b| a.time >= b.time));
        assert!(stop().is_empty());
    }
}
