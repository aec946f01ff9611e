//! The GEMM of Hopper (sm_90a): TMA brings tiles of codes to shared memory, `wgmma` multiplies them.
//!
//! ```text
//! warpgroup 0       waits for a free stage, has TMA fill it; with blocks, fetches the stage's scales
//! warpgroups 1, 2   wait for a full stage, multiply it, free it; scale, add the bias, store the tile by TMA
//! ```
//!
//! A block works on one tile of the output after the other (a persistent grid), so the next tile's loads run during an
//! epilogue. The tensor cores keep about 14 bits of a sum (DeepSeek-V3, section 3.3.2), so sums of 128 products are
//! added to f32 registers, unless fast accumulation is asked for.
//!
//! **E8M0 scales**, of blocks of 32, go into bf16 operands: [`to_bf16`] writes codes times scales, and the same kernel multiplies bf16, 64 of the contraction a stage. That is exact down to bf16's normal
//! values, needs no promotion, and nothing in the count is faster, in cycles per 32 of the contraction for a tile of 128 by 256
//! on an SM:
//!
//! | | tensor cores | f32 units | shared memory |
//! | --- | --- | --- | --- |
//! | FP8, the sums of each 32 scaled by row and by column | 128 · 256 · 32 / 4096 = 256 | 2 · 128 · 256 / 128 = 512, and the tensor cores wait | 288 |
//! | bf16 that a launch before has written | 128 · 256 · 32 / 2048 = 512 | | 512 |
//! | bf16 that a warpgroup writes from codes in the kernel | 512 | 3 · 384 · 32 / 128 = 288 | 320 to read, 3 · 384 · 32 / 128 = 288 to convert, 96 for TMA: 704 |
//!
//! The first does as well only if all of its arithmetic is hidden behind the tensor cores' and theirs behind it, with 128 more
//! registers a thread for sums that are scaled while others are made. The third saves the launch, 3 (M + N) K bytes of device
//! memory, and pays with shared memory; it is the better one where blocks of a cluster convert for each other, so that each
//! converts half of B: the next step, should the launch show in profiles.

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
use super::tma::plan::{GemmShape, Plan, Tile};
use super::tma::ring::Layout;
use super::tma::scales::load_width;
use super::tma::store::Store;
use crate::dequantize::to_bf16;
use crate::ptx::wgmma::Element;
use crate::version::Version;
use crate::{Granularity, Operand};
use plan::{CONSUMERS, MMA_ROWS, Promotion, group_cols, sum_registers};

/// Threads of a warpgroup.
const GROUP: u32 = 128;

/// Threads of a block: the producer's warpgroup and the consumers'.
const THREADS: u32 = GROUP * (1 + CONSUMERS as u32);

/// Bytes of a chunk of the output on its way to TMA: 64 rows of 128 bytes.
const CHUNK: usize = MMA_ROWS * 128;

impl Element {
    /// The codes; or bf16, their values times their E8M0 scales.
    const fn of(gemm: &Gemm) -> Self {
        if Granularity::any_mx(gemm.granularities()) { Self::Bf16 } else { Self::Fp8(gemm.formats()) }
    }

    const fn bytes(self) -> usize {
        match self {
            Self::Fp8(_) => 1,
            Self::Bf16 => 2,
        }
    }
}

/// Length of the contraction in a stage, of codes or of bf16.
const fn step(granularities: [Granularity; 2]) -> usize {
    if Granularity::any_mx(granularities) { ROW_BYTES / 2 } else { ROW_BYTES }
}

/// The plan that the estimate chooses.
pub(super) fn plan(shape: &GemmShape, sms: usize) -> Plan {
    Plan::of(&Promotion::of(shape), shape, step(shape.granularities), sms)
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    tile: Tile,
    cluster: usize,
    stages: usize,
    /// Where the sums of a stage go.
    promotion: Promotion,
    /// Chunks of the output that a warpgroup has in shared memory.
    chunks: usize,
    store: Store,
    element: Element,
    /// Blocks whose scales of A, and of B, one load brings: 1, 2 or 4.
    scale_widths: [u32; 2],
}

impl Config {
    /// Whether sums take more than the 168 registers that each of 384 threads can have, so that the producer gives some of its
    /// own away.
    const fn moves_registers(&self) -> bool {
        sum_registers(self.tile, self.promotion) > 112
    }

    /// Registers of a producer's and of a consumer's thread where they are moved: 128 times the first and twice the second are 384
    /// times 168. Threads that fetch scales of blocks hold up to 16 of them.
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

    /// Where stages and chunks lie in shared memory.
    const fn layout(&self) -> Layout {
        // Those of A, then those of B.
        let scales = 4 * (self.scale_lines(0) + self.scale_lines(1));
        Layout {
            stages: self.stages,
            stage_a: self.tile.rows * ROW_BYTES,
            stage_b: self.tile.cols * ROW_BYTES,
            stage_scales: if self.promotion.is_scaled() { scales.next_multiple_of(16) } else { 0 },
            chunks: CONSUMERS * self.chunks * CHUNK,
        }
    }

    /// Where the mbarriers begin: those of full stages, then those of empty ones.
    const fn barriers_at(&self) -> usize {
        self.layout().end()
    }

    /// Words of shared memory.
    const fn shared_words(&self) -> usize {
        // And the one that CubeCL sees used.
        (self.barriers_at() + 2 * self.stages * 8) / 4 + 1
    }
}

/// What TMA reads of an operand: its codes, or what a launch writes as bf16.
fn matrix<R: Runtime>(client: &ComputeClient<R>, operand: &Operand, element: Element) -> Matrix {
    let codes = Matrix::codes(operand);
    match element {
        Element::Fp8(_) => codes,
        Element::Bf16 => Matrix { handle: to_bf16(client, operand), pitch: codes.pitch * element.bytes(), ..codes },
    }
}

/// Launches the kernel, one before for each operand that it takes as bf16, and one more if the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let promotion = Promotion::of(&gemm.shape());
    launch::launch(client, gemm, &promotion, step(gemm.granularities()), |pass| {
        launch_tiles(client, gemm, promotion, pass);
    });
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, promotion: Promotion, pass: &Pass) {
    let (plan, target, store) = (&pass.plan, pass.target, pass.store());
    let mut config = Config {
        tile: plan.tile,
        cluster: plan.cluster,
        stages: 1,
        promotion,
        // Successive chunks must alternate, also from one tile to the next. Scales need the room of the second.
        chunks: if promotion.is_scaled() || group_cols(plan.tile) == store.chunk_cols() { 1 } else { 2 },
        store,
        element: Element::of(gemm),
        scale_widths: [gemm.a, gemm.b].map(load_width),
    };
    let max_shared = client.properties().hardware.max_shared_memory_size;
    config.stages = Layout::most_stages(max_shared, |stages| Config { stages, ..config }.shared_words() * 4);
    let [a, b] = [gemm.a, gemm.b].map(|operand| matrix(client, operand, config.element));
    let (_, n, _) = gemm.matrices();
    // SAFETY: `scaled_gemm` has checked that codes, scales, bias and output have the sizes given here; TMA stays inside its
    // maps, and ordinary loads and stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_hopper::launch_unchecked::<R>(
            client,
            pass.cubes(n),
            CubeDim::new_1d(THREADS),
            a.map(plan.tile.rows),
            b.map(plan.tile.cols / plan.cluster),
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
