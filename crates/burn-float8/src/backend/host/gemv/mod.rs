//! The GEMM of a few rows, as of one generated token: bound by reading the weight, which is read once, as the bytes that its codes are.
//!
//! ```text
//! sum[m, n] = Σ_g s[g] · scale[g, n],   s[g] = fma(x[k+15], w[k+15, n], .. fma(x[k+1], w[k+1, n], x[k] · w[k, n])),   k = 16 g
//! ```
//! scale[g, n] is that of a block; without scales of blocks it is 1, and s[g] is added as it is. Codes become f32 in registers. The order of an
//! output's sum depends neither on the number of rows, nor on the layout of the codes, the processor or the number of threads, so that each
//! row is what it would be alone.

mod lanes;
#[cfg(target_arch = "x86_64")]
mod vbmi;
#[cfg(target_arch = "x86_64")]
mod x86;

use float8_kernels::{Format, InvScale};
use rayon::prelude::*;

use self::lanes::{Kernel, Lanes, Portable};
use super::{HostOperand, Scales, loops, transpose, values};

/// Rows at most: with more of them it is arithmetic that takes the time, and a GEMM of tiles is faster.
pub(super) const MAX_ROWS: usize = 4;
/// Elements of the contraction that are added before they join the sum.
const GROUP: usize = 16;
/// Groups that share a scale in every granularity: the smallest block, of MX, has 32 elements.
const SPAN: usize = 2;
/// Outputs of a vector.
const LANES: usize = 16;
/// Outputs of a block: a cache line of codes where outputs lie side by side.
const BLOCK: usize = 64;
/// Bytes of codes that a thread reads in a row at least, where there are as many: less is not fetched ahead by the processor.
const BAND: usize = 256;

/// Σ a[m, k] b[n, k], `[M, N]`, without the scales of tensors and rows; none if `a` has too many rows, or `b` a code that is no number.
pub(super) fn sums<D: Sync>(a: &HostOperand<D>, b: &HostOperand<D>) -> Option<Vec<f32>> {
    let ([m, k], [n, _]) = (a.matrix(), b.matrix());
    if m > MAX_ROWS || [m, k, n].contains(&0) || b.codes.has_nan(b.format) {
        return None;
    }
    let x = match a.transposed {
        true => transpose(&values(a), a.dims),
        false => values(a),
    };
    let weight = Weight {
        codes: &b.codes,
        dims: b.dims,
        k_is_rows: b.transposed,
        scales: b.block().map(|size| Blocks { scales: &b.inv_scales, size, row: b.scale_dims()[1] }),
    };
    Some(match m {
        1 => run::<1>(&x, &weight, b.format),
        2 => run::<2>(&x, &weight, b.format),
        3 => run::<3>(&x, &weight, b.format),
        _ => run::<4>(&x, &weight, b.format),
    })
}

/// Codes as they lie.
#[derive(Clone, Copy)]
struct Weight<'a> {
    codes: &'a [u8],
    /// Rows and columns of `codes`.
    dims: [usize; 2],
    /// Whether `codes` is `[K, N]`; `[N, K]` if not.
    k_is_rows: bool,
    scales: Option<Blocks<'a>>,
}

/// Scales of parts of the codes, which lie as those do.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    scales: &'a Scales,
    /// Rows and columns of the codes that share one, powers of two: one output, or a multiple of 16.
    size: [usize; 2],
    /// Scales of a row.
    row: usize,
}

impl Weight<'_> {
    fn k(&self) -> usize {
        self.dims[usize::from(!self.k_is_rows)]
    }

    fn n(&self) -> usize {
        self.dims[usize::from(self.k_is_rows)]
    }

    /// The scales of a block of outputs' elements from `k` on, as far as there are so many outputs. A span has one for each output.
    #[inline(always)]
    fn factors(&self, k: usize, first: usize) -> [f32; BLOCK] {
        let Some(Blocks { scales, size: [height, width], row }) = self.scales else { return [1.0; BLOCK] };
        let last = self.n() - 1;
        // Powers of two: a division would take as long as the block.
        let at = |n: usize| {
            let (of_row, of_column) = if self.k_is_rows { (k, n) } else { (n, k) };
            (of_row >> height.trailing_zeros()) * row + (of_column >> width.trailing_zeros())
        };
        if (if self.k_is_rows { width } else { height }).is_multiple_of(BLOCK) {
            return [scales.get(at(first.min(last))).get(); BLOCK];
        }
        let mut factors = [0.0; BLOCK];
        let side_by_side = self.k_is_rows && width == 1 && first + BLOCK <= self.n();
        match scales {
            Scales::E8m0(bytes) if side_by_side => {
                let bytes: &[u8; BLOCK] = bytes[at(first)..].first_chunk().expect("a scale for each output");
                // All but 0 (2^-127) and 255 (NaN) are the exponent field of an f32. Without those two the product takes a fifth less time.
                let are_exponents = bytes.iter().fold(true, |all, byte| all & (byte.wrapping_add(1) > 1));
                for (factor, byte) in factors.iter_mut().zip(bytes) {
                    *factor = match are_exponents {
                        true => f32::from_bits(u32::from(*byte) << 23),
                        false => InvScale::from_e8m0(*byte).get(),
                    };
                }
            }
            _ => {
                for (lane, factor) in factors.iter_mut().enumerate() {
                    *factor = scales.get(at((first + lane).min(last))).get();
                }
            }
        }
        factors
    }
}

