//! GEMM for Blackwell (sm_100a). TMA loads tiles of codes and block scales to shared memory, and
//! `tcgen05` multiplies them.
//!
//! ```text
//! warp 0        one thread waits for a free stage and fills it by TMA
//! warp 1        one thread waits for a full stage, copies its scales to tensor memory, and multiplies it
//! warps 2 to 5  wait for the sums of a tile, scale them, add the bias, and store the tile by TMA
//! ```
//!
//! The grid is persistent: a block works on one output tile after the other, alone or in a cluster
//! of two. The blocks of a pair make a tile of 256 rows together:
//!
//! - Warp 0 of each fills that block's stages, with half of the rows of B, and signals the
//!   mbarriers of block 0.
//! - Warp 1 of block 0 issues the products of both blocks, and signals both when stages become free
//!   or sums are done.
//!
//! Sums are f32 in tensor memory, which has room for two tiles. One is multiplied while the
//! previous one is stored. The scales determine the instruction:
//!
//! - 1x32 ([`Granularity::Block1x32`]): `kind::mxf8f6f4`, which applies the scales.
//! - Per tensor or per row: `kind::f8f6f4`. The epilogue scales the sums.
//! - Per 128 of the contraction, all powers of two: an extra launch converts them to 1x32 E8M0
//!   scales. Pairs of blocks then multiply them like MX.
//! - Per 128 of the contraction otherwise: each step has separate sums. Warps 2 to 5 scale them and
//!   add them to f32 registers while the next steps are multiplied. Single blocks do this in 512
//!   cycles for 128 columns; a pair takes 448 for 192 ([`plan`]).

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
use super::tma::plan::{GemmPlan, GemmShape};
use super::tma::ring::Layout;
use super::tma::scales::load_width;
use super::tma::store::Store;
use crate::Format;
use crate::version::Version;
use e8m0::with_e8m0_scales;
use maps::{MapsLaunch, scales_map};
use plan::{ROWS, STEP, Scaling};

/// Threads of a block: one warp that fills stages, one that multiplies, and four that store tiles.
const THREADS: u32 = 32 * 6;

/// Warps that store tiles, 32 rows each.
const STORERS: usize = 4;

/// Rows of one warp in a tile.
const WARP_ROWS: usize = 32;

/// Bytes of an output chunk that TMA stores: 32 rows of 128 bytes.
const CHUNK: usize = WARP_ROWS * 128;

/// Bytes of the scales of 128 rows in a stage.
const SCALES: usize = 512;

/// Columns of tensor memory for [`SCALES`].
const SCALE_COLUMNS: usize = 4;

/// Rows whose scales take two columns of tensor memory.
const SCALE_ALIGN: usize = 64;

/// Tiles whose sums are in tensor memory.
const BUFFERS: usize = 2;

/// Steps whose sums are in tensor memory when each step is accumulated separately. They fill its
/// 512 columns, so that the tensor cores continue while a step is accumulated.
const PROMOTED_BUFFERS: usize = 4;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlackwellConfig {
    /// Columns of a tile.
    cols: usize,
    /// Blocks that multiply together: 1, or a cluster of 2 with 128 rows of its tile each.
    ctas: u32,
    stages: usize,
    /// Output chunks that a warp has in shared memory.
    chunks: usize,
    store: Store,
    scaling: Scaling,
    /// Groups of 128 rows of B whose scales a tile needs.
    scale_tiles_b: usize,
    /// Blocks of A's and of B's scales that one load covers, if sums accumulate in registers: 1, 2
    /// or 4.
    scale_widths: [u32; 2],
    formats: [Format; 2],
}

impl BlackwellConfig {
    /// Whether the tensor cores apply the scales.
    const fn block_scaled(&self) -> bool {
        matches!(self.scaling, Scaling::TensorCores)
    }

    /// Buffers of sums in tensor memory, one per tile or step.
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

    /// Alignment of a tile's first row of B where the matrices of B are stacked. Scales of 32 rows
    /// take one column of tensor memory, and the tensor cores read them from an even column.
    const fn column_align(&self) -> usize {
        if self.block_scaled() { SCALE_ALIGN } else { 1 }
    }

    /// Columns of a matrix with `n` columns, plus the maximum that alignment puts before them.
    const fn columns(&self, n: usize, grouping: Option<Grouping>) -> usize {
        match grouping {
            Some(Grouping::Rows) if !n.is_multiple_of(self.column_align()) => n + self.column_align() - 1,
            _ => n,
        }
    }

    /// Bytes of scales in a stage, first for A.
    const fn stage_scales(&self) -> usize {
        if self.block_scaled() { (1 + self.scale_tiles_b) * SCALES } else { 0 }
    }

    /// Bytes of one step's column scales, which the storing warps share.
    const fn column_scales(&self) -> usize {
        if matches!(self.scaling, Scaling::EachStepByColumn) { self.cols * 4 } else { 0 }
    }

    /// Layout of stages and chunks in shared memory.
    const fn layout(&self) -> Layout {
        Layout {
            stages: self.stages,
            stage_a: ROWS * STEP,
            stage_b: self.cols / self.ctas as usize * STEP,
            stage_scales: self.stage_scales(),
            chunks: STORERS * self.chunks * CHUNK,
        }
    }

