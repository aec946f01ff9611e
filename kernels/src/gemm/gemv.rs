//! GEMV: the GEMM of a few rows, as in decoding. Bound by reading B; each code of B is loaded once.
//!
//! A cube makes [`COLS`] columns of the output for all rows. Its units share the contraction and
//! take one chunk of codes per column at a time. So the loads of all columns are in flight
//! together. Codes become f32 in registers. Each unit adds products in contraction order, and the
//! cube adds the units' sums. So an element's sum does not depend on the other rows or their
//! number.
//!
//! | | CUDA | other devices |
//! | --- | --- | --- |
//! | codes of a chunk | 16: warps read runs of 512 bytes | 4 |
//! | codes to f32 | by `cvt` from sm_89 on, before by moving bits to f16 | in integers |
//! | sums of units | by shuffles, then through shared memory | through shared memory |

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::Gemm;
use super::problem::{Problem, ProblemLaunch};
use crate::format::{F32_NAN, decode};
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::grid::{cube_first, fold, lanes_sum};
use crate::load::{all_loaded, load_pinned};
use crate::mx::e8m0_inverse_bits;
use crate::ptx::cvt::{Isa, cvt_f16x2, cvt_f32_f16};
use crate::ptx::memory::load_global_words;
use crate::scale::{scale_index, scale_word};
use crate::version::Version;
use crate::{Format, Granularity, cuda_arch};

/// Maximum rows. A code of B takes about two operations, and two more per row. With four rows an SM
/// of Hopper still keeps up with its share of the memory bandwidth. With more rows tensor cores,
/// whose tiles also read B once, are expected to be faster. This is not measured on a GPU yet.
pub const GEMV_ROWS: usize = 4;

/// Columns of a cube, and chunks of B that each unit has in flight.
const COLS: u32 = 4;

/// E8M0 byte of the scale 1.
const E8M0_ONE: u32 = 127;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GemvConfig {
    formats: [Format; 2],
    /// Number of rows.
    m: u32,
    isa: Isa,
}

impl GemvConfig {
    /// Units of a cube.
    const fn units(self) -> u32 {
        if self.isa.has_ptx() { 128 } else { 64 }
    }

    /// Adjacent units whose sums are added by shuffles.
    const fn lanes(self) -> u32 {
        if self.isa.has_ptx() { 32 } else { 1 }
    }

    /// Words in a chunk.
    const fn words(self) -> u32 {
        if self.isa.has_ptx() { 4 } else { 1 }
    }

    /// Chunks in `codes` codes.
    const fn chunks(self, codes: usize) -> u32 {
        codes as u32 / (4 * self.words())
    }
}

/// Whether the GEMV runs this GEMM: few rows, no groups, and no CUDA architecture with other
/// kernels.
pub(super) fn takes<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) -> bool {
    gemm.groups.is_none() && gemm.a.rows <= GEMV_ROWS && cuda_arch(client).is_none()
}

/// Launches the kernel, for at most [`GEMV_ROWS`] rows.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (m, n, _) = gemm.matrices();
    let config = GemvConfig { formats: gemm.formats(), m: m as u32, isa: gemm.isa };
    let words = config.words() as usize;
    // SAFETY: `scaled_gemm` has checked the sizes of codes, scales and bias. Loads are of existing
    // rows and chunks; stores are guarded by `m` and `n`.
    unsafe {
        gemv::launch_unchecked::<R>(
            client,
            fold(client, (n as u32).div_ceil(COLS)),
            CubeDim::new_1d(config.units()),
            words,
            gemm.a.codes_array(words),
            gemm.b.codes_array(words),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n),
            config,
            gemm.dtype,
            Version::of(client),
        );
    }
}

