//! The GEMM of Blackwell (sm_100a): TMA brings tiles of codes, and scales of blocks, to shared memory, `tcgen05` multiplies them.
//!
//! ```text
//! warp 0        one thread waits for a free stage and has TMA fill it
//! warp 1        one thread waits for a full stage, has the scales copied to tensor memory, and the stage multiplied
//! warps 2 to 5  wait for the sums of a tile, scale them, add the bias, and store the tile by TMA
//! ```
//!
//! A block works on one tile of the output after the other (a persistent grid). Sums are f32 in tensor memory, which has room
//! for two tiles: one is multiplied while the one before is stored. Operands with scales of 1 x 32
//! ([`Granularity::Block1x32`]) are multiplied by `kind::mxf8f6f4`, which applies the scales; those of tensors and rows by
//! `kind::f8f6f4`, whose sums the epilogue scales. Operands with other blocks are not for this kernel.
//!
//! **Never run on a GPU**: the CUDA is compiled and its machine code checked, and its PTX is run by an interpreter.

mod epilogue;
mod kernel;
mod plan;

use cubecl::prelude::*;

use super::grouped::Grouping;
use super::maps::{Matrix, Target, sms};
use super::pipeline::{ExtentLaunch, ItemShape, trap};
use super::problem::ProblemLaunch;
use super::{Gemm, split_k};
use crate::version::VERSION;
use crate::view::Source;
use crate::{Format, Granularity};
use plan::{Plan, ROWS, STEP};

/// Threads of a block: a warp that fills stages, one that multiplies them, and four that store tiles.
const THREADS: u32 = 32 * 6;

/// Warps that store tiles, 32 rows each.
const STORERS: usize = 4;

/// Rows of a warp's part of a tile.
const WARP_ROWS: usize = 32;

/// Bytes of a chunk of the output on its way to TMA: 32 rows of 128 bytes.
const CHUNK: usize = WARP_ROWS * 128;

/// Bytes of the scales of 128 rows in a stage.
const SCALES: usize = 512;

/// Columns of tensor memory that they take.
const SCALE_COLUMNS: usize = 4;

/// Rows whose scales are two columns of tensor memory.
const SCALE_ALIGN: usize = 64;

/// Tiles whose sums are in tensor memory.
const BUFFERS: usize = 2;

/// Most stages of the pipeline; more would only lengthen its start.
const MAX_STAGES: usize = 8;

/// What the kernel is generated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    /// Columns of a tile.
    cols: usize,
    stages: usize,
    /// Chunks of the output that a warp has in shared memory.
    chunks: usize,
    /// Store through TMA; otherwise each thread stores its elements.
    tma_store: bool,
    /// Write unscaled f32 sums of a part of the contraction.
    partial: bool,
    accumulate: bool,
    bias: bool,
    grouping: Option<Grouping>,
    formats: [Format; 2],
    granularities: [Granularity; 2],
    /// Of the output.
    dtype: Source,
    /// The kernel's name, if barriers that are stuck end it.
    trap: Option<&'static str>,
}

impl Config {
    /// Whether the tensor cores apply the scales.
    const fn block_scaled(&self) -> bool {
        block_scaled(self.granularities)
    }

    const fn item_shape(&self) -> ItemShape {
        ItemShape {
            tile: [ROWS as u32, self.cols as u32],
            cluster: 1,
            step: STEP as u32,
            align: self.column_align() as u32,
        }
    }

    /// Bytes of a stage of A.
    const fn stage_a(&self) -> usize {
        ROWS * STEP
    }

    /// Bytes of a stage of B.
    const fn stage_b(&self) -> usize {
        self.cols * STEP
    }

    /// What the first row of B of a tile is a multiple of, where matrices of B follow each other: scales of 32 rows are one column
    /// of tensor memory, and the tensor cores read them from an even one on.
    const fn column_align(&self) -> usize {
        if self.block_scaled() { SCALE_ALIGN } else { 1 }
    }

