//! Attention by tensor cores (`mma.sync`): f16 and bf16 on CUDA devices from sm_80 on.
//!
//! The operands of a cube's rows stay in shared memory. Those of columns are copied one step ahead
//! into two stages (`cp.async`). A tile has rows of 128 bytes, one per position and slice of 64
//! elements, and 16-byte piece `p` of row `r` is at `p xor (r mod 8)`, so that the rows that
//! `ldmatrix` reads at a time are in different banks.
//!
//! A warp has whole rows of scores. Their accumulators are, rounded to 16 bits, the fragments of the
//! second product, whose other operand is the tile of columns that is in shared memory already,
//! transposed by `ldmatrix`. Weights and slopes never leave registers.
//!
//! ```text
//! lane l of a warp: rows g, g + 8 (, g + 16, g + 24), columns 2t, 2t + 1, 2t + 8, ...
//! with g = l / 4 and t = l mod 4
//! ```

use cubecl::prelude::*;

use super::launch::{Launch, Operands, Place, Role, Sides, Stat};
use super::problem::{CLASS_HIDDEN, Config, Item, Scores, Span};
use super::{Checked, HIDDEN, NOTHING, TILE};
use crate::element_type::ElementType;
use crate::grid::fold;
use crate::load::Geometry;
use crate::ptx::cvt::exp2_approx;
use crate::ptx::mma::{commit_copies, copy_chunk, load_matrices, load_matrices_transposed, mma_half, wait_copies};
use crate::ptx::shared::shared_address;
use crate::ptx::wgmma::pack_half;
use crate::version::Version;

/// Bytes of a row of a slice.
const ROW: u32 = 2 * TILE;

/// Most f32 sums that a lane holds. Scores, slopes and fragments need the other registers.
const SUMS: u32 = 128;

const LOG2E: f32 = core::f32::consts::LOG2_E;

/// Operation on the lanes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fold {
    Max,
    Sum,
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    role: Role,
    bf16: bool,
    /// Slices of the operands of S, and of the other two.
    slices: [u32; 2],
    warps: u32,
    /// Products of 16 rows that a warp makes: 1 or 2.
    products: u32,
    /// Columns of a step.
    cols: u32,
}

impl Plan {
    /// Largest tile that fits. Two cubes share an SM if a warp has 32 rows. Then a fragment of
    /// columns serves two products.
    fn of(role: Role, config: Config, shared: usize) -> Option<Self> {
        let plan = |products, warps, cols| {
            let bf16 = config.element_type == ElementType::Bf16;
            Self { role, bf16, slices: config.slices, warps, products, cols }
        };
        let cols = if role == Role::Forward { 64 } else { 32 };
        let plans = [plan(2, 4, cols), plan(1, 8, cols), plan(1, 8, 32), plan(1, 4, 32), plan(1, 4, 16)];
        plans.into_iter().find(|plan| {
            plan.products * plan.sums() <= SUMS && plan.products as usize * plan.shared_bytes() <= shared
        })
    }

    const fn rows(self) -> u32 {
        16 * self.products * self.warps
    }

    /// f32 sums of a lane per product of 16 rows.
    const fn sums(self) -> u32 {
        let [slices, second] = self.slices;
        let columns = if self.role.sums_slopes() { slices } else { 0 } + if self.role.sums_weights() { second } else { 0 };
        columns * TILE / 2
    }

    /// Bytes of the first operand of rows, and of both.
    const fn row_bytes(self) -> [u32; 2] {
        let [slices, second] = self.slices;
        let second = if self.role.sums_slopes() { second } else { 0 };
        [self.rows() * ROW * slices, self.rows() * ROW * (slices + second)]
    }

    /// Bytes of the columns of a step.
    const fn stage(self) -> u32 {
        self.cols * ROW * (self.slices[0] + self.slices[1])
    }

    /// Rows of a lane.
    const fn lane_rows(self) -> u32 {
        2 * self.products
    }

    /// Scores of a lane in a step.
    const fn scores(self) -> u32 {
        self.products * self.cols / 2
    }

    /// Offset of a lane's score from its first one: rows and columns.
    const fn place(self, i: u32) -> [u32; 2] {
        let tiles = self.cols / 8;
        [i / (4 * tiles) * 16 + i / 2 % 2 * 8, i / 4 % tiles * 8 + i % 2]
    }

    /// Whether each column, or each row, of a lane has statistics.
    fn has_stats(self, of_cols: bool) -> bool {
        self.role != Role::Forward && self.role.rows_are_keys() == of_cols
    }

