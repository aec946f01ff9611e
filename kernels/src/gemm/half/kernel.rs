//! The kernel.

use cubecl::cmma;
use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::decode::{Chunk, Halves, chunk_scales, decode_halves};
use super::{HalfConfig, PITCH, STEP};
use crate::gemm::problem::Problem;
use crate::gemm::schedule::Work;
use crate::granularity::BLOCK;
use crate::version::Version;

/// Codes in a chunk: four words.
const CHUNK_CODES: u32 = 16;

/// Chunks per row in a step.
const ROW_CHUNKS: u32 = STEP / CHUNK_CODES;

/// Steps in a block of the contraction.
const BLOCK_STEPS: u32 = BLOCK as u32 / STEP;

/// [`Halves`] from one row to the next.
const PITCH_HALVES: u32 = PITCH / 4;

#[cube(launch_unchecked)]
pub(super) fn gemm_half<O: Float, E: Float>(
    a: &Array<Chunk>,
    b: &Array<Chunk>,
    problem: &Problem,
    out: &mut Array<O>,
    #[comptime] config: HalfConfig,
    #[define(O)] _dtype: StorageType,
    #[define(E)] _element: StorageType,
    #[comptime] _version: Version,
) {
    let tile_rows = comptime!(config.tile.size[0]);
    let part_rows = comptime!(config.tile.part()[0]);
    let part_cols = comptime!(config.tile.part()[1]);
    let stage = comptime!(config.tile.stage() / 4);
    let work = problem.work(CUBE_POS as u32, comptime!(config.tile.size));
    let (row0, col0) = (work.row0, work.col0);
    if row0 >= work.row_end {
        terminate!();
    }
    // First row of B for the tile's columns, and the end of this matrix's rows.
    let first_b = work.row0_b + col0;
    let rows_b = work.row0_b + problem.n;
    let first_block = work.k_begin / comptime!(BLOCK as u32);
    let end_block = min(work.k_end.div_ceil(comptime!(BLOCK as u32)), problem.blocks);
    let mut stages = SharedMemory::<Halves<E>>::new_aligned(comptime!(2 * stage as usize), 32usize);
    let mut strips =
        SharedMemory::<f32>::new_aligned(comptime!(config.tile.strips(config.unit.shape[0]) as usize), 32usize);
    let mut factors = SharedMemory::<f32>::new(comptime!((config.tile.size[0] + config.tile.size[1]) as usize));
    let plane_row = UNIT_POS_Y % comptime!(config.tile.planes[0]) * part_rows;
    let plane_col = UNIT_POS_Y / comptime!(config.tile.planes[0]) * part_cols;

    let sums = zeros(config);
    let mut totals = Array::<f32>::new(comptime!(config.sums() as usize));
    #[unroll]
    for i in 0..comptime!(config.sums()) {
        totals[i as usize] = 0.0f32;
    }
    // Row and column of this unit's first sum.
    let row = row0 + plane_row + UNIT_POS_X / part_cols;
    let col = col0 + plane_col + UNIT_POS_X % part_cols;

    let mut chunk = work.k_begin / CHUNK_CODES;
    let mut read = 0u32.runtime();
    let held_a = load_step(a, problem, row0, work.row_end, chunk, config, 0usize);
    let held_b = load_step(b, problem, first_b, rows_b, chunk, config, 1usize);
    store_step::<E>(&held_a, problem, &mut stages, 0u32.runtime(), config, 0usize);
    store_step::<E>(&held_b, problem, &mut stages, 0u32.runtime(), config, 1usize);
    sync_cube();
    let mut block = first_block;
    while block < end_block {
        for step in 0..BLOCK_STEPS {
            if comptime!(config.by_block) {
                // After the first step's barrier, no unit reads the previous block's factors.
                let are_free = step == 1;
                if are_free {
                    load_factors(problem, &mut factors, &work, block, config);
                }
            }
            chunk += ROW_CHUNKS;
            let held_a = load_step(a, problem, row0, work.row_end, chunk, config, 0usize);
            let held_b = load_step(b, problem, first_b, rows_b, chunk, config, 1usize);
            multiply::<E>(
                &stages,
                &sums,
                read + plane_row * PITCH_HALVES,
                read + (tile_rows + plane_col) * PITCH_HALVES,
                config,
            );
            let write = stage - read;
            store_step::<E>(&held_a, problem, &mut stages, write, config, 0usize);
            store_step::<E>(&held_b, problem, &mut stages, write, config, 1usize);
            read = write;
            sync_cube();
        }
        if comptime!(config.by_block) {
            scale(&sums, &mut strips, &mut totals, &factors, config);
            clear(&sums, config);
        }
        block += 1;
    }
    if comptime!(!config.by_block) {
        load_factors(problem, &mut factors, &work, 0u32.runtime(), config);
        sync_cube();
        scale(&sums, &mut strips, &mut totals, &factors, config);
    }

    if col < problem.n {
        let shift = problem.bias.at(col);
        #[unroll]
        for i in 0..comptime!(config.sums()) {
            let row = row + comptime!(i * (config.unit.plane / part_cols));
            // The totals are already scaled.
            let total = select(first_block < end_block, totals[i as usize], 0.0f32);
            problem.put::<O>(out, total + shift, row, col, &work);
        }
    }
}

