//! Prints the time of a small allocation in CubeCL's memory pool, by the number of live ones. The
//! storage holds nothing.

use std::sync::Arc;
use std::time::Instant;

use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
};
use cubecl_runtime::server::IoError;
use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};

struct Nothing;

impl ComputeStorage for Nothing {
    type Resource = ();

    fn alignment(&self) -> usize {
        256
    }

    fn get(&mut self, _: &StorageHandle) {}

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        Ok(StorageHandle::new(StorageId::new(), StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}
}

/// Allocates a small tensor, reserved and bound as by the CUDA server.
fn small(memory: &mut MemoryManagement<Nothing>) -> ManagedMemoryHandle {
    let (reserved, assigned) = (memory.reserve(4).expect("it is free"), ManagedMemoryHandle::new());
    memory.bind(reserved, assigned.clone(), 0).expect("just reserved");
    assigned
}

fn main() {
    const CALLS: usize = 500;
    let properties = MemoryDeviceProperties { max_page_size: 35 << 30, alignment: 256 };
    for live in [10, 200, 2000] {
        let (logger, options) = (Arc::new(ServerLogger::default()), MemoryManagementOptions::new("pool"));
        let sliced = MemoryConfiguration::SubSlices;
        let mut memory = MemoryManagement::from_configuration(Nothing, &properties, sliced, logger, options);
        let kept: Vec<_> = (0..live).map(|_| small(&mut memory)).collect();
        let mut rounds = [(); 20].map(|()| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| drop(small(&mut memory)));
            start.elapsed().as_secs_f64() * 1e6 / CALLS as f64
        });
        rounds.sort_by(f64::total_cmp);
        println!("{live} live: {:.2} us a piece, quartiles {:.2} and {:.2}", rounds[10], rounds[5], rounds[15]);
        drop(kept);
    }
}
