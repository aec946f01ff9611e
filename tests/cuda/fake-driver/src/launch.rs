//! Kernels of modules, and launches: checked as the driver checks them, and interpreted.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::{self, *};
use ptx_interpreter::{Arg, Buffer, Kernel, TensorMap};

use crate::device::{MOST_BLOCK, MOST_GRID, MOST_THREADS, Model};
use crate::maps::{self, BYTES};
use crate::memory::Memory;
use crate::say;

/// PTX version of the newest toolkit that the driver knows, CUDA 13.0.
const MOST_PTX: [u32; 2] = [9, 0];

/// Dynamic shared memory that a kernel may have without an attribute.
const USUAL_SHARED: usize = 48 << 10;

/// Kernel of a loaded module.
pub struct Function {
    pub kernel: Arc<Kernel>,
    /// Most bytes of dynamic shared memory.
    dynamic: usize,
}

impl Function {
    /// Loads PTX on a device.
    pub fn load(ptx: &str, model: Model) -> Result<Self, CUresult> {
        let word = |name: &str| ptx.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let version: Vec<u32> = word(".version").split('.').filter_map(|part| part.parse().ok()).collect();
        if version.as_slice() > MOST_PTX.as_slice() {
            say(&format!("PTX {} is newer than this driver", word(".version")));
            return Err(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        }
        let target = word(".target").split(',').next().unwrap_or_default().trim_start_matches("sm_");
        let (number, exact) = match target.strip_suffix('a') {
            Some(number) => (number, true),
            None => (target, false),
        };
        let number: u32 = number.parse().map_err(|_| CUDA_ERROR_INVALID_PTX)?;
        if number > model.sm || exact && number != model.sm {
            say(&format!("PTX for sm_{target} on a device of sm_{}", model.sm));
            return Err(CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        let kernel = Kernel::parse(ptx).map_err(|error| refused(&error.to_string(), CUDA_ERROR_INVALID_PTX))?;
        Ok(Self { kernel: Arc::new(kernel), dynamic: USUAL_SHARED })
    }

    /// Sets the most bytes of dynamic shared memory.
    pub fn set_dynamic(&mut self, bytes: usize, model: Model) -> Result<(), CUresult> {
        if bytes + self.kernel.static_shared() > model.shared_memory() {
            return Err(self.refuse(&format!("{bytes} bytes of shared memory"), CUDA_ERROR_INVALID_VALUE));
        }
        self.dynamic = bytes;
        Ok(())
    }

    fn refuse(&self, reason: &str, code: CUresult) -> CUresult {
        refused(&format!("{}: {reason}", self.kernel.name), code)
    }

    /// Checks a launch, and reads its parameters.
    ///
    /// # Safety
    /// `parameters` points to one pointer for each parameter of the kernel, to bytes of its size.
    pub unsafe fn launch(
        &self,
        [grid, block]: [[u32; 3]; 2],
        dynamic: usize,
        parameters: *const *const c_void,
        model: Model,
    ) -> Result<Launch, CUresult> {
        let exceeds = |sides: [u32; 3], most: [u32; 3]| (0..3).any(|i| sides[i] == 0 || sides[i] > most[i]);
        let threads = block.iter().product::<u32>();
        if exceeds(grid, MOST_GRID) || exceeds(block, MOST_BLOCK) || threads > MOST_THREADS {
            return Err(self.refuse(&format!("grid {grid:?} of blocks {block:?}"), CUDA_ERROR_INVALID_VALUE));
        }
        if self.kernel.max_threads.is_some_and(|most| threads > most) {
            return Err(self.refuse(&format!("{threads} threads"), CUDA_ERROR_INVALID_VALUE));
        }
        if dynamic > self.dynamic || dynamic + self.kernel.static_shared() > model.shared_memory() {
            let reason = format!("{dynamic} bytes of shared memory, of {}", self.dynamic);
            return Err(self.refuse(&reason, CUDA_ERROR_INVALID_VALUE));
        }
        let cluster = self.kernel.cluster;
        if (0..3).any(|i| !grid[i].is_multiple_of(cluster[i])) || cluster.iter().product::<u32>() > 8 {
            let reason = format!("a grid {grid:?} in clusters of {cluster:?}");
            return Err(self.refuse(&reason, CUDA_ERROR_INVALID_CLUSTER_SIZE));
        }
        let mut launch = Launch { kernel: self.kernel.clone(), grid, block, dynamic, args: vec![], maps: vec![] };
        for (i, size) in self.kernel.parameters().enumerate() {
            // SAFETY: guaranteed by the caller.
            let pointer = unsafe { parameters.add(i).read() };
            if pointer.is_null() {
                return Err(self.refuse(&format!("no parameter {i}"), CUDA_ERROR_INVALID_VALUE));
            }
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
            launch.args.push(match maps::decode(bytes).filter(|_| size == BYTES) {
                Some(map) => {
                    launch.maps.push(map);
                    Arg::Map(launch.maps.len() - 1)
                }
                None => Arg::Bytes(bytes.to_vec()),
            });
        }
        Ok(launch)
    }
}

/// Launch that waits for its turn.
pub struct Launch {
    kernel: Arc<Kernel>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: usize,
    args: Vec<Arg>,
    maps: Vec<(u64, TensorMap)>,
}

impl Launch {
    /// Name of the kernel.
    pub fn name(&self) -> &str {
        &self.kernel.name
    }

    /// Interprets the kernel.
    pub fn run(self, memory: &Memory) -> Result<(), CUresult> {
        let mut buffers = memory.buffers();
        let mut maps = vec![];
        for (address, map) in self.maps {
            let Some((host, len)) = memory.find(address) else {
                return Err(refused(&format!("a tensor map of {address:#x}"), CUDA_ERROR_ILLEGAL_ADDRESS));
            };
            maps.push(TensorMap { buffer: buffers.len(), ..map });
            // SAFETY: as in `Memory::buffers`.
            buffers.push(unsafe { Buffer::new(host, len) });
        }
        let launch = ptx_interpreter::Launch {
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.dynamic,
            args: self.args,
            buffers,
            maps,
            ..Default::default()
        };
        self.kernel.run(&launch).map(drop).map_err(|error| {
            let text = error.to_string();
            let code = [
                ("deadlock in", CUDA_ERROR_LAUNCH_TIMEOUT),
                ("still running", CUDA_ERROR_LAUNCH_TIMEOUT),
                ("belongs to no buffer", CUDA_ERROR_ILLEGAL_ADDRESS),
                (" of buffer ", CUDA_ERROR_ILLEGAL_ADDRESS),
                ("not aligned", CUDA_ERROR_MISALIGNED_ADDRESS),
            ];
            let code =
                code.iter().find(|(part, _)| text.contains(part)).map_or(CUDA_ERROR_LAUNCH_FAILED, |(_, code)| *code);
            refused(&text, code)
        })
    }
}

/// Prints the reason for an error code.
pub fn refused(reason: &str, code: CUresult) -> CUresult {
    say(reason);
    code
}
