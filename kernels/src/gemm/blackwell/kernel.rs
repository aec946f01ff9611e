//! The kernel: the role of each warp for each tile.

use cubecl::prelude::*;

use super::epilogue::{Storer, store_sums, store_tile};
use super::maps::Maps;
use super::plan::{ROWS, STEP};
use super::promote::{Places, add_steps};
use super::{BlackwellConfig, SCALE_COLUMNS, SCALES, STORERS};
use crate::gemm::problem::Problem;
use crate::gemm::schedule::{Work, first_group};
use crate::gemm::tma::item::{Extent, Item, first_item, item, items_at_once, sync_blocks};
use crate::gemm::tma::maps::InsteadOfShapes;
use crate::gemm::tma::ring::{Ring, RingPlace, advance, arrive, first_place, stage_operands, stage_scales};
use crate::gemm::tma::store::finish_stores;
use crate::ptx::barrier::{
    cluster_address, fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait,
};
use crate::ptx::shared::shared_address;
use crate::ptx::tcgen05::{
    fp8_instruction, mma_fp8, mma_mxfp8, mxfp8_instruction, operand_descriptor, scales_descriptor, tcgen05_after_wait,
    tcgen05_before_signal, tcgen05_commit, tmem_alloc, tmem_copy_scales, tmem_dealloc,
};
use crate::ptx::tma::{Reach, bulk_load, tma_load, tma_prefetch_map};
use crate::version::Version;

/// Warp that multiplies. Warp 0 fills stages.
const MULTIPLIER: u32 = 1;

#[cube(launch_unchecked, cluster_dim = CubeDim::new_2d(config.ctas, 1))]
pub(super) fn gemm_blackwell<O: Float>(
    maps: &Maps,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    // Not read here. CubeCL orders a launch after other streams' writes to its arrays, but not
    // after writes to its tensor maps.
    _codes_a: &Array<u32>,
    problem: &Problem,
    out: &mut Array<O>,
    _codes_b: &InsteadOfShapes,
    extent: Extent,
    #[comptime] config: BlackwellConfig,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut shared = SharedMemory::<u32>::new_aligned(comptime!(config.shared_words()), 1024usize);
    let base = shared_address(&shared);
    let ring = Ring::new(base, comptime!(config.barriers_at()), comptime!(config.stages));
    let ready = ring.empty + comptime!(8 * config.stages as u32);
    let read = ready + comptime!(8 * config.buffers() as u32);
    let places = Places { ring, ready, read };
    if UNIT_POS == 0 {
        // All other uses are by address. Without this one CubeCL would treat the memory as unused.
        shared[comptime!(config.slot_at() / 4)] = 0u32;
        ring.init(comptime!(config.stages), 1u32, 1u32);
        #[unroll]
        for buffer in 0..comptime!(config.buffers() as u32) {
            mbarrier_init(ready + comptime!(8 * buffer), 1u32);
            mbarrier_init(read + comptime!(8 * buffer), comptime!(32 * STORERS as u32 * config.ctas));
        }
        fence_mbarrier_init();
        tma_prefetch_map(&maps.a);
        tma_prefetch_map(&maps.b);
    }
    // The other block of a pair must be running and have initialized its mbarriers before it is
    // signaled.
    sync_blocks(config.ctas);
    let warp = UNIT_POS / 32;
    if warp == MULTIPLIER {
        let slot = base + comptime!(config.slot_at() as u32);
        tmem_alloc(slot, comptime!(config.tmem_columns() as u32), comptime!(config.ctas));
    }
    tcgen05_before_signal();
    sync_blocks(config.ctas);
    tcgen05_after_wait();
    let tmem = shared[comptime!(config.slot_at() / 4)];

    // One thread each. With `elect.sync` the assembler knows that one thread is active, and keeps
    // addresses in uniform registers.
    if warp == 0 {
        if plane_elect() {
            fill_stages(maps, problem, &places.ring, &extent, config);
        }
    } else if warp == MULTIPLIER {
        if leads_pair(config) {
            if plane_elect() {
                multiply_tiles(problem, tmem, &places, &extent, config);
            }
        }
    } else {
        let mut buffer = first_place(0u32);
        let mut storer = Storer::new(base);
        // Sums of this thread's row, if they accumulate in registers.
        let mut sums = Array::<f32>::new(comptime!(if config.scaling.is_promoted() { config.cols } else { 1 }));
        let mut index = first_item(config.ctas);
        let mut group = first_group();
        while index < extent.items() {
            let item = item(index, problem, &extent, &mut group, comptime!(config.item_shape()));
            storer.begin(problem, &item, config);
            if comptime!(config.scaling.is_promoted()) {
                add_steps(&mut sums, tmem, &places, &mut buffer, problem, &item, config);
                store_sums::<O>(&sums, &mut storer, out_map, out, problem, &item, config);
            } else {
                mbarrier_wait(places.ready + 8 * buffer.at, buffer.parity, true);
                tcgen05_after_wait();
                let tile = tmem + buffer.at * comptime!(config.cols as u32);
                store_tile::<O>(tile, &mut storer, out_map, out, problem, &item, config);
                tcgen05_before_signal();
                // Signals the thread that issues the products.
                arrive(places.read + 8 * buffer.at, 0u32.runtime(), config.ctas);
                advance(&mut buffer, comptime!(config.buffers() as u32));
            }
            index += items_at_once(config.ctas);
        }
        if comptime!(config.store.tma) {
            finish_stores(32u32);
        }
    }
    tcgen05_before_signal();
    sync_blocks(config.ctas);
    tcgen05_after_wait();
    // `warp == MULTIPLIER`, from the thread's index. In some kernels ptxas spills `warp` if it must
    // live until here.
    if (UNIT_POS ^ comptime!(32 * MULTIPLIER)) < 32u32 {
        tmem_dealloc(tmem, comptime!(config.tmem_columns() as u32), comptime!(config.ctas));
    }
}