    /// Offset of the column scales: two buffers, for the previous and the current step.
    const fn column_scales_at(&self) -> usize {
        self.layout().end()
    }

    /// Offset of the mbarriers: full stages, empty stages, finished sums, then sums that have been
    /// read.
    const fn barriers_at(&self) -> usize {
        self.column_scales_at() + 2 * self.column_scales()
    }

    /// Offset of the word that receives the tensor memory address.
    const fn slot_at(&self) -> usize {
        self.barriers_at() + 2 * (self.stages + self.buffers()) * 8
    }

    /// Words of shared memory.
    const fn shared_words(&self) -> usize {
        self.slot_at() / 4 + 1
    }

    /// Columns of tensor memory for a stage's scales. Each stage has separate columns, because only
    /// its mbarriers order its products before the next copy.
    const fn stage_scale_columns(&self) -> usize {
        self.stage_scales() / SCALES * SCALE_COLUMNS
    }

    /// Columns of tensor memory: sums, then scales.
    const fn tmem_columns(&self) -> usize {
        (self.buffers() * self.cols + self.stages * self.stage_scale_columns()).next_power_of_two()
    }

    /// Uses the maximum number of stages, and two chunks if that costs no stage.
    fn with_stages(self, max_shared: usize) -> Self {
        let stages = |chunks: usize| {
            Layout::most_stages(max_shared, |stages| BlackwellConfig { stages, chunks, ..self }.shared_words() * 4)
        };
        let (one, two) = (stages(1), stages(2));
        Self { stages: one, chunks: if one == two { 2 } else { 1 }, ..self }
    }
}

/// Launches the kernel. A launch before it converts scales to E8M0 if needed; one more follows if
/// the contraction is split.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let scaling = Scaling::of(&gemm.shape());
    let launch = |gemm: &Gemm| {
        launch::launch(client, gemm, &scaling, STEP, |pass| launch_tiles(client, gemm, scaling, pass));
    };
    if gemm.shape().by_block() && scaling == Scaling::TensorCores {
        let [a, b] = &with_e8m0_scales(client, [gemm.a, gemm.b]);
        launch(&Gemm { a, b, ..gemm.clone() });
    } else {
        launch(gemm);
    }
}

/// Plan that the cost estimate chooses.
pub(super) fn plan(shape: &GemmShape, sms: usize) -> GemmPlan {
    GemmPlan::of(&Scaling::of(shape), shape, STEP, sms)
}

/// Groups of 128 rows of B whose scales a tile of `cols` columns needs.
const fn scale_tiles_b(cols: usize, grouping: Option<Grouping>) -> usize {
    // With one matrix of B, tiles start at multiples of their columns.
    let before = if matches!(grouping, Some(Grouping::Rows)) { SCALE_ALIGN } else { 0 };
    (before + cols).div_ceil(128)
}

fn launch_tiles<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm, scaling: Scaling, pass: &Pass) {
    let (cols, ctas, target) = (pass.plan.tile.cols, pass.plan.cluster, pass.target);
    let config = BlackwellConfig {
        cols,
        ctas: ctas as u32,
        stages: 1,
        chunks: 1,
        store: pass.store(),
        scaling,
        scale_tiles_b: scale_tiles_b(cols, gemm.shape().grouping()),
        scale_widths: if scaling.is_promoted() { [gemm.a, gemm.b].map(load_width) } else { [1; 2] },
        formats: gemm.formats(),
    };
    let config = config.with_stages(client.properties().hardware.max_shared_memory_size);
    let (_, n, _) = gemm.matrices();
    let columns = config.columns(n, gemm.shape().grouping());
    let has_scale_maps = config.block_scaled() && ctas == 2;
    // SAFETY: `scaled_gemm` has checked the sizes of codes, scales, bias and output. TMA stays
    // inside its maps and the scales of existing rows. Other loads and stores are guarded by `m`
    // and `n`.
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
    use crate::element_type::ElementType;
    use crate::gemm::tma::plan::{GemmTile, Machine};

    /// Sums and scales of every tile fit in the 512 columns of tensor memory. Stages, chunks and
    /// barriers fit in a block's shared memory, at the alignment that TMA and the tensor cores
    /// need.
    #[test]
    fn memory_suffices() {
        let scalings = [Scaling::Epilogue, Scaling::TensorCores, Scaling::EachStep, Scaling::EachStepByColumn];
        let tiles = |scaling: Scaling| scaling.tiles().map(move |tile| (scaling, tile)).collect::<Vec<_>>();
        let clusters = |(scaling, tile): (Scaling, GemmTile)| {
            scaling.clusters(tile, 4096).iter().map(move |&cluster| (scaling, tile.cols, cluster as u32))
        };
        for (scaling, cols, ctas) in scalings.into_iter().flat_map(tiles).flat_map(clusters) {
            let groupings = [None, Some(Grouping::Rows), Some(Grouping::Contraction)];
            let dtypes = [ElementType::F32, ElementType::F16, ElementType::Bf16];
            for (dtype, grouping) in dtypes.into_iter().flat_map(|dtype| groupings.map(|grouping| (dtype, grouping))) {
                let config = BlackwellConfig {
                    cols,
                    ctas,
                    stages: 1,
                    chunks: 1,
                    store: Store { tma: true, partial: false, dtype },
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