/// Sums of all outputs, some on each core.
fn run<const M: usize>(x: &[f32], weight: &Weight<'_>, format: Format) -> Vec<f32> {
    let (k, n) = (weight.k(), weight.n());
    let x = &pack::<M>(x, k);
    // One band a thread: the longer its parts of rows are, the nearer reading is to a stream.
    let width = n.div_ceil(rayon::current_num_threads()).max(BAND).max(loops::TASK / k).next_multiple_of(BLOCK);
    let kernel = kernel::<M>(format, weight.scales.is_some());
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
    // A decoded code of e4m3 is as small as an f16 with its bits.
    let factor = if format == Format::E4m3 { 256.0 } else { 1.0 };
    let mut sums = vec![0.0; M * n];
    for (m, sums) in sums.chunks_exact_mut(n).enumerate() {
        for (sums, band) in sums.chunks_mut(width).zip(&bands) {
            let row = &band[m * (band.len() / M)..];
            sums.iter_mut().zip(row).for_each(|(sum, part)| *sum = part * factor);
        }
    }
    sums
}

/// x `[M, K]` as `[K / 16, M, 16]`, with zeros behind it.
fn pack<const M: usize>(x: &[f32], k: usize) -> Vec<f32> {
    let mut packed = vec![0.0; k.div_ceil(GROUP) * M * GROUP];
    for (m, row) in x.chunks_exact(k).enumerate() {
        for (group, part) in packed.chunks_exact_mut(M * GROUP).zip(row.chunks(GROUP)) {
            group[m * GROUP..][..part.len()].copy_from_slice(part);
        }
    }
    packed
}

/// The kernel for this processor.
fn kernel<const M: usize>(format: Format, is_scaled: bool) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = x86::kernel::<M>(format, is_scaled) {
        return kernel;
    }
    portable::<M>(format, is_scaled)
}

fn portable<const M: usize>(format: Format, is_scaled: bool) -> Kernel {
    match (format, is_scaled) {
        (Format::E4m3, false) => band::<Portable<false>, M, false>,
        (Format::E4m3, true) => band::<Portable<false>, M, true>,
        (Format::E5m2, false) => band::<Portable<true>, M, false>,
        (Format::E5m2, true) => band::<Portable<true>, M, true>,
    }
}

/// Sums of the outputs from `first` on into `y`, `[M, width]`, of which those that there are not stay 0.
#[inline(always)]
fn band<L: Lanes, const M: usize, const SCALED: bool>(x: &[f32], weight: &Weight<'_>, first: usize, y: &mut [f32]) {
    let width = y.len() / M;
    if weight.k_is_rows {
        for (span, x) in x.chunks(SPAN * M * GROUP).enumerate() {
            for column in (0..width).step_by(BLOCK) {
                rows_of_k::<L, M, SCALED>(x, weight, [span * SPAN * GROUP, first + column], &mut y[column..], width);
            }
        }
    } else {
        for column in (0..width).step_by(BLOCK) {
            rows_of_n::<L, M, SCALED>(x, weight, first + column, &mut y[column..], width);
        }
    }
}

