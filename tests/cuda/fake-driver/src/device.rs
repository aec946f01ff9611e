//! Devices by their attributes.

use std::sync::OnceLock;

use cudarc::driver::sys::CUdevice_attribute::{self, *};

/// One device of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Ten times the compute capability, such as 90.
    pub sm: u32,
    /// Number of SMs.
    pub sms: u32,
}

/// Devices that `FAKE_CUDA` lists as `SM` or `SM:SMS`, separated by commas; an H200 without it.
///
/// # Panics
/// On an entry of another form.
pub fn models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let list = std::env::var("FAKE_CUDA").unwrap_or_else(|_| "90".into());
        let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("FAKE_CUDA={list}: {text:?} is no number"));
        let model = |entry: &str| match entry.split_once(':') {
            Some((sm, sms)) => Model { sm: number(sm), sms: number(sms) },
            None => Model { sm: number(entry), sms: product(number(entry)).2 },
        };
        list.split(',').map(model).collect()
    })
}

/// Products by architecture: name, SMs, GiB of memory.
const PRODUCTS: [(u32, &str, u32, u64); 7] = [
    (80, "Fake A100", 108, 80),
    (89, "Fake RTX 4090", 128, 24),
    (90, "Fake H200", 132, 140),
    (100, "Fake B200", 148, 180),
    (103, "Fake B300", 148, 270),
    (120, "Fake RTX 5090", 170, 32),
    (121, "Fake GB10", 48, 119),
];

/// Product of an architecture.
fn product(sm: u32) -> (u32, &'static str, u32, u64) {
    PRODUCTS.into_iter().find(|product| product.0 == sm).unwrap_or((sm, "Fake GPU", 64, 16))
}

impl Model {
    /// Name of a product of this architecture.
    pub fn name(self) -> &'static str {
        product(self.sm).1
    }

    /// Bytes of device memory.
    pub fn memory(self) -> u64 {
        product(self.sm).3 << 30
    }

    /// Most bytes of shared memory in a block, from the programming guide's table.
    pub fn shared_memory(self) -> usize {
        match self.sm {
            80 | 87 => 163 << 10,
            86 | 89 | 120.. => 99 << 10,
            _ => 227 << 10,
        }
    }

    /// Value of an attribute; None for one that no caller here needs.
    pub fn attribute(self, attribute: CUdevice_attribute) -> Option<u32> {
        Some(match attribute {
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => self.sm / 10,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => self.sm % 10,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => self.shared_memory() as u32,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => MOST_THREADS,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X => MOST_BLOCK[0],
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => MOST_BLOCK[1],
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => MOST_BLOCK[2],
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => MOST_GRID[0],
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y => MOST_GRID[1],
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => MOST_GRID[2],
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => self.sms,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            _ => return None,
        })
    }
}

/// Most threads in a block.
pub const MOST_THREADS: u32 = 1024;
/// Most threads of a block by axis.
pub const MOST_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most blocks of a grid by axis.
pub const MOST_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
