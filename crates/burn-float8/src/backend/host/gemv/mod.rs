//! GEMM of few rows, for decoding. It is bound by reading the weight, so each byte of codes is read
//! once.
//!
//! ```text
//! sum[m, n] = Σ_g s[g] · scale[g, n],   k = 16 g
//! s[g] = fma(x[k+15], w[k+15, n], .. fma(x[k+1], w[k+1, n], x[k] · w[k, n]))
//! ```
//! scale[g, n] is the scale of a block. Without block scales it is 1, and s[g] is added unchanged.
//! Codes become f32 in registers.
//!
//! The order of summation does not depend on the number of rows, layout of the codes, processor or
//! number of threads. A row therefore has the same bits in every batch of up to four rows.

#![cfg_attr(not(target_arch = "x86_64"), allow(unused_mut, unused_variables))]

#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

use burn_std::f16;
use float8_kernels::{Format, InvScale};
use rayon::prelude::*;

use super::{HostOperand, Scales, loops, transpose, values};

/// Maximum number of rows. With more rows arithmetic dominates, and a tiled GEMM is faster.
pub(super) const MAX_ROWS: usize = 4;
/// Elements of the contraction that are summed before they are added to the output.
const GROUP: usize = 16;
/// Groups that share a scale in every granularity: the smallest block, MX, has 32 elements.
const SPAN: usize = 2;
/// Outputs per vector.
const LANES: usize = 16;
/// Outputs per block: a cache line of codes if outputs are contiguous.
const BLOCK: usize = 64;
/// Minimum number of consecutive bytes of codes per thread. The processor does not prefetch shorter
/// runs.
const BAND: usize = 256;

/// Σ a[m, k] b[n, k], `[M, N]`, without tensor and row scales. None if `a` has too many rows, or
/// `b` contains an e4m3 NaN.
pub(super) fn sums<D: Sync>(a: &HostOperand<D>, b: &HostOperand<D>) -> Option<Vec<f32>> {
    let ([m, k], [n, _]) = (a.matrix(), b.matrix());
    if m > MAX_ROWS || [m, k, n].contains(&0) || b.codes.has_nan(b.format) {
        return None;
    }
    let x = if a.transposed { transpose(&values(a), a.dims) } else { values(a) };
    let weight = Weight {
        codes: &b.codes,
        format: b.format,
        dims: b.dims,
        k_is_rows: b.transposed,
        scales: b.block().map(|size| Blocks { scales: &b.inv_scales, size, row: b.scale_dims()[1] }),
    };
    Some(match m {
        1 => run::<1>(&x, &weight),
        2 => run::<2>(&x, &weight),
        3 => run::<3>(&x, &weight),
        _ => run::<4>(&x, &weight),
    })
}

/// Codes in their memory layout.
struct Weight<'a> {
    codes: &'a [u8],
    format: Format,
    /// Rows and columns of `codes`.
    dims: [usize; 2],
    /// Whether `codes` is `[K, N]` instead of `[N, K]`.
    k_is_rows: bool,
    scales: Option<Blocks<'a>>,
}

/// Block scales, in the layout of the codes.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    scales: &'a Scales,
    /// Rows and columns of the codes that share a scale, powers of two. Covers one output, or a
    /// multiple of 16.
    size: [usize; 2],
    /// Scales per row.
    row: usize,
}

impl Weight<'_> {
    fn k_and_n(&self) -> [usize; 2] {
        let [rows, cols] = self.dims;
        if self.k_is_rows { [rows, cols] } else { [cols, rows] }
    }

    /// Reads 64 codes of several rows, with zeros beyond the end. Prefetches the codes `ahead`
    /// bytes later.
    #[inline(always)]
    fn read(&self, [row, col]: [usize; 2], ahead: usize, lines: &mut [[u8; BLOCK]]) {
        let [rows, cols] = self.dims;
        for (row, line) in (row..).zip(lines) {
            let codes = if row < rows { &self.codes[row * cols + col.min(cols)..(row + 1) * cols] } else { &[] };
            // Into L2, which supports more outstanding cache lines than L1.
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch may take any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(codes.as_ptr().wrapping_add(ahead).cast());
            }
            if let Some(whole) = codes.first_chunk() {
                *line = *whole;
            } else {
                line.fill(0);
                line[..codes.len()].copy_from_slice(codes);
            }
        }
    }

    /// Scales of a block of outputs for elements starting at `k`. Outputs beyond the end repeat the
    /// last scale. A span has one scale per output.
    #[inline(always)]
    fn factors(&self, k: usize, first: usize) -> [f32; BLOCK] {
        let Some(Blocks { scales, size: [height, width], row }) = self.scales else { return [1.0; BLOCK] };
        let [_, count] = self.k_and_n();
        // Powers of two: a division would take as long as the block.
        let at = |n: usize| {
            let (of_row, of_column) = if self.k_is_rows { (k, n) } else { (n, k) };
            (of_row >> height.trailing_zeros()) * row + (of_column >> width.trailing_zeros())
        };
        if (if self.k_is_rows { width } else { height }).is_multiple_of(BLOCK) {
            return [scales.get(at(first.min(count - 1))).get(); BLOCK];
        }
        let mut factors = [0.0; BLOCK];
        let side_by_side = self.k_is_rows && width == 1 && first + BLOCK <= count;
        match scales {
            Scales::E8m0(bytes) if side_by_side => {
                let bytes: &[u8; BLOCK] = bytes[at(first)..].first_chunk().expect("a scale for each output");
                // Except 0 (2^-127) and 255 (NaN), a byte is the exponent field of an f32. Without
                // these two the product takes a fifth less time.
                let are_exponents = bytes.iter().fold(true, |all, byte| all & (byte.wrapping_add(1) > 1));
                for (factor, byte) in factors.iter_mut().zip(bytes) {
                    let exponent = f32::from_bits(u32::from(*byte) << 23);
                    *factor = if are_exponents { exponent } else { InvScale::from_e8m0(*byte).get() };
                }
            }
            _ => factors = core::array::from_fn(|lane| scales.get(at((first + lane).min(count - 1))).get()),
        }
        factors
    }
}

