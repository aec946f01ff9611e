//! What an element of a GEMM may be wrong by.

use crate::{GemmConfig, GemmPath, Granularity};

impl GemmPath {
    /// The error that this path may make before the result is rounded, as a share of `Σ |a·b|`, for a contraction of length `k` of
    /// operands with these granularities.
    ///
    /// - Emulated and the GEMV: products are exact and sums f32, so every addition and the four operations after them round by at most
    ///   2^-24 of the terms; where scales change every 128, the additions of the longest block and of the blocks' sums. A bound
    ///   that always holds.
    /// - FP8 tensor cores of sm_89 and sm_90 align the products of an instruction and the accumulator to the largest of them,
    ///   drop what lies 13 or 14 bits below it, and cut the sum as short (DeepSeek-V3, arXiv:2412.19437, 3.5.2; MMA-Sim,
    ///   arXiv:2511.10909). The largest itself loses nothing. Until the sum is added to f32 registers, these are n = min(k, 128)
    ///   products in i ≤ ⌈n / 16⌉ instructions. Whichever way bits are dropped and whatever the data,
    ///
    ///   ```text
    ///           products, accumulators, but the largest; sums
    ///   lost  <  (n   +    (i - 1)    -      i       +   i) · 2^-13 · Σ |a·b|   ≤   (n + 16) · 2^-13 · Σ |a·b|
    ///   ```
    ///
    ///   where 16 leaves room for what the losses themselves add to the sums, for f32 sums and scales, and for products of
    ///   subnormal codes, which count as larger than they are. Random data lose a tenth of it where bits are dropped toward zero,
    ///   and a third where they are dropped downward, which is the same way each time.
    /// - With fast accumulation the running sum is cut on, and grows as √k: √k · 2^-15 more, toward zero. Dropped downward it
    ///   would lose 33 / 2 · 2^-13 of itself in each of k / 32 instructions, some √k · 2^-12 · Σ |a·b|: with 16384 products as
    ///   much as the result is. That is not allowed for, and beyond 512 products would be noticed: MMA-Sim agrees with the
    ///   hardware bit for bit by dropping toward zero.
    /// - Others keep 23 bits or more (ib.): some k · 2^-24 in the worst case.
    pub fn error_bound(self, config: GemmConfig, granularities: [Granularity; 2], k: usize) -> f64 {
        let promoted = k.min(128) as f64;
        let additions = if Granularity::any_blocks(granularities) { k.min(128) + k.div_ceil(128) } else { k };
        match self {
            GemmPath::Emulated | GemmPath::Gemv => (additions as f64 + 4.0) * 2f64.powi(-24),
            GemmPath::Wgmma | GemmPath::Mma => {
                let running = if config.use_fast_accum { (k as f64).sqrt() * 2f64.powi(-15) } else { 0.0 };
                (promoted + 16.0) * 2f64.powi(-13) + running
            }
            GemmPath::Tcgen05 | GemmPath::Bf16Wgmma | GemmPath::F16Mma | GemmPath::Host => 2f64.powi(-10),
        }
    }
}
