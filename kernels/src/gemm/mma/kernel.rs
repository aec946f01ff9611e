//! The kernel. A step's rows have 64 bytes each in shared memory. Their 16-byte chunks are
//! swizzled, so that the eight rows that `ldmatrix` reads at a time are in different banks:
//!
//! ```text
//! place of chunk c of row r = 64 r + 16 (c xor (r / 2 mod 4))
//! ```

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::scales::{Corner, Scales, sum_factor};
use super::{MmaConfig, MmaTile};
use crate::gemm::problem::Problem;
use crate::gemm::schedule::Work;
use crate::granularity::BLOCK;
use crate::ptx::mma::{MmaKind, Product, commit_copies, copy_chunk, load_matrices, mma_fp8, wait_copies};
use crate::ptx::shared::shared_address;
use crate::version::Version;

/// Contraction words of a step.
const STEP_WORDS: u32 = 16;

/// Bytes of a row in shared memory.
const ROW_BYTES: u32 = 4 * STEP_WORDS;

/// Products along the contraction in a step.
const STEP_PRODUCTS: u32 = 2;

/// Steps between promotions.
const BLOCK_STEPS: u32 = BLOCK as u32 / ROW_BYTES;

#[cube(launch_unchecked)]
pub(super) fn gemm_mma<O: Float, W: Size>(
    a: &Array<u32>,
    b: &Array<u32>,
    problem: &Problem,
    out: &mut Array<Vector<O, W>>,
    #[comptime] config: MmaConfig,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let tile = comptime!(config.tile);
    let products_m = comptime!(tile.products()[0]);
    let products_n = comptime!(tile.products()[1]);
    let stage = comptime!((tile.size[0] + tile.size[1]) * ROW_BYTES);
    let stages = comptime!(tile.stages);
    let work = problem.work(CUBE_POS as u32, tile.size);
    let (row0, col0) = (work.row0, work.col0);
    if comptime!(problem.grouping.is_some()) {
        if row0 >= work.row_end {
            terminate!();
        }
    }
    // First row of B for the tile's columns, and the end of this matrix's rows.
    let first_b = work.row0_b + col0;
    let rows_b = work.row0_b + problem.n;
    let first_block = work.k_begin / comptime!(BLOCK as u32);
    // An empty last group may start past the last block.
    let loaded_block = min(first_block, problem.blocks - 1);
    let end_block = min(work.k_end.div_ceil(comptime!(BLOCK as u32)), problem.blocks);
    let mut ring = SharedMemory::<u32>::new_aligned(comptime!((stages * stage / 4) as usize), 128usize);
    // Never true. It makes CubeCL allocate the memory, which otherwise only raw statements use.
    if problem.words == 0 {
        ring[0] = 0u32;
    }
    let start = shared_address(&ring);
    let end = start + comptime!(stages * stage);

    // Destination and source of this thread's copies.
    let local_row = UNIT_POS / 4;
    let chunk = UNIT_POS % 4;
    let place = local_row * ROW_BYTES + (chunk ^ (local_row / 2 % 4)) * 16;
    let copied = Corner { row: row0 + local_row, rows: work.row_end, col: first_b + local_row, cols: rows_b };
    // Address offsets of this thread's fragments.
    let lane = UNIT_POS % 32;
    let warp_row = UNIT_POS / 32 % comptime!(tile.warps[0]) * (16 * products_m);
    let warp_col = UNIT_POS / 32 / comptime!(tile.warps[0]) * (8 * products_n);
    let swizzle = lane / 2 % 4;
    let from_a = (warp_row + lane % 16) * ROW_BYTES + ((lane / 16) ^ swizzle) * 16;
    let from_b =
        (comptime!(tile.size[0]) + warp_col + lane % 8 + lane / 16 * 8) * ROW_BYTES + ((lane / 8 % 2) ^ swizzle) * 16;

    let mut sums = Array::<f32>::new(comptime!((4 * products_m * products_n) as usize));
    let mut totals = Array::<f32>::new(comptime!((4 * products_m * products_n) as usize));
    #[unroll]
    for i in 0..comptime!(4 * products_m * products_n) {
        sums[i as usize] = 0.0f32;
        totals[i as usize] = 0.0f32;
    }

    let mut word = work.k_begin / 4 + chunk * 4;
    let mut write = start;
    #[unroll]
    for _ in 0..comptime!(stages - 1) {
        load_step(a, b, write + place, &copied, word, problem.words, tile);
        write += stage;
        word += STEP_WORDS;
    }
    let mut read = start;
    // First row and column of this thread in the products.
    let row = row0 + warp_row + lane / 4;
    let col = col0 + warp_col + lane % 4 * 2;
    let col_b = work.row0_b + col;
    let mut scales_a = Scales::new(config, 0usize);
    let mut scales_b = Scales::new(config, 1usize);
    let given = lane % 4 * 8 + lane / 4;
    let summed = Corner { row, rows: work.row_end, col: col_b, cols: rows_b };
    let given = if comptime!(config.kind == MmaKind::BlockScaled) {
        Corner { row: row0 + warp_row + given, rows: work.row_end, col: first_b + warp_col + given, cols: rows_b }
    } else {
        summed
    };
    if comptime!(config.loads_ahead()) {
        scales_a.load_words(problem, &given, loaded_block, config);
        scales_b.load_words(problem, &given, loaded_block, config);
    }
    let mut block = first_block;
    while block < end_block {
        if comptime!(!config.loads_ahead()) {
            scales_a.load_words(problem, &given, block, config);
            scales_b.load_words(problem, &given, block, config);
        }
        scales_a.use_words(problem, config);
        scales_b.use_words(problem, config);
        if comptime!(config.loads_ahead()) {
            let next = min(block + 1, problem.blocks - 1);
            scales_a.load_words(problem, &given, next, config);
            scales_b.load_words(problem, &given, next, config);
        }
        if comptime!(config.by_block) {
            scales_a.load_factors(problem, &summed, block, config);
            scales_b.load_factors(problem, &summed, block, config);
        }
        #[unroll]
        for step in 0..BLOCK_STEPS {
            // Waits for all but the newest copies of this thread, and by the barrier of all
            // threads. All threads have then also finished with the stage that is written next.
            wait_copies(comptime!(stages - 2));
            sync_cube();
            load_step(a, b, write + place, &copied, word, problem.words, tile);
            word += STEP_WORDS;
            write += stage;
            write = select(write == end, start, write);
            let (from_a, from_b) = (read + from_a, read + from_b);
            multiply(&mut sums, &mut totals, &scales_a, &scales_b, problem, from_a, from_b, config, step);
            read += stage;
            read = select(read == end, start, read);
        }
        if comptime!(config.promotes() && !config.by_product) {
            #[unroll]
            for i in 0..comptime!(4 * products_m * products_n) {
                let sum = sums[i as usize];
                if comptime!(config.by_block) {
                    totals[i as usize] =
                        fma(sum, sum_factor(&scales_a, &scales_b, problem, i, config), totals[i as usize]);
                } else {
                    totals[i as usize] += sum;
                }
            }
        }
        block += 1;
    }
    // No copies may be in flight when the block ends.
    wait_copies(0u32);
    scales_a.load_factors(problem, &summed, 0u32.runtime(), config);
    scales_b.load_factors(problem, &summed, 0u32.runtime(), config);
    let mut shifts = Array::<f32>::new(comptime!(config.line_count(1) as usize));
    #[unroll]
    for line in 0..comptime!(config.line_count(1)) {
        let col = col + comptime!(config.sum_lines(1).offset(line));
        shifts[line as usize] = problem.bias.at(min(col, problem.n - 1));
    }
    #[unroll]
    for i in 0..comptime!(4 * products_m * products_n) {
        let place = i as usize;
        let sum = if comptime!(config.promotes()) { totals[place] } else { sums[place] };
        let scale = sum_factor(&scales_a, &scales_b, problem, i, config);
        let shift = shifts[comptime!(config.lines_of(i)[1] as usize)];
        totals[place] = problem.finish(sum, scale, shift, first_block < end_block);
    }
    store(&totals, problem, out, row, col, &work, config);
}