    /// Columns of a matrix of `n`, and the most that a tile has before it.
    const fn columns(&self, n: usize) -> usize {
        match self.grouping {
            Some(Grouping::Rows) if !n.is_multiple_of(self.column_align()) => n + self.column_align() - 1,
            _ => n,
        }
    }

    /// Parts of 128 rows of B whose scales a tile needs.
    const fn scale_tiles_b(&self) -> usize {
        // Tiles of one matrix begin at multiples of their columns.
        let before = if matches!(self.grouping, Some(Grouping::Rows)) { SCALE_ALIGN } else { 0 };
        (before + self.cols).div_ceil(128)
    }

    /// Bytes of a stage of scales, those of A first.
    const fn stage_scales(&self) -> usize {
        if self.block_scaled() { (1 + self.scale_tiles_b()) * SCALES } else { 0 }
    }

    const fn tiles_b_at(&self) -> usize {
        self.stages * self.stage_a()
    }

    const fn chunks_at(&self) -> usize {
        self.tiles_b_at() + self.stages * self.stage_b()
    }

    const fn scales_at(&self) -> usize {
        self.chunks_at() + STORERS * self.chunks * CHUNK
    }

    /// Of the mbarriers of full stages, of empty ones, of finished sums, and of sums that have been stored.
    const fn barriers_at(&self) -> usize {
        self.scales_at() + self.stages * self.stage_scales()
    }

    /// Of the word that holds the address in tensor memory.
    const fn slot_at(&self) -> usize {
        self.barriers_at() + 2 * (self.stages + BUFFERS) * 8
    }

    /// Words of shared memory.
    const fn shared_words(&self) -> usize {
        self.slot_at() / 4 + 1
    }

    /// Columns of tensor memory of a stage's scales. Each stage has its own: what has been multiplied is not ordered before
    /// the next copy in any other way than by the stage's mbarriers.
    const fn stage_scale_columns(&self) -> usize {
        self.stage_scales() / SCALES * SCALE_COLUMNS
    }

    /// Columns of tensor memory: of two tiles' sums, then of scales.
    const fn tmem_columns(&self) -> usize {
        (BUFFERS * self.cols + self.stages * self.stage_scale_columns()).next_power_of_two()
    }

    /// Columns of a chunk of the output: 128 bytes.
    const fn chunk_cols(&self) -> usize {
        128 / self.dtype.size()
    }

    /// With as many stages as fit, and two chunks where that costs no stage.
    fn with_stages(self, max_shared: usize) -> Self {
        let stages = |chunks: usize| {
            let fits = |stages: &usize| Config { stages: *stages, chunks, ..self }.shared_words() * 4 <= max_shared;
            (1..=MAX_STAGES).take_while(fits).last().expect("a stage fits")
        };
        let (one, two) = (stages(1), stages(2));
        Self { stages: one, chunks: if one == two { 2 } else { 1 }, ..self }
    }
}

/// Whether the tensor cores apply the scales.
const fn block_scaled(granularities: [Granularity; 2]) -> bool {
    granularities[0].is_mx() && granularities[1].is_mx()
}

/// Whether this kernel multiplies such operands.
pub(super) const fn takes(granularities: [Granularity; 2]) -> bool {
    let [a, b] = granularities;
    block_scaled(granularities) || !(Granularity::any_blocks(granularities) || a.is_mx() || b.is_mx())
}

