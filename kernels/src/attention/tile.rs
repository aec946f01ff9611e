//! Attention on any device. f32 tiles in shared memory, multiplied by 256 units.
//!
//! ```text
//! rows of the cube: q (and dy)       columns that pass: k, v     y, or dq
//! rows of the cube: k and v          columns that pass: q, dy    dv and dk
//! unit (i, j): rows 4i.. and columns 4j.. of a tile of scores, columns 4j.. of each slice of 64 of
//! a sum
//! ```
//! Products over the head size take 16 elements of rows and columns at a time, as `[element, row]`.
//! The weights of a tile then go through shared memory, and 16 columns at a time multiply them.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::problem::{CLASS_HIDDEN, Classes, Heads, HeadsGeometry, Item, Scores, ScoresLaunch};
use super::{AttentionOutput, Checked, HIDDEN, NOTHING, TILE};
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

/// Forward.
pub(super) fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &Checked,
    classes: Option<&Classes>,
) -> AttentionOutput {
    let Checked { query, key, value, config, .. } = problem;
    let ([batch, heads, queries, _], [.., width]) = (query.shape(), value.shape());
    let (rows, tiles) = (batch * heads * queries, queries.div_ceil(TILE as usize));
    let (y, y_arg) = output(client, rows * width, config.element_type);
    let (lse, lse_arg) = output(client, rows, ElementType::F32);
    // SAFETY: the inputs are checked. Loads and stores are guarded by the numbers of positions and
    // the widths of heads.
    unsafe {
        tile_forward::launch_unchecked::<R>(
            client,
            fold(client, (tiles * heads * batch) as u32),
            CubeDim::new_1d(UNITS),
            config.words,
            query.array(),
            key.array(),
            value.array(),
            query.geometry(),
            key.geometry(),
            value.geometry(),
            ScoresLaunch::of(problem, classes),
            y_arg,
            lse_arg,
            (tiles * heads * batch) as u32,
            config.element_type.storage(),
            Isa::of(client),
            Version::of(client),
        );
    }
    AttentionOutput { y, lse }
}

/// dq, from dy and the statistics of rows.
pub(super) fn query_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &Checked,
    dy: &Heads,
    stats: &Handle,
    classes: Option<&Classes>,
) -> Handle {
    let Checked { query, key, value, config, .. } = problem;
    let [batch, heads, queries, dim] = query.shape();
    let (rows, tiles) = (batch * heads * queries, queries.div_ceil(TILE as usize));
    let (dq, dq_arg) = output(client, rows * dim, config.element_type);
    // SAFETY: as in forward.
    unsafe {
        tile_query_gradient::launch_unchecked::<R>(
            client,
            fold(client, (tiles * heads * batch) as u32),
            CubeDim::new_1d(UNITS),
            config.words.min(dy.vector_words()),
            query.array(),
            key.array(),
            value.array(),
            dy.array(),
            query.geometry(),
            key.geometry(),
            value.geometry(),
            dy.geometry(),
            ArrayArg::from_raw_parts(stats.clone(), 2 * rows),
            ScoresLaunch::of(problem, classes),
            dq_arg,
            (tiles * heads * batch) as u32,
            config.element_type.storage(),
            Isa::of(client),
            Version::of(client),
        );
    }
    dq
}

/// dk and dv, from dy and the statistics of rows.
pub(super) fn key_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &Checked,
    dy: &Heads,
    stats: &Handle,
    classes: Option<&Classes>,
) -> [Handle; 2] {
    let Checked { query, key, value, config, .. } = problem;
    let ([batch, heads, queries, dim], [_, kv_heads, keys, width]) = (query.shape(), value.shape());
    let (rows, tiles) = (batch * kv_heads * keys, keys.div_ceil(TILE as usize));
    let (dk, dk_arg) = output(client, rows * dim, config.element_type);
    let (dv, dv_arg) = output(client, rows * width, config.element_type);
    // SAFETY: as in forward.
    unsafe {
        tile_key_gradients::launch_unchecked::<R>(
            client,
            fold(client, (tiles * kv_heads * batch) as u32),
            CubeDim::new_1d(UNITS),
            config.words.min(dy.vector_words()),
            query.array(),
            key.array(),
            value.array(),
            dy.array(),
            query.geometry(),
            key.geometry(),
            value.geometry(),
            dy.geometry(),
            ArrayArg::from_raw_parts(stats.clone(), 2 * batch * heads * queries),
            ScoresLaunch::of(problem, classes),
            dk_arg,
            dv_arg,
            (tiles * kv_heads * batch) as u32,
            config.element_type.storage(),
            Isa::of(client),
            Version::of(client),
        );
    }
    [dk, dv]
}