    /// Index of the statistics of a lane's score.
    const fn stat(self, i: u32) -> usize {
        let [row, col] = self.place(i);
        (if self.role.rows_are_keys() { col / 8 * 2 + col % 2 } else { row / 8 }) as usize
    }

    const fn shared_bytes(self) -> usize {
        (self.row_bytes()[1] + 2 * self.stage()) as usize
    }
}

/// Whether a launch may make dk and dv. Otherwise the sums of both take too many registers.
pub(super) fn fits_both(config: Config) -> bool {
    config.slices.iter().sum::<u32>() * TILE / 2 <= SUMS
}

/// Whether the kernel takes the problem. Every device with `mma.sync` of bf16 has the shared memory
/// that the widest heads need.
pub(super) fn takes(config: Config) -> bool {
    config.element_type != ElementType::F32 && config.words > 1
}

/// Launches the kernel.
///
/// # Panics
/// If a tile does not fit.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, launch: &Launch<'_>) {
    let Launch { problem: Checked { config, .. }, role, rows, cols, .. } = launch;
    let shared = client.properties().hardware.max_shared_memory_size;
    let plan = Plan::of(*role, *config, shared).expect("the device supports it");
    // SAFETY: the inputs are checked. Copies and stores are guarded by the numbers of positions and
    // the widths of heads.
    unsafe {
        attention_mma::launch_unchecked::<R>(
            client,
            fold(client, launch.items(plan.rows())),
            CubeDim::new_1d(32 * plan.warps),
            rows[0].array(),
            role.sums_slopes().then(|| rows[1].array()).into(),
            cols[0].array(),
            cols[1].array(),
            launch.operands(plan.rows()),
            launch.scores(),
            launch.result(0, size_of::<u32>()),
            launch.result(1, size_of::<u32>()),
            launch.result(2, size_of::<f32>()),
            plan,
            Version::of(client),
        );
    }
}