/// Sums of all outputs, in bands on all cores.
fn run<const M: usize>(x: &[f32], weight: &Weight<'_>) -> Vec<f32> {
    let [k, n] = weight.k_and_n();
    let x = &pack::<M>(x, k);
    // One band per thread: longer runs of a row come closer to a streaming read.
    let width = n.div_ceil(rayon::current_num_threads()).max(BAND).max(loops::TASK / k).next_multiple_of(BLOCK);
    let kernel = kernels::<M>().next().expect("one is for any processor");
    let bands: Vec<Vec<f32>> = (0..n.div_ceil(width))
        .into_par_iter()
        .map(|band| {
            let first = band * width;
            let width = width.min(n - first).next_multiple_of(BLOCK);
            let mut y = vec![0.0; M * width];
            kernel(x, weight, first, &mut y);
            y
        })
        .collect();
    // A decoded e4m3 code has the value of an f16 with its bits, which is 256 times too small.
    let factor = if weight.format == Format::E4m3 { 256.0 } else { 1.0 };
    let mut sums = vec![0.0; M * n];
    for (m, sums) in sums.chunks_exact_mut(n).enumerate() {
        for (sums, band) in sums.chunks_mut(width).zip(&bands) {
            sums.iter_mut().zip(&band[m * (band.len() / M)..]).for_each(|(sum, part)| *sum = part * factor);
        }
    }
    sums
}

/// x `[M, K]` as `[K / 16, M, 16]`, padded with zeros.
fn pack<const M: usize>(x: &[f32], k: usize) -> Vec<f32> {
    let mut packed = vec![0.0; k.div_ceil(GROUP) * M * GROUP];
    for (m, row) in x.chunks_exact(k).enumerate() {
        for (group, part) in packed.chunks_exact_mut(M * GROUP).zip(row.chunks(GROUP)) {
            group[m * GROUP..][..part.len()].copy_from_slice(part);
        }
    }
    packed
}

/// Computes sums of outputs from an index on, for packed x.
type Kernel = fn(&[f32], &Weight<'_>, usize, &mut [f32]);

/// Kernels that this processor supports, fastest first.
fn kernels<const M: usize>() -> impl Iterator<Item = Kernel> {
    let mut kernels: [Option<Kernel>; 3] = [None, None, Some(band::<false, M>)];
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! if_detected {
            ($features:literal: $($feature:tt)*) => {{
                #[target_feature(enable = $features)]
                fn vectorized<const M: usize>(x: &[f32], weight: &Weight<'_>, first: usize, y: &mut [f32]) {
                    band::<true, M>(x, weight, first, y);
                }
                // SAFETY: the processor has the features of the function.
                let kernel: Kernel = |x, weight, first, y| unsafe { vectorized::<M>(x, weight, first, y) };
                ($(is_x86_feature_detected!($feature))&&*).then_some(kernel)
            }};
        }
        kernels[0] =
            if_detected!("avx2,fma,f16c,avx512f,avx512bw,avx512vl": "fma" "f16c" "avx512f" "avx512bw" "avx512vl");
        kernels[1] = if_detected!("avx2,fma,f16c": "avx2" "fma" "f16c");
    }
    kernels.into_iter().flatten()
}