/// Allocates a result. Returns its memory and the kernel argument.
fn output<R: Runtime>(client: &ComputeClient<R>, elements: usize, element_type: ElementType) -> (Handle, ArrayArg<R>) {
    let memory = client.empty(elements * element_type.size());
    // SAFETY: the memory has this many elements.
    let arg = unsafe { ArrayArg::from_raw_parts(memory.clone(), elements) };
    (memory, arg)
}

/// Shared memory of the kernels.
#[derive(CubeType)]
struct Shared {
    /// Weights of a tile, `[row, column]`.
    weights: SharedMemory<Quad>,
    /// Chunk of rows, `[element, row]`.
    rows: SharedMemory<Quad>,
    /// Chunk of columns, `[element, column]`, or `[column, element]`.
    cols: SharedMemory<Quad>,
}

#[cube]
fn new_shared() -> Shared {
    Shared {
        weights: SharedMemory::<Quad>::new(comptime!((TILE * PITCH) as usize)),
        rows: SharedMemory::<Quad>::new(comptime!((CHUNK * PITCH) as usize)),
        cols: SharedMemory::<Quad>::new(comptime!((CHUNK * PITCH) as usize)),
    }
}

#[cube(launch_unchecked)]
fn tile_forward<O: Float, N: Size>(
    q: &Array<Vector<u32, N>>,
    k: &Array<Vector<u32, N>>,
    v: &Array<Vector<u32, N>>,
    q_heads: HeadsGeometry,
    k_heads: HeadsGeometry,
    v_heads: HeadsGeometry,
    scores: &Scores,
    y: &mut Array<O>,
    lse: &mut Array<f32>,
    items: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= items {
        terminate!();
    }
    let (element_type, slices) = comptime!((scores.config.element_type, scores.config.slices[1]));
    let item = scores.item(number, scores.queries.div_ceil(TILE), false);
    let (batch, head) = (item.batch, item.head);
    let key_head = head / scores.group();
    let (at_q, at_k, at_v) = (q_heads.of(batch, head), k_heads.of(batch, key_head), v_heads.of(batch, key_head));
    let mut shared = new_shared();
    let mut maxima = SharedMemory::<f32>::new(TILE as usize);
    let mut factors = SharedMemory::<f32>::new(TILE as usize);
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    if UNIT_POS < TILE {
        maxima[UNIT_POS as usize] = NOTHING;
    }
    let mut sums = zeros(comptime!(4 * slices));
    // Sum of the weights of the unit's rows and columns.
    let mut totals = Quad::new(0.0f32);
    let end = scores.keys_end(item.row0 + TILE);
    let mut key0 = 0u32.runtime();
    while key0 < end {
        let class = scores.class(batch, head, item.row0, key0);
        if class != CLASS_HIDDEN {
            let mut tile = products(q, &at_q, item.row0, k, &at_k, key0, &mut shared, element_type, isa);
            #[unroll]
            for a in 0..4u32 {
                let query = item.row0 + 4 * i + a;
                let mut row = Quad::empty();
                #[unroll]
                for b in 0..4u32 {
                    let product = tile[a as usize][b as usize];
                    row[b as usize] = scores.score(product, &item, query, key0 + 4 * j + b, class).value;
                }
                tile[a as usize] = row;
                shared.weights[((4 * i + a) * PITCH + j) as usize] = row;
            }
            sync_cube();
            if UNIT_POS < TILE {
                let old = maxima[UNIT_POS as usize];
                let mut largest = Quad::new(old);
                for quad in 0..SIDE {
                    largest = max(largest, shared.weights[(UNIT_POS * PITCH + quad) as usize]);
                }
                let new = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
                maxima[UNIT_POS as usize] = new;
                factors[UNIT_POS as usize] = (old - new).exp();
            }
            sync_cube();
            #[unroll]
            for a in 0..4u32 {
                let row = 4 * i + a;
                let weights = (tile[a as usize] - Quad::new(maxima[row as usize])).exp();
                let factor = factors[row as usize];
                let sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
                totals[a as usize] = totals[a as usize] * factor + sum;
                #[unroll]
                for slice in 0..slices {
                    let place = comptime!((4 * slice + a) as usize);
                    sums[place] *= Quad::new(factor);
                }
                shared.weights[(row * PITCH + j) as usize] = weights;
            }
            accumulate(v, &at_v, key0, &mut shared, &mut sums, slices, element_type, isa);
        }
        key0 += TILE;
    }
    // The totals of all units of a row, in lane 0 of the weights.
    sync_cube();
    #[unroll]
    for a in 0..4u32 {
        shared.weights[((4 * i + a) * PITCH + j) as usize] = Quad::new(totals[a as usize]);
    }
    sync_cube();
    let mut inverse = Quad::empty();
    #[unroll]
    for a in 0..4u32 {
        let row = 4 * i + a;
        let mut total = 0.0f32.runtime();
        for unit in 0..SIDE {
            total += shared.weights[(row * PITCH + unit) as usize][0];
        }
        inverse[a as usize] = select(total == 0.0, 0.0f32, 1.0f32 / total);
        let query = item.row0 + row;
        if j == 0 && query < scores.queries {
            let sum = maxima[row as usize] + total.ln();
            let at = (batch * scores.heads + head) * scores.queries + query;
            lse[at as usize] = select(total == 0.0, HIDDEN, sum);
        }
    }
    // y is [B, T, H, e].
    let stride = scores.heads * at_v.cols;
    let first = batch * scores.queries * stride + head * at_v.cols;
    store::<O>(&sums, inverse, y, first, stride, item.row0, scores.queries, at_v.cols, slices);
}

