//! The kernel: the role of each warpgroup for each tile.

use cubecl::prelude::*;

use super::epilogue::store_tile;
use super::plan::{CONSUMERS, Promotion, group_cols, mma_cols};
use super::rank::group_origin;
use super::scales::{SCALE_THREADS, fetch_scales, load_scales_a, load_scales_b, scales_b_at};
use super::{BOX_BYTES, GROUP, HALVES, HopperConfig};
use crate::gemm::problem::Problem;
use crate::gemm::schedule::first_group;
use crate::gemm::tma::item::{Extent, Item, first_item, item, items_at_once, sync_blocks};
use crate::gemm::tma::maps::{InsteadOfShapes, ROW_BYTES};
use crate::gemm::tma::ring::{Ring, RingPlace, advance, arrive, first_place, stage_operands};
use crate::gemm::tma::store::finish_stores;
use crate::ptx::barrier::{
    cluster_sync, fence_mbarrier_init, mbarrier_arrive_expect_tx, setmaxnreg_dec, setmaxnreg_inc,
};
use crate::ptx::shared::{load_shared, shared_address};
use crate::ptx::tma::{Reach, tma_load, tma_prefetch_map};
use crate::ptx::wgmma::{Major, descriptor, wgmma, wgmma_commit, wgmma_fence, wgmma_wait};
use crate::version::Version;

#[cube(launch_unchecked, cluster_dim = CubeDim::new_2d(config.cluster as u32, 1))]
pub(super) fn gemm_hopper<O: Float>(
    a: &TensorMap<u8, Tiled>,
    b: &TensorMap<u8, Tiled>,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    // Not read here. CubeCL orders a launch after other streams' writes to its arrays, but not
    // after writes to its tensor maps.
    _codes_a: &Array<u32>,
    problem: &Problem,
    out: &mut Array<O>,
    _codes_b: &InsteadOfShapes,
    extent: Extent,
    #[comptime] config: HopperConfig,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut shared = SharedMemory::<u32>::new_aligned(comptime!(config.shared_words()), 1024usize);
    let ring = Ring::new(shared_address(&shared), comptime!(config.barriers_at()), comptime!(config.stages));
    if UNIT_POS == 0 {
        // All other uses are by address. Without this one CubeCL would treat the memory as unused.
        shared[comptime!(config.shared_words() - 1)] = 0u32;
        // The thread that issues TMA loads, and the threads that fetch scales.
        let fillers = comptime!(1 + if config.promotion.is_scaled() { SCALE_THREADS } else { 0 });
        // All consumer warps of the cluster.
        let readers = comptime!((4 * CONSUMERS * config.cluster) as u32);
        ring.init(comptime!(config.stages), fillers, readers);
        fence_mbarrier_init();
        tma_prefetch_map(a);
        tma_prefetch_map(b);
    }
    let cluster = comptime!(config.cluster as u32);
    sync_blocks(cluster);

    let items = extent.items();
    let shape = comptime!(config.item_shape());
    let stride = items_at_once(cluster);
    let mut index = first_item(cluster);
    let mut group = first_group();
    if UNIT_POS < GROUP {
        if comptime!(config.moves_registers()) {
            setmaxnreg_dec(comptime!(config.registers()[0]));
        }
        // In the first round every stage is empty.
        let mut place = first_place(1u32);
        if UNIT_POS == 0 {
            while index < items {
                let item = item(index, problem, &extent, &mut group, shape);
                let mut step = item.step_begin;
                while step < item.step_end {
                    ring.wait_empty(&place);
                    fill(a, b, &ring, place.at, step, &item, config);
                    advance(&mut place, comptime!(config.stages as u32));
                    step += 1;
                }
                index += stride;
            }
            if comptime!(config.promotion == Promotion::Never) {
                // The consumers' waits do not trap. This one does if a stage never becomes full.
                ring.drain(&mut place, comptime!(config.stages));
            }
        } else if comptime!(config.promotion.is_scaled()) {
            if UNIT_POS >= comptime!(GROUP - SCALE_THREADS) {
                while index < items {
                    let item = item(index, problem, &extent, &mut group, shape);
                    fetch_scales(problem, &ring, &mut place, &item, config);
                    index += stride;
                }
            }
        }
    } else {
        if comptime!(config.moves_registers()) {
            setmaxnreg_inc(comptime!(config.registers()[1]));
        }
        let mut place = first_place(0u32);
        let mut sums = Array::<f32>::new(comptime!(group_cols(config.tile) / 2));
        while index < items {
            let item = item(index, problem, &extent, &mut group, shape);
            #[unroll]
            for i in 0..comptime!(group_cols(config.tile) / 2) {
                sums[i] = 0.0f32;
            }
            if comptime!(config.promotion != Promotion::Never) {
                multiply_promoted(&mut sums, &ring, &mut place, &item, config);
            } else {
                multiply_fast(&mut sums, &ring, &mut place, problem, &item, config);
            }
            store_tile::<O>(&mut sums, ring.base, out_map, out, problem, &item, config);
            index += stride;
        }
        if comptime!(config.store.tma) {
            finish_stores(GROUP);
        }
    }
    if comptime!(config.cluster > 1) {
        // No block exits while others of the cluster may still write to its shared memory.
        cluster_sync();
    }
}