#[cube(launch_unchecked)]
fn attention_mma(
    rows: &Array<u32>,
    second_rows: &ComptimeOption<Array<u32>>,
    cols: &Array<u32>,
    second_cols: &Array<u32>,
    operands: &Operands,
    scores: &Scores,
    of_weights: &mut ComptimeOption<Array<u32>>,
    of_slopes: &mut ComptimeOption<Array<u32>>,
    lse: &mut ComptimeOption<Array<f32>>,
    #[comptime] plan: Plan,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= operands.items {
        terminate!();
    }
    let of_keys = comptime!(plan.role.rows_are_keys());
    let (slices, second_slices) = comptime!((plan.slices[0], plan.slices[1]));
    let item = scores.item(number, comptime!(plan.rows()), of_keys);
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
    let (count, second_count) = comptime!((plan.products * slices * TILE / 2, plan.products * second_slices * TILE / 2));
    let mut weighted = zeros(comptime!(if plan.role.sums_weights() { second_count } else { 1 }));
    let mut sloped = zeros(comptime!(if plan.role.sums_slopes() { count } else { 1 }));
    let mut softmax = Softmax { maxima: zeros(comptime!(plan.lane_rows())), totals: zeros(comptime!(plan.lane_rows())) };
    #[unroll]
    for r in 0..comptime!(plan.lane_rows()) {
        softmax.maxima[r as usize] = NOTHING;
    }
    let span = scores.span(item.row0, comptime!(plan.rows()), of_keys);
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
            // This thread's copies, and by the barrier those of all threads. All have then also
            // finished with the other stage.
            wait_copies(0u32);
            sync_cube();
            let first = stages + stage * comptime!(plan.stage());
            let second = first + comptime!(plan.cols * ROW * slices);
            stage = 1u32 - stage;
            if next < span.end {
                copy_cols(cols, second_cols, &at_cols, stages + stage * comptime!(plan.stage()), next, plan);
            }
            let step = Step { col0, class: scores.class(&place, col0, comptime!(plan.rows()), of_keys) };
            let mut weights = products(start, first, &lanes, slices, plan);
            let mut slopes = products(
                second_start,
                second,
                &lanes,
                comptime!(if plan.role.sums_slopes() { second_slices } else { 0 }),
                plan,
            );
            let stats = if comptime!(of_keys) { &col_stats } else { &row_stats };
            lanes.score(&mut weights, &mut slopes, stats, scores, &place, &step, plan);
            if comptime!(plan.role == Role::Forward) {
                softmax.weigh(&mut weights, &mut weighted, plan);
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
    let mut factors = Array::<f32>::new(comptime!(plan.lane_rows() as usize));
    #[unroll]
    for r in 0..comptime!(plan.lane_rows()) {
        factors[r as usize] = 1.0f32;
        #[comptime]
        if let ComptimeOption::Some(lse) = &mut *lse {
            let (largest, total) = (softmax.maxima[r as usize], over_row(softmax.totals[r as usize], Fold::Sum));
            factors[r as usize] = select(total == 0.0, 0.0f32, 1.0f32 / total);
            let query = lanes.row + 8 * r;
            if lanes.col == 0 && query < scores.queries {
                let at = (item.batch * scores.heads + item.head) * scores.queries + query;
                lse[at as usize] = select(total == 0.0, HIDDEN, largest + total.ln());
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_weights {
        let width = operands.second_cols.width();
        let place = Place::of(&item, scores, width, comptime!(plan.role));
        store(&weighted, &factors, out, &place, &lanes, at_rows.first.rows, width, second_slices, plan);
    }
    #[comptime]
    if let ComptimeOption::Some(out) = of_slopes {
        #[unroll]
        for r in 0..comptime!(plan.lane_rows()) {
            factors[r as usize] = scores.scale;
        }
        let width = operands.cols.width();
        let place = Place::of(&item, scores, width, comptime!(plan.role));
        store(&sloped, &factors, out, &place, &lanes, at_rows.first.rows, width, slices, plan);
    }
}

/// `count` zeros.
#[cube]
fn zeros(#[comptime] count: u32) -> Array<f32> {
    let mut zeros = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        zeros[i as usize] = 0.0f32;
    }
    zeros
}

/// First column of a step from `col` on that is not hidden for all rows, or one past the end.
#[cube]
fn visible(scores: &Scores, place: &Item, col: u32, span: &Span, #[comptime] plan: Plan) -> u32 {
    let mut first = col;
    if comptime!(scores.config.has_classes()) {
        let (rows, of_keys) = comptime!((plan.rows(), plan.role.rows_are_keys()));
        let mut searches = first < span.end;
        while searches {
            searches = scores.class(place, first, rows, of_keys) == CLASS_HIDDEN;
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
    #[comptime] plan: Plan,
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
            copy_chunk(to + comptime!((slice * rows + pass * step) * ROW), x, at.index(row, col) / 2, bytes);
        }
    }
}

/// Starts this thread's copies of both operands of the columns of a step, as a group.
#[cube]
fn copy_cols(first: &Array<u32>, second: &Array<u32>, at: &Sides, to: u32, col0: u32, #[comptime] plan: Plan) {
    let [slices, second_slices] = comptime!(plan.slices);
    copy_tile(first, &at.first, to, col0, comptime!(plan.cols), slices, plan);
    let to = to + comptime!(plan.cols * ROW * slices);
    copy_tile(second, &at.second, to, col0, comptime!(plan.cols), second_slices, plan);
    commit_copies();
}

/// Place of a lane.
#[derive(CubeType, Clone, Copy)]
struct Lanes {
    /// First row of the warp.
    warp_row: u32,
    /// First row and column of the lane's scores.
    row: u32,
    col: u32,
    /// Byte offset of the warp's rows.
    warp: u32,
    /// Byte offset of the lane's row of fragments: 16 rows by two pieces, lanes down the rows.
    down: u32,
    /// The same, with lanes of eight rows across both pieces.
    across: u32,
}

/// Columns of a step.
#[derive(CubeType, Clone, Copy)]
struct Step {
    col0: u32,
    class: u32,
}

#[cube]
impl Lanes {
    fn new(row0: u32, #[comptime] plan: Plan) -> Lanes {
        let (lane, warp) = (UNIT_POS % 32, UNIT_POS / 32 * comptime!(16 * plan.products));
        let swizzle = lane % 8;
        Lanes {
            warp_row: row0 + warp,
            row: row0 + warp + lane / 4,
            col: lane % 4 * 2,
            warp: warp * ROW,
            down: lane % 16 * ROW + ((lane / 16) ^ swizzle) * 16,
            across: (lane % 8 + lane / 16 * 8) * ROW + ((lane / 8 % 2) ^ swizzle) * 16,
        }
    }

    /// Statistics of the queries of the lane's scores, or none. lse in bits.
    fn stats(
        &self,
        operands: &Operands,
        scores: &Scores,
        place: &Item,
        col0: u32,
        #[comptime] wanted: bool,
        #[comptime] plan: Plan,
    ) -> Sequence<Stat> {
        let mut stats = Sequence::<Stat>::new();
        if comptime!(wanted) {
            #[unroll]
            for i in 0..comptime!(if plan.role.rows_are_keys() { plan.cols / 4 } else { plan.lane_rows() }) {
                let query = if comptime!(plan.role.rows_are_keys()) {
                    col0 + self.col + comptime!(i / 2 * 8 + i % 2)
                } else {
                    self.row + comptime!(8 * i)
                };
                let stat = operands.stat(scores, place, query);
                stats.push(Stat { lse: stat.lse * LOG2E, delta: stat.delta });
            }
        }
        stats
    }

    /// Replaces products by scores, and for backward by weights, and the products of dy by slopes.
    fn score(
        &self,
        weights: &mut Array<f32>,
        slopes: &mut Array<f32>,
        stats: &Sequence<Stat>,
        scores: &Scores,
        place: &Item,
        step: &Step,
        #[comptime] plan: Plan,
    ) {
        let of_keys = comptime!(plan.role.rows_are_keys());
        let (row, col) = (self.row, step.col0 + self.col);
        #[unroll]
        for i in 0..comptime!(plan.scores()) {
            let [down, across] = comptime!(plan.place(i));
            let (query, key) =
                if comptime!(of_keys) { (col + across, row + down) } else { (row + down, col + across) };
            let score = scores.score(weights[i as usize], place, query, key);
            weights[i as usize] = score.value;
            if comptime!(plan.role.sums_slopes()) {
                let delta = stats.index(comptime!(plan.stat(i))).delta;
                slopes[i as usize] = (slopes[i as usize] - delta) * score.slope;
            }
        }
        let (rows_end, cols_end) =
            (self.warp_row + comptime!(16 * plan.products - 1), step.col0 + comptime!(plan.cols - 1));
        let (query, last) =
            if comptime!(of_keys) { (step.col0, rows_end) } else { (self.warp_row, cols_end) };
        if scores.is_partial(query, last, step.class) {
            #[unroll]
            for i in 0..comptime!(plan.scores()) {
                let [down, across] = comptime!(plan.place(i));
                let (query, key) =
                    if comptime!(of_keys) { (col + across, row + down) } else { (row + down, col + across) };
                let hidden = scores.is_hidden(place, query, key, step.class);
                weights[i as usize] = select(hidden, HIDDEN, weights[i as usize]);
            }
        }
        if comptime!(plan.role != Role::Forward) {
            #[unroll]
            for i in 0..comptime!(plan.scores()) {
                let lse = stats.index(comptime!(plan.stat(i))).lse;
                let weight = exp2_approx(fma(weights[i as usize], LOG2E, -lse));
                weights[i as usize] = weight;
                if comptime!(plan.role.sums_slopes()) {
                    slopes[i as usize] *= weight;
                }
            }
        }
    }
}

/// Largest score, and sum of the weights of the lane's columns, of each of the lane's rows.
#[derive(CubeType)]
struct Softmax {
    maxima: Array<f32>,
    totals: Array<f32>,
}

#[cube]
impl Softmax {
    /// Replaces scores by the weights of forward, with the largest score of each row so far as
    /// maximum. Multiplies the sums by the factors of new maxima.
    fn weigh(&mut self, weights: &mut Array<f32>, sums: &mut Array<f32>, #[comptime] plan: Plan) {
        let (tiles, sum_tiles) = comptime!((plan.cols / 8, plan.slices[1] * TILE / 8));
        #[unroll]
        for r in 0..comptime!(plan.lane_rows()) {
            let (first, first_sum) =
                comptime!((4 * tiles * (r / 2) + 2 * (r % 2), 4 * sum_tiles * (r / 2) + 2 * (r % 2)));
            let old = self.maxima[r as usize];
            let mut largest = old;
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                largest = max(largest, weights[comptime!((first + i / 2 * 4 + i % 2) as usize)]);
            }
            let largest = over_row(largest, Fold::Max);
            self.maxima[r as usize] = largest;
            let factor = exp2_approx((old - largest) * LOG2E);
            let shift = -largest * LOG2E;
            let mut total = self.totals[r as usize] * factor;
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                let at = comptime!((first + i / 2 * 4 + i % 2) as usize);
                let weight = exp2_approx(fma(weights[at], LOG2E, shift));
                total += weight;
                weights[at] = weight;
            }
            self.totals[r as usize] = total;
            #[unroll]
            for i in 0..comptime!(2 * sum_tiles) {
                sums[comptime!((first_sum + i / 2 * 4 + i % 2) as usize)] *= factor;
            }
        }
    }
}

