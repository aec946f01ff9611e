//! The kernel: copies of tiles, its loop, and stores.

use cubecl::prelude::*;

use super::lanes::{Lanes, Softmax, Step, accumulate, products, rescale, zeros};
use super::{MmaPlan, ROW};
use crate::attention::launch::{Operands, Role, RowPlace, Sides};
use crate::attention::problem::{CLASS_HIDDEN, Item, Scores, Span};
use crate::attention::{HIDDEN, TILE};
use crate::load::Geometry;
use crate::ptx::mma::{commit_copies, copy_chunk, wait_copies};
use crate::ptx::shared::shared_address;
use crate::ptx::wgmma::pack_half;
use crate::version::Version;

#[cube(launch_unchecked)]
pub(super) fn attention_mma(
    rows: &Array<u32>,
    second_rows: &ComptimeOption<Array<u32>>,
    cols: &Array<u32>,
    second_cols: &Array<u32>,
    operands: &Operands,
    scores: &Scores,
    of_weights: &mut ComptimeOption<Array<u32>>,
    of_slopes: &mut ComptimeOption<Array<u32>>,
    lse: &mut ComptimeOption<Array<f32>>,
    #[comptime] plan: MmaPlan,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= operands.items {
        terminate!();
    }
    let of_keys = comptime!(plan.role.rows_are_keys());
    let (slices, second_slices) = comptime!((plan.slices[0], plan.slices[1]));
    let results = scores.item(number, comptime!(plan.rows()), of_keys);
    let item = operands.inputs(&results, comptime!(plan.role));
    let at_rows = operands.of_rows(&item);
    let mut memory = SharedMemory::<u32>::new_aligned(comptime!(plan.shared_bytes() / 4), 128usize);
    // Never true. It makes CubeCL allocate the memory, which otherwise only raw statements use.
    if scores.keys == 0 {
        memory[0] = 0u32;
    }
    let start = shared_address(&memory);
    let second_start = start + comptime!(plan.row_bytes()[0]);
    let stages = start + comptime!(plan.row_bytes()[1]);
    copy_tile(rows, &at_rows.first, start, item.row0, comptime!(plan.rows()), slices, plan);
    #[comptime]
    if let ComptimeOption::Some(second_rows) = second_rows {
        copy_tile(second_rows, &at_rows.second, second_start, item.row0, comptime!(plan.rows()), second_slices, plan);
    }
    commit_copies();
    let lanes = Lanes::new(item.row0, plan);
    // Results are sums of weights, or of slopes, times columns.
    let (count, second_count) =
        comptime!((plan.products * slices * TILE / 2, plan.products * second_slices * TILE / 2));
    let mut weighted = zeros(comptime!(if plan.role.sums_weights() { second_count } else { 1 }));
    let mut sloped = zeros(comptime!(if plan.role.sums_slopes() { count } else { 1 }));
    let mut softmax = Softmax::new(plan);
    let span = operands.span(scores, &results, comptime!(plan.rows()), comptime!(plan.role));
    let heads = if comptime!(of_keys) { scores.group() } else { 1u32.runtime() };
    for member in 0..heads {
        let place = Item { row0: item.row0, head: item.head * heads + member, batch: item.batch };
        let col_head = if comptime!(of_keys) { place.head } else { place.head / scores.group() };
        let at_cols = operands.of_cols(item.batch, col_head);
        let row_stats = lanes.stats(operands, scores, &place, 0u32.runtime(), comptime!(plan.has_stats(false)), plan);
        let mut col0 = visible(scores, &place, span.first, &span, plan);
        // No warp still reads the columns of the previous head.
        sync_cube();
        if col0 < span.end {
            copy_cols(cols, second_cols, &at_cols, stages, col0, plan);
        }
        let mut stage = 0u32.runtime();
        while col0 < span.end {
            let col_stats = lanes.stats(operands, scores, &place, col0, comptime!(plan.has_stats(true)), plan);
            let next = visible(scores, &place, col0 + comptime!(plan.cols), &span, plan);
            // This thread's copies, and by the barrier all copies. All threads have then also finished
            // with the other stage.
            wait_copies(0u32);
            sync_cube();
            let first = stages + stage * comptime!(plan.stage());
            let second = first + comptime!(plan.cols * ROW * slices);
            stage = 1u32 - stage;
            if next < span.end {
                copy_cols(cols, second_cols, &at_cols, stages + stage * comptime!(plan.stage()), next, plan);
            }
            let step = Step::new(scores, &place, col0, plan);
            let mut weights = products(start, first, &lanes, slices, plan);
            let mut slopes = products(
                second_start,
                second,
                &lanes,
                comptime!(if plan.role.sums_slopes() { second_slices } else { 0 }),
                plan,
            );
            let stats = if comptime!(of_keys) { &col_stats } else { &row_stats };
            lanes.score(&mut weights, &mut slopes, stats, scores, &step, plan);
            if comptime!(plan.role.is_forward()) {
                let factors = softmax.weigh(&mut weights, plan);
                rescale(&mut weighted, &factors, plan);
            }
            if comptime!(plan.role.sums_slopes()) {
                accumulate(&slopes, first, &lanes, &mut sloped, slices, plan);
            }
            if comptime!(plan.role.sums_weights()) {
                accumulate(&weights, second, &lanes, &mut weighted, second_slices, plan);
            }
            col0 = next;
        }
    }
    // No copies may be in flight when the block ends.
    wait_copies(0u32);
    let sums = Sums { weighted, sloped };
    store_results(&sums, &softmax, &results, &lanes, operands, scores, of_weights, of_slopes, lse, plan);
}

