//! Attention by warpgroups (`wgmma`) and TMA: f16 and bf16 on Hopper.
//!
//! ```text
//! warpgroup 0       a thread loads the rows of an item, then columns into a ring of stages, by TMA
//! warpgroups 1, 2   64 rows each: scores of a stage's columns, weights, sums; stores
//! ```
//! The grid is persistent: a block works on one item after the other. Items cost less and less, so
//! they are dealt to blocks back and forth. While a warpgroup computes weights, the other one multiplies.
//!
//! Tiles have the swizzled rows of 128 bytes of [`mma`](super::mma), and a product's accumulators
//! have the places of its `products = 1`. So scores, weights and stores are the same code.
//! Accumulators are, rounded to 16 bits, the words of the second product's A. Its B is the tile of
//! columns that is in shared memory already, whose rows are then the contraction.
//!
//! Source: Shah et al., *FlashAttention-3* (2024), without its overlap within a warpgroup.

mod kernel;
mod products;

use std::sync::{Mutex, PoisonError};

use cubecl::prelude::*;

use super::launch::{Launch, Role};
use super::mma::{self, MmaPlan, ROW, SUMS};
use super::problem::HeadsConfig;
use super::{CheckedHeads, TILE};
use crate::element_type::ElementType;
use crate::gemm::tma::maps::sms;
use crate::version::Version;

/// Threads of a warpgroup.
const GROUP: u32 = 128;

/// Warps of the two warpgroups that multiply.
const WARPS: u32 = 8;

/// Registers of a thread that loads and of one that multiplies. 128 times the first plus 256 times
/// the second is 384 times 168.
const REGISTERS: [u32; 2] = [40, 232];

/// Most registers of a thread for sums, scores and slopes.
const HELD: u32 = 192;

/// Order of the products of a warpgroup in forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionSchedule {
    /// Scores of a step, then its sums.
    #[default]
    Plain,
    /// Scores of a step together with the sums of the one before.
    Overlapped,
    /// As [`Overlapped`](Self::Overlapped), and both warpgroups take turns to start them.
    PingPong,
}

static SCHEDULE: Mutex<AttentionSchedule> = Mutex::new(AttentionSchedule::Plain);

/// Sets the schedule of [`AttentionKernel::Wgmma`](super::AttentionKernel::Wgmma) on all devices of
/// the process, for benchmarks.
pub fn fix_attention_schedule(schedule: AttentionSchedule) {
    *SCHEDULE.lock().unwrap_or_else(PoisonError::into_inner) = schedule;
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tiles {
    plan: MmaPlan,
    /// Stages of the ring of columns.
    stages: u32,
    schedule: AttentionSchedule,
}

impl Tiles {
    /// Most columns, then most stages, that fit.
    fn of(role: Role, config: HeadsConfig, shared: usize) -> Option<Self> {
        // Softcap takes registers.
        let widest = if config.softcap { TILE } else { 128 };
        let fixed = *SCHEDULE.lock().unwrap_or_else(PoisonError::into_inner);
        let schedule = if role == Role::Forward { fixed } else { AttentionSchedule::Plain };
        let choices = [(128, 3), (128, 2), (64, 4), (64, 3), (64, 2), (32, 4)];
        let tiles = choices.map(|(cols, stages)| {
            let bf16 = config.element_type == ElementType::Bf16;
            Self {
                plan: MmaPlan { role, bf16, slices: config.slices, warps: WARPS, products: 1, cols },
                stages,
                schedule,
            }
        });
        tiles.into_iter().find(|tiles| {
            let Self { plan, .. } = tiles;
            let products = if role.sums_slopes() { 2 } else { 1 };
            let tangents = if config.softcap { 32 } else { 0 };
            let registers = plan.sums() + products * plan.scores() + tangents;
            plan.cols <= widest && plan.sums() <= SUMS && registers <= HELD && 4 * tiles.shared_words() <= shared
        })
    }

    /// Bytes of the statistics of a stage's columns.
    const fn stats(&self) -> u32 {
        if self.plan.role.rows_are_keys() { 8 * self.plan.cols } else { 0 }
    }

    /// Offset of the mbarriers: full stages, empty stages, full and empty rows.
    const fn barriers_at(&self) -> u32 {
        self.plan.row_bytes()[1] + self.stages * (self.plan.stage() + self.stats())
    }

    const fn shared_words(&self) -> usize {
        // Includes one word for the use that CubeCL sees.
        ((self.barriers_at() + 16 * (self.stages + 1)) / 4 + 1) as usize
    }

    /// Widths of the products of a step, and no words.
    const fn products(&self) -> [u32; 3] {
        [self.plan.cols, if self.plan.role.sums_slopes() { self.plan.cols } else { 0 }, 0]
    }

    /// Words of weights.
    const fn weights(&self) -> u32 {
        if self.plan.role.sums_weights() { self.plan.scores() / 2 } else { 0 }
    }

    /// Widths of both sums, and words of weights and slopes.
    const fn sums(&self) -> [u32; 3] {
        let MmaPlan { role, slices: [slices, second], .. } = self.plan;
        let (weights, slopes) = (role.sums_weights() as u32, role.sums_slopes() as u32);
        [weights * second * TILE, slopes * slices * TILE, (weights + slopes) * self.plan.scores() / 2]
    }
}

/// Whether the kernel takes the roles of a problem whose inputs TMA can load.
pub(super) fn takes<R: Runtime>(client: &ComputeClient<R>, config: HeadsConfig, roles: &[Role]) -> bool {
    let shared = client.properties().hardware.max_shared_memory_size;
    let fits = |role: &Role| Tiles::of(*role, config, shared).is_some();
    config.bias.is_none() && mma::takes(config) && roles.iter().all(fits)
}

/// Launches the kernel.
///
/// # Panics
/// Unless it [`takes`] the problem.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, launch: &Launch<'_>) {
    let Launch { problem: CheckedHeads { config, .. }, role, rows, cols, .. } = launch;
    let shared = client.properties().hardware.max_shared_memory_size;
    let tiles = Tiles::of(*role, *config, shared).expect("it takes the problem");
    let plan = tiles.plan;
    let items = launch.items(plan.rows());
    // SAFETY: the inputs are checked. TMA stays inside its maps. Stores are guarded by the numbers of
    // positions and the widths of heads.
    unsafe {
        kernel::attention_hopper::launch_unchecked::<R>(
            client,
            CubeCount::Static(items.min(sms(client) as u32), 1, 1),
            CubeDim::new_1d(GROUP + 32 * WARPS),
            rows[0].map(plan.rows()),
            role.sums_slopes().then(|| rows[1].map(plan.rows())).into(),
            cols[0].map(plan.cols),
            cols[1].map(plan.cols),
            rows[0].array(),
            rows[1].array(),
            cols[0].array(),
            launch.operands(plan.rows()),
            launch.scores(),
            launch.result(0, size_of::<u32>()),
            launch.result(1, size_of::<u32>()),
            launch.result(2, size_of::<f32>()),
            cols[1].array(),
            tiles,
            Version::of(client),
        );
    }
}