#[cube(launch_unchecked)]
fn gemv<N: Size, O: Float>(
    a: &Array<Vector<u32, N>>,
    b: &Array<Vector<u32, N>>,
    problem: &Problem,
    out: &mut Array<O>,
    #[comptime] config: GemvConfig,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let col0 = cube_first(COLS);
    if col0 >= problem.n {
        terminate!();
    }
    let GemvConfig { formats, m, isa, .. } = comptime!(config);
    let (units, lanes, words) = comptime!((config.units(), config.lanes(), config.words()));
    let by_block = comptime!(Granularity::any_blocks(problem.granularities));
    let by_mx = comptime!(Granularity::any_mx(problem.granularities));
    // Whether a chunk's products are summed separately.
    let apart = comptime!(by_block || by_mx || !isa.has_ptx());
    let count = comptime!(m * COLS);
    let chunks = problem.words / words;
    let mut sums = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        sums[i as usize] = f32::new(0.0);
    }
    let (lane, warp) = (UNIT_POS % lanes, UNIT_POS / lanes);
    // First chunk of the warp, whose lanes stay together.
    let mut first = warp * lanes;
    while first < chunks {
        let chunk = first + lane;
        let at = min(chunk, chunks - 1);
        let block = at / comptime!(config.chunks(BLOCK));
        let mut right = Array::<u32>::new(comptime!((COLS * words) as usize));
        let mut left = Array::<u32>::new(comptime!((m * words) as usize));
        let mut scales = Array::<u32>::new(comptime!(COLS as usize));
        #[unroll]
        for j in 0..COLS {
            // Past the last column, loads repeat it; its sum is not stored.
            load_pinned(b, min(col0 + j, problem.n - 1) * chunks + at, &mut right, comptime!(j * words), isa);
        }
        #[unroll]
        for i in 0..m {
            load_pinned(a, i * chunks + at, &mut left, comptime!(i * words), isa);
        }
        if comptime!(by_block || by_mx) {
            #[unroll]
            for j in 0..COLS {
                load_scale(problem, &mut scales, j, min(col0 + j, problem.n - 1), block, isa, 1usize);
            }
        }
        all_loaded(isa);
        if comptime!(lanes > 1) {
            // Lanes past the end multiply zeros. Clearing only one operand could give NaN, as
            // infinity · 0.
            let exists = chunk < chunks;
            clear_unless(&mut right, exists, comptime!(COLS * words));
            clear_unless(&mut left, exists, comptime!(m * words));
        }
        let mut partial = Array::<f32>::new(comptime!(count as usize));
        #[unroll]
        for i in 0..count {
            partial[i as usize] = if comptime!(apart) { f32::new(0.0) } else { sums[i as usize] };
        }
        #[unroll]
        for w in 0..words {
            let mut rows = Array::<f32>::new(comptime!((4 * m) as usize));
            #[unroll]
            for i in 0..m {
                let packed = left[comptime!((i * words + w) as usize)];
                decode_word(packed, &mut rows, comptime!(4 * i), comptime!(formats[0]), isa);
            }
            #[unroll]
            for j in 0..COLS {
                let mut weights = Array::<f32>::new(4usize);
                let packed = right[comptime!((j * words + w) as usize)];
                decode_word(packed, &mut weights, 0u32, comptime!(formats[1]), isa);
                #[unroll]
                for i in 0..m {
                    let place = comptime!((i * COLS + j) as usize);
                    if comptime!(isa.has_ptx()) {
                        #[unroll]
                        for e in 0..4u32 {
                            let x = rows[comptime!((4 * i + e) as usize)];
                            partial[place] = fma(x, weights[e as usize], partial[place]);
                        }
                    } else {
                        let first = comptime!((4 * i) as usize);
                        partial[place] = (rows[first] * weights[0] + rows[comptime!(first + 1)] * weights[1])
                            + (rows[comptime!(first + 2)] * weights[2] + rows[comptime!(first + 3)] * weights[3]);
                    }
                }
            }
        }
        #[unroll]
        for i in 0..m {
            let mut of_row = Array::<u32>::new(1usize);
            if comptime!(by_block || by_mx) {
                // Loaded late, because they are cached and registers are scarce.
                load_scale(problem, &mut of_row, 0u32, i.runtime(), block, isa, 0usize);
            }
            #[unroll]
            for j in 0..COLS {
                let place = comptime!((i * COLS + j) as usize);
                let (row_scale, col_scale) = (of_row[0], scales[j as usize]);
                let sum = if comptime!(by_mx) {
                    let row_byte = e8m0(row_scale, at, comptime!(problem.granularities[0]), config);
                    let col_byte = e8m0(col_scale, at, comptime!(problem.granularities[1]), config);
                    times_e8m0(partial[place], row_byte, col_byte)
                } else {
                    partial[place]
                };
                if comptime!(by_block) {
                    let row_factor = factor(row_scale, comptime!(problem.granularities[0]));
                    let col_factor = factor(col_scale, comptime!(problem.granularities[1]));
                    sums[place] = fma(sum, row_factor * col_factor, sums[place]);
                } else if comptime!(apart) {
                    sums[place] += sum;
                } else {
                    sums[place] = sum;
                }
            }
        }
        first += units;
    }
    let warps = comptime!(units / lanes);
    let mut shared = SharedMemory::<f32>::new(comptime!((count * warps) as usize));
    #[unroll]
    for i in 0..count {
        let sum = if comptime!(lanes > 1) { lanes_sum(sums[i as usize], lanes, isa) } else { sums[i as usize] };
        if lane == 0 {
            shared[(warp * count + i) as usize] = sum;
        }
    }
    sync_cube();
    let (row, col) = (UNIT_POS / COLS, col0 + UNIT_POS % COLS);
    if row < m && col < problem.n {
        let mut total = shared[UNIT_POS as usize];
        #[unroll(isa.has_ptx())]
        for warp in 1..warps {
            total += shared[(UNIT_POS + warp * count) as usize];
        }
        problem.store::<O>(out, total, row, col);
    }
}

