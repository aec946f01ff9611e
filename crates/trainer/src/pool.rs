//! [`use_current_thread`]: runs parallel loops on the calling thread too.

use std::num::NonZero;
use std::thread::available_parallelism;

/// Makes the current thread part of rayon's global pool. Call it from a program's main computing
/// thread. A thread outside of the pool sleeps during its parallel loops, and each loop must wake a
/// thread of the pool.
///
/// The pool keeps its number of threads. Nothing changes if the pool already exists or would have
/// one thread: this thread could not run the loops of others while it waits for them.
pub fn use_current_thread() {
    let cores = available_parallelism().map_or(1, NonZero::get);
    // Like rayon's default.
    let chosen = std::env::var("RAYON_NUM_THREADS").ok().and_then(|threads| threads.parse().ok());
    let threads = chosen.filter(|threads| *threads > 0).unwrap_or(cores);
    if threads > 1 {
        // Fails only if the pool already exists.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global();
    }
}