/// Starts this thread's copies of one step of both operands into a stage, and commits them as a
/// group.
#[cube]
fn load_step(a: &Array<u32>, b: &Array<u32>, to: u32, from: &Corner, word: u32, words: u32, #[comptime] tile: MmaTile) {
    let pass = comptime!(tile.threads() / 4);
    #[unroll]
    for i in 0..comptime!(tile.size[0] / pass) {
        let row = from.row + i * pass;
        let bytes = select(row < from.rows && word < words, 16u32, 0u32.runtime());
        copy_chunk(to + comptime!(i * pass * ROW_BYTES), a, row * words + word, bytes);
    }
    #[unroll]
    for i in 0..comptime!(tile.size[1] / pass) {
        let row = from.col + i * pass;
        let bytes = select(row < from.cols && word < words, 16u32, 0u32.runtime());
        copy_chunk(to + comptime!((tile.size[0] + i * pass) * ROW_BYTES), b, row * words + word, bytes);
    }
    commit_copies();
}

/// Adds the products of step `step` of a block to `sums`. If the products have scales that the
/// instruction does not apply, adds each one to `totals`.
#[cube]
fn multiply(
    sums: &mut Array<f32>,
    totals: &mut Array<f32>,
    scales_a: &Scales,
    scales_b: &Scales,
    problem: &Problem,
    from_a: u32,
    from_b: u32,
    #[comptime] config: MmaConfig,
    #[comptime] step: u32,
) {
    let products_m = comptime!(config.tile.products()[0]);
    let products_n = comptime!(config.tile.products()[1]);
    #[unroll]
    for k in 0..STEP_PRODUCTS {
        let byte = comptime!(STEP_PRODUCTS * step + k);
        let mut codes_a = Array::<u32>::new(comptime!((4 * products_m) as usize));
        let mut codes_b = Array::<u32>::new(comptime!((2 * products_n) as usize));
        // Overwritten later. Makes CubeCL declare the arrays, which otherwise only raw statements
        // use.
        codes_a[0] = 0u32;
        codes_b[0] = 0u32;
        // Two chunks further flips the other bit of the swizzle.
        #[unroll]
        for i in 0..products_m {
            load_matrices(&mut codes_a, comptime!(4 * i), (from_a ^ comptime!(32 * k)) + comptime!(16 * ROW_BYTES * i));
        }
        #[unroll]
        for j in 0..comptime!(products_n / 2) {
            load_matrices(&mut codes_b, comptime!(4 * j), (from_b ^ comptime!(32 * k)) + comptime!(16 * ROW_BYTES * j));
        }
        #[unroll]
        for i in 0..products_m {
            #[unroll]
            for j in 0..products_n {
                let product = comptime!(Product {
                    places: [4 * (i * products_n + j), 4 * i, 2 * j],
                    formats: config.formats,
                    scales: config.scale_sources(problem.granularities, [i, j], byte),
                    fresh: config.by_product || (config.promotes() && byte == 0),
                });
                mma_fp8(sums, &codes_a, &codes_b, &scales_a.words, &scales_b.words, product);
            }
        }
        if comptime!(config.by_product) {
            let factors_a = scales_a.of_product(byte, config);
            let factors_b = scales_b.of_product(byte, config);
            #[unroll]
            for i in 0..comptime!(4 * products_m * products_n) {
                let [row, col] = comptime!(config.lines_of(i));
                let sum = sums[i as usize] * factors_a[row as usize];
                totals[i as usize] = fma(sum, factors_b[col as usize], totals[i as usize]);
            }
        }
    }
}

