//! The GEMM of Blackwell (sm_100a): TMA brings tiles of codes, and scales of blocks, to shared memory, `tcgen05` multiplies them.
//!
//! ```text
//! warp 0        one thread waits for a free stage and has TMA fill it
//! warp 1        one thread waits for a full stage, has the scales copied to tensor memory, and the stage multiplied
//! warps 2 to 5  wait for the sums of a tile, scale them, add the bias, and store the tile by TMA
//! ```
//!
//! A block works on one tile of the output after the other (a persistent grid), alone or in a cluster of two. These make a tile of 256
//! rows together: warp 0 of each fills its own stages, with half of the rows of B, and tells the mbarriers of block 0, whose warp 1
//! issues the products of both; what these free or finish is told to both. Sums are f32 in tensor memory, which has room
//! for two tiles: one is multiplied while the one before is stored. Operands with scales of 1 x 32
//! ([`Granularity::Block1x32`]) are multiplied by `kind::mxf8f6f4`, which applies the scales; those of tensors and rows by
//! `kind::f8f6f4`, whose sums the epilogue scales. Where scales change every 128 of the contraction and all are powers of two, a launch
//! before makes E8M0 scales of 1 x 32 of them, so that pairs multiply them as they do MX. Other such scales leave the sums of each step
//! apart: warps 2 to 5 add them, times their scales, to f32 registers as soon as they are there, while the next steps are multiplied. That
//! is done by single blocks, in 512 cycles for 128 columns; a pair takes 448 for 192 ([`plan`]).

mod e8m0;
mod epilogue;
mod kernel;
mod maps;
mod plan;
mod promote;

use cubecl::prelude::*;

use super::Gemm;
use super::grouped::Grouping;
use super::tma::item::ItemShape;
use super::tma::launch::{self, Pass};
use super::tma::maps::Matrix;
use super::tma::plan::{GemmShape, Plan};
use super::tma::ring::Layout;
use super::tma::scales::load_width;
use super::tma::store::Store;
use crate::Format;
use crate::version::Version;
use e8m0::with_e8m0_scales;
use maps::{MapsLaunch, scales_map};
use plan::{ROWS, STEP, Scaling};

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

/// Steps whose sums are in tensor memory, where each is added up apart: all that its 512 columns have room for, so that
/// the tensor cores go on while a step is added up.
const PROMOTED_BUFFERS: usize = 4;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    /// Columns of a tile.
    cols: usize,
    /// Blocks that multiply together: 1, or 2, which are a cluster, 128 rows of its tile each.
    ctas: u32,
    stages: usize,
    /// Chunks of the output that a warp has in shared memory.
    chunks: usize,
    store: Store,
    scaling: Scaling,
    /// Parts of 128 rows of B whose scales a tile needs.
    scale_tiles_b: usize,
    /// Blocks whose scales of A, and of B, one load brings where sums are added up in registers: 1, 2 or 4.
    scale_widths: [u32; 2],
    formats: [Format; 2],
}

impl Config {
    /// Whether the tensor cores apply the scales.
    const fn block_scaled(&self) -> bool {
        matches!(self.scaling, Scaling::TensorCores)
    }

    /// Sums that are in tensor memory, of tiles or of steps.
    const fn buffers(&self) -> usize {
        if self.scaling.is_promoted() { PROMOTED_BUFFERS } else { BUFFERS }
    }

    const fn item_shape(&self) -> ItemShape {
        ItemShape {
            tile: [ROWS as u32, self.cols as u32],
            cluster: self.ctas,
            step: STEP as u32,
            align: self.column_align() as u32,
        }
    }

    /// What the first row of B of a tile is a multiple of, where matrices of B follow each other: scales of 32 rows are one column
    /// of tensor memory, and the tensor cores read them from an even one on.
    const fn column_align(&self) -> usize {
        if self.block_scaled() { SCALE_ALIGN } else { 1 }
    }

    /// Columns of a matrix of `n`, and the most that a tile has before it.
    const fn columns(&self, n: usize, grouping: Option<Grouping>) -> usize {
        match grouping {
            Some(Grouping::Rows) if !n.is_multiple_of(self.column_align()) => n + self.column_align() - 1,
            _ => n,
        }
    }

    /// Bytes of a stage of scales, those of A first.
    const fn stage_scales(&self) -> usize {
        if self.block_scaled() { (1 + self.scale_tiles_b) * SCALES } else { 0 }
    }

    /// Bytes of the columns' scales of one step, which the warps that store keep for each other.
    const fn column_scales(&self) -> usize {
        if matches!(self.scaling, Scaling::EachStepByColumn) { self.cols * 4 } else { 0 }
    }

    /// Where stages and chunks lie in shared memory.
    const fn layout(&self) -> Layout {
        Layout {
            stages: self.stages,
            stage_a: ROWS * STEP,
            stage_b: self.cols / self.ctas as usize * STEP,
            stage_scales: self.stage_scales(),
            chunks: STORERS * self.chunks * CHUNK,
        }
    }

    /// Where the columns' scales begin: two buffers, of the last step and of this one.
    const fn column_scales_at(&self) -> usize {
        self.layout().end()
    }

    /// Where the mbarriers begin: those of full stages, of empty ones, of finished sums, and of sums that have been read.
    const fn barriers_at(&self) -> usize {
        self.column_scales_at() + 2 * self.column_scales()
    }