/// Accumulators of the plane, in row-major order of its products.
#[cube]
fn zeros(#[comptime] config: HalfConfig) -> Sequence<cmma::Matrix<f32>> {
    let mut sums = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(config.products()[0] * config.products()[1]) {
        sums.push(cmma::Matrix::<f32>::from_value(
            cmma::MatrixIdent::Accumulator,
            comptime!(config.unit.shape[0] as usize),
            comptime!(config.unit.shape[1] as usize),
            comptime!(config.unit.shape[2] as usize),
            cmma::MatrixLayout::Undefined,
            0.0f32,
        ));
    }
    sums
}

#[cube]
fn clear(sums: &Sequence<cmma::Matrix<f32>>, #[comptime] config: HalfConfig) {
    #[unroll]
    for i in 0..comptime!((config.products()[0] * config.products()[1]) as usize) {
        cmma::fill(sums.index(i), 0.0f32);
    }
}

/// This unit's chunks of one step of an operand, and the scales of their values.
#[derive(CubeType)]
struct Held {
    chunks: Array<Chunk>,
    scales: Array<u32>,
}

/// Loads this unit's chunks of one step of operand 0 (A) or 1 (B). Zeros outside the operand.
#[cube]
fn load_step(
    codes: &Array<Chunk>,
    problem: &Problem,
    row0: u32,
    rows: u32,
    first: u32,
    #[comptime] config: HalfConfig,
    #[comptime] side: usize,
) -> Held {
    let chunks = problem.words / comptime!(CHUNK_CODES / 4);
    let units = comptime!(config.units());
    let held_chunks = comptime!(config.tile.size[side] * ROW_CHUNKS);
    let passes = comptime!(held_chunks.div_ceil(units));
    let mut held = Held {
        chunks: Array::<Chunk>::new(comptime!(passes as usize)),
        scales: Array::<u32>::new(comptime!(passes as usize)),
    };
    #[unroll]
    for pass in 0..passes {
        let place = UNIT_POS + pass * units;
        let row = row0 + place / ROW_CHUNKS;
        let chunk = first + place % ROW_CHUNKS;
        let inside = row < rows && chunk < chunks && place < held_chunks;
        let mut value = Chunk::new(0u32);
        if inside {
            value = codes[(row * chunks + chunk) as usize];
        }
        held.chunks[pass as usize] = value;
        if comptime!(problem.granularities[side].is_mx()) {
            // Zeros outside stay zero, except under a NaN scale, which makes the whole row NaN
            // anyway.
            let (row, chunk) = (min(row, rows - 1), min(chunk, chunks - 1));
            held.scales[pass as usize] = chunk_scales(problem, row, chunk, side);
        }
    }
    held
}

/// Decodes the chunks into the stage at `start`. The rows of B follow the rows of A.
#[cube]
fn store_step<E: Float>(
    held: &Held,
    problem: &Problem,
    stages: &mut SharedMemory<Halves<E>>,
    start: u32,
    #[comptime] config: HalfConfig,
    #[comptime] side: usize,
) {
    let units = comptime!(config.units());
    let held_chunks = comptime!(config.tile.size[side] * ROW_CHUNKS);
    let start = if comptime!(side == 0) { start } else { start + comptime!(config.tile.size[0] * PITCH_HALVES) };
    #[unroll]
    for pass in 0..comptime!(held_chunks.div_ceil(units)) {
        let place = UNIT_POS + pass * units;
        if place < held_chunks {
            let to = start + place / ROW_CHUNKS * PITCH_HALVES + place % ROW_CHUNKS * 4;
            #[unroll]
            for i in 0..4u32 {
                let word = held.chunks[pass as usize][i as usize];
                stages[(to + i) as usize] = decode_halves::<E>(
                    word,
                    held.scales[pass as usize],
                    comptime!(config.formats[side]),
                    comptime!(config.element),
                    comptime!(problem.granularities[side].is_mx()),
                );
            }
        }
    }
}