/// First column of a step from `col` on that is not hidden for all rows, or one past the end.
#[cube]
pub(in crate::attention) fn visible(
    scores: &Scores,
    place: &Item,
    col: u32,
    span: &Span,
    #[comptime] plan: MmaPlan,
) -> u32 {
    let mut first = col;
    if comptime!(scores.config.has_classes()) {
        let (size, of_keys) = comptime!(([plan.rows(), plan.cols], plan.role.rows_are_keys()));
        let mut searches = first < span.end;
        while searches {
            searches = scores.class(place, first, size, of_keys) == CLASS_HIDDEN;
            if searches {
                first += comptime!(plan.cols);
                searches = first < span.end;
            }
        }
    }
    first
}

/// Starts this thread's copies of a tile to shared memory at `to`. Zeros past the end.
#[cube]
fn copy_tile(
    x: &Array<u32>,
    at: &Geometry,
    to: u32,
    row0: u32,
    #[comptime] rows: u32,
    #[comptime] slices: u32,
    #[comptime] plan: MmaPlan,
) {
    let (row, piece) = (UNIT_POS / 8, UNIT_POS % 8);
    let step = comptime!(4 * plan.warps);
    let to = to + row * ROW + (piece ^ (row % 8)) * 16;
    #[unroll]
    for slice in 0..slices {
        #[unroll]
        for pass in 0..comptime!(rows / step) {
            let (row, col) = (row0 + row + comptime!(pass * step), comptime!(slice * TILE) + piece * 8);
            let bytes = select(row < at.rows && col < at.cols, 16u32, 0u32.runtime());
            // One warp's passes are four rows apart, which changes a row's swizzle.
            let to = (to ^ comptime!(pass * step % 8 * 16)) + comptime!((slice * rows + pass * step) * ROW);
            copy_chunk(to, x, at.index(row, col) / 2, bytes);
        }
    }
}