/// Whether this block issues the products: a single block, or the first of a pair.
#[cube]
fn leads_pair(#[comptime] config: BlackwellConfig) -> bool {
    if comptime!(config.ctas > 1) {
        let rank = CUBE_POS_X % comptime!(config.ctas);
        rank == 0
    } else {
        true.runtime()
    }
}

/// Fills the stages by TMA in order, as they become free.
#[cube]
fn fill_stages(maps: &Maps, problem: &Problem, ring: &Ring, extent: &Extent, #[comptime] config: BlackwellConfig) {
    // In a pair, all loads report to the mbarriers of the block that issues the products.
    let full = if comptime!(config.ctas > 1) {
        cluster_address(ring.full(0u32.runtime()), 0u32.runtime())
    } else {
        ring.full(0u32.runtime())
    };
    // In the first round every stage is empty.
    let mut place = first_place(1u32);
    let mut index = first_item(config.ctas);
    let mut group = first_group();
    while index < extent.items() {
        let item = item(index, problem, extent, &mut group, comptime!(config.item_shape()));
        let mut step = item.step_begin;
        while step < item.step_end {
            ring.wait_empty(&place);
            fill(maps, problem, ring, full, place.at, step, &item.work, config);
            advance(&mut place, comptime!(config.stages as u32));
            step += 1;
        }
        index += items_at_once(config.ctas);
    }
    if comptime!(config.ctas > 1) {
        // The commits of a pair arrive at the mbarriers of both blocks. Neither may exit before.
        for _ in 0..comptime!(config.stages as u32) {
            ring.wait_empty(&place);
            advance(&mut place, comptime!(config.stages as u32));
        }
    }
}

/// Issues the products of each tile, as stages become full and buffers of sums become free.
#[cube]
fn multiply_tiles(problem: &Problem, tmem: u32, places: &Places, extent: &Extent, #[comptime] config: BlackwellConfig) {
    let mut place = first_place(0u32);
    // In the first round the buffers hold no unread sums.
    let mut buffer = first_place(1u32);
    let mut index = first_item(config.ctas);
    let mut group = first_group();
    while index < extent.items() {
        let item = item(index, problem, extent, &mut group, comptime!(config.item_shape()));
        if comptime!(!config.scaling.is_promoted()) {
            wait_for_room(places, &buffer);
        }
        let mut step = item.step_begin;
        while step < item.step_end {
            if comptime!(config.scaling.is_promoted()) {
                wait_for_room(places, &buffer);
            }
            places.ring.wait_full(&place, true);
            tcgen05_after_wait();
            let sums = tmem + buffer.at * comptime!(config.cols as u32);
            let is_sum = if comptime!(config.scaling.is_promoted()) { false.runtime() } else { step > item.step_begin };
            multiply_stage(places.ring.base, tmem, sums, place.at, select(is_sum, 1u32, 0u32), &item, config);
            tcgen05_commit(places.ring.empty(place.at), comptime!(config.ctas));
            advance(&mut place, comptime!(config.stages as u32));
            if comptime!(config.scaling.is_promoted()) {
                finish_sums(places, &mut buffer, config);
            }
            step += 1;
        }
        if comptime!(!config.scaling.is_promoted()) {
            finish_sums(places, &mut buffer, config);
        }
        index += items_at_once(config.ctas);
    }
}

/// Waits until the previous sums in a buffer have been read.
#[cube]
fn wait_for_room(places: &Places, buffer: &RingPlace) {
    mbarrier_wait(places.read + 8 * buffer.at, buffer.parity, true);
    tcgen05_after_wait();
}

/// Signals the readers when the sums in a buffer are done, and advances to the next buffer.
#[cube]
fn finish_sums(places: &Places, buffer: &mut RingPlace, #[comptime] config: BlackwellConfig) {
    tcgen05_commit(places.ready + 8 * buffer.at, comptime!(config.ctas));
    advance(buffer, comptime!(config.buffers() as u32));
}

