//! A panic on one rank ends all: no rank waits for one that has unwound.

use std::panic;
use std::sync::Once;

/// From now on a panic of any thread is printed with the rank, and then calls `end`, which ends the job.
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
