//! [`use_current_thread`]: loops over tensors on a CPU begin where the program is, and not in a thread that has to be waked first.

use std::num::NonZero;
use std::thread::available_parallelism;

/// Makes the current thread one of rayon's global pool, of which a program that does nothing else with its first thread gains: a thread
/// outside the pool sleeps through each parallel loop, and one of the pool's is waked for it.
///
/// The pool has as many threads as without this. It stays as it is if it is in use already, or has one thread: that one could do nothing
/// for others while the program waits for them.
pub fn use_current_thread() {
    let cores = available_parallelism().map_or(1, NonZero::get);
    // What rayon asks, in its order.
    let chosen = std::env::var("RAYON_NUM_THREADS").ok().and_then(|threads| threads.parse().ok());
    let threads = chosen.filter(|threads| *threads > 0).unwrap_or(cores);
    if threads > 1 {
        // The only error is a pool that is there.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global();
    }
}
