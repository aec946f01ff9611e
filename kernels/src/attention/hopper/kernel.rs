//! The kernel: loads of tiles, and the steps of a warpgroup.

use cubecl::prelude::*;

use super::products::Products;
use super::{AttentionSchedule, GROUP, REGISTERS, ROW, Tiles, WARPS};
use crate::attention::launch::{Operands, Role};
use crate::attention::mma::kernel::{Sums, store_results, visible};
use crate::attention::mma::lanes::{Lanes, Softmax, Stats, Step, rescale, zeros};
use crate::attention::problem::{Item, Scores};
use crate::gemm::tma::maps::InsteadOfShapes;
use crate::gemm::tma::ring::{Ring, RingPlace, advance, first_place};
use crate::ptx::barrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, named_barrier, named_barrier_arrive,
    setmaxnreg_dec, setmaxnreg_inc,
};
use crate::ptx::shared::shared_address;
use crate::ptx::tma::{bulk_load, tma_load_head, tma_prefetch_map};
use crate::version::Version;

#[cube(launch_unchecked)]
pub(super) fn attention_hopper(
    rows: &TensorMap<u8, Tiled>,
    second_rows: &ComptimeOption<TensorMap<u8, Tiled>>,
    cols: &TensorMap<u8, Tiled>,
    second_cols: &TensorMap<u8, Tiled>,
    // Not read here. CubeCL orders a launch after other streams' writes to its arrays, but not
    // after writes to its tensor maps.
    _row_memory: &Array<u32>,
    _second_row_memory: &Array<u32>,
    _col_memory: &Array<u32>,
    operands: &Operands,
    scores: &Scores,
    of_weights: &mut ComptimeOption<Array<u32>>,
    of_slopes: &mut ComptimeOption<Array<u32>>,
    lse: &mut ComptimeOption<Array<f32>>,
    _second_col_memory: &InsteadOfShapes,
    #[comptime] tiles: Tiles,
    #[comptime] _version: Version,
) {
    let plan = comptime!(tiles.plan);
    let of_keys = comptime!(plan.role.rows_are_keys());
    let mut memory = SharedMemory::<u32>::new_aligned(comptime!(tiles.shared_words()), 1024usize);
    let start = shared_address(&memory);
    let ring = Ring::new(start, comptime!(tiles.barriers_at() as usize), comptime!(tiles.stages as usize));
    let resident = Ring::new(start, comptime!((tiles.barriers_at() + 16 * tiles.stages) as usize), 1usize);
    if UNIT_POS == 0 {
        // All other uses are by address. Without this one CubeCL would treat the memory as unused.
        memory[comptime!(tiles.shared_words() - 1)] = 0u32;
        ring.init(comptime!(tiles.stages as usize), 1u32, WARPS);
        resident.init(1usize, 1u32, WARPS);
        fence_mbarrier_init();
        tma_prefetch_map(rows);
        tma_prefetch_map(cols);
        tma_prefetch_map(second_cols);
    }
    sync_cube();

    let heads = if comptime!(of_keys) { scores.group() } else { 1u32.runtime() };
    let mut round = 0u32.runtime();
    let mut number = CUBE_POS_X;
    if UNIT_POS < GROUP {
        setmaxnreg_dec(comptime!(REGISTERS[0]));
        if UNIT_POS == 0 {
            // In the first round everything is empty.
            let (mut place, mut at_rows) = (first_place(1u32), first_place(1u32));
            while number < operands.items {
                let item = scores.item(number, comptime!(plan.rows()), of_keys);
                resident.wait_empty(&at_rows);
                load_rows(rows, second_rows, start, resident.full(0u32), &item, tiles);
                advance(&mut at_rows, 1u32);
                let span = scores.span(item.row0, comptime!(plan.rows()), of_keys);
                for member in 0..heads {
                    let of = Item { row0: item.row0, head: item.head * heads + member, batch: item.batch };
                    let mut col0 = visible(scores, &of, span.first, &span, plan);
                    while col0 < span.end {
                        ring.wait_empty(&place);
                        load_cols(cols, second_cols, operands, scores, &ring, place.at, &of, col0, tiles);
                        advance(&mut place, tiles.stages);
                        col0 = visible(scores, &of, col0 + comptime!(plan.cols), &span, plan);
                    }
                }
                round += 1;
                number = dealt(round, CUBE_POS_X, CUBE_COUNT_X);
            }
            // The consumers' waits do not trap. These do if a load never ends.
            ring.drain(&mut place, comptime!(tiles.stages as usize));
            resident.drain(&mut at_rows, 1usize);
        }
    } else {
        setmaxnreg_inc(comptime!(REGISTERS[1]));
        let (mut place, mut at_rows) = (first_place(0u32), first_place(0u32));
        let [weighted, sloped, _] = comptime!(tiles.sums());
        let mut sums =
            Sums { weighted: zeros(comptime!((weighted / 2).max(1))), sloped: zeros(comptime!((sloped / 2).max(1))) };
        if comptime!(tiles.schedule == AttentionSchedule::PingPong) {
            if UNIT_POS / GROUP == 2 {
                // The first turn is the other warpgroup's.
                named_barrier_arrive(2u32, comptime!(2 * GROUP));
            }
        }
        let mut step = Products::new(tiles);
        while number < operands.items {
            let item = scores.item(number, comptime!(plan.rows()), of_keys);
            let lanes = Lanes::new(item.row0, plan);
            let mut softmax = Softmax::new(plan);
            clear(&mut sums, tiles);
            resident.wait_full(&at_rows, false);
            let span = scores.span(item.row0, comptime!(plan.rows()), of_keys);
            for member in 0..heads {
                let of = Item { row0: item.row0, head: item.head * heads + member, batch: item.batch };
                let row_stats =
                    lanes.stats(operands, scores, &of, 0u32.runtime(), comptime!(plan.has_stats(false)), plan);
                let mut col0 = visible(scores, &of, span.first, &span, plan);
                if comptime!(tiles.schedule != AttentionSchedule::Plain) {
                    if col0 < span.end {
                        overlapped(
                            &mut step,
                            &mut sums,
                            &mut softmax,
                            &lanes,
                            &ring,
                            &mut place,
                            scores,
                            &of,
                            col0,
                            tiles,
                        );
                    }
                } else {
                    while col0 < span.end {
                        let columns = Step::new(scores, &of, col0, plan);
                        ring.wait_full(&place, false);
                        let at = stage_at(&ring, place.at, tiles);
                        step.multiply(start, at, tiles);
                        step.finish_products(0u32, tiles);
                        let col_stats = Stats::in_shared(stats_at(&ring, place.at, tiles), &lanes);
                        let stats = if comptime!(of_keys) { &col_stats } else { &row_stats };
                        lanes.score(&mut step.weights, &mut step.slopes, stats, scores, &columns, plan);
                        if comptime!(plan.role == Role::Forward) {
                            let factors = softmax.weigh(&mut step.weights, plan);
                            rescale(&mut sums.weighted, &factors, plan);
                        }
                        step.pack(tiles);
                        step.accumulate(&mut sums, at, tiles);
                        step.finish_sums(&mut sums, tiles);
                        release(&ring, place.at);
                        advance(&mut place, tiles.stages);
                        col0 = visible(scores, &of, col0 + comptime!(plan.cols), &span, plan);
                    }
                }
            }
            release(&resident, at_rows.at);
            advance(&mut at_rows, 1u32);
            store_results(&sums, &softmax, &item, &lanes, operands, scores, of_weights, of_slopes, lse, plan);
            round += 1;
            number = dealt(round, CUBE_POS_X, CUBE_COUNT_X);
        }
    }
}