/// Fills a stage by TMA.
#[cube]
fn fill(
    a: &TensorMap<u8, Tiled>,
    b: &TensorMap<u8, Tiled>,
    ring: &Ring,
    stage: u32,
    step: u32,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let layout = comptime!(config.layout());
    let full = ring.full(stage);
    let (at_a, at_b) = stage_operands(ring.base, stage, layout);
    mbarrier_arrive_expect_tx(full, comptime!((layout.stage_a + layout.stage_b) as u32));
    load(a, at_a, full, step, item.work.row0, config, 0usize);
    load(b, at_b, full, step, item.work.row0_b + item.work.col0, config, 1usize);
}

/// Loads a stage of operand 0 (A) or 1 (B), from row `row` on. Each block of the cluster multicasts
/// its share of B to all: of the rows, or of the contraction if the rows are contiguous.
#[cube]
fn load(
    map: &TensorMap<u8, Tiled>,
    at: u32,
    full: u32,
    step: u32,
    row: u32,
    #[comptime] config: HopperConfig,
    #[comptime] side: usize,
) {
    let blocks = comptime!(if side == 0 { 1 } else { config.cluster as u32 });
    let reach = comptime!(if blocks > 1 { Reach::Cluster((1u32 << blocks) - 1) } else { Reach::Block });
    let lines = comptime!(config.box_lines(side) as u32);
    let first = if comptime!(blocks > 1) { CUBE_POS_X % blocks * lines } else { 0u32.runtime() };
    let at = at + first * comptime!(ROW_BYTES as u32);
    if comptime!(config.element.major(side) == Major::K) {
        tma_load(map, at, full, step * comptime!(ROW_BYTES as u32), row + first, reach);
    } else {
        #[unroll]
        for i in 0..comptime!((config.rows(side) / HALVES) as u32) {
            let column = (row + comptime!(i * HALVES as u32)) * 2;
            let at = at + comptime!(i * BOX_BYTES);
            tma_load(map, at, full, column, step * comptime!(HALVES as u32) + first, reach);
        }
    }
}

/// Signals every producer of the cluster that this warp has finished reading a stage.
#[cube]
fn release(ring: &Ring, stage: u32, #[comptime] config: HopperConfig) {
    let lane = UNIT_POS % 32;
    if lane < comptime!(config.cluster as u32) {
        arrive(ring.empty(stage), lane, comptime!(config.cluster as u32));
    }
}

/// [`release`] after all lanes have read the stage's scales; one arrival covers the whole warp.
#[cube]
fn release_read(ring: &Ring, stage: u32, #[comptime] config: HopperConfig) {
    if comptime!(config.promotion.is_scaled()) {
        sync_plane();
    }
    release(ring, stage, config);
}

/// Addresses of this warpgroup's rows of A and of B in a stage. 64 rows have the same size in either
/// order.
#[cube]
fn operands(base: u32, stage: u32, #[comptime] config: HopperConfig) -> (u32, u32) {
    let (row, col) = group_origin(config);
    let (a, b) = stage_operands(base, stage, comptime!(config.layout()));
    (a + row * comptime!(ROW_BYTES as u32), b + col * comptime!(ROW_BYTES as u32))
}