/// Maximum or sum of a value over the four lanes of a row, in each of them.
#[cube]
fn over_row(value: f32, #[comptime] fold: Fold) -> f32 {
    let mut result = value;
    #[unroll]
    for lanes in 0..2u32 {
        let other = plane_shuffle_xor(result, comptime!(1u32 << lanes));
        result = if comptime!(fold == Fold::Max) { max(result, other) } else { result + other };
    }
    result
}

/// Products of the warp's rows and of columns, both in shared memory.
#[cube]
fn products(rows: u32, cols: u32, lanes: &Lanes, #[comptime] slices: u32, #[comptime] plan: Plan) -> Array<f32> {
    let mut sums = zeros(comptime!(if slices > 0 { plan.scores() } else { 1 }));
    let (rows, cols) = (rows + lanes.warp + lanes.down, cols + lanes.across);
    let tiles = comptime!(plan.cols / 8);
    #[unroll]
    for k in 0..comptime!(4 * slices) {
        let (mut a, mut b) = fragments(plan);
        // Two pieces further flips other bits of the swizzle.
        let (slice, piece) = comptime!((k / 4, 32 * (k % 4)));
        #[unroll]
        for i in 0..comptime!(plan.products) {
            let at = comptime!((slice * plan.rows() + 16 * i) * ROW);
            load_matrices(&mut a, comptime!(4 * i), (rows ^ piece) + at);
        }
        #[unroll]
        for j in 0..comptime!(tiles / 2) {
            let at = comptime!((slice * plan.cols + 16 * j) * ROW);
            load_matrices(&mut b, 0u32, (cols ^ piece) + at);
            multiply(&mut sums, &a, &b, comptime!(2 * j), tiles, plan);
        }
    }
    sums
}