    /// Where the word is that holds the address in tensor memory.
    const fn slot_at(&self) -> usize {
        self.barriers_at() + 2 * (self.stages + self.buffers()) * 8
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

    /// Columns of tensor memory: of sums, then of scales.
    const fn tmem_columns(&self) -> usize {
        (self.buffers() * self.cols + self.stages * self.stage_scale_columns()).next_power_of_two()
    }

    /// With as many stages as fit, and two chunks where that costs no stage.
    fn with_stages(self, max_shared: usize) -> Self {
        let stages = |chunks: usize| {
            Layout::most_stages(max_shared, |stages| Config { stages, chunks, ..self }.shared_words() * 4)
        };
        let (one, two) = (stages(1), stages(2));
        Self { stages: one, chunks: if one == two { 2 } else { 1 }, ..self }
    }
}

/// Launches the kernel, one before where scales become E8M0, and one more if the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let scaling = Scaling::of(&gemm.shape());
    let launch = |gemm: &Gemm| {
        launch::launch(client, gemm, &scaling, STEP, |pass| launch_tiles(client, gemm, scaling, pass));
    };
    if gemm.by_block() && scaling == Scaling::TensorCores {
        let [a, b] = &with_e8m0_scales(client, [gemm.a, gemm.b]);
        launch(&Gemm { a, b, ..gemm.clone() });
    } else {
        launch(gemm);
    }
}

/// The plan that the estimate chooses.
pub(super) fn plan(shape: &GemmShape, sms: usize) -> Plan {
    Plan::of(&Scaling::of(shape), shape, STEP, sms)
}

/// Parts of 128 rows of B whose scales a tile of `cols` columns needs.
const fn scale_tiles_b(cols: usize, grouping: Option<Grouping>) -> usize {
    // Tiles of one matrix begin at multiples of their columns.
    let before = if matches!(grouping, Some(Grouping::Rows)) { SCALE_ALIGN } else { 0 };
    (before + cols).div_ceil(128)
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, scaling: Scaling, pass: &Pass) {
    let (cols, ctas, target) = (pass.plan.tile.cols, pass.plan.cluster, pass.target);
    let config = Config {
        cols,
        ctas: ctas as u32,
        stages: 1,
        chunks: 1,
        store: pass.store(),
        scaling,
        scale_tiles_b: scale_tiles_b(cols, gemm.grouping()),
        scale_widths: if scaling.is_promoted() { [gemm.a, gemm.b].map(load_width) } else { [1; 2] },
        formats: gemm.formats(),
    };
    let config = config.with_stages(client.properties().hardware.max_shared_memory_size);
    let (_, n, _) = gemm.matrices();
    let columns = config.columns(n, gemm.grouping());
    let has_scale_maps = config.block_scaled() && ctas == 2;
    // SAFETY: `scaled_gemm` has checked that codes, scales, bias and output have the sizes given here; TMA stays inside its
    // maps and the scales of existing rows, and ordinary loads and stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_blackwell::launch_unchecked::<R>(
            client,
            pass.cubes(columns),
            CubeDim::new_1d(THREADS),
            MapsLaunch::new(
                Matrix::codes(gemm.a).map(ROWS),
                Matrix::codes(gemm.b).map(cols / ctas),
                has_scale_maps.then(|| scales_map(gemm.a)).into(),
                has_scale_maps.then(|| scales_map(gemm.b)).into(),
            ),
            target.tma_store.then(|| target.map(WARP_ROWS)).into(),
            gemm.a.codes_array(1),
            pass.problem(),
            target.array(),
            gemm.b.codes_array(1),
            pass.extent(columns),
            config,
            target.dtype,
            Version::of(client),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::tma::plan::{Machine, Tile};
    use crate::source::Source;

    /// Every tile's sums and scales fit in the 512 columns of tensor memory, and stages, chunks and barriers in a block's shared
    /// memory, at the addresses that TMA and the tensor cores ask for.
    #[test]
    fn memory_suffices() {
        let scalings = [Scaling::Epilogue, Scaling::TensorCores, Scaling::EachStep, Scaling::EachStepByColumn];
        let tiles = |scaling: Scaling| scaling.tiles().map(move |tile| (scaling, tile)).collect::<Vec<_>>();
        let clusters = |(scaling, tile): (Scaling, Tile)| {
            scaling.clusters(tile, 4096).iter().map(move |&cluster| (scaling, tile.cols, cluster as u32))
        };
        for (scaling, cols, ctas) in scalings.into_iter().flat_map(tiles).flat_map(clusters) {
            let groupings = [None, Some(Grouping::Rows), Some(Grouping::Contraction)];
            let dtypes = [Source::F32, Source::F16, Source::Bf16];
            for (dtype, grouping) in dtypes.into_iter().flat_map(|dtype| groupings.map(|grouping| (dtype, grouping))) {
                let config = Config {
                    cols,
                    ctas,
                    stages: 1,
                    chunks: 1,
                    store: Store { tma: true, partial: false, accumulate: false, dtype },
                    scaling,
                    scale_tiles_b: scale_tiles_b(cols, grouping),
                    scale_widths: [1; 2],
                    formats: [Format::E4m3; 2],
                };
                let config = config.with_stages(227 * 1024);
                assert!(config.stages >= 4, "{config:?}");
                assert!(config.tmem_columns() <= 512 && config.tmem_columns() >= 32, "{config:?}");
                assert!(config.shared_words() * 4 <= 227 * 1024, "{config:?}");
                assert!(
                    config.layout().tiles_b_at().is_multiple_of(1024)
                        && config.layout().stage_b.is_multiple_of(1024)
                        && config.layout().chunks_at().is_multiple_of(1024),
                    "{config:?}"
                );
                assert!(
                    config.column_scales_at().is_multiple_of(16) && config.barriers_at().is_multiple_of(8),
                    "{config:?}"
                );
                assert_eq!(config.cols % config.store.chunk_cols(), 0, "{config:?}");
            }
        }
    }
}
