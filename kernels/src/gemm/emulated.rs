//! The GEMM of any device: codes are decoded to f32 on their way into shared memory, then an f32 tile product.
//!
//! A cube makes a 64x64 tile of the output, 32 codes of the contraction a step; each of its 8x8 units holds 8x8 sums, so
//! that it reads one value from shared memory for every four multiplications. Tiles lie in shared memory as `[k, row]`,
//! four rows to a vector.
//!
//! With blocks of 128, the sums of every fourth step are scaled and moved to a second set of 8x8. E8M0 scales multiply the
//! decoded values, which is exact but for values below f32's normal ones.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::Gemm;
use super::problem::{Problem, ProblemLaunch};
use crate::format::decode;
use crate::granularity::BLOCK;
use crate::grid::fold;
use crate::mx::e8m0_inverse_bits;
use crate::version::{VERSION, Version};
use crate::{Format, Granularity};

/// Rows and columns of a cube's tile of the output.
const TILE: u32 = 64;

/// Groups of four rows (or columns) in a tile.
const QUADS: u32 = TILE / 4;

/// Units along each side of a tile. Unit `u` holds the groups `u` and `u + SIDE`: neighbours read neighbouring vectors.
const SIDE: u32 = QUADS / 2;

/// Words of contraction in a step: 32 codes, one memory sector of a row.
const STEP_WORDS: u32 = 8;

/// Contraction length of a step.
const STEP: u32 = STEP_WORDS * 4;

/// Words of one block of the contraction.
const BLOCK_WORDS: u32 = BLOCK as u32 / 4;

/// Vectors from one `k` to the next in shared memory, with one of padding against bank conflicts.
const PITCH: u32 = QUADS + 1;

type Quad = Vector<f32, Const<4>>;

/// Launches the kernel.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (m, n, matrices) = gemm.matrices();
    // SAFETY: `scaled_gemm` has checked that the codes, scales and bias have the sizes given here; loads are guarded by
    // the rows and words of the operands, stores by `m` and `n`.
    unsafe {
        gemm_emulated::launch_unchecked::<R>(
            client,
            fold(client, gemm.tiles([TILE; 2])),
            CubeDim::new_1d(SIDE * SIDE),
            gemm.a.codes_array(1),
            gemm.b.codes_array(1),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n * matrices),
            gemm.formats(),
            gemm.accumulate,
            gemm.dtype,
            VERSION,
        );
    }
}

// The outer of nested `if`s is resolved while the kernel is generated.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn gemm_emulated<O: Float>(
    a: &Array<u32>,
    b: &Array<u32>,
    problem: &Problem,
    out: &mut Array<O>,
    #[comptime] formats: [Format; 2],
    #[comptime] accumulate: bool,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let work = problem.work(CUBE_POS as u32, comptime!([TILE; 2]));
    let (row0, col0) = (work.row0, work.col0);
    if row0 >= work.row_end {
        terminate!();
    }
    let end = min(work.end.div_ceil(4u32), problem.words);
    let mut tile_a = SharedMemory::<Quad>::new(comptime!((STEP * PITCH) as usize));
    let mut tile_b = SharedMemory::<Quad>::new(comptime!((STEP * PITCH) as usize));
    let unit_x = UNIT_POS % SIDE;
    let unit_y = UNIT_POS / SIDE;
    let by_block = comptime!(Granularity::any_blocks(problem.granularities));

    // Row `i` of the unit, columns of its group `j`, at `2 * i + j`.
    let mut sums = Array::<Quad>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = Quad::new(0.0f32);
    }
    let mut totals = Array::<Quad>::new(16usize);
    if comptime!(by_block) {
        #[unroll]
        for i in 0..16usize {
            totals[i] = Quad::new(0.0f32);
        }
    }
    // Where the tile's columns begin and end among the rows of B.
    let first_b = work.row0_b + col0;
    let rows_b = work.row0_b + problem.n;
    let mut step = work.first / 4;
    while step < end {
        load_tile(a, problem, &mut tile_a, row0, work.row_end, step, comptime!(formats[0]), 0usize);
        load_tile(b, problem, &mut tile_b, first_b, rows_b, step, comptime!(formats[1]), 1usize);
        sync_cube();
        for k in 0..STEP {
            let cols_0 = tile_b[(k * PITCH + unit_x) as usize];
            let cols_1 = tile_b[(k * PITCH + unit_x + SIDE) as usize];
            #[unroll]
            for half in 0..2u32 {
                let rows = tile_a[(k * PITCH + unit_y + half * SIDE) as usize];
                #[unroll]
                for i in 0..4u32 {
                    let row = Quad::new(rows[i as usize]);
                    let place = comptime!((2 * (4 * half + i)) as usize);
                    sums[place] = fma(row, cols_0, sums[place]);
                    sums[place + 1] = fma(row, cols_1, sums[place + 1]);
                }
            }
        }
        sync_cube();
        step += STEP_WORDS;
        if comptime!(by_block) {
            let after = step % BLOCK_WORDS;
            if after == 0 || step >= end {
                let block = (step - 1) / BLOCK_WORDS;
                let factors_a = factors(problem, row0 + unit_y * 4, work.row_end, block, 0usize);
                let factors_b = factors(problem, first_b + unit_x * 4, rows_b, block, 1usize);
                #[unroll]
                for i in 0..16usize {
                    let factor = Quad::new(factors_a[i / 8][i / 2 % 4]) * factors_b[i % 2];
                    totals[i] = fma(sums[i], factor, totals[i]);
                    sums[i] = Quad::new(0.0f32);
                }
            }
        }
    }
    if comptime!(!by_block) {
        let factors_a = factors(problem, row0 + unit_y * 4, work.row_end, 0u32.runtime(), 0usize);
        let factors_b = factors(problem, first_b + unit_x * 4, rows_b, 0u32.runtime(), 1usize);
        #[unroll]
        for i in 0..16usize {
            totals[i] = sums[i] * (Quad::new(factors_a[i / 8][i / 2 % 4]) * factors_b[i % 2]);
        }
    }
    if comptime!(problem.grouping.is_some()) {
        if work.first / 4 >= end {
            // Nothing was multiplied, so no scale counts, not even NaN.
            #[unroll]
            for i in 0..16usize {
                totals[i] = Quad::new(0.0f32);
            }
        }
    }

    #[unroll]
    for j in 0..8u32 {
        let col = col0 + (unit_x + comptime!(j / 4 * SIDE)) * 4 + comptime!(j % 4);
        if col < problem.n {
            let shift = problem.bias.at(col);
            #[unroll]
            for i in 0..8u32 {
                let row = row0 + (unit_y + comptime!(i / 4 * SIDE)) * 4 + comptime!(i % 4);
                if row >= work.row_begin && row < work.row_end {
                    let total = totals[comptime!((2 * i + j / 4) as usize)][comptime!((j % 4) as usize)];
                    let index = (work.out0 + row * problem.n + col) as usize;
                    let sum = if comptime!(accumulate) {
                        f32::cast_from(out[index]) + (total + shift)
                    } else {
                        total + shift
                    };
                    out[index] = O::cast_from(sum);
                }
            }
        }
    }
}