/// Steps of forward from column `col` on. While a step's weights are computed, the weights of the one
/// before multiply.
#[cube]
fn overlapped(
    step: &mut Products,
    sums: &mut Sums,
    softmax: &mut Softmax,
    lanes: &Lanes,
    ring: &Ring,
    place: &mut RingPlace,
    scores: &Scores,
    of: &Item,
    col: u32,
    #[comptime] tiles: Tiles,
) {
    let plan = comptime!(tiles.plan);
    let takes_turns = comptime!(tiles.schedule == AttentionSchedule::PingPong);
    // The two warpgroups have the same steps.
    let own = 1 + UNIT_POS / GROUP % 2;
    let none = Stats::none();
    let span = scores.span(of.row0, comptime!(plan.rows()), false);
    let columns = Step::new(scores, of, col, plan);
    ring.wait_full(place, false);
    step.multiply(ring.base, stage_at(ring, place.at, tiles), tiles);
    step.finish_products(0u32, tiles);
    lanes.score(&mut step.weights, &mut step.slopes, &none, scores, &columns, plan);
    // There are no earlier weights.
    softmax.weigh(&mut step.weights, plan);
    step.pack(tiles);
    let mut before = place.at;
    advance(place, tiles.stages);
    let mut col0 = visible(scores, of, col + comptime!(plan.cols), &span, plan);
    while col0 < span.end {
        let columns = Step::new(scores, of, col0, plan);
        ring.wait_full(place, false);
        if comptime!(takes_turns) {
            named_barrier(own, comptime!(2 * GROUP));
        }
        step.multiply(ring.base, stage_at(ring, place.at, tiles), tiles);
        step.accumulate(sums, stage_at(ring, before, tiles), tiles);
        if comptime!(takes_turns) {
            named_barrier_arrive(3 - own, comptime!(2 * GROUP));
        }
        step.finish_products(1u32, tiles);
        lanes.score(&mut step.weights, &mut step.slopes, &none, scores, &columns, plan);
        let factors = softmax.weigh(&mut step.weights, plan);
        step.finish_sums(sums, tiles);
        release(ring, before);
        rescale(&mut sums.weighted, &factors, plan);
        step.pack(tiles);
        before = place.at;
        advance(place, tiles.stages);
        col0 = visible(scores, of, col0 + comptime!(plan.cols), &span, plan);
    }
    step.accumulate(sums, stage_at(ring, before, tiles), tiles);
    step.finish_sums(sums, tiles);
    release(ring, before);
}

