//! [`Counting`]: allocator that measures peak memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator with counters, for use as `#[global_allocator]`.
pub struct Counting;

static ALIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl Counting {
    /// Live bytes.
    pub fn alive() -> usize {
        ALIVE.load(Relaxed)
    }

    /// Peak bytes during a call above the bytes live before it, over all threads.
    pub fn peak_of(call: impl FnOnce()) -> usize {
        let before = ALIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        call();
        PEAK.load(Relaxed) - before
    }
}

fn grow(bytes: usize) {
    let alive = ALIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(alive, Relaxed);
}

// SAFETY: every call is forwarded to the system allocator; counting does not access the caller's
// memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}
