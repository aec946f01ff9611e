//! Execution of a grid: one cluster at a time, its warps in turn, asynchronous operations when
//! nothing else can run. A cluster that runs long may be waiting for another one, so the next
//! cluster then runs alongside it.

use super::accumulator::Accumulator;
use super::copies::MAP_TAG;
use super::decode::Kernel;
use super::error::Error;
use super::memory::{Buffer, Global, Shared};
use super::operand::Special;
use super::state::{Block, Cluster, Machine, Random, Warp};
use super::table::Op;
use super::tma::TensorMap;

/// Argument of a kernel.
#[derive(Clone, Debug)]
pub enum Arg {
    /// Tensor map by index, passed by value.
    Map(usize),
    /// Address of a buffer, by index.
    Buffer(usize),
    /// Value of these bytes, truncated or zero-extended to the parameter's size.
    Bytes(Vec<u8>),
}

/// Parameters of a launch.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// Number of blocks.
    pub grid: [u32; 3],
    /// Number of threads in a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// One argument for each parameter.
    pub args: Vec<Arg>,
    /// Buffers that [`Arg::Buffer`] and tensor maps index.
    pub buffers: Vec<Buffer>,
    /// Tensor maps that [`Arg::Map`] indexes.
    pub maps: Vec<TensorMap>,
    /// With seed 0 asynchronous copies and reads of shared memory complete as late as the program
    /// allows. With other seeds each completes immediately or late, and warps take turns of random
    /// length, reproducible by the seed.
    pub seed: u64,
    /// Accumulation of FP8 products.
    pub accumulator: Accumulator,
    /// Maximum average number of instructions per warp before the launch is aborted; 0 for the
    /// default.
    pub limit: u64,
}

/// Instructions of a cluster's warps before the next cluster starts.
const PATIENCE: u64 = 4_000_000;
/// Maximum number of clusters that run concurrently.
const RESIDENT: usize = 132;

impl Kernel {
    /// Runs a launch; returns the number of warp instructions executed.
    ///
    /// # Errors
    /// [`Error::Launch`] before execution starts, [`Error::Fault`] afterwards.
    pub fn run(&self, launch: &Launch) -> Result<u64, Error> {
        Machine::new(self, launch).map_err(Error::Launch)?.run(launch).map_err(Error::Fault)
    }
}

