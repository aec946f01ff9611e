//! State of a running kernel: warps, blocks, clusters, and copies in flight.

use std::collections::VecDeque;

use super::accumulator::Accumulator;
use super::alu::Lanes;
use super::barrier::{Mbarrier, Named};
use super::decode::Kernel;
use super::memory::{Global, LOCAL, SHARED, Shared, shared_parts, space_of};
use super::operand::{Addr, Space};
use super::tensor_memory::Tensor;
use super::tma::TensorMap;
use super::warpgroup::{Held, Warpgroup};

/// Reason why a lane does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wait {
    #[default]
    None,
    /// Waits for other lanes of its warp at the same instruction.
    Warp,
    Bar {
        id: usize,
        generation: u64,
    },
    Cluster {
        generation: u64,
    },
    Mbarrier {
        rank: usize,
        offset: usize,
        value: u64,
        parity: bool,
    },
    /// Waits until the other warps of its warpgroup have issued this number of operations.
    Warpgroup {
        issued: u64,
    },
    /// Waits for a warp of the pair's other block that allocates or deallocates tensor memory with
    /// this one.
    Peer,
    /// Waits for any change.
    Turn,
}

/// Non-bulk copy in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub lane: usize,
    pub to: Addr,
    pub to_address: u64,
    pub from_address: u64,
    pub size: usize,
    pub source_size: usize,
    /// Commit group, once committed.
    pub group: Option<u32>,
}

/// Location of a bulk copy in global memory.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Tensor { map: usize, coords: Vec<i32> },
    Bytes { address: u64, size: usize },
}

/// Bulk store that has not read shared memory yet.
#[derive(Clone, Debug)]
pub(crate) struct BulkStore {
    pub lane: usize,
    pub to: Place,
    pub offset: usize,
    pub add: bool,
    pub group: Option<u32>,
}

/// Bulk load into one block that has not arrived yet.
#[derive(Clone, Debug)]
pub(crate) struct BulkLoad {
    pub from: Place,
    pub rank: usize,
    pub offset: usize,
    /// Block of the mbarrier, and its offset there.
    pub barrier: (usize, usize),
}

#[derive(Debug, Default)]
pub(crate) struct Warp {
    pub id: usize,
    pub registers: Vec<Lanes>,
    pub predicates: Vec<u32>,
    pub pc: [u32; 32],
    pub live: u32,
    pub blocked: u32,
    pub wait: [Wait; 32],
    /// Lanes that let other lanes of the warp run first.
    pub patient: u32,
    pub local: Vec<u8>,
    pub copies: Vec<Copy>,
    pub copy_groups: [u32; 32],
    pub stores: Vec<BulkStore>,
    pub store_groups: [u32; 32],
    pub cluster_generation: [u64; 32],
    /// Number of wgmma operations issued; `groups` has the number at the end of each open group.
    pub issued: u64,
    pub groups: VecDeque<u64>,
    /// Registers of accumulators in flight, and of pending copies of them.
    pub in_flight: Vec<u32>,
    /// Pending copies: register and accumulator.
    pub moved: Vec<(u32, u32)>,
    /// Registers of A in flight.
    pub held: Vec<Held>,
    /// Loads of tensor memory without a wait yet: registers and first column.
    pub tensor_loads: Vec<(Vec<u32>, usize)>,
    /// Lanes that waited for tcgen05 without a fence since, and lanes that read without a fence
    /// since.
    pub unordered: u32,
    pub unsignalled: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Block {
    pub shared: Shared,
    pub barriers: [Named; 16],
    pub warps: Vec<Warp>,
    /// Warps with at least one running lane.
    pub live_warps: u32,
    pub warpgroups: Vec<Warpgroup>,
    pub tensor: Tensor,
}

#[derive(Debug, Default)]
pub(crate) struct Cluster {
    /// Index of the first block in the grid.
    pub origin: [u32; 3],
    pub blocks: Vec<Block>,
    pub loads: Vec<BulkLoad>,
    /// Arrivals of commits on their way to mbarriers: block and offset.
    pub signals: Vec<(usize, usize)>,
    pub arrived: u32,
    pub generation: u64,
    pub live_threads: u32,
    /// `%globaltimer` in nanoseconds.
    pub clock: u64,
    /// Waiting lanes at the last advance of the clock.
    pub stuck: String,
}

impl Cluster {
    /// Opens the cluster's barrier if all threads have arrived.
    pub(crate) fn turn(&mut self) {
        if self.arrived > 0 && self.arrived >= self.live_threads {
            self.arrived = 0;
            self.generation += 1;
        }
    }

    pub(crate) fn mbarrier(&mut self, rank: usize, offset: usize) -> Result<Mbarrier, String> {
        let bits = self.shared(rank)?.locate(offset, 8)?;
        // SAFETY: `locate` returned eight bytes of shared memory.
        Mbarrier::from_bits(unsafe { bits.cast::<u64>().read_unaligned() })
            .map_err(|error| format!("{error}: offset {offset} of block {rank}"))
    }

    pub(crate) fn set_mbarrier(&mut self, rank: usize, offset: usize, bits: u64) -> Result<(), String> {
        let at = self.shared(rank)?.locate(offset, 8)?;
        // SAFETY: `locate` returned eight bytes of shared memory.
        unsafe { at.cast::<u64>().write_unaligned(bits) };
        Ok(())
    }

