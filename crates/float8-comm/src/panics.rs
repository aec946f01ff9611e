//! Ends all ranks after a panic on one, so that none waits for a rank that has unwound.

use std::panic;
use std::sync::Once;

/// Installs a hook that prints a panic of any thread with the rank, then calls `end` to end the
/// job.
pub(crate) fn end_on_panic(rank: usize, world_size: usize, end: fn()) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            eprintln!("rank {rank} of {world_size} panicked, which ends the job:");
            print(info);
            end();
        }));
    });
}
