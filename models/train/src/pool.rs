//! [`use_current_thread`]: parallel loops start on the thread that calls them.

use std::num::NonZero;
use std::thread::available_parallelism;

/// Makes the current thread one of rayon's global pool: for the first thread of a program that computes on it. A thread outside the pool
/// sleeps while its parallel loops run, and each loop has to wake one of the pool's threads.
///
/// The pool has as many threads as without this. Nothing changes if the pool is there already, or would have one thread: that thread could
/// not run the loops of others while it waits for them.
pub fn use_current_thread() {
    let cores = available_parallelism().map_or(1, NonZero::get);
    // As rayon chooses.
    let chosen = std::env::var("RAYON_NUM_THREADS").ok().and_then(|threads| threads.parse().ok());
    let threads = chosen.filter(|threads| *threads > 0).unwrap_or(cores);
    if threads > 1 {
        // The only error is a pool that is there.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global();
    }
}
