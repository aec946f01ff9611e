//! GEMM for Hopper (sm_90a). TMA loads tiles of codes to shared memory, and `wgmma` multiplies
//! them.
//!
//! ```text
//! warpgroup 0       waits for a free stage, fills it by TMA; fetches its block scales
//! warpgroups 1, 2   wait for a full stage, multiply and release it; scale, add the bias, store by TMA
//! ```
//!
//! The grid is persistent: a block works on one output tile after the other, so the next tile's
//! loads run during an epilogue. The tensor cores keep about 14 bits of a sum (DeepSeek-V3, section
//! 3.3.2). So sums of 128 products are added to f32 registers, unless fast accumulation is enabled.
//!
//! **E8M0 scales** of blocks of 32 use bf16 operands. [`to_bf16`] writes codes times scales, and
//! the same kernel multiplies bf16, 64 of the contraction per stage. That is exact down to bf16's
//! normal values and needs no promotion. By the cycle counts below no alternative is faster. Cycles
//! per 32 of the contraction, for a tile of 128 by 256 on an SM:
//!
//! | | tensor cores | f32 units | shared memory |
//! | --- | --- | --- | --- |
//! | FP8, the sums of each 32 scaled by row and by column | 128 · 256 · 32 / 4096 = 256 | 2 · 128 · 256 / 128 = 512, and the tensor cores wait | 288 |
//! | bf16 written by an earlier launch | 128 · 256 · 32 / 2048 = 512 | | 512 |
//! | bf16 that a warpgroup writes from codes in the kernel | 512 | 3 · 384 · 32 / 128 = 288 | 320 to read, 3 · 384 · 32 / 128 = 288 to convert, 96 for TMA: 704 |
//!
//! The first is equal only if its arithmetic and the tensor cores' products fully overlap. That
//! needs 128 more registers a thread, for sums that are scaled while others are computed. The third
//! saves the launch and 3 (M + N) K bytes of device memory, at the cost of shared memory. It would
//! be better if the blocks of a cluster each converted half of B for both. That is the next step if
//! the launch shows up in profiles.
//!
//! **16-bit matrices** ([`halves`](super::halves)) are multiplied in the same way. Rows of A or B may
//! be contiguous instead of the contraction: TMA then loads boxes of 64 rows by 64 of the contraction,
//! and the descriptors say so.

mod epilogue;
mod kernel;
mod plan;
mod rank;
mod scales;

use cubecl::prelude::*;

use super::Gemm;
use super::tma::item::ItemShape;
use super::tma::launch::{self, Pass};
use super::tma::maps::{Matrix, ROW_BYTES};
use super::tma::plan::{GemmPlan, GemmShape, GemmTile};
use super::tma::ring::Layout;
use super::tma::scales::load_width;
use super::tma::store::Store;
use crate::dequantize::to_bf16;
use crate::ptx::cvt::Isa;
use crate::ptx::wgmma::{Element, Major};
use crate::version::Version;
use crate::{Granularity, Operand};
use plan::{CONSUMERS, MMA_ROWS, Promotion, group_cols, sum_registers};

/// Threads of a warpgroup.
const GROUP: u32 = 128;

/// Threads of a block: the producer's and the consumers' warpgroups.
const THREADS: u32 = GROUP * (1 + CONSUMERS as u32);

/// 16-bit elements in a box's row.
const HALVES: usize = ROW_BYTES / 2;

/// Bytes of 64 rows of a stage, for 64 of the contraction.
const BOX_BYTES: u32 = (HALVES * ROW_BYTES) as u32;

/// Bytes of an output chunk that TMA stores: 64 rows of 128 bytes.
const CHUNK: usize = MMA_ROWS * 128;

impl Element {
    /// FP8 codes, bf16 values of codes times E8M0 scales, or 16-bit operands.
    fn of(gemm: &Gemm) -> Self {
        match gemm.halves {
            Some(halves) => halves.element,
            None if Granularity::any_mx(gemm.shape().granularities) => Self::Half { bf16: true, majors: [Major::K; 2] },
            None => Self::Fp8(gemm.formats()),
        }
    }

    const fn bytes(self) -> usize {
        match self {
            Self::Fp8(_) => 1,
            Self::Half { .. } => 2,
        }
    }

    /// Contiguous axis of operand 0 (A) or 1 (B).
    pub(super) const fn major(self, side: usize) -> Major {
        match self {
            Self::Fp8(_) => Major::K,
            Self::Half { majors, .. } => majors[side],
        }
    }
}

/// Contraction length of a stage, in codes or bf16 values.
const fn step(granularities: [Granularity; 2]) -> usize {
    if Granularity::any_mx(granularities) { ROW_BYTES / 2 } else { ROW_BYTES }
}

