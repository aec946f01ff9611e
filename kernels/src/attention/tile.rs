//! Attention on any device. f32 tiles in shared memory, multiplied by 256 units.
//!
//! ```text
//! unit (i, j): rows 4i.. and columns 4j.. of a tile of scores, columns 4j.. of each slice of 64 of
//! a sum
//! ```
//! Products over the head size take 16 elements of rows and columns at a time, as `[element, row]`.
//! The weights of a tile then go through shared memory, and 16 columns at a time multiply them.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::launch::{Launch, Operands, Role, RowPlace, Stat};
use super::problem::{CLASS_HIDDEN, Item, Scores};
use super::{HIDDEN, NOTHING, TILE};
use crate::element_type::ElementType;
use crate::grid::{UNITS, fold};
use crate::load::{Geometry, element, load_vector};
use crate::ptx::cvt::Isa;
use crate::quad::{Quad, zeros};
use crate::version::Version;

/// Units along each side of a tile.
const SIDE: u32 = 16;

/// Elements of the head size, or columns, in shared memory at a time.
const CHUNK: u32 = 16;

/// Quads from one row to the next in shared memory. One is padding against bank conflicts.
const PITCH: u32 = TILE / 4 + 1;

/// Shared memory of a cube: weights, a chunk of rows and one of columns, and a maximum and a factor
/// per row.
pub(super) const SHARED_BYTES: usize = (16 * PITCH * (TILE + 2 * CHUNK) + 8 * TILE) as usize;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct TilePlan {
    role: Role,
    element_type: ElementType,
    isa: Isa,
}

/// Launches the kernel.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, launch: &Launch<'_>) {
    let Launch { problem, role, rows, cols, .. } = launch;
    let (element_type, items) = (problem.config.element_type, launch.items(TILE));
    let of_results = if *role == Role::Part { ElementType::F32 } else { element_type };
    // SAFETY: the inputs are checked. Loads and stores are guarded by the numbers of positions and
    // the widths of heads.
    unsafe {
        attention_tile::launch_unchecked::<R>(
            client,
            fold(client, items),
            CubeDim::new_1d(UNITS),
            problem.config.words,
            rows[0].array(),
            (!role.is_forward()).then(|| rows[1].array()).into(),
            cols[0].array(),
            cols[1].array(),
            launch.operands(TILE),
            launch.scores(),
            launch.result(0, of_results.size()),
            launch.result(1, of_results.size()),
            launch.result(2, size_of::<f32>()),
            TilePlan { role: *role, element_type, isa: Isa::of(client) },
            of_results.storage(),
            Version::of(client),
        );
    }
}

/// Shared memory of the kernel.
#[derive(CubeType)]
struct Shared {
    /// Weights of a tile, `[row, column]`.
    weights: SharedMemory<Quad>,
    /// Chunk of rows, `[element, row]`.
    rows: SharedMemory<Quad>,
    /// Chunk of columns, `[element, column]`, or `[column, element]`.
    cols: SharedMemory<Quad>,
    /// Largest score of a row.
    maxima: SharedMemory<f32>,
    /// Factor of a row's sums after a new maximum.
    factors: SharedMemory<f32>,
}