/// Inverse scales of the two groups of four rows (or columns) that a unit holds, the first beginning at `first`; ones, where
/// the tile is scaled already.
#[cube]
fn factors(problem: &Problem, first: u32, rows: u32, block: u32, #[comptime] side: usize) -> Array<Quad> {
    let mut factors = Array::<Quad>::new(2usize);
    #[unroll]
    for half in 0..2u32 {
        let mut quad = Quad::empty();
        #[unroll]
        for i in 0..4u32 {
            // Past the last row there is nothing to scale; any scale will do.
            let row = min(first + comptime!(half * SIDE * 4 + i), rows - 1);
            quad[i as usize] = problem.factor(row, block, side);
        }
        factors[half as usize] = quad;
    }
    factors
}

/// Decodes 64 rows by 32 codes into `tile`: each unit takes one word of each of four neighbouring rows, twice. A step is one
/// block of E8M0 scales.
#[cube]
fn load_tile(
    codes: &Array<u32>,
    problem: &Problem,
    tile: &mut SharedMemory<Quad>,
    row0: u32,
    rows: u32,
    step: u32,
    #[comptime] format: Format,
    #[comptime] side: usize,
) {
    let is_mx = comptime!(problem.granularities[side].is_mx());
    let local_word = UNIT_POS % STEP_WORDS;
    let word = step + local_word;
    #[unroll]
    for pass in 0..2u32 {
        let quad = UNIT_POS / STEP_WORDS + pass * SIDE;
        let mut packed = Array::<u32>::new(4usize);
        let mut scales = Quad::new(1.0f32);
        #[unroll]
        for i in 0..4u32 {
            let row = row0 + quad * 4 + i;
            let mut value = 0u32.runtime();
            if row < rows && word < problem.words {
                value = codes[(row * problem.words + word) as usize];
            }
            packed[i as usize] = value;
            if is_mx {
                let byte = problem.e8m0(min(row, rows - 1), step / STEP_WORDS, side);
                scales[i as usize] = f32::reinterpret(e8m0_inverse_bits(byte));
            }
        }
        #[unroll]
        for j in 0..4u32 {
            let mut values = Quad::empty();
            #[unroll]
            for i in 0..4usize {
                values[i] = decode((packed[i] >> comptime!(8 * j)) & 0xffu32, format);
            }
            let values = if is_mx { values * scales } else { values };
            tile[((local_word * 4 + j) * PITCH + quad) as usize] = values;
        }
    }
}
