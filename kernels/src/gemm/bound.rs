//! Error bounds of a GEMM's elements.

use crate::{GemmConfig, GemmPath, Granularity};

impl GemmPath {
    /// Maximum error of this path before the result is rounded, as a fraction of `Σ |a·b|`. The
    /// contraction has length `k` and the operands these granularities.
    ///
    /// - Emulated and GEMV: products are exact and sums f32. Every addition and the four operations
    ///   after them round by at most 2^-24 of the terms. If scales change every 128, the additions
    ///   are the ones of the longest block and of the blocks' sums. This bound always holds.
    /// - FP8 tensor cores of sm_89 and sm_90 align the products of an instruction and the
    ///   accumulator to the largest of them. They drop bits 13 or 14 below it and truncate the sum
    ///   to the same width (DeepSeek-V3, arXiv:2412.19437, 3.5.2; MMA-Sim, arXiv:2511.10909). The
    ///   largest term loses nothing. Until the sum is added to f32 registers, there are
    ///   `n = min(k, 128)` products in `i ≤ ⌈n / 16⌉` instructions. For any direction of rounding
    ///   and any data,
    ///
    ///   ```text
    ///            products, accumulators, except the largest; sums
    ///   lost  <  (n    +    (i - 1)     -      i      +     i)    · 2^-13 · Σ |a·b|
    ///         ≤  (n + 16) · 2^-13 · Σ |a·b|
    ///   ```
    ///
    ///   The 16 leaves room for the losses' effect on the sums, and for f32 sums and scales. It
    ///   also leaves room for products of subnormal codes, which are aligned as if they were
    ///   larger. Random data lose a tenth of the bound if bits are dropped toward zero. They lose a
    ///   third if bits are dropped downward, always in the same direction.
    /// - With fast accumulation the running sum, which grows as √k, is truncated too: √k · 2^-15
    ///   more if toward zero. Truncated downward, it would lose 33 / 2 · 2^-13 of itself in each of
    ///   k / 32 instructions, about √k · 2^-12 · Σ |a·b|. With 16384 products that is as large as
    ///   the result. The bound does not allow this, so it would fail the check beyond 512 products.
    ///   MMA-Sim matches the hardware bit for bit by truncating toward zero.
    /// - Others keep 23 bits or more (ib.): about k · 2^-24 in the worst case. At k = 16384 that is
    ///   the bound of 2^-10.
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
