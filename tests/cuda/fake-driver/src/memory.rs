//! Device memory on host pages. Each allocation has a window of device addresses that the
//! interpreter takes for a buffer of its own; pinned host memory is remembered.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUresult::{self, *};
use ptx_interpreter::Buffer;

/// Bits of an offset in an allocation, as in the interpreter's addresses.
const WINDOW_BITS: u32 = 36;

/// Most allocations at a time: the interpreter's other windows follow.
const MOST: usize = 1983;

/// Allocations of at most this size begin as poison. The rest costs no memory until it is written.
const MOST_POISON: usize = 64 << 20;

/// Pages of the host.
pub struct Pages {
    host: *mut u8,
    len: usize,
}

// SAFETY: the pages are owned, and used under the lock of their device.
unsafe impl Send for Pages {}

impl Pages {
    fn new(len: usize) -> Result<Self, CUresult> {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address that the system chooses.
        let host = unsafe { libc::mmap(null_mut(), len, access, flags, -1, 0) };
        if host == libc::MAP_FAILED {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        if len <= MOST_POISON {
            // SAFETY: inside the new mapping.
            unsafe { host.cast::<u8>().write_bytes(0xff, len) };
        }
        Ok(Self { host: host.cast(), len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped with this length.
        unsafe { libc::munmap(self.host.cast(), self.len) };
    }
}

/// Memory of a device.
pub struct Memory {
    slots: Vec<Option<Pages>>,
    used: u64,
    /// Bytes that may be allocated.
    pub limit: u64,
}

impl Memory {
    /// Memory of this many bytes.
    pub fn new(limit: u64) -> Self {
        Self { slots: vec![], used: 0, limit }
    }

    /// Allocates memory; returns its address.
    pub fn alloc(&mut self, len: usize) -> Result<u64, CUresult> {
        if len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if self.used + len as u64 > self.limit || len >> WINDOW_BITS != 0 || free == MOST {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let pages = Pages::new(len)?;
        self.used += len as u64;
        match self.slots.get_mut(free) {
            Some(slot) => *slot = Some(pages),
            None => self.slots.push(Some(pages)),
        }
        Ok((free as u64 + 1) << WINDOW_BITS)
    }

    /// Frees the allocation that begins at an address.
    pub fn free(&mut self, address: u64) -> Result<(), CUresult> {
        let slot = (address >> WINDOW_BITS).wrapping_sub(1) as usize;
        let begins = address.trailing_zeros() >= WINDOW_BITS;
        let pages = self.slots.get_mut(slot).filter(|_| begins).and_then(Option::take);
        self.used -= pages.ok_or(CUDA_ERROR_INVALID_VALUE)?.len as u64;
        Ok(())
    }

    /// Host address and length of the memory from a device address to its allocation's end.
    pub fn find(&self, address: u64) -> Option<(*mut u8, usize)> {
        let pages = self.slots.get((address >> WINDOW_BITS).wrapping_sub(1) as usize)?.as_ref()?;
        let offset = (address & ((1 << WINDOW_BITS) - 1)) as usize;
        // SAFETY: inside the allocation.
        (offset < pages.len).then(|| (unsafe { pages.host.add(offset) }, pages.len - offset))
    }

    /// Host address of `len` bytes of one allocation.
    pub fn locate(&self, address: u64, len: usize) -> Option<*mut u8> {
        self.find(address).filter(|(_, rest)| len <= *rest).map(|(host, _)| host)
    }

    /// Buffers of the interpreter at the addresses of the allocations.
    pub fn buffers(&self) -> Vec<Buffer> {
        let buffer = |pages: &Option<Pages>| {
            let (host, len) = pages.as_ref().map_or((null_mut(), 0), |pages| (pages.host, pages.len));
            // SAFETY: the pages live while the device is locked, and the interpreter alone uses them.
            unsafe { Buffer::new(host, len) }
        };
        self.slots.iter().map(buffer).collect()
    }
}

/// Pinned memory by its address.
static PINNED: Mutex<Option<HashMap<usize, Pages>>> = Mutex::new(None);

/// Allocates pinned memory.
pub fn alloc_host(len: usize) -> Result<*mut u8, CUresult> {
    let pages = Pages::new(len.max(1))?;
    let host = pages.host;
    PINNED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(host as usize, pages);
    Ok(host)
}

/// Frees pinned memory.
pub fn free_host(host: *mut u8) -> Result<(), CUresult> {
    let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    let pages = pinned.get_or_insert_default().remove(&(host as usize));
    pages.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Whether a host address is in pinned memory.
pub fn is_pinned(host: usize) -> bool {
    let pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    pinned.iter().flatten().any(|(start, pages)| (*start..*start + pages.len).contains(&host))
}