/// Writes this thread's finished sums, in pairs of columns if `W` is two.
#[cube]
fn store<O: Float, W: Size>(
    totals: &Array<f32>,
    problem: &Problem,
    out: &mut Array<Vector<O, W>>,
    row: u32,
    col: u32,
    work: &Work,
    #[comptime] config: MmaConfig,
) {
    let products_m = comptime!(config.tile.products()[0]);
    let products_n = comptime!(config.tile.products()[1]);
    let width = W::value();
    let width = comptime!(width as u32);
    #[unroll]
    for j in 0..comptime!(products_n * 2 / width) {
        let col = col + comptime!(j * width / 2 * 8 + j * width % 2);
        if col < problem.n {
            #[unroll]
            for i in 0..comptime!(2 * products_m) {
                let row = row + comptime!(8 * i);
                if row >= work.row_begin && row < work.row_end {
                    let index = ((work.out0 + row * problem.n + col) / width) as usize;
                    let mut values = Vector::<O, W>::empty();
                    #[unroll]
                    for w in 0..width {
                        let place =
                            comptime!(4 * (i / 2 * products_n + j * width / 2) + 2 * (i % 2) + (j * width + w) % 2);
                        values[w as usize] = O::cast_from(totals[place as usize]);
                    }
                    out[index] = values;
                }
            }
        }
    }
}