/// Adds the products of one step, from the rows of the plane's part.
#[cube]
fn multiply<E: Float>(
    stages: &SharedMemory<Halves<E>>,
    sums: &Sequence<cmma::Matrix<f32>>,
    rows_a: u32,
    rows_b: u32,
    #[comptime] config: HalfConfig,
) {
    let [m, n, k] = comptime!(config.unit.shape);
    let products_m = comptime!(config.products()[0]);
    let products_n = comptime!(config.products()[1]);
    #[unroll]
    for step in 0..comptime!(STEP / k) {
        let mut right = Sequence::<cmma::Matrix<Halves<E>>>::new();
        #[unroll]
        for j in 0..products_n {
            let start = (rows_b + comptime!(j * n * PITCH_HALVES + step * k / 4)) as usize;
            right.push(fragment::<E>(stages, start, cmma::MatrixIdent::B, config));
        }
        #[unroll]
        for i in 0..products_m {
            let start = (rows_a + comptime!(i * m * PITCH_HALVES + step * k / 4)) as usize;
            let left = fragment::<E>(stages, start, cmma::MatrixIdent::A, config);
            #[unroll]
            for j in 0..products_n {
                let sum = sums.index(comptime!((i * products_n + j) as usize));
                cmma::execute(&left, right.index(comptime!(j as usize)), sum, sum);
            }
        }
    }
}

/// Operand of a product: rows of A from `start`, or rows of B, which are its columns.
#[cube]
fn fragment<E: Float>(
    stages: &SharedMemory<Halves<E>>,
    start: usize,
    #[comptime] ident: cmma::MatrixIdent,
    #[comptime] config: HalfConfig,
) -> cmma::Matrix<Halves<E>> {
    let [m, n, k] = comptime!(config.unit.shape);
    let (rows, layout) = comptime!(match ident {
        cmma::MatrixIdent::A => (m, cmma::MatrixLayout::RowMajor),
        _ => (n, cmma::MatrixLayout::ColMajor),
    });
    cmma::Matrix::<Halves<E>>::from_slice(
        ident,
        comptime!(m as usize),
        comptime!(n as usize),
        comptime!(k as usize),
        layout,
        &stages.slice(start, start + comptime!((rows * PITCH_HALVES) as usize)),
        PITCH,
    )
}

/// Loads the inverse scales of the tile's rows, then of its columns.
#[cube]
fn load_factors(
    problem: &Problem,
    factors: &mut SharedMemory<f32>,
    work: &Work,
    block: u32,
    #[comptime] config: HalfConfig,
) {
    let units = comptime!(config.units());
    let rows = comptime!(config.tile.size[0]);
    let both = comptime!(config.tile.size[0] + config.tile.size[1]);
    #[unroll]
    for pass in 0..comptime!(both.div_ceil(units)) {
        let place = UNIT_POS + pass * units;
        if place < rows {
            factors[place as usize] = problem.line_factor(work.row0 + place, work, block, 0usize);
        } else if place < both {
            factors[place as usize] = problem.line_factor(work.col0 + place - rows, work, block, 1usize);
        }
    }
}

/// Scales the sums of a block of the contraction and adds them to the totals, strip by strip of the
/// plane's part. Each unit keeps the totals of its rows and columns.
#[cube]
fn scale(
    sums: &Sequence<cmma::Matrix<f32>>,
    strips: &mut SharedMemory<f32>,
    totals: &mut Array<f32>,
    factors: &SharedMemory<f32>,
    #[comptime] config: HalfConfig,
) {
    let shape = comptime!(config.unit.shape);
    let part = comptime!(config.tile.part());
    let cols = comptime!(part[1]);
    let size = comptime!(shape[0] * part[1]);
    let apart = comptime!(config.unit.plane / part[1]);
    let row = UNIT_POS_Y % comptime!(config.tile.planes[0]) * comptime!(part[0]) + UNIT_POS_X / cols;
    let col = UNIT_POS_Y / comptime!(config.tile.planes[0]) * cols + UNIT_POS_X % cols;
    let factor_b = factors[(comptime!(config.tile.size[0]) + col) as usize];
    let start = UNIT_POS_Y * size;
    #[unroll]
    for i in 0..comptime!(config.products()[0]) {
        #[unroll]
        for j in 0..comptime!(config.products()[1]) {
            let place = (start + comptime!(j * shape[1])) as usize;
            cmma::store(
                &mut strips.slice_mut(place, place + comptime!((size - j * shape[1]) as usize)),
                sums.index(comptime!((i * config.products()[1] + j) as usize)),
                cols,
                cmma::MatrixLayout::RowMajor,
            );
        }
        sync_strips(config);
        #[unroll]
        for q in 0..comptime!(size / config.unit.plane) {
            let place = comptime!(i * (size / config.unit.plane) + q);
            let factor_a = factors[(row + comptime!(place * apart)) as usize];
            let sum = strips[(start + UNIT_POS_X + comptime!(q * config.unit.plane)) as usize];
            totals[place as usize] = fma(sum, factor_a * factor_b, totals[place as usize]);
        }
        sync_strips(config);
    }
}

/// Synchronizes the plane. No other plane uses its strip.
#[cube]
fn sync_strips(#[comptime] config: HalfConfig) {
    if comptime!(config.unit.plane_sync) {
        sync_plane();
    } else {
        sync_cube();
    }
}