/// Adds weights, rounded, times columns in shared memory to `sums`.
#[cube]
fn accumulate(
    weights: &Array<f32>,
    cols: u32,
    lanes: &Lanes,
    sums: &mut Array<f32>,
    #[comptime] slices: u32,
    #[comptime] plan: Plan,
) {
    let cols = cols + lanes.down;
    #[unroll]
    for k in 0..comptime!(plan.cols / 16) {
        let (mut a, mut b) = fragments(plan);
        #[unroll]
        for i in 0..comptime!(4 * plan.products) {
            let tile = comptime!(i / 4 * (plan.cols / 8) + 2 * k + i % 4 / 2);
            let at = comptime!((4 * tile + 2 * (i % 2)) as usize);
            a[i as usize] = pack_half(weights[at], weights[comptime!(at + 1)], comptime!(plan.bf16));
        }
        #[unroll]
        for j in 0..comptime!(4 * slices) {
            let (slice, piece) = comptime!((j / 4, 32 * (j % 4)));
            let at = comptime!((slice * plan.cols + 16 * k) * ROW);
            load_matrices_transposed(&mut b, 0u32, (cols ^ piece) + at);
            multiply(sums, &a, &b, comptime!(2 * j), comptime!(8 * slices), plan);
        }
    }
}

/// Fragments of the warp's rows, and of two products' columns.
#[cube]
fn fragments(#[comptime] plan: Plan) -> (Array<u32>, Array<u32>) {
    let mut a = Array::<u32>::new(comptime!((4 * plan.products) as usize));
    let mut b = Array::<u32>::new(4usize);
    // Overwritten later. Makes CubeCL declare the arrays, which otherwise only raw statements use.
    a[0] = 0u32;
    b[0] = 0u32;
    (a, b)
}

/// Adds the products of all rows and of columns `tile` and `tile + 1` of `tiles`.
#[cube]
fn multiply(
    sums: &mut Array<f32>,
    a: &Array<u32>,
    b: &Array<u32>,
    #[comptime] tile: u32,
    #[comptime] tiles: u32,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for half in 0..2u32 {
        #[unroll]
        for i in 0..comptime!(plan.products) {
            mma_half(sums, a, b, comptime!([4 * (i * tiles + tile + half), 4 * i, 2 * half]), comptime!(plan.bf16));
        }
    }
}

/// Stores the lane's sums, each row times its factor.
#[cube]
fn store(
    sums: &Array<f32>,
    factors: &Array<f32>,
    out: &mut Array<u32>,
    place: &Place,
    lanes: &Lanes,
    rows: u32,
    width: u32,
    #[comptime] slices: u32,
    #[comptime] plan: Plan,
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
                    let pair = pack_half(sums[at] * factor, sums[comptime!(at + 1)] * factor, comptime!(plan.bf16));
                    out[((first + comptime!(8 * j)) / 2) as usize] = pair;
                }
            }
        }
    }
}
