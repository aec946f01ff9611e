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
//! **Never run on a GPU**: the CUDA is compiled and its machine code checked, and its PTX is run by an interpreter.

mod epilogue;
mod kernel;
mod plan;

use cubecl::ir::{ElemType, FloatKind, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bias::BiasLaunch;
use super::{Gemm, combine};
use crate::view::Source;
use crate::{Format, Granularity, Operand, row_words};
use plan::{CONSUMERS, MMA_ROWS, Plan, STEP, Tile};

/// Threads of a warpgroup.
const GROUP: u32 = 128;

/// Threads of a block: the producer's warpgroup and the consumers'.
const THREADS: u32 = GROUP * (1 + CONSUMERS as u32);

/// Bytes of a chunk of the output on its way to TMA: 64 rows of 128 bytes.
const CHUNK: usize = MMA_ROWS * 128;

/// Most stages of the pipeline; more would only lengthen its start.
const MAX_STAGES: usize = 8;

/// What the kernel is generated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    tile: Tile,
    cluster: usize,
    stages: usize,
    /// Add sums of 128 products to f32 registers.
    promote: bool,
    /// Chunks of the output that a warpgroup has in shared memory.
    chunks: usize,
    /// Store through TMA; otherwise each thread stores its elements.
    tma_store: bool,
    /// Write unscaled f32 sums of a part of the contraction.
    partial: bool,
    accumulate: bool,
    formats: [Format; 2],
    granularities: [Granularity; 2],
    /// Of the output.
    dtype: Source,
}

impl Config {
    /// Whether scales change along the contraction.
    const fn by_block(&self) -> bool {
        Granularity::any_blocks(self.granularities)
    }

    /// Whether all columns of a product share one scale of B within a block of the contraction.
    const fn one_scale_b(&self) -> bool {
        matches!(self.granularities[1], Granularity::Tensor | Granularity::Block128x128)
    }

    /// Whether sums take more than the 168 registers that each of 384 threads can have, so that the producer gives some of its
    /// own away.
    const fn moves_registers(&self) -> bool {
        let product = if self.promote { self.tile.mma_cols(true) / 2 } else { 0 };
        self.tile.group_cols() / 2 + product > 112
    }

    /// Bytes of a stage of A.
    const fn stage_a(&self) -> usize {
        self.tile.rows * STEP
    }

    /// Bytes of a stage of B.
    const fn stage_b(&self) -> usize {
        self.tile.cols * STEP
    }

    const fn tiles_b_at(&self) -> usize {
        self.stages * self.stage_a()
    }

    const fn chunks_at(&self) -> usize {
        self.tiles_b_at() + self.stages * self.stage_b()
    }

    /// Bytes of a stage of scales: of the tile's rows, then of its columns.
    const fn stage_scales(&self) -> usize {
        if self.by_block() { (self.tile.rows + self.tile.cols) * 4 } else { 0 }
    }

    const fn scales_at(&self) -> usize {
        self.chunks_at() + CONSUMERS * self.chunks * CHUNK
    }

    /// Of the mbarriers of full stages, then those of empty ones.
    const fn barriers_at(&self) -> usize {
        self.scales_at() + self.stages * self.stage_scales()
    }

    /// Words of shared memory.
    const fn shared_words(&self) -> usize {
        // And the one that CubeCL sees used.
        (self.barriers_at() + 2 * self.stages * 8) / 4 + 1
    }

    /// Columns of a chunk of the output: 128 bytes.
    const fn chunk_cols(&self) -> usize {
        128 / self.dtype.size()
    }
}

/// Launches the kernel, and one more if the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let promote = gemm.by_block() || !gemm.use_fast_accum;
    let plan = Plan::new([gemm.m(), gemm.n(), gemm.a.k], multiprocessors(client), promote);
    let (m, n) = (gemm.m(), gemm.n());
    if plan.splits == 1 {
        let tma_store = (n * gemm.dtype.size()).is_multiple_of(16);
        let target = Target { handle: gemm.out.clone(), rows: m, pitch: n, dtype: gemm.dtype, tma_store };
        launch_tiles(client, gemm, &plan, promote, &target);
    } else {
        let (rows, pitch) = (plan.splits * plan.padded_rows(m), n.next_multiple_of(4));
        let dtype = StorageType::Scalar(ElemType::Float(FloatKind::F32));
        let target = Target { handle: client.empty(rows * pitch * 4), rows, pitch, dtype, tma_store: true };
        launch_tiles(client, gemm, &plan, promote, &target);
        combine::launch(client, gemm, &target.handle, plan.splits, [plan.padded_rows(m), pitch]);
    }
}

