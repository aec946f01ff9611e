//! The emulated GEMM of a few rows, as of one generated token: bound by reading B, each word of which is read once, by one unit.
//!
//! A cube makes [`COLS`] columns of the output for all rows. Its units go through the contraction side by side, a word of four codes each,
//! and keep sums of their own, which meet in shared memory. Scales of blocks multiply the sum of each word; E8M0 scales the decoded values.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::Gemm;
use super::problem::{Problem, ProblemLaunch};
use crate::format::decode;
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::grid::{cube_first, fold};
use crate::mx::e8m0_inverse_bits;
use crate::version::Version;
use crate::{Format, Granularity, cuda_arch};

/// Rows at most.
const MAX_ROWS: usize = 4;

/// Units of a cube.
const UNITS: u32 = 64;

/// Columns of a cube: as many words of B are on their way to a unit.
const COLS: u32 = 4;

/// Words of a block of 128, and of one of 32.
const BLOCK_WORDS: u32 = BLOCK as u32 / 4;
const MX_WORDS: u32 = MX_BLOCK as u32 / 4;

type Quad = Vector<f32, Const<4>>;

/// Whether it is for this GEMM. Of NVIDIA's devices tensor cores take it, in tiles that read B once as well.
pub(super) fn takes<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) -> bool {
    gemm.groups.is_none() && gemm.a.rows <= MAX_ROWS && cuda_arch(client).is_none()
}

/// Launches the kernel.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (m, n, _) = gemm.matrices();
    // SAFETY: `scaled_gemm` has checked that the codes, scales and bias have the sizes given here; loads are guarded by the rows and words
    // of the operands, stores by `m` and `n`.
    unsafe {
        gemm_few_rows::launch_unchecked::<R>(
            client,
            fold(client, (n as u32).div_ceil(COLS)),
            CubeDim::new_1d(UNITS),
            gemm.a.codes_array(1),
            gemm.b.codes_array(1),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n),
            gemm.formats(),
            m as u32,
            gemm.accumulate,
            gemm.dtype,
            Version::of(client),
        );
    }
}

#[cube(launch_unchecked)]
fn gemm_few_rows<O: Float>(
    a: &Array<u32>,
    b: &Array<u32>,
    problem: &Problem,
    out: &mut Array<O>,
    #[comptime] formats: [Format; 2],
    #[comptime] m: u32,
    #[comptime] accumulate: bool,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let col0 = cube_first(COLS);
    if col0 >= problem.n {
        terminate!();
    }
    let by_block = comptime!(Granularity::any_blocks(problem.granularities));
    let count = comptime!(m * COLS);
    let mut sums = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        sums[i as usize] = f32::new(0.0);
    }
    let mut word = UNIT_POS;
    while word < problem.words {
        let block = word / BLOCK_WORDS;
        let mut rows = Array::<Quad>::new(comptime!(m as usize));
        #[unroll]
        for i in 0..m {
            rows[i as usize] = values(a, problem, i, word, comptime!(formats[0]), 0usize);
        }
        #[unroll]
        for j in 0..COLS {
            // Past the last column any will do: its sum is not stored.
            let col = min(col0 + j, problem.n - 1);
            let weights = values(b, problem, col, word, comptime!(formats[1]), 1usize);
            #[unroll]
            for i in 0..m {
                let products = rows[i as usize] * weights;
                let sum = (products[0usize] + products[1usize]) + (products[2usize] + products[3usize]);
                let place = comptime!((i * COLS + j) as usize);
                if by_block {
                    let factor = problem.factor(i, block, 0usize) * problem.factor(col, block, 1usize);
                    sums[place] = fma(sum, factor, sums[place]);
                } else {
                    sums[place] += sum;
                }
            }
        }
        word += UNITS;
    }
    let mut shared = SharedMemory::<f32>::new(comptime!((count * UNITS) as usize));
    #[unroll]
    for i in 0..count {
        shared[(comptime!(i * UNITS) + UNIT_POS) as usize] = sums[i as usize];
    }
    sync_cube();
    let (row, col) = (UNIT_POS / COLS, col0 + UNIT_POS % COLS);
    if row < m && col < problem.n {
        let mut total = f32::new(0.0);
        for unit in 0..UNITS {
            total += shared[(UNIT_POS * UNITS + unit) as usize];
        }
        problem.store::<O>(out, total, row, col, accumulate);
    }
}

/// The values of a word of operand `side`, with E8M0 scales.
#[cube]
fn values(
    codes: &Array<u32>,
    problem: &Problem,
    row: u32,
    word: u32,
    #[comptime] format: Format,
    #[comptime] side: usize,
) -> Quad {
    let packed = codes[(row * problem.words + word) as usize];
    let mut values = Quad::empty();
    #[unroll]
    for i in 0..4u32 {
        values[i as usize] = decode((packed >> comptime!(8 * i)) & 0xffu32, format);
    }
    if comptime!(problem.granularities[side].is_mx()) {
        let byte = problem.e8m0(row, word / MX_WORDS, side);
        values * Quad::new(f32::reinterpret(e8m0_inverse_bits(byte)))
    } else {
        values
    }
}
