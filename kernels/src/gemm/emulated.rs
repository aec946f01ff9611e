//! GEMM for any device. Decodes codes to f32 into shared memory and multiplies f32 tiles.
//!
//! A cube of 8x8 units makes one output tile ([`EmulatedTile`]), with 32 codes of the contraction per step.
//! Tiles are stored in shared memory as `[k, row]`, four rows per vector.
//!
//! | device | tile | sums of a unit | values read from shared memory per `k` |
//! | --- | --- | --- | --- |
//! | GPU | 64x64 | 8x8 | 16 |
//! | CPU behind a graphics driver | 64x128 | 8x16 | 24 |
//! | either, for at most 32 rows | half as high | half as many | 12, 20 |
//!
//! A CPU driver vectorizes over adjacent units and loads the values of each unit one by one, so
//! loads take most of the time. Larger tiles are faster still, but take the driver tens of seconds
//! to compile.
//!
//! With blocks of 128, the sums of every four steps are scaled and added to a second set. E8M0
//! scales multiply the decoded values. That is exact except for f32 subnormals.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::Gemm;
use super::problem::{Problem, ProblemLaunch};
use super::schedule::Work;
use crate::format::decode;
use crate::granularity::BLOCK;
use crate::grid::{fold, is_cpu};
use crate::mx::e8m0_inverse_bits;
use crate::quad::{Quad, zeros};
use crate::version::Version;
use crate::{Format, Granularity};

/// Units along each side of a tile.
const SIDE: u32 = 8;

/// Maximum rows that use the half-height tile.
pub(super) const FEW: usize = 4 * SIDE as usize;

/// Tile of a cube: groups of four rows, and of four columns, per unit. Unit `u` has the groups `u`,
/// `u + SIDE` and so on, so adjacent units read adjacent vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct EmulatedTile([u32; 2]);

impl EmulatedTile {
    /// Tile for an output of `rows` rows.
    const fn new(rows: usize, cpu: bool) -> Self {
        Self([if rows <= FEW { 1 } else { 2 }, if cpu { 4 } else { 2 }])
    }

    /// Rows and columns.
    const fn size(self) -> [u32; 2] {
        [4 * SIDE * self.0[0], 4 * SIDE * self.0[1]]
    }

    /// Vectors from one `k` to the next in shared memory. One is padding against bank conflicts.
    const fn pitch(self, side: usize) -> u32 {
        SIDE * self.0[side] + 1
    }

    /// Four-column vectors of a unit's sums: one per column group, for each of its rows.
    const fn sums(self) -> u32 {
        4 * self.0[0] * self.0[1]
    }
}

/// Contraction words of a step: 32 codes, one memory sector of a row.
const STEP_WORDS: u32 = 8;

/// Contraction length of a step.
const STEP: u32 = STEP_WORDS * 4;

/// Words of one block of the contraction.
const BLOCK_WORDS: u32 = BLOCK as u32 / 4;

/// Launches the kernel.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (m, n, matrices) = gemm.matrices();
    let tile = EmulatedTile::new(m, is_cpu(client));
    // SAFETY: `scaled_gemm` has checked the sizes of codes, scales and bias. Loads are guarded by
    // the operands' rows and words, stores by `m` and `n`.
    unsafe {
        gemm_emulated::launch_unchecked::<R>(
            client,
            fold(client, gemm.shape().tiles(tile.size())),
            CubeDim::new_1d(SIDE * SIDE),
            gemm.a.codes_array(1),
            gemm.b.codes_array(1),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n * matrices),
            gemm.formats(),
            tile,
            gemm.dtype,
            Version::of(client),
        );
    }
}