/// Plan that the cost estimate chooses.
pub(super) fn plan(shape: &GemmShape, sms: usize) -> GemmPlan {
    GemmPlan::of(&Promotion::of(shape), shape, step(shape.granularities), sms)
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HopperConfig {
    tile: GemmTile,
    cluster: usize,
    stages: usize,
    /// Destination of a stage's sums.
    promotion: Promotion,
    /// Output chunks that a warpgroup has in shared memory.
    chunks: usize,
    store: Store,
    element: Element,
    /// Blocks of A's and of B's scales that one load covers: 1, 2 or 4.
    scale_widths: [u32; 2],
}

impl HopperConfig {
    /// Whether sums do not fit in the 168 registers that each of 384 threads can have. The producer
    /// then gives up some of its registers.
    const fn moves_registers(&self) -> bool {
        sum_registers(self.tile, self.promotion) > 112
    }

    /// Registers of a producer and of a consumer thread, if they are moved. 128 times the first
    /// plus 256 times the second is 384 times 168. Threads that fetch block scales hold up to 16 of
    /// them.
    const fn registers(&self) -> [u32; 2] {
        if self.promotion.is_scaled() { [56, 224] } else { [40, 232] }
    }

    const fn item_shape(&self) -> ItemShape {
        ItemShape {
            tile: [self.tile.rows as u32, self.tile.cols as u32],
            cluster: self.cluster as u32,
            step: (ROW_BYTES / self.element.bytes()) as u32,
            align: 1,
        }
    }

    /// Rows of operand 0 (A) or 1 (B) in a stage.
    const fn rows(&self, side: usize) -> usize {
        if side == 0 { self.tile.rows } else { self.tile.cols }
    }

    /// Lines of 128 bytes in a box of operand 0 (A) or 1 (B): rows, or steps of the contraction for
    /// 64 contiguous rows.
    const fn box_lines(&self, side: usize) -> usize {
        let lines = match self.element.major(side) {
            Major::K => self.rows(side),
            Major::Mn => HALVES,
        };
        if side == 0 { lines } else { lines / self.cluster }
    }

    /// Leading byte offset of an operand's [`descriptor`](crate::ptx::wgmma::descriptor).
    const fn leading(&self, side: usize) -> u32 {
        if matches!(self.element.major(side), Major::K) { 16 } else { BOX_BYTES }
    }

    /// Distance from one product of a stage to the next, in units of 16 bytes: 32 bytes of a row, or
    /// 16 steps of the contraction.
    const fn product_step(&self, side: usize) -> u32 {
        if matches!(self.element.major(side), Major::K) { 2 } else { ROW_BYTES as u32 }
    }

    /// Layout of stages and chunks in shared memory.
    const fn layout(&self) -> Layout {
        // Scales of A, then of B.
        let scales = 4 * (self.scale_lines(0) + self.scale_lines(1));
        Layout {
            stages: self.stages,
            stage_a: self.tile.rows * ROW_BYTES,
            stage_b: self.tile.cols * ROW_BYTES,
            stage_scales: if self.promotion.is_scaled() { scales.next_multiple_of(16) } else { 0 },
            chunks: CONSUMERS * self.chunks * CHUNK,
        }
    }

    /// Offset of the mbarriers: full stages, then empty stages.
    const fn barriers_at(&self) -> usize {
        self.layout().end()
    }

    /// Words of shared memory.
    const fn shared_words(&self) -> usize {
        // Includes one word for the use that CubeCL sees.
        (self.barriers_at() + 2 * self.stages * 8) / 4 + 1
    }
}

/// Matrix of an operand that TMA reads: its codes, or bf16 values that a launch with these
/// instructions writes.
fn matrix<R: Runtime>(client: &ComputeClient<R>, operand: &Operand, element: Element, isa: Isa) -> Matrix {
    let codes = Matrix::codes(operand);
    match element {
        Element::Fp8(_) => codes,
        Element::Half { .. } => {
            let width = codes.width * element.bytes();
            Matrix { handle: to_bf16(client, operand, isa), width, pitch: width, ..codes }
        }
    }
}

/// Launches the kernel. A launch before it converts each operand with E8M0 scales to bf16; one more
/// follows if the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let promotion = Promotion::of(&gemm.shape());
    launch::launch(client, gemm, &promotion, step(gemm.shape().granularities), |pass| {
        launch_tiles(client, gemm, promotion, pass);
    });
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, promotion: Promotion, pass: &Pass) {
    let (plan, target, store) = (&pass.plan, pass.target, pass.store());
    let mut config = HopperConfig {
        tile: plan.tile,
        cluster: plan.cluster,
        stages: 1,
        promotion,
        // Successive chunks must alternate, also from one tile to the next. With scales there is no
        // room for a second chunk.
        chunks: if promotion.is_scaled() || group_cols(plan.tile) == store.chunk_cols() { 1 } else { 2 },
        store,
        element: Element::of(gemm),
        scale_widths: [gemm.a, gemm.b].map(load_width),
    };
    let max_shared = client.properties().hardware.max_shared_memory_size;
    config.stages = Layout::most_stages(max_shared, |stages| HopperConfig { stages, ..config }.shared_words() * 4);
    let codes = || [gemm.a, gemm.b].map(|operand| matrix(client, operand, config.element, gemm.isa));
    let [a, b] = gemm.halves.map_or_else(codes, |halves| halves.matrices.clone());
    let (_, n, _) = gemm.matrices();
    // SAFETY: the caller has checked the sizes of codes or halves, scales, bias and output. TMA stays
    // inside its maps. Other loads and stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_hopper::launch_unchecked::<R>(
            client,
            pass.cubes(n),
            CubeDim::new_1d(THREADS),
            a.map(config.box_lines(0)),
            b.map(config.box_lines(1)),
            target.tma_store.then(|| target.map(MMA_ROWS)).into(),
            a.array(),
            pass.problem(),
            target.array(),
            b.array(),
            pass.extent(n),
            config,
            target.dtype,
            Version::of(client),
        );
    }
}