/// CubeCL always knows them on CUDA; else those of an H200.
pub(super) fn multiprocessors<R: Runtime>(client: &ComputeClient<R>) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize
}

/// Where the tiles go: `[rows, pitch]`.
struct Target {
    handle: Handle,
    rows: usize,
    pitch: usize,
    dtype: StorageType,
    tma_store: bool,
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, plan: &Plan, promote: bool, target: &Target) {
    let (m, n) = (gemm.m(), gemm.n());
    let partial = plan.splits > 1;
    let by_block = gemm.by_block();
    let hardware = &client.properties().hardware;
    let mut config = Config {
        tile: plan.tile,
        cluster: plan.cluster,
        stages: 1,
        promote,
        // Successive chunks must alternate, also from one tile to the next. Scales need the room of the second.
        chunks: if by_block || plan.tile.group_cols() * target.dtype.size() == 128 { 1 } else { 2 },
        tma_store: target.tma_store,
        partial,
        accumulate: gemm.accumulate && !partial,
        formats: [gemm.a.format, gemm.b.format],
        granularities: [gemm.a.granularity, gemm.b.granularity],
        dtype: Source::of(target.dtype).expect("checked by scaled_gemm"),
    };
    let fits =
        |stages: &usize| Config { stages: *stages, ..config }.shared_words() * 4 <= hardware.max_shared_memory_size;
    config.stages = (1..=MAX_STAGES).take_while(fits).last().expect("a stage fits");

    let at_once = (multiprocessors(client) / plan.cluster).max(1);
    let clusters = plan.items(m, n).min(at_once);
    let extent = kernel::ExtentLaunch::new(
        m as u32,
        n as u32,
        gemm.a.k.div_ceil(STEP) as u32,
        plan.row_clusters(m) as u32,
        n.div_ceil(plan.tile.cols) as u32,
        plan.splits as u32,
    );
    // SAFETY: `scaled_gemm` has checked that codes, scales, bias and output have the sizes given here; TMA stays inside its
    // maps, and ordinary loads and stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_hopper::launch_unchecked::<R>(
            client,
            CubeCount::Static((clusters * plan.cluster) as u32, 1, 1),
            CubeDim::new_1d(THREADS),
            code_map(gemm.a, plan.tile.rows),
            code_map(gemm.b, plan.tile.cols / plan.cluster),
            target.tma_store.then(|| output_map(target)).into(),
            gemm.a.codes_array(1),
            gemm.b.codes_array(1),
            gemm.a.scales_array(),
            gemm.b.scales_array(),
            BiasLaunch::of(gemm.bias.as_ref().filter(|_| !partial)),
            ArrayArg::from_raw_parts(target.handle.clone(), target.rows * target.pitch),
            extent,
            config,
            target.dtype,
        );
    }
}

/// Boxes of `rows` rows and 128 codes of the contraction.
pub(super) unsafe fn code_map<R: Runtime>(operand: &Operand, rows: usize) -> TensorMapArg<R, Tiled> {
    let pitch = row_words(operand.k) * 4;
    let dtype = StorageType::Scalar(ElemType::UInt(UIntKind::U8));
    // SAFETY: by the caller.
    let codes =
        unsafe { TensorArg::from_raw_parts(operand.codes.clone(), [pitch, 1].into(), [operand.rows, pitch].into()) };
    TensorMapArg::new(TiledArgs { tile_size: [rows, STEP].into() }, codes, dtype)
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

/// Boxes of one chunk.
unsafe fn output_map<R: Runtime>(target: &Target) -> TensorMapArg<R, Tiled> {
    let cols = 128 / target.dtype.size();
    // SAFETY: by the caller.
    let out = unsafe {
        TensorArg::from_raw_parts(target.handle.clone(), [target.pitch, 1].into(), [target.rows, target.pitch].into())
    };
    TensorMapArg::new(TiledArgs { tile_size: [MMA_ROWS, cols].into() }, out, target.dtype)
        .with_swizzle(TensorMapSwizzle::B128)
}