/// Launches the kernel, and one more if the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (m, n, _) = gemm.matrices();
    let plan = match gemm.groups {
        Some(groups) => Plan::grouped(groups, [m, n, gemm.a.k], sms(client), gemm.a.granularity.is_mx()),
        None => Plan::new([m, n, gemm.a.k], sms(client), gemm.a.granularity.is_mx()),
    };
    if plan.splits == 1 {
        launch_tiles(client, gemm, &plan, &Target::output(gemm));
    } else {
        let rows = plan.padded_rows(m);
        let target = Target::partials(client, gemm, plan.splits, rows);
        launch_tiles(client, gemm, &plan, &target);
        split_k::launch(client, gemm, &target.handle, plan.splits, [rows, target.pitch]);
    }
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, plan: &Plan, target: &Target) {
    let (_, n, _) = gemm.matrices();
    // Tiles along M.
    let rows = gemm.row_tiles(ROWS) * ROWS;
    let partial = plan.splits > 1;
    let config = Config {
        cols: plan.cols,
        stages: 1,
        chunks: 1,
        tma_store: target.tma_store,
        partial,
        accumulate: gemm.accumulate && !partial,
        bias: gemm.bias.is_some() && !partial,
        grouping: gemm.grouping(),
        formats: gemm.formats(),
        granularities: gemm.granularities(),
        dtype: Source::of(target.dtype).expect("checked by scaled_gemm"),
        trap: trap("gemm_blackwell"),
    };
    let config = config.with_stages(client.properties().hardware.max_shared_memory_size);
    let extent = ExtentLaunch::new(
        gemm.a.k.div_ceil(STEP) as u32,
        rows.div_ceil(ROWS) as u32,
        config.columns(n).div_ceil(plan.cols) as u32,
        plan.splits as u32,
    );
    // SAFETY: `scaled_gemm` has checked that codes, scales, bias and output have the sizes given here; TMA stays inside its
    // maps and the scales of existing rows, and ordinary loads and stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_blackwell::launch_unchecked::<R>(
            client,
            CubeCount::Static(plan.items(rows, config.columns(n)).min(sms(client)) as u32, 1, 1),
            CubeDim::new_1d(THREADS),
            Matrix::codes(gemm.a).map(ROWS),
            Matrix::codes(gemm.b).map(plan.cols),
            target.tma_store.then(|| target.map(WARP_ROWS)).into(),
            gemm.a.codes_array(1),
            ProblemLaunch::of(gemm, gemm.bias.as_ref().filter(|_| !partial)),
            ArrayArg::from_raw_parts(target.handle.clone(), target.rows * target.pitch),
            gemm.b.codes_array(1),
            extent,
            config,
            target.dtype,
            VERSION,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tile's sums and scales fit in the 512 columns of tensor memory, and stages, chunks and barriers in a block's shared
    /// memory, at the addresses that TMA and the tensor cores ask for.
    #[test]
    fn memory_suffices() {
        let pairs = [[Granularity::Tensor, Granularity::Row], [Granularity::Block1x32; 2]];
        for (granularities, cols) in [(pairs[0], 256), (pairs[0], 128), (pairs[0], 64)].into_iter().chain([
            (pairs[1], 192),
            (pairs[1], 128),
            (pairs[1], 64),
        ]) {
            let groupings = [None, Some(Grouping::Rows), Some(Grouping::Contraction)];
            let dtypes = [Source::F32, Source::F16, Source::Bf16];
            for (dtype, grouping) in dtypes.into_iter().flat_map(|dtype| groupings.map(|grouping| (dtype, grouping))) {
                let config = Config {
                    cols,
                    stages: 1,
                    chunks: 1,
                    tma_store: true,
                    partial: false,
                    accumulate: false,
                    grouping,
                    bias: false,
                    formats: [Format::E4m3; 2],
                    granularities,
                    dtype,
                    trap: None,
                };
                let config = config.with_stages(227 * 1024);
                assert!(config.stages >= 4, "{config:?}");
                assert!(config.tmem_columns() <= 512 && config.tmem_columns() >= 32, "{config:?}");
                assert!(config.shared_words() * 4 <= 227 * 1024, "{config:?}");
                assert!(
                    config.tiles_b_at().is_multiple_of(1024) && config.chunks_at().is_multiple_of(1024),
                    "{config:?}"
                );
                assert!(config.scales_at().is_multiple_of(16) && config.barriers_at().is_multiple_of(8), "{config:?}");
                assert_eq!(config.cols % config.chunk_cols(), 0, "{config:?}");
            }
        }
    }
}