/// Sums of the outputs from `first` on into `y`, `[M, width]`. Outputs beyond the last stay 0.
#[inline(always)]
fn band<const F16C: bool, const M: usize>(x: &[f32], weight: &Weight<'_>, first: usize, y: &mut [f32]) {
    let width = y.len() / M;
    if weight.k_is_rows {
        for (span, x) in x.chunks(SPAN * M * GROUP).enumerate() {
            for column in (0..width).step_by(BLOCK) {
                let (k, n) = (span * SPAN * GROUP, first + column);
                let factors = &weight.factors(k, n);
                for (k, x) in (k..).step_by(GROUP).zip(x.chunks_exact(M * GROUP)) {
                    let mut codes = [[0; BLOCK]; GROUP];
                    weight.read([k, n], SPAN * GROUP * weight.dims[1], &mut codes);
                    block::<F16C, M>(x, &codes, weight.format, factors, &mut y[column..], width);
                }
            }
        }
        return;
    }
    for column in (0..width).step_by(BLOCK) {
        let (n, mut codes) = (first + column, [[0; BLOCK]; BLOCK]);
        for (part, x) in x.chunks(BLOCK * M).enumerate() {
            // Reads whole cache lines.
            weight.read([n, part * BLOCK], 4 * BLOCK, &mut codes);
            for (group, x) in x.chunks_exact(M * GROUP).enumerate() {
                let factors = &weight.factors(part * BLOCK + group * GROUP, n);
                let codes = &by_element(&codes, group * GROUP);
                block::<F16C, M>(x, codes, weight.format, factors, &mut y[column..], width);
            }
        }
    }
}

/// Adds one group of the contraction, x `[M, 16]`, to a block of outputs.
#[inline(always)]
fn block<const F16C: bool, const M: usize>(
    x: &[f32],
    codes: &[[u8; BLOCK]; GROUP],
    format: Format,
    factors: &[f32; BLOCK],
    y: &mut [f32],
    stride: usize,
) {
    for (v, factors) in factors.as_chunks::<LANES>().0.iter().enumerate() {
        let mut sums = [[0.0_f32; LANES]; M];
        for (r, codes) in codes.iter().enumerate() {
            let w = decode::<F16C>(&codes.as_chunks().0[v], format);
            for (m, sums) in sums.iter_mut().enumerate() {
                let x = x[m * GROUP + r];
                for (sum, w) in sums.iter_mut().zip(&w) {
                    *sum = w.mul_add(x, *sum);
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let y = &mut y[m * stride..].as_chunks_mut::<LANES>().0[v];
            for ((y, sum), factor) in y.iter_mut().zip(sums).zip(factors) {
                *y = sum.mul_add(*factor, *y);
            }
        }
    }
}

/// Decodes codes other than the e4m3 NaN by shifting their bits into an f16. Values of e4m3 are
/// divided by 256.
#[inline(always)]
fn decode<const F16C: bool>(codes: &[u8; LANES], format: Format) -> [f32; LANES] {
    // For e4m3: the sign, a zero before the four exponent bits, and three mantissa bits.
    let (shift, mask) = if format == Format::E4m3 { (1, 0xbfff_u16) } else { (0, 0xffff) };
    #[cfg(target_arch = "x86_64")]
    if F16C {
        // SAFETY: `kernels` checked the processor. Sixteen bytes are one vector, sixteen f32 are
        // two.
        return unsafe {
            let codes = core::mem::transmute::<[u8; LANES], __m128i>(*codes);
            let shifted =
                _mm256_sra_epi16(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(codes)), _mm_cvtsi32_si128(shift));
            let halves = _mm256_and_si256(shifted, _mm256_set1_epi16(mask as i16));
            let [low, high] = [_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves)];
            core::mem::transmute::<[__m256; 2], [f32; LANES]>([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)])
        };
    }
    let mut values = [0.0; LANES];
    for (value, code) in values.iter_mut().zip(codes) {
        *value = f16::from_bits(((i16::from(*code) << 8) >> shift) as u16 & mask).to_f32();
    }
    values
}

/// Columns of a group, starting at `first`.
#[inline(always)]
fn by_element(codes: &[[u8; BLOCK]; BLOCK], first: usize) -> [[u8; BLOCK]; GROUP] {
    let mut columns = [[0; BLOCK]; GROUP];
    #[cfg(target_arch = "x86_64")]
    for (v, codes) in codes.as_chunks::<LANES>().0.iter().enumerate() {
        // SAFETY: sixteen bytes are a vector, and every x86-64 has SSE2.
        let vectors: [[u8; LANES]; GROUP] = unsafe {
            let mut rows: [__m128i; 16] = codes.map(|row| _mm_loadu_si128(row[first..][..GROUP].as_ptr().cast()));
            // Interleaves row i with row i + 8, four times. Each time the bits of a byte's index
            // rotate by one.
            for _ in 0..4 {
                let was = rows;
                for i in 0..8 {
                    rows[2 * i] = _mm_unpacklo_epi8(was[i], was[i + 8]);
                    rows[2 * i + 1] = _mm_unpackhi_epi8(was[i], was[i + 8]);
                }
            }
            core::mem::transmute(rows)
        };
        columns.iter_mut().zip(vectors).for_each(|(column, part)| column[v * LANES..][..LANES].copy_from_slice(&part));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for (n, row) in codes.iter().enumerate() {
        columns.iter_mut().zip(&row[first..]).for_each(|(column, code)| column[n] = *code);
    }
    columns
}

#[cfg(test)]
mod tests;