/// Accumulates in the tensor cores. A stage is released when the next stage's products have been
/// issued.
#[cube]
fn multiply_fast(
    sums: &mut Array<f32>,
    ring: &Ring,
    place: &mut RingPlace,
    problem: &Problem,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let mut step = item.step_begin;
    let mut previous = place.at;
    while step < item.step_end {
        // Products of the previous stage are in flight.
        ring.wait_full(place, false);
        let (a, b) = operands(ring.base, place.at, config);
        multiply_stage(sums, a, b, 1u32.runtime(), config);
        wgmma_wait(sums, comptime!(group_cols(config.tile) as u32), 1u32);
        if step > item.step_begin {
            release(ring, previous, config);
        }
        previous = place.at;
        advance(place, comptime!(config.stages as u32));
        step += 1;
    }
    wgmma_wait(sums, comptime!(group_cols(config.tile) as u32), 0u32);
    // An empty group has read no stage.
    let any = if comptime!(problem.grouping.is_none()) { true.runtime() } else { item.step_begin < item.step_end };
    if any {
        release(ring, previous, config);
    }
}

/// Issues the four `wgmma` of a stage whose operands are at these addresses. The first adds to the
/// accumulators unless `add` is zero.
#[cube]
fn multiply_stage(acc: &mut Array<f32>, a: u32, b: u32, add: u32, #[comptime] config: HopperConfig) {
    let cols = comptime!(mma_cols(config.tile, config.promotion) as u32);
    let [leading_a, leading_b] = comptime!([0, 1].map(|side| config.leading(side)));
    let [step_a, step_b] = comptime!([0, 1].map(|side| config.product_step(side)));
    let (a, b) = (descriptor(a, leading_a), descriptor(b, leading_b));
    wgmma_fence(acc, cols);
    #[unroll]
    for k in 0..4u32 {
        let add = if comptime!(k == 0) { add } else { 1u32.runtime() };
        let (a, b) = (a + u64::cast_from(comptime!(k * step_a)), b + u64::cast_from(comptime!(k * step_b)));
        wgmma(acc, a, b, add, cols, config.element);
    }
    wgmma_commit();
}

/// Sums each stage separately and adds it to f32 registers, scaled if scales change along the
/// contraction. A stage is released as soon as its last product is done and its scales are in
/// registers. Per-column scales do not all fit in registers: two are loaded for every four sums.
#[cube]
fn multiply_promoted(
    sums: &mut Array<f32>,
    ring: &Ring,
    place: &mut RingPlace,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let cols = comptime!(mma_cols(config.tile, config.promotion));
    let parts = comptime!(group_cols(config.tile) / mma_cols(config.tile, config.promotion));
    let mut part = Array::<f32>::new(comptime!(cols / 2));
    #[unroll]
    for i in 0..comptime!(cols / 2) {
        part[i] = 0.0f32;
    }
    let mut scales_a = Array::<f32>::new(2usize);
    let mut scales_b = Array::<f32>::new(2usize);
    let by_column = comptime!(config.promotion == Promotion::EachStepByColumn);
    let mut step = item.step_begin;
    while step < item.step_end {
        ring.wait_full(place, true);
        let (a, b) = operands(ring.base, place.at, config);
        #[unroll]
        for p in 0..comptime!(parts as u32) {
            let b = b + comptime!(p * (cols * ROW_BYTES) as u32);
            multiply_stage(&mut part, a, b, 0u32.runtime(), config);
            let at_b = scales_b_at(ring.base, place.at, p, config);
            if comptime!(config.promotion.is_scaled() && p == 0) {
                load_scales_a(&mut scales_a, ring.base, place.at, config);
            }
            if comptime!(config.promotion == Promotion::EachStepScaled) {
                scales_b[0] = load_shared(at_b);
            }
            wgmma_wait(&mut part, comptime!(cols as u32), 0u32);
            if comptime!(!by_column && p as usize == parts - 1) {
                release_read(ring, place.at, config);
            }
            #[unroll]
            for i in 0..comptime!(cols / 2) {
                if comptime!(by_column && i % 4 == 0) {
                    load_scales_b(&mut scales_b, at_b, comptime!(i as u32 / 4));
                }
                let sum = comptime!(p as usize * cols / 2 + i);
                sums[sum] = if comptime!(config.promotion.is_scaled()) {
                    let scale_b = scales_b[comptime!(if by_column { i % 2 } else { 0 })];
                    fma(part[i], scales_a[comptime!(i / 2 % 2)] * scale_b, sums[sum])
                } else {
                    sums[sum] + part[i]
                };
            }
            if comptime!(by_column && p as usize == parts - 1) {
                release_read(ring, place.at, config);
            }
        }
        advance(place, comptime!(config.stages as u32));
        step += 1;
    }
}