#[cube(launch_unchecked)]
fn gemm_emulated<O: Float>(
    a: &Array<u32>,
    b: &Array<u32>,
    problem: &Problem,
    out: &mut Array<O>,
    #[comptime] formats: [Format; 2],
    #[comptime] tile: EmulatedTile,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let work = problem.work(CUBE_POS as u32, comptime!(tile.size()));
    let (row0, col0) = (work.row0, work.col0);
    if row0 >= work.row_end {
        terminate!();
    }
    let end = min(work.k_end.div_ceil(4u32), problem.words);
    let mut tile_a = SharedMemory::<Quad>::new(comptime!((STEP * tile.pitch(0)) as usize));
    let mut tile_b = SharedMemory::<Quad>::new(comptime!((STEP * tile.pitch(1)) as usize));
    let unit_x = UNIT_POS % SIDE;
    let unit_y = UNIT_POS / SIDE;
    let by_block = comptime!(Granularity::any_blocks(problem.granularities));
    let [quads_y, quads_x] = comptime!(tile.0);
    let count = comptime!(tile.sums());

    // Row `i` of the unit and its column group `j` are at `quads_x * i + j`.
    let mut sums = zeros(count);
    let mut totals = zeros(count);
    // First row of B for the tile's columns, and the end of this matrix's rows.
    let first_b = work.row0_b + col0;
    let rows_b = work.row0_b + problem.n;
    let mut step = work.k_begin / 4;
    while step < end {
        load_tile(a, problem, &mut tile_a, row0, work.row_end, step, comptime!((tile, formats[0])), 0usize);
        load_tile(b, problem, &mut tile_b, first_b, rows_b, step, comptime!((tile, formats[1])), 1usize);
        sync_cube();
        for k in 0..STEP {
            let mut cols = Array::<Quad>::new(comptime!(quads_x as usize));
            #[unroll]
            for j in 0..quads_x {
                cols[j as usize] = tile_b[(k * comptime!(tile.pitch(1)) + unit_x + comptime!(j * SIDE)) as usize];
            }
            #[unroll]
            for quad in 0..quads_y {
                let rows = tile_a[(k * comptime!(tile.pitch(0)) + unit_y + comptime!(quad * SIDE)) as usize];
                #[unroll]
                for i in 0..4u32 {
                    let row = Quad::new(rows[i as usize]);
                    #[unroll]
                    for j in 0..quads_x {
                        let place = comptime!((quads_x * (4 * quad + i) + j) as usize);
                        sums[place] = fma(row, cols[j as usize], sums[place]);
                    }
                }
            }
        }
        sync_cube();
        step += STEP_WORDS;
        if comptime!(by_block) {
            let after = step % BLOCK_WORDS;
            if after == 0 || step >= end {
                let block = (step - 1) / BLOCK_WORDS;
                let factors_a = factors(problem, row0 + unit_y * 4, &work, block, tile, 0usize);
                let factors_b = factors(problem, col0 + unit_x * 4, &work, block, tile, 1usize);
                #[unroll]
                for i in 0..count {
                    let place = comptime!(i as usize);
                    let (row, quad) = comptime!((i / quads_x, (i % quads_x) as usize));
                    let row_factor = factors_a[comptime!((row / 4) as usize)][comptime!((row % 4) as usize)];
                    totals[place] = fma(sums[place], Quad::new(row_factor) * factors_b[quad], totals[place]);
                    sums[place] = Quad::new(0.0f32);
                }
            }
        }
    }
    let factors_a = factors(problem, row0 + unit_y * 4, &work, 0u32.runtime(), tile, 0usize);
    let factors_b = factors(problem, col0 + unit_x * 4, &work, 0u32.runtime(), tile, 1usize);
    let any = work.k_begin / 4 < end;
    #[unroll]
    for j in 0..comptime!(4 * quads_x) {
        let (quad, lane) = comptime!(((j / 4) as usize, (j % 4) as usize));
        let col = col0 + (unit_x + comptime!(j / 4 * SIDE)) * 4 + comptime!(j % 4);
        if col < problem.n {
            let shift = problem.bias.at(col);
            #[unroll]
            for i in 0..comptime!(4 * quads_y) {
                let row = row0 + (unit_y + comptime!(i / 4 * SIDE)) * 4 + comptime!(i % 4);
                let place = comptime!((quads_x * i) as usize + quad);
                let sum = if comptime!(by_block) { totals[place][lane] } else { sums[place][lane] };
                let row_factor = factors_a[comptime!((i / 4) as usize)][comptime!((i % 4) as usize)];
                let value = problem.finish(sum, row_factor * factors_b[quad][lane], shift, any);
                problem.put::<O>(out, value, row, col, &work);
            }
        }
    }
}

/// Inverse scales of a unit's groups of four rows (or columns). The first group starts at `first`.
#[cube]
fn factors(
    problem: &Problem,
    first: u32,
    work: &Work,
    block: u32,
    #[comptime] tile: EmulatedTile,
    #[comptime] side: usize,
) -> Array<Quad> {
    let mut factors = Array::<Quad>::new(comptime!(tile.0[side] as usize));
    #[unroll]
    for group in 0..comptime!(tile.0[side]) {
        let mut quad = Quad::empty();
        #[unroll]
        for i in 0..4u32 {
            quad[i as usize] = problem.line_factor(first + comptime!(group * SIDE * 4 + i), work, block, side);
        }
        factors[group as usize] = quad;
    }
    factors
}

/// Decodes a step of operand `side` into shared memory. A unit takes one word of four adjacent rows
/// at a time. A step is one block of E8M0 scales.
#[cube]
fn load_tile(
    codes: &Array<u32>,
    problem: &Problem,
    decoded: &mut SharedMemory<Quad>,
    row0: u32,
    rows: u32,
    step: u32,
    #[comptime] what: (EmulatedTile, Format),
    #[comptime] side: usize,
) {
    let (tile, format) = comptime!(what);
    let is_mx = comptime!(problem.granularities[side].is_mx());
    let local_word = UNIT_POS % STEP_WORDS;
    let word = step + local_word;
    #[unroll]
    for pass in 0..comptime!(tile.0[side]) {
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
            decoded[((local_word * 4 + j) * comptime!(tile.pitch(side)) + quad) as usize] = values;
        }
    }
}