impl<'a> Machine<'a> {
    /// Runs all clusters; returns the number of warp instructions executed.
    fn run(mut self, launch: &Launch) -> Result<u64, String> {
        let size = self.kernel.cluster;
        let [x, y, z] = [0, 1, 2].map(|axis| launch.grid[axis] / size[axis]);
        let mut waiting = (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k])));
        let mut resident: Vec<Cluster> = vec![];
        let threads = launch.block.iter().product::<u32>() as u64 * launch.grid.iter().product::<u32>() as u64;
        let limit = if launch.limit == 0 { 20_000_000 } else { launch.limit } * threads.div_ceil(32);
        let mut turn = 0;
        loop {
            if resident.is_empty() {
                match waiting.next() {
                    Some(id) => resident.push(self.cluster(id)),
                    None => return Ok(self.executed),
                }
            }
            turn %= resident.len();
            let finished = self.run_cluster(&mut resident[turn], PATIENCE)?;
            if finished {
                resident.swap_remove(turn);
            } else {
                if resident.len() < RESIDENT
                    && let Some(id) = waiting.next()
                {
                    resident.push(self.cluster(id));
                }
                turn += 1;
            }
            if self.executed > limit {
                return Err(format!("{}: still running after {} instructions", self.kernel.name, self.executed));
            }
        }
    }

    fn new(kernel: &'a Kernel, launch: &'a Launch) -> Result<Self, String> {
        let size = kernel.cluster;
        for axis in 0..3 {
            if size[axis] == 0 || !launch.grid[axis].is_multiple_of(size[axis]) {
                return Err(format!("{}: a grid of {:?} blocks in clusters of {size:?}", kernel.name, launch.grid));
            }
        }
        let threads: u32 = launch.block.iter().product();
        if threads == 0 || threads > 1024 || kernel.max_threads.is_some_and(|most| threads > most) {
            return Err(format!("{}: {threads} threads in a block, of {:?}", kernel.name, kernel.max_threads));
        }
        if launch.args.len() != kernel.params.len() {
            let (given, taken) = (launch.args.len(), kernel.params.len());
            return Err(format!("{}: {given} arguments for {taken} parameters", kernel.name));
        }
        launch.accumulator.check()?;
        for map in &launch.maps {
            map.check(&launch.buffers)?;
        }
        let mut params = vec![0; kernel.param_bytes];
        for (arg, (offset, size)) in launch.args.iter().zip(&kernel.params) {
            let bytes = match arg {
                Arg::Map(index) => [MAP_TAG.to_le_bytes(), (*index as u64).to_le_bytes()].concat(),
                Arg::Buffer(index) => {
                    let buffer = launch.buffers.get(*index).ok_or("no such buffer")?;
                    buffer.address(*index).to_le_bytes().to_vec()
                }
                Arg::Bytes(bytes) => bytes.clone(),
            };
            let wrong = match arg {
                Arg::Map(_) => *size != 128,
                Arg::Buffer(_) => *size != 8,
                Arg::Bytes(_) => false,
            };
            if wrong {
                return Err(format!("{}: {arg:?} for a parameter of {size} bytes", kernel.name));
            }
            let len = bytes.len().min(*size);
            params[*offset..offset + len].copy_from_slice(&bytes[..len]);
        }
        let global = Global { buffers: launch.buffers.clone(), globals: kernel.globals.clone(), params };
        Ok(Self {
            kernel,
            global,
            maps: &launch.maps,
            grid: launch.grid,
            block: launch.block,
            dynamic_shared: launch.dynamic_shared,
            accumulator: launch.accumulator,
            random: Random::new(launch.seed),
            random_turns: launch.seed != 0,
            executed: 0,
        })
    }

    /// Creates the cluster with this index in the grid of clusters.
    fn cluster(&self, index: [u32; 3]) -> Cluster {
        let size = self.kernel.cluster;
        let origin = [0, 1, 2].map(|axis| index[axis] * size[axis]);
        let threads: u32 = self.block.iter().product();
        let ranks = size.iter().product::<u32>();
        let blocks = (0..ranks).map(|rank| {
            let inside = [rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]];
            self.start_block(index, origin, inside, rank)
        });
        Cluster { origin, blocks: blocks.collect(), live_threads: threads * ranks, ..Cluster::default() }
    }

    fn start_block(&self, index: [u32; 3], origin: [u32; 3], inside: [u32; 3], rank: u32) -> Block {
        let threads: u32 = self.block.iter().product();
        let warps = threads.div_ceil(32);
        let asynchronous =
            |op: &Op| matches!(op, Op::Wgmma(_) | Op::TensorCopy { .. } | Op::TensorMma { .. } | Op::BulkStore { .. });
        let tracked = self.kernel.code.iter().any(|instr| asynchronous(&instr.op));
        let shared = self.kernel.static_shared + self.dynamic_shared;
        let start = |id: u32| {
            let live = threads - id * 32;
            let mut warp = Warp {
                id: id as usize,
                registers: vec![[0xdead_beef; 32]; self.kernel.registers],
                predicates: vec![0; self.kernel.predicates],
                live: if live >= 32 { u32::MAX } else { (1 << live) - 1 },
                local: vec![0xff; self.kernel.local_bytes * 32],
                ..Warp::default()
            };
            for (register, special) in &self.kernel.initial {
                for lane in 0..32 {
                    warp.registers[*register as usize][lane] =
                        self.special(*special, id * 32 + lane as u32, [index, origin, inside], rank);
                }
            }
            warp
        };
        Block {
            shared: Shared::new(shared, warps as usize, tracked),
            warps: (0..warps).map(start).collect(),
            live_warps: warps,
            warpgroups: vec![Default::default(); warps as usize / 4],
            ..Block::default()
        }
    }

    fn special(&self, special: Special, thread: u32, [index, origin, inside]: [[u32; 3]; 3], rank: u32) -> u64 {
        let [x, y, _] = self.block;
        let size = self.kernel.cluster;
        let lane = thread % 32;
        u64::from(match special {
            Special::Constant(value) => return value,
            Special::Tid(axis) => [thread % x, thread / x % y, thread / x / y][axis],
            Special::Ntid(axis) => self.block[axis],
            Special::Ctaid(axis) => origin[axis] + inside[axis],
            Special::Nctaid(axis) => self.grid[axis],
            Special::Lane => lane,
            Special::Warp => thread / 32,
            Special::Warps => self.block.iter().product::<u32>().div_ceil(32),
            Special::LaneMask('=') => 1 << lane,
            Special::LaneMask('<') => (1 << lane) - 1,
            Special::LaneMask('[') => u32::MAX >> (31 - lane),
            Special::LaneMask(']') => u32::MAX << lane,
            Special::LaneMask(_) => (u32::MAX << lane) << 1,
            Special::ClusterId(axis) => index[axis],
            Special::Clusters(axis) => self.grid[axis] / size[axis],
            Special::ClusterCtaid(axis) => inside[axis],
            Special::ClusterNctaid(axis) => size[axis],
            Special::ClusterRank => rank,
            Special::ClusterSize => size.iter().product(),
            Special::IsCluster => u32::from(size != [1; 3]),
            Special::DynamicShared => self.dynamic_shared as u32,
            Special::NumSms => 132,
            Special::Zero => 0,
        })
    }

    /// Runs a cluster until it finishes, returning true, or until it exceeds its patience.
    fn run_cluster(&mut self, cluster: &mut Cluster, patience: u64) -> Result<bool, String> {
        let start = self.executed;
        let mut rounds = 0u64;
        while cluster.live_threads > 0 {
            let mut progress = false;
            for rank in 0..cluster.blocks.len() {
                let warps = cluster.blocks[rank].warps.len();
                let first = if self.random_turns { self.random.below(warps) } else { 0 };
                for i in 0..warps {
                    let id = (first + i) % warps;
                    let fuel = if self.random_turns { 1 + self.random.below(2000) as u64 } else { 20_000 };
                    let executed = self.run_warp(cluster, rank, id, fuel);
                    progress |= executed.map_err(|error| cluster.with_stuck(error))? > 0;
                }
            }
            rounds += 1;
            // Polling warps keep making progress, so asynchronous operations also advance now and
            // then.
            let late = !progress || rounds.is_multiple_of(64);
            let pending = cluster.blocks.iter().any(|block| block.tensor.is_pending());
            let others = !cluster.loads.is_empty() || pending;
            if late && !cluster.signals.is_empty() && (!others || self.random.below(2) == 0) {
                let which = self.random.below(cluster.signals.len());
                let signal = cluster.signals.swap_remove(which);
                cluster.signal(signal).map_err(|error| format!("{}: {error}", self.kernel.name))?;
            } else if late && pending && (cluster.loads.is_empty() || self.random.below(2) == 0) {
                for rank in 0..cluster.blocks.len() {
                    let error = |error| format!("{}: a product under way: {error}", self.kernel.name);
                    self.advance_tensor(cluster, rank).map_err(error)?;
                }
            } else if late && !cluster.loads.is_empty() {
                let which = self.random.below(cluster.loads.len());
                let load = cluster.loads.swap_remove(which);
                self.deliver(cluster, load).map_err(|error| format!("{}: a bulk load: {error}", self.kernel.name))?;
            } else if !progress && !self.pass_time(cluster) {
                return Err(self.deadlock(cluster));
            }
            if self.executed - start > patience {
                return Ok(false);
            }
        }
        for block in &cluster.blocks {
            block.tensor.check_exit().map_err(|error| format!("{}: {error}", self.kernel.name))?;
        }
        if !cluster.signals.is_empty() {
            let count = cluster.signals.len();
            return Err(format!("{}: {count} arrivals are under way when the cluster exits", self.kernel.name));
        }
        if cluster.loads.is_empty() {
            Ok(true)
        } else {
            Err(format!(
                "{}: {} bulk loads are under way when the cluster exits",
                self.kernel.name,
                cluster.loads.len()
            ))
        }
    }
}