/// A block of outputs that lie side by side, by a span of the contraction.
#[inline(always)]
fn rows_of_k<L: Lanes, const M: usize, const SCALED: bool>(
    x: &[f32],
    weight: &Weight<'_>,
    [k, first]: [usize; 2],
    y: &mut [f32],
    stride: usize,
) {
    let [rows, cols] = weight.dims;
    let factors = &if SCALED { weight.factors(k, first) } else { [1.0; BLOCK] };
    for (k, x) in (k..).step_by(GROUP).zip(x.chunks_exact(M * GROUP)) {
        if k + GROUP <= rows && first + BLOCK <= cols {
            let codes = &weight.codes[k * cols + first..][..(GROUP - 1) * cols + BLOCK];
            let load = |r: usize| {
                L::prefetch(codes.as_ptr().wrapping_add((r + SPAN * GROUP) * cols));
                codes[r * cols..].first_chunk().expect("inside")
            };
            block::<L, M, SCALED>(x, load, factors, y, stride);
        } else {
            let mut codes = [[0; BLOCK]; GROUP];
            for (row, codes) in codes.iter_mut().enumerate().take(rows - k) {
                let known = BLOCK.min(cols.saturating_sub(first));
                codes[..known].copy_from_slice(&weight.codes[(k + row) * cols + first.min(cols)..][..known]);
            }
            block::<L, M, SCALED>(x, |r| &codes[r], factors, y, stride);
        }
    }
}

/// A block of outputs, the elements of each of which lie side by side, by the whole contraction.
#[inline(always)]
fn rows_of_n<L: Lanes, const M: usize, const SCALED: bool>(
    x: &[f32],
    weight: &Weight<'_>,
    first: usize,
    y: &mut [f32],
    stride: usize,
) {
    let [rows, cols] = weight.dims;
    let known = BLOCK.min(rows.saturating_sub(first));
    let mut codes = [[0; BLOCK]; BLOCK];
    for (part, x) in x.chunks(BLOCK / GROUP * M * GROUP).enumerate() {
        let k = part * BLOCK;
        // Whole cache lines are read.
        for (n, codes) in codes[..known].iter_mut().enumerate() {
            let row = &weight.codes[(first + n) * cols + k..(first + n + 1) * cols];
            L::prefetch(row.as_ptr().wrapping_add(4 * BLOCK));
            match row.first_chunk() {
                Some(whole) => *codes = *whole,
                None => {
                    codes[..row.len()].copy_from_slice(row);
                    codes[row.len()..].fill(0);
                }
            }
        }
        for (group, x) in x.chunks_exact(M * GROUP).enumerate() {
            let by_element = L::transpose(&codes, group * GROUP);
            let factors = &if SCALED { weight.factors(k + group * GROUP, first) } else { [1.0; BLOCK] };
            block::<L, M, SCALED>(x, |r| &by_element[r], factors, y, stride);
        }
    }
}

/// Adds one group of the contraction, x `[M, 16]`, to a block of outputs.
#[inline(always)]
fn block<'a, L: Lanes, const M: usize, const SCALED: bool>(
    x: &[f32],
    load: impl Fn(usize) -> &'a [u8; BLOCK],
    factors: &[f32; BLOCK],
    y: &mut [f32],
    stride: usize,
) {
    if M == 1 || L::ARE_MANY {
        vectors::<L, M, { BLOCK / LANES }, SCALED>(x, |r| chunks(load(r)), factors, 0, y, stride);
    } else {
        for v in 0..BLOCK / LANES {
            vectors::<L, M, 1, SCALED>(x, |r| chunks(&load(r)[v * LANES..]), factors, v, &mut y[v * LANES..], stride);
        }
    }
}

#[inline(always)]
fn chunks<const V: usize, T>(values: &[T]) -> &[[T; LANES]; V] {
    values.as_chunks().0.first_chunk().expect("so many vectors")
}

/// Adds one group of the contraction to some vectors of a block, from its `v`th on.
#[inline(always)]
fn vectors<'a, L: Lanes, const M: usize, const V: usize, const SCALED: bool>(
    x: &[f32],
    load: impl Fn(usize) -> &'a [[u8; LANES]; V],
    factors: &[f32; BLOCK],
    v: usize,
    y: &mut [f32],
    stride: usize,
) {
    let mut sums = [[L::default(); V]; M];
    for r in 0..GROUP {
        let w = L::decode(load(r));
        for m in 0..M {
            let x = x[m * GROUP + r];
            for v in 0..V {
                sums[m][v] = if r == 0 { w[v].scaled(x) } else { w[v].scaled_plus(x, sums[m][v]) };
            }
        }
    }
    for (m, sums) in sums.into_iter().enumerate() {
        let y = y[m * stride..].as_chunks_mut().0.first_chunk_mut().expect("so many vectors");
        L::add(sums, SCALED.then(|| chunks(&factors[v * LANES..])), y);
    }
}

#[cfg(test)]
mod tests;