    /// Arrival of an asynchronous operation at an mbarrier.
    pub(crate) fn signal(&mut self, (rank, offset): (usize, usize)) -> Result<(), String> {
        if self.blocks.get(rank).is_none_or(|block| block.live_warps == 0) {
            return Err(format!("a commit arrives in block {rank}, which has exited"));
        }
        let mut state = self.mbarrier(rank, offset)?;
        state.arrive(1, false)?;
        self.set_mbarrier(rank, offset, state.bits())
    }

    pub(crate) fn shared(&mut self, rank: usize) -> Result<&mut Shared, String> {
        let size = self.blocks.len();
        let block = self.blocks.get_mut(rank).ok_or_else(|| format!("block {rank} of a cluster of {size}"))?;
        Ok(&mut block.shared)
    }
}

/// State shared by all threads of a launch.
pub(crate) struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub global: Global,
    pub maps: &'a [TensorMap],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: usize,
    pub accumulator: Accumulator,
    pub random: Random,
    /// Whether warps take turns of random length.
    pub random_turns: bool,
    /// Number of warp instructions executed.
    pub executed: u64,
}

/// Small generator (xorshift64*), so that a seed reproduces an order of events.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
    /// Whether asynchronous operations may complete early.
    early: bool,
}

impl Random {
    /// Seed 0 makes every asynchronous operation complete as late as possible.
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, early: seed != 0 }
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        ((self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound as u64) as usize
    }

    /// Whether an asynchronous operation completes now instead of at the last moment.
    pub(crate) fn now(&mut self) -> bool {
        self.early && self.below(2) == 0
    }
}

/// Lanes of a warp that reach an instruction together, and its position.
pub(crate) struct Issue<'a> {
    pub(crate) cluster: &'a mut Cluster,
    /// Rank of the warp's block in the cluster.
    pub(crate) rank: usize,
    pub(crate) warp: &'a mut Warp,
    /// Lanes that execute the instruction.
    pub(crate) mask: u32,
    /// Lanes that reach the instruction, including lanes that its predicate disables.
    pub(crate) group: u32,
    pub(crate) pc: u32,
}

impl Warp {
    /// Address of an operand in a lane.
    pub(crate) fn address(&self, address: &Addr, lane: usize) -> u64 {
        let value = self.registers[address.base as usize][lane].wrapping_add(address.offset as u64);
        if address.space == Space::Shared { value & 0xffff_ffff } else { value }
    }
}

impl Machine<'_> {
    /// Locates `len` bytes at a lane's address. Records writes to shared memory for the proxies.
    pub(crate) fn locate(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        (space, address, lane): (Space, u64, usize),
        len: usize,
        write: bool,
    ) -> Result<*mut u8, String> {
        if !address.is_multiple_of(len as u64) {
            return Err(format!("{len} bytes at {address:#x}, which is not aligned"));
        }
        // Kernel parameters have a separate window; parameters of calls are local.
        let space = if matches!(space, Space::Generic | Space::Param) { space_of(address) } else { space };
        match space {
            Space::Shared => {
                let (owner, offset) = shared_parts(address & 0xffff_ffff, rank);
                let warp_id = warp.id;
                let shared = cluster.shared(owner)?;
                if write && owner == rank {
                    shared.note_write(offset, len, warp_id);
                }
                shared.locate(offset, len)
            }
            Space::Local => {
                let per_lane = self.kernel.local_bytes;
                let offset = address.wrapping_sub(LOCAL) as usize;
                if offset.saturating_add(len) > per_lane {
                    return Err(format!("{len} bytes at {offset} of {per_lane} bytes of local memory"));
                }
                Ok(warp.local[lane * per_lane + offset..][..len].as_mut_ptr())
            }
            _ => self.global.locate(address, len),
        }
    }

    /// Shared address of an operand, whose space may be generic.
    pub(crate) fn shared_address(address: &Addr, value: u64) -> Result<u64, String> {
        if address.space == Space::Shared {
            return Ok(value);
        }
        match space_of(value) {
            Space::Shared => Ok(value - SHARED),
            _ => Err(format!("{value:#x} is not in shared memory")),
        }
    }
}

/// Reads a little-endian value of up to eight bytes.
///
/// # Safety
/// `bytes` bytes at `at` are readable.
pub(crate) unsafe fn read(at: *const u8, bytes: usize) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match bytes {
            1 => u64::from(at.read()),
            2 => u64::from(at.cast::<u16>().read_unaligned()),
            4 => u64::from(at.cast::<u32>().read_unaligned()),
            _ => at.cast::<u64>().read_unaligned(),
        }
    }
}

/// Writes the low bytes of a value.
///
/// # Safety
/// `bytes` bytes at `at` are writable.
pub(crate) unsafe fn write(at: *mut u8, bytes: usize, value: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match bytes {
            1 => at.write(value as u8),
            2 => at.cast::<u16>().write_unaligned(value as u16),
            4 => at.cast::<u32>().write_unaligned(value as u32),
            _ => at.cast::<u64>().write_unaligned(value),
        }
    }
}