#[cube(launch_unchecked)]
fn tile_query_gradient<O: Float, N: Size>(
    q: &Array<Vector<u32, N>>,
    k: &Array<Vector<u32, N>>,
    v: &Array<Vector<u32, N>>,
    dy: &Array<Vector<u32, N>>,
    q_heads: HeadsGeometry,
    k_heads: HeadsGeometry,
    v_heads: HeadsGeometry,
    dy_heads: HeadsGeometry,
    stats: &Array<f32>,
    scores: &Scores,
    dq: &mut Array<O>,
    items: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= items {
        terminate!();
    }
    let (element_type, slices) = comptime!((scores.config.element_type, scores.config.slices[0]));
    let item = scores.item(number, scores.queries.div_ceil(TILE), false);
    let (batch, head) = (item.batch, item.head);
    let key_head = head / scores.group();
    let (at_q, at_k, at_v) = (q_heads.of(batch, head), k_heads.of(batch, key_head), v_heads.of(batch, key_head));
    let at_dy = dy_heads.of(batch, head);
    let mut shared = new_shared();
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    let first_stat = (batch * scores.heads + head) * scores.queries;
    let of_rows = stats_of_four(stats, scores, first_stat, item.row0 + 4 * i);
    let (lse, delta) = (of_rows.lse, of_rows.delta);
    let mut sums = zeros(comptime!(4 * slices));
    let end = scores.keys_end(item.row0 + TILE);
    let mut key0 = 0u32.runtime();
    while key0 < end {
        let class = scores.class(batch, head, item.row0, key0);
        if class != CLASS_HIDDEN {
            let tile = products(q, &at_q, item.row0, k, &at_k, key0, &mut shared, element_type, isa);
            let slopes = products(dy, &at_dy, item.row0, v, &at_v, key0, &mut shared, element_type, isa);
            #[unroll]
            for a in 0..4u32 {
                let query = item.row0 + 4 * i + a;
                let mut row = Quad::empty();
                #[unroll]
                for b in 0..4u32 {
                    let score = scores.score(tile[a as usize][b as usize], &item, query, key0 + 4 * j + b, class);
                    let weight = (score.value - lse[a as usize]).exp();
                    row[b as usize] = weight * (slopes[a as usize][b as usize] - delta[a as usize]) * score.slope;
                }
                shared.weights[((4 * i + a) * PITCH + j) as usize] = row;
            }
            accumulate(k, &at_k, key0, &mut shared, &mut sums, slices, element_type, isa);
        }
        key0 += TILE;
    }
    store::<O>(
        &sums,
        Quad::new(scores.scale),
        dq,
        first_stat * at_q.cols,
        at_q.cols,
        item.row0,
        scores.queries,
        at_q.cols,
        slices,
    );
}

