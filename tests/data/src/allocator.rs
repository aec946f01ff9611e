//! [`Counting`]: how much memory a program has at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting. It is a program's `#[global_allocator]`.
pub struct Counting;

static ALIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl Counting {
    /// Bytes that are alive.
    pub fn alive() -> usize {
        ALIVE.load(Relaxed)
    }

    /// Peak bytes of a call over what is alive before it, of all threads.
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

// SAFETY: every call is the system allocator's; counting touches no memory of the caller.
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
