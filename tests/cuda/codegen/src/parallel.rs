//! Parallel work on all cores.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Calls `work` for each item, on one thread per core.
pub fn on_all_cores<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            work(item);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run))));
}