/// Starts the TMA loads of a stage. They report to the stage's mbarrier in the array at `full`.
#[cube]
fn fill(
    maps: &Maps,
    problem: &Problem,
    ring: &Ring,
    full: u32,
    stage: u32,
    step: u32,
    work: &Work,
    #[comptime] config: BlackwellConfig,
) {
    let full = full + 8 * stage;
    let layout = comptime!(config.layout());
    let (at_a, at_b) = stage_operands(ring.base, stage, layout);
    let column = step * comptime!(STEP as u32);
    let announced = ring.full(stage);
    if leads_pair(config) {
        // Bytes that arrive for all blocks.
        let bytes = comptime!((layout.stage_a + layout.stage_b + layout.stage_scales) as u32 * config.ctas);
        mbarrier_arrive_expect_tx(announced, bytes);
    }
    let row_b = work.row0_b + work.col0;
    if comptime!(config.ctas > 1) {
        let share = CUBE_POS_X % comptime!(config.ctas) * comptime!(config.cols as u32 / config.ctas);
        tma_load(&maps.a, at_a, full, column, work.row0, Reach::Pair);
        tma_load(&maps.b, at_b, full, column, row_b + share, Reach::Pair);
    } else {
        tma_load(&maps.a, at_a, full, column, work.row0, Reach::Block);
        tma_load(&maps.b, at_b, full, column, row_b, Reach::Block);
    }
    if comptime!(config.block_scaled()) {
        let at = stage_scales(ring.base, stage, layout);
        load_scales(&maps.scales_a, &problem.inv_scale_a, work.row0 / 128 * problem.blocks + step, at, full);
        #[unroll]
        for i in 0..comptime!(config.scale_tiles_b as u32) {
            // Columns past the last are not stored, so their scales are arbitrary.
            let tile_b = min(row_b / 128 + i, (work.row0_b + problem.n - 1) / 128);
            let to = at + comptime!((1 + i) * SCALES as u32);
            load_scales(&maps.scales_b, &problem.inv_scale_b, tile_b * problem.blocks + step, to, full);
        }
    }
}

/// Loads tile `tile` of an operand's scales by TMA.
#[cube]
fn load_scales(map: &ComptimeOption<TensorMap<u32, Tiled>>, scales: &Array<u32>, tile: u32, to: u32, full: u32) {
    #[comptime]
    match map {
        ComptimeOption::Some(map) => tma_load(map, to, full, 0u32.runtime(), tile, Reach::Pair),
        ComptimeOption::None => {
            bulk_load(scales, tile * comptime!(SCALES as u32 / 4), to, full, comptime!(SCALES as u32));
        }
    }
}

/// Issues the four `tcgen05.mma` of a stage. The first adds to the sums unless `add` is zero.
#[cube]
fn multiply_stage(
    base: u32,
    tmem: u32,
    sums: u32,
    stage: u32,
    add: u32,
    item: &Item,
    #[comptime] config: BlackwellConfig,
) {
    let layout = comptime!(config.layout());
    let (a, b) = stage_operands(base, stage, layout);
    let (a, b) = (operand_descriptor(a), operand_descriptor(b));
    let columns = comptime!(config.stage_scale_columns() as u32);
    let to_a = tmem + comptime!((config.buffers() * config.cols) as u32) + stage * columns;
    let to_b = to_a + comptime!(SCALE_COLUMNS as u32);
    if comptime!(config.block_scaled()) {
        let at = stage_scales(base, stage, layout);
        tmem_copy_scales(to_a, scales_descriptor(at), comptime!(config.ctas));
        #[unroll]
        for i in 0..comptime!(config.scale_tiles_b as u32) {
            let from = scales_descriptor(at + comptime!((1 + i) * SCALES as u32));
            tmem_copy_scales(to_b + comptime!(i * SCALE_COLUMNS as u32), from, comptime!(config.ctas));
        }
    }
    #[unroll]
    for k in 0..4u32 {
        // Next 32 bytes of the contraction, in units of 16.
        let offset = u64::cast_from(comptime!(2 * k));
        let add = if comptime!(k == 0) { add } else { 1u32.runtime() };
        let (rows, cols) = comptime!((ROWS as u32 * config.ctas, config.cols as u32));
        if comptime!(config.block_scaled()) {
            // One column of tensor memory holds the scales of 32 columns.
            let scales_b = to_b + (item.work.row0_b + item.work.col0) % 128 / 32;
            let instruction = comptime!(mxfp8_instruction(rows, cols, config.formats, k));
            mma_mxfp8(sums, a + offset, b + offset, to_a, scales_b, add, instruction, comptime!(config.ctas));
        } else {
            let instruction = comptime!(fp8_instruction(rows, cols, config.formats));
            mma_fp8(sums, a + offset, b + offset, add, instruction, comptime!(config.ctas));
        }
    }
}