#[cube(launch_unchecked)]
fn tile_key_gradients<O: Float, N: Size>(
    q: &Array<Vector<u32, N>>,
    k: &Array<Vector<u32, N>>,
    v: &Array<Vector<u32, N>>,
    dy: &Array<Vector<u32, N>>,
    q_heads: HeadsGeometry,
    k_heads: HeadsGeometry,
    v_heads: HeadsGeometry,
    dy_heads: HeadsGeometry,
    stats: &Array<f32>,
    scores: &Scores,
    dk: &mut Array<O>,
    dv: &mut Array<O>,
    items: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= items {
        terminate!();
    }
    let element_type = comptime!(scores.config.element_type);
    let (of_k, of_v) = comptime!((scores.config.slices[0], scores.config.slices[1]));
    let item = scores.item(number, scores.keys.div_ceil(TILE), true);
    let (batch, key_head) = (item.batch, item.head);
    let (at_k, at_v) = (k_heads.of(batch, key_head), v_heads.of(batch, key_head));
    let mut shared = new_shared();
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    let mut dk_sums = zeros(comptime!(4 * of_k));
    let mut dv_sums = zeros(comptime!(4 * of_v));
    let group = scores.group();
    for member in 0..group {
        let head = key_head * group + member;
        let (at_q, at_dy) = (q_heads.of(batch, head), dy_heads.of(batch, head));
        let place = Item { row0: item.row0, head, batch };
        let first_stat = (batch * scores.heads + head) * scores.queries;
        let mut query0 = scores.first_query(item.row0);
        while query0 < scores.queries {
            let class = scores.class(batch, head, query0, item.row0);
            if class != CLASS_HIDDEN {
                let tile = products(k, &at_k, item.row0, q, &at_q, query0, &mut shared, element_type, isa);
                let mut slopes = products(v, &at_v, item.row0, dy, &at_dy, query0, &mut shared, element_type, isa);
                let of_cols = stats_of_four(stats, scores, first_stat, query0 + 4 * j);
                let (lse, delta) = (of_cols.lse, of_cols.delta);
                #[unroll]
                for a in 0..4u32 {
                    let key = item.row0 + 4 * i + a;
                    let (mut row, mut gradients) = (Quad::empty(), Quad::empty());
                    #[unroll]
                    for b in 0..4u32 {
                        let score = scores.score(tile[a as usize][b as usize], &place, query0 + 4 * j + b, key, class);
                        let weight = (score.value - lse[b as usize]).exp();
                        row[b as usize] = weight;
                        gradients[b as usize] =
                            weight * (slopes[a as usize][b as usize] - delta[b as usize]) * score.slope;
                    }
                    shared.weights[((4 * i + a) * PITCH + j) as usize] = row;
                    slopes[a as usize] = gradients;
                }
                accumulate(dy, &at_dy, query0, &mut shared, &mut dv_sums, of_v, element_type, isa);
                sync_cube();
                #[unroll]
                for a in 0..4u32 {
                    shared.weights[((4 * i + a) * PITCH + j) as usize] = slopes[a as usize];
                }
                accumulate(q, &at_q, query0, &mut shared, &mut dk_sums, of_k, element_type, isa);
            }
            query0 += TILE;
        }
    }
    let first = (batch * scores.kv_heads + key_head) * scores.keys;
    let (scale, one) = (Quad::new(scores.scale), Quad::new(1.0f32));
    store::<O>(&dk_sums, scale, dk, first * at_k.cols, at_k.cols, item.row0, scores.keys, at_k.cols, of_k);
    store::<O>(&dv_sums, one, dv, first * at_v.cols, at_v.cols, item.row0, scores.keys, at_v.cols, of_v);
}

/// Statistics of four queries.
#[derive(CubeType)]
struct Stats {
    lse: Quad,
    delta: Quad,
}

/// Statistics of the four queries from `query` on. Past the last, weights are 0.
#[cube]
fn stats_of_four(stats: &Array<f32>, scores: &Scores, first: u32, query: u32) -> Stats {
    let (mut lse, mut delta) = (Quad::empty(), Quad::empty());
    let rows = stats.len() as u32 / 2;
    #[unroll]
    for i in 0..4u32 {
        let at = first + min(query + i, scores.queries - 1);
        lse[i as usize] = select(query + i < scores.queries, stats[at as usize], -HIDDEN);
        delta[i as usize] = stats[(rows + at) as usize];
    }
    Stats { lse, delta }
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
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) -> Array<Quad> {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    let units = comptime!(SIDE * CHUNK / element_type.vector_len());
    let mut sums = zeros(4u32);
    let mut first = 0u32.runtime();
    while first < at_rows.cols {
        sync_cube();
        if UNIT_POS < units {
            load_transposed(rows, at_rows, row0, first, UNIT_POS, &mut shared.rows, element_type, isa);
        } else if UNIT_POS < 2 * units {
            load_transposed(cols, at_cols, col0, first, UNIT_POS - units, &mut shared.cols, element_type, isa);
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
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
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
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
    let (i, j) = (UNIT_POS / SIDE, UNIT_POS % SIDE);
    #[unroll]
    for slice in 0..slices {
        for chunk in 0..comptime!(TILE / CHUNK) {
            sync_cube();
            load_rows(x, at, row0 + chunk * CHUNK, comptime!(slice * TILE), &mut shared.cols, element_type, isa);
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

/// Stores [`CHUNK`] rows of x from `row0` on, and [`TILE`] columns from `col0` on. Zeros past the end.
#[cube]
fn load_rows<N: Size>(
    x: &Array<Vector<u32, N>>,
    at: &Geometry,
    row0: u32,
    #[comptime] col0: u32,
    to: &mut SharedMemory<Quad>,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
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
    first: u32,
    stride: u32,
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
                    out[(first + row * stride + col) as usize] = O::cast_from(value);
                }
            }
        }
    }
}