/// Item of block `block` of `blocks` in a round. Every other round goes backwards.
#[cube]
fn dealt(round: u32, block: u32, blocks: u32) -> u32 {
    round * blocks + select(round.is_multiple_of(2), block, blocks - 1 - block)
}

/// Loads both operands of an item's rows to shared memory at `to`.
#[cube]
fn load_rows(
    first: &TensorMap<u8, Tiled>,
    second: &ComptimeOption<TensorMap<u8, Tiled>>,
    to: u32,
    full: u32,
    item: &Item,
    #[comptime] tiles: Tiles,
) {
    let plan = comptime!(tiles.plan);
    let [bytes, both] = comptime!(plan.row_bytes());
    mbarrier_arrive_expect_tx(full, both);
    load_tile(first, to, full, item.row0, item, comptime!([plan.rows(), plan.slices[0]]));
    #[comptime]
    if let ComptimeOption::Some(second) = second {
        load_tile(second, to + bytes, full, item.row0, item, comptime!([plan.rows(), plan.slices[1]]));
    }
}

/// Loads both operands of the columns from `col0` on to a stage, and the statistics of queries.
#[cube]
fn load_cols(
    first: &TensorMap<u8, Tiled>,
    second: &TensorMap<u8, Tiled>,
    operands: &Operands,
    scores: &Scores,
    ring: &Ring,
    stage: u32,
    of: &Item,
    col0: u32,
    #[comptime] tiles: Tiles,
) {
    let plan = comptime!(tiles.plan);
    let of_keys = comptime!(plan.role.rows_are_keys());
    let full = ring.full(stage);
    mbarrier_arrive_expect_tx(full, comptime!(plan.stage() + tiles.stats()));
    let head = if comptime!(of_keys) { of.head } else { of.head / scores.group() };
    let of_cols = Item { row0: of.row0, head, batch: of.batch };
    let to = stage_at(ring, stage, tiles);
    load_tile(first, to, full, col0, &of_cols, comptime!([plan.cols, plan.slices[0]]));
    let to = to + comptime!(plan.cols * ROW * plan.slices[0]);
    load_tile(second, to, full, col0, &of_cols, comptime!([plan.cols, plan.slices[1]]));
    if comptime!(of_keys) {
        #[comptime]
        if let ComptimeOption::Some(stats) = &operands.stats {
            let (to, at) = (stats_at(ring, stage, tiles), operands.first_stat(scores, of) + col0);
            bulk_load(stats, at, to, full, comptime!(4 * plan.cols));
            let to_deltas = to + comptime!(4 * plan.cols);
            bulk_load(stats, operands.deltas + at, to_deltas, full, comptime!(4 * plan.cols));
        }
    }
}

/// Loads a tile of a head's positions. `size` is the number of positions and of slices.
#[cube]
fn load_tile(map: &TensorMap<u8, Tiled>, to: u32, full: u32, row0: u32, of: &Item, #[comptime] size: [u32; 2]) {
    let [rows, slices] = comptime!(size);
    #[unroll]
    for slice in 0..slices {
        let x = comptime!(slice * ROW).runtime();
        tma_load_head(map, to + comptime!(slice * rows * ROW), full, x, row0, of.head, of.batch);
    }
}

/// Address of a stage of columns.
#[cube]
fn stage_at(ring: &Ring, stage: u32, #[comptime] tiles: Tiles) -> u32 {
    ring.base + comptime!(tiles.plan.row_bytes()[1]) + stage * comptime!(tiles.plan.stage())
}

/// Address of the statistics of a stage's columns: lse, then δ.
#[cube]
fn stats_at(ring: &Ring, stage: u32, #[comptime] tiles: Tiles) -> u32 {
    let first = comptime!(tiles.plan.row_bytes()[1] + tiles.stages * tiles.plan.stage());
    ring.base + first + stage * comptime!(tiles.stats())
}

/// Signals that this warp has finished reading a stage.
#[cube]
fn release(ring: &Ring, stage: u32) {
    if UNIT_POS.is_multiple_of(32) {
        mbarrier_arrive(ring.empty(stage));
    }
}

#[cube]
fn clear(sums: &mut Sums, #[comptime] tiles: Tiles) {
    let [weighted, sloped, _] = comptime!(tiles.sums());
    #[unroll]
    for i in 0..comptime!(weighted / 2) {
        sums.weighted[i as usize] = 0.0f32;
    }
    #[unroll]
    for i in 0..comptime!(sloped / 2) {
        sums.sloped[i as usize] = 0.0f32;
    }
}
