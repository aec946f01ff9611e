//! Attention by tensor cores (`mma.sync`): f16 and bf16 on CUDA devices from sm_80 on.
//!
//! The operands of a cube's rows stay in shared memory. The operands of columns are copied one step ahead
//! into two stages (`cp.async`). A tile has rows of 128 bytes, one per position and slice of 64
//! elements, and 16-byte piece `p` of row `r` is at `p xor (r mod 8)`, so that the rows that
//! `ldmatrix` reads at a time are in different banks.
//!
//! A warp has whole rows of scores. Their accumulators are, rounded to 16 bits, the fragments of the
//! second product, whose other operand is the tile of columns that is in shared memory already,
//! transposed by `ldmatrix`. Weights and slopes never leave registers.
//!
//! ```text
//! lane l of a warp: rows g, g + 8 (, g + 16, g + 24), columns 2t, 2t + 1, 2t + 8, ...
//! with g = l / 4 and t = l mod 4
//! ```

pub(super) mod kernel;
pub(super) mod lanes;

use cubecl::prelude::*;

use super::launch::{Launch, Role};
use super::problem::HeadsConfig;
use super::{CheckedHeads, TILE};
use crate::element_type::ElementType;
use crate::grid::fold;
use crate::version::Version;

/// Bytes of a row of a slice.
pub(super) const ROW: u32 = 2 * TILE;

/// Most f32 sums that a lane holds. Scores, slopes and fragments need the other registers.
pub(super) const SUMS: u32 = 128;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MmaPlan {
    pub(super) role: Role,
    pub(super) bf16: bool,
    /// Slices of the operands of S, and of the other two.
    pub(super) slices: [u32; 2],
    /// Warps that multiply.
    pub(super) warps: u32,
    /// Products of 16 rows that a warp makes: 1 or 2.
    pub(super) products: u32,
    /// Columns of a step.
    pub(super) cols: u32,
}

impl MmaPlan {
    /// Largest tile that fits. Two cubes share an SM if a warp has 32 rows. Then a fragment of
    /// columns serves two products.
    fn of(role: Role, config: HeadsConfig, shared: usize) -> Option<Self> {
        let plan = |products, warps, cols| {
            let bf16 = config.element_type == ElementType::Bf16;
            Self { role, bf16, slices: config.slices, warps, products, cols }
        };
        let cols = if role.is_forward() { 64 } else { 32 };
        let plans = [plan(2, 4, cols), plan(1, 8, cols), plan(1, 8, 32), plan(1, 4, 32), plan(1, 4, 16)];
        // A part has few rows, and waits for memory.
        let of_parts = [plan(1, 1, 64), plan(1, 1, 32)];
        let plans: &[Self] = if role == Role::Part { &of_parts } else { &plans };
        plans
            .iter()
            .copied()
            .find(|plan| plan.products * plan.sums() <= SUMS && plan.products as usize * plan.shared_bytes() <= shared)
    }

    pub(super) const fn rows(self) -> u32 {
        16 * self.products * self.warps
    }

    /// f32 sums of a lane per product of 16 rows.
    pub(super) const fn sums(self) -> u32 {
        let [slices, second] = self.slices;
        let columns =
            if self.role.sums_slopes() { slices } else { 0 } + if self.role.sums_weights() { second } else { 0 };
        columns * TILE / 2
    }

    /// Bytes of the first operand of rows, and of both.
    pub(super) const fn row_bytes(self) -> [u32; 2] {
        let [slices, second] = self.slices;
        let second = if self.role.sums_slopes() { second } else { 0 };
        [self.rows() * ROW * slices, self.rows() * ROW * (slices + second)]
    }

    /// Bytes of the columns of a step.
    pub(super) const fn stage(self) -> u32 {
        self.cols * ROW * (self.slices[0] + self.slices[1])
    }

    /// Rows of a lane.
    const fn lane_rows(self) -> u32 {
        2 * self.products
    }

    /// Scores of a lane in a step.
    pub(super) const fn scores(self) -> u32 {
        self.products * self.cols / 2
    }

    /// Offset of a lane's score from its first one: rows and columns.
    const fn place(self, i: u32) -> [u32; 2] {
        let tiles = self.cols / 8;
        [i / (4 * tiles) * 16 + i / 2 % 2 * 8, i / 4 % tiles * 8 + i % 2]
    }

    /// Whether each column, or each row, of a lane has statistics.
    pub(super) fn has_stats(self, of_cols: bool) -> bool {
        !self.role.is_forward() && self.role.rows_are_keys() == of_cols
    }

    /// Index of the statistics of a lane's score.
    const fn stat(self, i: u32) -> usize {
        let [row, col] = self.place(i);
        (if self.role.rows_are_keys() { col / 8 * 2 + col % 2 } else { row / 8 }) as usize
    }

    const fn shared_bytes(self) -> usize {
        (self.row_bytes()[1] + 2 * self.stage()) as usize
    }
}

/// Whether a launch may make dk and dv. Otherwise the sums of both take too many registers.
pub(super) fn fits_both(config: HeadsConfig) -> bool {
    config.slices.iter().sum::<u32>() * TILE / 2 <= SUMS
}

/// Whether the kernel takes the problem. Every device with `mma.sync` of bf16 has the shared memory
/// that the widest heads need.
pub(super) fn takes(config: HeadsConfig) -> bool {
    config.element_type != ElementType::F32 && config.words > 1
}

/// Launches the kernel.
///
/// # Panics
/// If a tile does not fit.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, launch: &Launch<'_>) {
    let Launch { problem: CheckedHeads { config, .. }, role, rows, cols, .. } = launch;
    let shared = client.properties().hardware.max_shared_memory_size;
    let plan = MmaPlan::of(*role, *config, shared).expect("the device supports it");
    // SAFETY: the inputs are checked. Copies and stores are guarded by the numbers of positions and
    // the widths of heads.
    unsafe {
        kernel::attention_mma::launch_unchecked::<R>(
            client,
            fold(client, launch.items(plan.rows())),
            CubeDim::new_1d(32 * plan.warps),
            rows[0].array(),
            role.sums_slopes().then(|| rows[1].array()).into(),
            cols[0].array(),
            cols[1].array(),
            launch.operands(plan.rows()),
            launch.scores(),
            launch.result(0, size_of::<u32>()),
            launch.result(1, size_of::<u32>()),
            launch.result(2, size_of::<f32>()),
            plan,
            Version::of(client),
        );
    }
}