/// Loads a scale of a block of 128, or the word of its E8M0 bytes, into `to[place]`.
#[cube]
fn load_scale(
    problem: &Problem,
    to: &mut Array<u32>,
    #[comptime] place: u32,
    row: u32,
    block: u32,
    #[comptime] isa: Isa,
    #[comptime] side: usize,
) {
    let granularity = comptime!(problem.granularities[side]);
    if comptime!(isa.has_ptx()) {
        let index = scale_index(row, block, problem.blocks, granularity);
        load_global_words(problem.inv_scales(side), index, to, place, 1u32);
    } else {
        to[place as usize] = scale_word(problem.inv_scales(side), row, block, problem.blocks, granularity);
    }
}

#[cube]
fn clear_unless(words: &mut Array<u32>, keep: bool, #[comptime] count: u32) {
    #[unroll]
    for i in 0..count {
        words[i as usize] = select(keep, words[i as usize], 0u32.runtime());
    }
}

/// Factor for the sums of a block. One for E8M0 scales, which are applied separately.
#[cube]
fn factor(scale: u32, #[comptime] granularity: Granularity) -> f32 {
    if comptime!(granularity.is_mx()) { 1.0f32.runtime() } else { f32::reinterpret(scale) }
}

/// E8M0 byte of a chunk, from the word of its block of 128.
#[cube]
fn e8m0(word: u32, chunk: u32, #[comptime] granularity: Granularity, #[comptime] config: GemvConfig) -> u32 {
    if comptime!(granularity.is_mx()) {
        (word >> (chunk % comptime!(config.chunks(BLOCK)) / comptime!(config.chunks(MX_BLOCK)) * 8)) & 0xffu32
    } else {
        E8M0_ONE.runtime()
    }
}

/// `value · 2^(a - 127) · 2^(b - 127)`, NaN if a byte is 255. The exponent is split evenly, so that
/// no intermediate product leaves f32's range unless the result does.
#[cube]
fn times_e8m0(value: f32, a: u32, b: u32) -> f32 {
    let sum = a + b;
    let half = sum >> 1u32;
    let scaled = value * f32::reinterpret(e8m0_inverse_bits(half)) * f32::reinterpret(e8m0_inverse_bits(sum - half));
    f32::reinterpret(select(max(a, b) == 255u32, F32_NAN.runtime(), u32::reinterpret(scaled)))
}

/// Decodes the four codes of a word to f32. Exact; the order is the same for both operands.
#[cube]
fn decode_word(
    word: u32,
    to: &mut Array<f32>,
    #[comptime] first: u32,
    #[comptime] format: Format,
    #[comptime] isa: Isa,
) {
    if comptime!(isa.has_ptx()) {
        #[unroll]
        for pair in 0..2u32 {
            let (place, upper) = comptime!(((first + 2 * pair) as usize, pair == 1));
            let halves = if comptime!(isa.has_fp8_cvt()) {
                cvt_f16x2(word, upper, format)
            } else {
                f16_pair(word, upper, format)
            };
            // E4M3 by shifts gives the value times 2⁻⁸.
            let is_shifted = comptime!(!isa.has_fp8_cvt() && matches!(format, Format::E4m3));
            #[unroll]
            for half in 0..2usize {
                let value = cvt_f32_f16(halves, comptime!(half == 1));
                to[comptime!(place + half)] = if comptime!(is_shifted) { value * 256.0f32 } else { value };
            }
        }
    } else {
        #[unroll]
        for i in 0..4u32 {
            to[comptime!((first + i) as usize)] = decode((word >> comptime!(8 * i)) & 0xffu32, format);
        }
    }
}

/// Two codes of a word as f16: the second and fourth, or with `upper` the first and third.
///
/// E5M2 is the upper byte of f16. E4M3's exponent and mantissa, placed under f16's five exponent
/// bits, give the value times 2⁻⁸, including subnormals. Only NaN needs separate treatment.
#[cube]
fn f16_pair(word: u32, #[comptime] upper: bool, #[comptime] format: Format) -> u32 {
    // The upper byte of each half is the code.
    let codes = if comptime!(upper) { word << 8u32 } else { word };
    if comptime!(matches!(format, Format::E5m2)) {
        codes & 0xff00_ff00u32
    } else {
        let magnitude = codes & 0x7f00_7f00u32;
        // 0x80 where the magnitude is 0x7f, then ones in the whole exponent and the next bit.
        let nan = (((magnitude + 0x0100_0100u32) & 0x8000_8000u32) >> 8u32) * 0xfcu32;
        (codes & 0x8000_8000u32) | (magnitude >> 1u32) | nan
    }
}
