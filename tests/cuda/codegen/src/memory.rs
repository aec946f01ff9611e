//! Host memory of an emulated device.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;

use cubecl_runtime::server::IoError;
use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};

/// Alignment of allocations in bytes.
pub(crate) const ALIGNMENT: usize = 512;

/// Memory of any size, allocated at first use.
#[derive(Debug, Default)]
pub struct OfflineStorage {
    sizes: HashMap<StorageId, u64>,
    memory: HashMap<StorageId, Memory>,
}

/// Device memory on the host.
#[derive(Debug)]
struct Memory {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is owned and used only by the server's thread.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr, self.layout) }
    }
}

/// Range of device memory.
#[derive(Clone, Copy, Debug)]
pub struct OfflineResource {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: dereferenced only on the server's thread.
unsafe impl Send for OfflineResource {}

impl OfflineResource {
    /// The bytes.
    ///
    /// # Safety
    /// No other reference to them is alive.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a mut [u8] {
        // SAFETY: the range is inside one allocation; the rest is guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl ComputeStorage for OfflineStorage {
    type Resource = OfflineResource;

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn get(&mut self, handle: &StorageHandle) -> OfflineResource {
        let size = self.sizes.get(&handle.id).copied().unwrap_or(0);
        let memory = self.memory.entry(handle.id).or_insert_with(|| {
            let layout = Layout::from_size_align(size.max(1) as usize, ALIGNMENT).expect("a size of memory");
            // SAFETY: the layout is not empty.
            let ptr = unsafe { alloc_zeroed(layout) };
            assert!(!ptr.is_null(), "no {size} bytes of memory");
            Memory { ptr, layout }
        });
        let StorageUtilization { offset, size: len } = handle.utilization;
        assert!(offset + len <= memory.layout.size() as u64, "a resource ends behind its memory");
        // SAFETY: inside the allocation.
        OfflineResource { ptr: unsafe { memory.ptr.add(offset as usize) }, len: len as usize }
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let id = StorageId::new();
        self.sizes.insert(id, size);
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.sizes.remove(&id);
        self.memory.remove(&id);
    }

    fn flush(&mut self) {}
}
