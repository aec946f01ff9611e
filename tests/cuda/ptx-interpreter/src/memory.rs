//! Address spaces. Each launch buffer, the module's variables, parameters, local memory and each
//! block's shared memory have separate windows. So an access outside of the object that an address
//! belongs to is an error.
//!
//! A shared address is an offset in the block's own memory. With `(rank + 1) << 24` added it refers
//! to that block of the cluster. The generic window of shared memory starts at a multiple of 2^32.

use super::operand::Space;

pub(crate) const GLOBALS: u64 = 0x7c00_0000_0000;
pub(crate) const PARAM: u64 = 0x7d00_0000_0000;
pub(crate) const LOCAL: u64 = 0x7e00_0000_0000;
pub(crate) const SHARED: u64 = 0x7f00_0000_0000;
const WINDOW: u64 = 0x0100_0000_0000;

/// Bits of an offset in a buffer.
const BUFFER_BITS: u32 = 36;

/// Device memory passed to a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    ptr: *mut u8,
    len: usize,
}

impl Buffer {
    /// # Safety
    /// The bytes live, and nothing else reads or writes them, while the kernel runs. Two buffers
    /// may overlap.
    pub unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Address of the buffer's start in the kernel: its own window, with the host address's
    /// alignment.
    pub(crate) fn address(&self, index: usize) -> u64 {
        ((index as u64 + 1) << BUFFER_BITS) + (self.ptr as u64 & 0xfff)
    }
}

/// Global memory, module variables and parameters.
#[derive(Debug)]
pub(crate) struct Global {
    pub buffers: Vec<Buffer>,
    pub globals: Vec<u8>,
    pub params: Vec<u8>,
}

impl Global {
    /// Locates `len` bytes at an address outside of shared and local memory.
    pub(crate) fn locate(&mut self, address: u64, len: usize) -> Result<*mut u8, String> {
        let inside = |bytes: &mut Vec<u8>, base: u64, what: &str| {
            let offset = (address - base) as usize;
            match bytes.get_mut(offset..offset + len) {
                Some(found) => Ok(found.as_mut_ptr()),
                None => Err(format!("{len} bytes at {offset} of {} bytes of {what}", bytes.len())),
            }
        };
        match address {
            GLOBALS..PARAM => inside(&mut self.globals, GLOBALS, "module variables"),
            PARAM..LOCAL => inside(&mut self.params, PARAM, "parameters"),
            _ => {
                let index = (address >> BUFFER_BITS).wrapping_sub(1) as usize;
                let Some(buffer) = self.buffers.get(index) else {
                    return Err(format!("{len} bytes at {address:#x}, which belongs to no buffer"));
                };
                let offset = address.wrapping_sub(buffer.address(index)) as i64;
                if offset < 0 || offset as usize + len > buffer.len {
                    return Err(format!("{len} bytes at {offset} of buffer {index}, which has {} bytes", buffer.len));
                }
                // SAFETY: inside the buffer.
                Ok(unsafe { buffer.ptr.add(offset as usize) })
            }
        }
    }
}

/// Shared memory of a block.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub bytes: Vec<u8>,
    /// For each 16 bytes, one plus the warp whose writes are not yet visible to the asynchronous
    /// proxy.
    unfenced: Vec<u16>,
    /// For each warp, the 16-byte granules whose writes are not yet visible to the asynchronous
    /// proxy.
    written: Vec<Vec<u32>>,
}

impl Shared {
    /// `len` bytes of poison. Set `tracked` if an asynchronous proxy reads them.
    pub(crate) fn new(len: usize, warps: usize, tracked: bool) -> Self {
        let granules = if tracked { len.div_ceil(16) } else { 0 };
        Self { bytes: vec![0xff; len], unfenced: vec![0; granules], written: vec![vec![]; warps] }
    }

    pub(crate) fn locate(&mut self, offset: usize, len: usize) -> Result<*mut u8, String> {
        let available = self.bytes.len();
        match self.bytes.get_mut(offset..offset + len) {
            Some(found) => Ok(found.as_mut_ptr()),
            None => Err(format!("{len} bytes at {offset} of shared memory, which has {available} bytes")),
        }
    }

    /// Records a write of a warp through the generic proxy.
    pub(crate) fn note_write(&mut self, offset: usize, len: usize, warp: usize) {
        if self.unfenced.is_empty() {
            return;
        }
        for granule in offset / 16..=(offset + len - 1) / 16 {
            if let Some(unfenced) = self.unfenced.get_mut(granule).filter(|unfenced| **unfenced != warp as u16 + 1) {
                *unfenced = warp as u16 + 1;
                self.written[warp].push(granule as u32);
            }
        }
    }

    /// Applies a `fence.proxy.async` of a warp.
    pub(crate) fn fence(&mut self, warp: usize) {
        for granule in self.written[warp].drain(..) {
            let unfenced = &mut self.unfenced[granule as usize];
            if *unfenced == warp as u16 + 1 {
                *unfenced = 0;
            }
        }
    }

    /// Records a write through the asynchronous proxy, which needs no fence.
    pub(crate) fn note_async_write(&mut self, offset: usize, len: usize) {
        if !self.unfenced.is_empty() {
            for granule in offset / 16..=(offset + len - 1) / 16 {
                if let Some(unfenced) = self.unfenced.get_mut(granule) {
                    *unfenced = 0;
                }
            }
        }
    }

    /// Checks that the asynchronous proxy may read.
    pub(crate) fn check_async_read(&self, offset: usize, len: usize) -> Result<(), String> {
        if offset + len > self.bytes.len() {
            let available = self.bytes.len();
            return Err(format!("{len} bytes at {offset} of shared memory, which has {available} bytes"));
        }
        if self.unfenced.is_empty() || len == 0 {
            return Ok(());
        }
        match self.unfenced[offset / 16..=(offset + len - 1) / 16].iter().find(|unfenced| **unfenced != 0) {
            Some(warp) => Err(format!(
                "shared memory at {offset} was written by warp {} with no fence.proxy.async since",
                warp - 1
            )),
            None => Ok(()),
        }
    }
}

/// Block of the cluster and offset of a shared address, for a block of rank `own`.
pub(crate) fn shared_parts(address: u64, own: usize) -> (usize, usize) {
    let rank = (address >> 24 & 0xff) as usize;
    (rank.checked_sub(1).unwrap_or(own), (address & 0xff_ffff) as usize)
}

/// Space of a generic address.
pub(crate) fn space_of(address: u64) -> Space {
    match address {
        SHARED.. if address < SHARED + WINDOW => Space::Shared,
        LOCAL..SHARED => Space::Local,
        PARAM..LOCAL => Space::Param,
        _ => Space::Global,
    }
}