#[cube(launch_unchecked)]
fn attention_tile<O: Float, N: Size>(
    rows: &Array<Vector<u32, N>>,
    second_rows: &ComptimeOption<Array<Vector<u32, N>>>,
    cols: &Array<Vector<u32, N>>,
    second_cols: &Array<Vector<u32, N>>,
    operands: &Operands,
    scores: &Scores,
    of_weights: &mut ComptimeOption<Array<O>>,
    of_slopes: &mut ComptimeOption<Array<O>>,
    lse: &mut ComptimeOption<Array<f32>>,
    #[comptime] plan: TilePlan,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= operands.items {
        terminate!();
    }
    let (role, of_keys) = comptime!((plan.role, plan.role.rows_are_keys()));
    let (slices, second_slices) = comptime!((scores.config.slices[0], scores.config.slices[1]));
    let results = scores.item(number, TILE, of_keys);
    let item = operands.inputs(&results, role);
    let at_rows = operands.of_rows(&item);
    let mut shared = Shared {
        weights: SharedMemory::<Quad>::new(comptime!((TILE * PITCH) as usize)),
        rows: SharedMemory::<Quad>::new(comptime!((CHUNK * PITCH) as usize)),
        cols: SharedMemory::<Quad>::new(comptime!((CHUNK * PITCH) as usize)),
        maxima: SharedMemory::<f32>::new(TILE as usize),
        factors: SharedMemory::<f32>::new(TILE as usize),
    };
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    if comptime!(role.is_forward()) {
        if UNIT_POS < TILE {
            shared.maxima[UNIT_POS as usize] = NOTHING;
        }
    }
    // Results are sums of weights, or of slopes, times columns.
    let mut weighted = zeros(comptime!(if role.sums_weights() { 4 * second_slices } else { 1 }));
    let mut sloped = zeros(comptime!(if role.sums_slopes() { 4 * slices } else { 1 }));
    // Sum of the weights of the unit's rows and columns.
    let mut totals = Quad::new(0.0f32);
    let span = operands.span(scores, &results, TILE, role);
    let heads = if comptime!(of_keys) { scores.group() } else { 1u32.runtime() };
    for member in 0..heads {
        let place = Item { row0: item.row0, head: item.head * heads + member, batch: item.batch };
        let col_head = if comptime!(of_keys) { place.head } else { place.head / scores.group() };
        let at_cols = operands.of_cols(item.batch, col_head);
        let mut col0 = span.first;
        while col0 < span.end {
            let class = scores.class(&place, col0, comptime!([TILE; 2]), of_keys);
            if class != CLASS_HIDDEN {
                let mut tile = products(rows, &at_rows.first, item.row0, cols, &at_cols.first, col0, &mut shared, plan);
                let (first, second) = (&at_cols.first, &at_cols.second);
                #[comptime]
                match second_rows {
                    ComptimeOption::Some(second_rows) => {
                        let at = &at_rows.second;
                        let mut slopes =
                            products(second_rows, at, item.row0, second_cols, second, col0, &mut shared, plan);
                        differentiate(&mut tile, &mut slopes, operands, scores, &place, col0, class, of_keys);
                        if comptime!(role.sums_slopes()) {
                            put_weights(&slopes, &mut shared);
                            accumulate(cols, first, col0, &mut shared, &mut sloped, slices, plan);
                        }
                    }
                    ComptimeOption::None => {
                        weigh(&mut tile, &mut totals, &mut weighted, scores, &place, col0, class, &mut shared);
                    }
                }
                if comptime!(role.sums_weights()) {
                    if comptime!(role.sums_slopes()) {
                        sync_cube();
                    }
                    put_weights(&tile, &mut shared);
                    accumulate(second_cols, second, col0, &mut shared, &mut weighted, second_slices, plan);
                }
            }
            col0 += TILE;
        }
    }
    let mut factors = Quad::new(1.0f32);
    #[comptime]
    if let ComptimeOption::Some(lse) = lse {
        // The totals of all units of a row, in lane 0 of the weights.
        sync_cube();
        #[unroll]
        for a in 0..4u32 {
            shared.weights[((4 * i + a) * PITCH + j) as usize] = Quad::new(totals[a as usize]);
        }
        sync_cube();
        #[unroll]
        for a in 0..4u32 {
            let row = 4 * i + a;
            let mut total = 0.0f32.runtime();
            for unit in 0..SIDE {
                total += shared.weights[(row * PITCH + unit) as usize][0];
            }
            factors[a as usize] = select(total == 0.0, 0.0f32, 1.0f32 / total);
            let query = item.row0 + row;
            if j == 0 && query < scores.queries {
                let sum = shared.maxima[row as usize] + total.ln();
                let at = (results.batch * scores.heads + results.head) * scores.queries + query;
                lse[at as usize] = select(total == 0.0, HIDDEN, sum);
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_weights {
        let width = operands.second_cols.width();
        let place = RowPlace::of(&results, scores, width, role);
        store::<O>(&weighted, factors, out, &place, item.row0, at_rows.first.rows, width, second_slices);
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_slopes {
        let (width, scale) = (operands.cols.width(), Quad::new(scores.scale));
        let place = RowPlace::of(&results, scores, width, role);
        store::<O>(&sloped, scale, out, &place, item.row0, at_rows.first.rows, width, slices);
    }
}

/// Replaces products by the weights of forward, with the largest score of each row so far as
/// maximum. Multiplies the sums by the factors of new maxima.
#[cube]
fn weigh(
    tile: &mut Array<Quad>,
    totals: &mut Quad,
    sums: &mut Array<Quad>,
    scores: &Scores,
    place: &Item,
    col0: u32,
    class: u32,
    shared: &mut Shared,
) {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    #[unroll]
    for a in 0..4u32 {
        let query = place.row0 + 4 * i + a;
        let mut row = Quad::empty();
        #[unroll]
        for b in 0..4u32 {
            let key = col0 + 4 * j + b;
            let value = scores.score(tile[a as usize][b as usize], place, query, key).value;
            row[b as usize] = select(scores.is_hidden(place, query, key, class), HIDDEN, value);
        }
        tile[a as usize] = row;
    }
    put_weights(tile, shared);
    sync_cube();
    if UNIT_POS < TILE {
        let old = shared.maxima[UNIT_POS as usize];
        let mut largest = Quad::new(old);
        for quad in 0..SIDE {
            largest = max(largest, shared.weights[(UNIT_POS * PITCH + quad) as usize]);
        }
        let new = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        shared.maxima[UNIT_POS as usize] = new;
        shared.factors[UNIT_POS as usize] = (old - new).exp();
    }
    sync_cube();
    #[unroll]
    for a in 0..4u32 {
        let row = 4 * i + a;
        let weights = (tile[a as usize] - Quad::new(shared.maxima[row as usize])).exp();
        let factor = shared.factors[row as usize];
        let sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
        totals[a as usize] = totals[a as usize] * factor + sum;
        #[unroll]
        for slice in 0..comptime!(scores.config.slices[1]) {
            let at = comptime!((4 * slice + a) as usize);
            sums[at] *= Quad::new(factor);
        }
        tile[a as usize] = weights;
    }
}

/// Replaces products by the weights of backward, and the products of dy by slopes.
#[cube]
fn differentiate(
    tile: &mut Array<Quad>,
    slopes: &mut Array<Quad>,
    operands: &Operands,
    scores: &Scores,
    place: &Item,
    col0: u32,
    class: u32,
    #[comptime] of_keys: bool,
) {
    let (row, col) = (place.row0 + 4 * (UNIT_POS / SIDE), col0 + 4 * (UNIT_POS % SIDE));
    let query = if comptime!(of_keys) { col } else { row };
    let mut stats = Sequence::<Stat>::new();
    #[unroll]
    for q in 0..4u32 {
        stats.push(operands.stat(scores, place, query + q));
    }
    #[unroll]
    for a in 0..4u32 {
        let (mut weights, mut gradients) = (Quad::empty(), Quad::empty());
        #[unroll]
        for b in 0..4u32 {
            let (query, key) = if comptime!(of_keys) { (col + b, row + a) } else { (row + a, col + b) };
            let stat = stats.index(comptime!((if of_keys { b } else { a }) as usize));
            let score = scores.score(tile[a as usize][b as usize], place, query, key);
            let value = select(scores.is_hidden(place, query, key, class), HIDDEN, score.value);
            let weight = (value - stat.lse).exp();
            weights[b as usize] = weight;
            gradients[b as usize] = weight * (slopes[a as usize][b as usize] - stat.delta) * score.slope;
        }
        tile[a as usize] = weights;
        slopes[a as usize] = gradients;
    }
}

/// Copies the unit's four rows and columns of weights to shared memory.
#[cube]
fn put_weights(tile: &Array<Quad>, shared: &mut Shared) {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    #[unroll]
    for a in 0..4u32 {
        shared.weights[((4 * i + a) * PITCH + j) as usize] = tile[a as usize];
    }
}

/// Products of the unit's four rows and four columns.
#[cube]
fn products<N: Size>(
    rows: &Array<Vector<u32, N>>,
    at_rows: &Geometry,
    row0: u32,
    cols: &Array<Vector<u32, N>>,
    at_cols: &Geometry,
    col0: u32,
    shared: &mut Shared,
    #[comptime] plan: TilePlan,
) -> Array<Quad> {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    let units = comptime!(SIDE * CHUNK / plan.element_type.vector_len());
    let mut sums = zeros(4u32);
    let mut first = 0u32.runtime();
    while first < at_rows.cols {
        sync_cube();
        if UNIT_POS < units {
            load_transposed(rows, at_rows, row0, first, UNIT_POS, &mut shared.rows, plan);
        } else if UNIT_POS < 2 * units {
            load_transposed(cols, at_cols, col0, first, UNIT_POS - units, &mut shared.cols, plan);
        }
        sync_cube();
        for k in 0..CHUNK {
            let left = shared.rows[(k * PITCH + i) as usize];
            let right = shared.cols[(k * PITCH + j) as usize];
            #[unroll]
            for a in 0..4usize {
                sums[a] = fma(Quad::new(left[a]), right, sums[a]);
            }
        }
        first += CHUNK;
    }
    sums
}

/// Stores a vector of four adjacent rows from column `col0` on as `[element, row]`. Zeros past the
/// end.
#[cube]
fn load_transposed<N: Size>(
    x: &Array<Vector<u32, N>>,
    at: &Geometry,
    row0: u32,
    col0: u32,
    unit: u32,
    to: &mut SharedMemory<Quad>,
    #[comptime] plan: TilePlan,
) {
    let (element_type, isa) = comptime!((plan.element_type, plan.isa));
    let len = comptime!(element_type.vector_len());
    let (row, piece) = (unit % SIDE, unit / SIDE * len);
    let mut raw = Array::<u32>::new(16usize);
    #[unroll]
    for i in 0..4u32 {
        load_vector(x, at, row0 + 4 * row + i, col0 + piece, &mut raw, comptime!(4 * i), element_type, isa);
    }
    #[unroll]
    for k in 0..len {
        let mut values = Quad::empty();
        #[unroll]
        for i in 0..4u32 {
            let is_inside = row0 + 4 * row + i < at.rows && col0 + piece + k < at.cols;
            let value = f32::reinterpret(element(&raw, comptime!(4 * i), k, element_type, isa));
            values[i as usize] = select(is_inside, value, 0.0f32);
        }
        to[((piece + k) * PITCH + row) as usize] = values;
    }
}

/// Adds the weights times the rows of x from `row0` on to `sums`.
#[cube]
fn accumulate<N: Size>(
    x: &Array<Vector<u32, N>>,
    at: &Geometry,
    row0: u32,
    shared: &mut Shared,
    sums: &mut Array<Quad>,
    #[comptime] slices: u32,
    #[comptime] plan: TilePlan,
) {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    #[unroll]
    for slice in 0..slices {
        for chunk in 0..comptime!(TILE / CHUNK) {
            sync_cube();
            load_rows(x, at, row0 + chunk * CHUNK, comptime!(slice * TILE), &mut shared.cols, plan);
            sync_cube();
            for quad in 0..comptime!(CHUNK / 4) {
                let mut weights = Array::<Quad>::new(4usize);
                #[unroll]
                for a in 0..4u32 {
                    let at = (4 * i + a) * PITCH + chunk * comptime!(CHUNK / 4) + quad;
                    weights[a as usize] = shared.weights[at as usize];
                }
                #[unroll]
                for lane in 0..4u32 {
                    let values = shared.cols[((4 * quad + lane) * PITCH + j) as usize];
                    #[unroll]
                    for a in 0..4u32 {
                        let place = comptime!((4 * slice + a) as usize);
                        let weight = Quad::new(weights[a as usize][lane as usize]);
                        sums[place] = fma(weight, values, sums[place]);
                    }
                }
            }
        }
    }
}

/// Stores [`CHUNK`] rows and [`TILE`] columns of x, starting at `row0` and `col0`. Zeros past the end.
#[cube]
fn load_rows<N: Size>(
    x: &Array<Vector<u32, N>>,
    at: &Geometry,
    row0: u32,
    #[comptime] col0: u32,
    to: &mut SharedMemory<Quad>,
    #[comptime] plan: TilePlan,
) {
    let (element_type, isa) = comptime!((plan.element_type, plan.isa));
    let len = comptime!(element_type.vector_len());
    let per_row = comptime!(TILE / element_type.vector_len());
    let (row, piece) = (UNIT_POS / per_row, UNIT_POS % per_row);
    if row < CHUNK {
        let mut raw = Array::<u32>::new(4usize);
        let col = col0 + piece * len;
        load_vector(x, at, row0 + row, col, &mut raw, 0u32, element_type, isa);
        #[unroll]
        for quad in 0..comptime!(element_type.vector_len() / 4) {
            let mut values = Quad::empty();
            #[unroll]
            for i in 0..4u32 {
                let is_inside = row0 + row < at.rows && col + comptime!(4 * quad + i) < at.cols;
                let value = f32::reinterpret(element(&raw, 0u32, comptime!(4 * quad + i), element_type, isa));
                values[i as usize] = select(is_inside, value, 0.0f32);
            }
            to[(row * PITCH + piece * comptime!(element_type.vector_len() / 4) + quad) as usize] = values;
        }
    }
}

/// Stores the unit's rows, each times its factor.
#[cube]
fn store<O: Float>(
    sums: &Array<Quad>,
    factors: Quad,
    out: &mut Array<O>,
    place: &RowPlace,
    row0: u32,
    rows: u32,
    width: u32,
    #[comptime] slices: u32,
) {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    #[unroll]
    for a in 0..4u32 {
        let row = row0 + 4 * i + a;
        #[unroll]
        for slice in 0..slices {
            #[unroll]
            for lane in 0..4u32 {
                let col = comptime!(slice * TILE) + 4 * j + lane;
                if row < rows && col < width {
                    let value = sums[comptime!((4 * slice + a) as usize)][lane as usize] * factors[a as usize];
                    out[(place.first + row * place.stride + col) as usize] = O::cast_from(value);
                }
            }
        }
    }
}