/// Starts this thread's copies of both operands of the columns of a step, as a group.
#[cube]
fn copy_cols(first: &Array<u32>, second: &Array<u32>, at: &Sides, to: u32, col0: u32, #[comptime] plan: MmaPlan) {
    let [slices, second_slices] = comptime!(plan.slices);
    copy_tile(first, &at.first, to, col0, comptime!(plan.cols), slices, plan);
    let to = to + comptime!(plan.cols * ROW * slices);
    copy_tile(second, &at.second, to, col0, comptime!(plan.cols), second_slices, plan);
    commit_copies();
}

/// Sums of weights, or of slopes, times columns.
#[derive(CubeType)]
pub(in crate::attention) struct Sums {
    pub(in crate::attention) weighted: Array<f32>,
    pub(in crate::attention) sloped: Array<f32>,
}

/// Stores the results of an item.
#[cube]
pub(in crate::attention) fn store_results(
    sums: &Sums,
    softmax: &Softmax,
    item: &Item,
    lanes: &Lanes,
    operands: &Operands,
    scores: &Scores,
    of_weights: &mut ComptimeOption<Array<u32>>,
    of_slopes: &mut ComptimeOption<Array<u32>>,
    lse: &mut ComptimeOption<Array<f32>>,
    #[comptime] plan: MmaPlan,
) {
    let rows = if comptime!(plan.role.rows_are_keys()) { scores.keys } else { scores.queries };
    let mut factors = Array::<f32>::new(comptime!(plan.lane_rows() as usize));
    #[unroll]
    for r in 0..comptime!(plan.lane_rows()) {
        factors[r as usize] = 1.0f32;
        #[comptime]
        if let ComptimeOption::Some(lse) = &mut *lse {
            let total = softmax.total(r);
            factors[r as usize] = select(total == 0.0, 0.0f32, 1.0f32 / total);
            let query = lanes.row + comptime!(8 * r);
            if lanes.col == 0 && query < scores.queries {
                let at = (item.batch * scores.heads + item.head) * scores.queries + query;
                lse[at as usize] = select(total == 0.0, HIDDEN, softmax.maxima[r as usize] + total.ln());
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_weights {
        let width = operands.second_cols.width();
        let place = RowPlace::of(item, scores, width, comptime!(plan.role));
        store(&sums.weighted, &factors, out, &place, lanes, rows, width, comptime!(plan.slices[1]), plan);
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_slopes {
        #[unroll]
        for r in 0..comptime!(plan.lane_rows()) {
            factors[r as usize] = scores.scale;
        }
        let width = operands.cols.width();
        let place = RowPlace::of(item, scores, width, comptime!(plan.role));
        store(&sums.sloped, &factors, out, &place, lanes, rows, width, comptime!(plan.slices[0]), plan);
    }
}

/// Stores the lane's sums, each row times its factor.
#[cube]
fn store(
    sums: &Array<f32>,
    factors: &Array<f32>,
    out: &mut Array<u32>,
    place: &RowPlace,
    lanes: &Lanes,
    rows: u32,
    width: u32,
    #[comptime] slices: u32,
    #[comptime] plan: MmaPlan,
) {
    let tiles = comptime!(8 * slices);
    #[unroll]
    for r in 0..comptime!(plan.lane_rows()) {
        let (row, factor) = (lanes.row + comptime!(8 * r), factors[r as usize]);
        if row < rows {
            let first = place.first + row * place.stride + lanes.col;
            #[unroll]
            for j in 0..tiles {
                let at = comptime!((4 * (r / 2 * tiles + j) + 2 * (r % 2)) as usize);
                if comptime!(8 * j) < width {
                    let (even, odd) = (sums[at] * factor, sums[comptime!(at + 1)] * factor);
                    let at = first + comptime!(8 * j);
                    if comptime!(plan.role == Role::Part) {
                        out[at as usize] = u32::reinterpret(even);
                        out[(at + 1) as usize] = u32::reinterpret(odd);
                    } else {
                        out[(at / 2) as usize] = pack_half(even, odd, comptime!(plan.bf16));
                    }
                }
            }
        }
    }
}
