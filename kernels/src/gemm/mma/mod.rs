//! GEMM for sm_89 and sm_120: FP8 tensor cores through `mma.sync`.
//!
//! A thread block makes one output tile ([`MmaTile`]), with 64 codes of the contraction per step.
//! Copies to shared memory (`cp.async`) run some steps ahead of the products. Rows and codes past
//! the operand's end are filled with zeros. Each warp multiplies its part of the tile from
//! fragments that `ldmatrix` loads.
//!
//! For FP8 the accumulators of the tensor cores keep fewer bits than f32. On Hopper these are about
//! 14 (DeepSeek-V3's technical report), on Ada 13 of mantissa (Zhang et al., *SageAttention2*). For
//! sm_120 nothing is published. So two steps, 128 of the contraction, are summed there and then
//! added to f32 registers. With `use_fast_accum` this happens only if scales change.
//!
//! **E8M0 scales.** A product takes 32 of the contraction, which is one block of scales. On sm_120
//! the tensor cores apply them. A lane's scale register is one word of the scale tiles: a row's
//! four scales for 128 of the contraction, one per product. An operand without E8M0 scales has unit
//! scales there. On sm_89 each product is summed separately and added to f32 registers as
//!
//! ```text
//! total ← total + (sum · 2^(byte_a - 127)) · 2^(byte_b - 127)
//! ```
//!
//! These are two operations per 32 products, half of the time of the products at 1024 a cycle.
//! `sum · 2^(byte_a - 127)` is exact while it is normal. It is infinite if the scale of A alone
//! takes the unscaled sum beyond f32. That cannot happen for e4m3 with scales up to 2^105 and for
//! e5m2 with scales up to 2^91. No infinity is multiplied by zero, as no scale is infinite or zero.
//!
//! | tile | threads | products of a warp | |
//! | --- | --- | --- | --- |
//! | 128 × 128 | 256 | 64 × 32 | |
//! | 64 × 64 | 128 | 32 × 32 | if the larger tile leaves SMs idle |
//! | 32 × 64 | 128 | 32 × 16 | few rows |

mod kernel;
mod scales;

use cubecl::prelude::*;

use super::problem::ProblemLaunch;
use super::{Gemm, GemmShape};
use crate::ptx::mma::MmaKind;
use crate::version::Version;
use crate::{CudaArch, Format, Granularity, cuda_arch};

/// Output tile of a block, its split among warps, and its pipeline depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MmaTile {
    /// Rows and columns.
    size: [u32; 2],
    /// Warps along the rows and along the columns.
    warps: [u32; 2],
    /// Steps in shared memory.
    stages: u32,
}

/// Tiles, largest first. Three stages of the first take 48 KiB, so that two blocks fit on an SM if
/// their registers do.
const TILES: [MmaTile; 3] = [
    MmaTile { size: [128, 128], warps: [2, 4], stages: 3 },
    MmaTile { size: [64, 64], warps: [2, 2], stages: 4 },
    MmaTile { size: [32, 64], warps: [1, 4], stages: 4 },
];

impl MmaTile {
    const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Products of 16 by 8 that a warp makes along the rows and along the columns.
    const fn products(self) -> [u32; 2] {
        [self.size[0] / self.warps[0] / 16, self.size[1] / self.warps[1] / 8]
    }

    /// Tile with the least work on the busiest SM, from the number of tiles of each size. Of equal
    /// ones, the larger.
    ///
    /// ```text
    /// work = ceil(tiles / SMs) · (rows · cols + 32 (rows + cols))
    /// ```
    ///
    /// The second term is memory traffic: an SM multiplies about 32 codes in the time of loading
    /// one.
    fn of(count: impl Fn([u32; 2]) -> u32, sms: u32) -> Self {
        let work = |tile: &MmaTile| {
            let [rows, cols] = tile.size;
            u64::from(count(tile.size).div_ceil(sms)) * u64::from(rows * cols + 32 * (rows + cols))
        };
        TILES.into_iter().min_by_key(work).expect("there are tiles")
    }
}

/// Rows and columns of the tile for a GEMM of this shape.
pub(super) fn tile(shape: &GemmShape, sms: u32) -> [u32; 2] {
    MmaTile::of(|size| shape.tiles(size), sms).size
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MmaConfig {
    tile: MmaTile,
    kind: MmaKind,
    formats: [Format; 2],
    /// Whether scales change along the contraction.
    by_block: bool,
    /// Whether each product's sums are scaled: E8M0 scales, and an instruction that does not apply
    /// them.
    by_product: bool,
    fast_accum: bool,
    /// Whether f32 scales of B differ among the columns of a tile.
    scales_b_differ: bool,
}

impl MmaConfig {
    /// Whether sums of each 128 of the contraction, or of each product, are added to f32 registers.
    const fn promotes(self) -> bool {
        self.by_block || self.by_product || !self.fast_accum
    }

    /// Indices of the row and column of the thread's sum `i`, among the thread's rows and columns.
    const fn lines_of(self, i: u32) -> [u32; 2] {
        let cols = self.tile.products()[1];
        [i / (4 * cols) * 2 + i / 2 % 2, i / 4 % cols * 2 + i % 2]
    }
}

/// Launches the kernel.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let (a, b) = (gemm.a, gemm.b);
    let (m, n, matrices) = gemm.matrices();
    let tile = TILES.into_iter().find(|tile| tile.size == gemm.plan.size()).expect("selected among them");
    let kind = if cuda_arch(client) == Some(CudaArch::Sm120) { MmaKind::BlockScaled } else { MmaKind::Plain };
    let config = MmaConfig {
        tile,
        kind,
        formats: gemm.formats(),
        by_block: gemm.shape().by_block(),
        by_product: Granularity::any_mx(gemm.shape().granularities) && kind == MmaKind::Plain,
        fast_accum: gemm.use_fast_accum,
        scales_b_differ: gemm.shape().scales_b_differ(),
    };
    // Two adjacent columns are one store if every row starts at an even element.
    let width = if n.is_multiple_of(2) { 2 } else { 1 };
    // SAFETY: `scaled_gemm` has checked the sizes of codes, scales and bias. Copies read only
    // inside the operands' rows and words. Stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_mma::launch_unchecked::<R>(
            client,
            CubeCount::Static(gemm.shape().tiles(tile.size), 1, 1),
            CubeDim::new_1d(tile.threads()),
            width,
            a.codes_array(1),
            b.codes_array(1),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n * matrices),
            config,
            gemm.dtype,
            Version::of(client),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_the_device() {
        let size = |m: u32, n: u32| MmaTile::of(|[rows, cols]| m.div_ceil(rows) * n.div_ceil(cols), 142).size;
        assert_eq!(size(4096, 4096), [128, 128]);
        assert_eq!(size(16384, 1024), [128, 128]);
        assert_eq!(size(1024, 1024), [64, 64]);
        assert_eq!(size(1, 4096), [32, 64]);
        assert_eq!(size(32, 4096), [32, 64]);
        assert_eq!(size(1, 1), [32, 64]);
    }

    #[test]
    fn warps_share_the_tile() {
        for tile in TILES {
            let ([rows, cols], [warps_m, warps_n], [i, j]) = (tile.size, tile.warps, tile.products());
            assert_eq!([16 * i * warps_m, 8 * j * warps_n], [rows, cols]);
            // `ldmatrix` loads the columns of two products at a time, and a pass of copies covers
            // whole swizzle periods.
            assert!(j.is_multiple_of(2) && (tile.threads() / 4).is_multiple_of(8));
            assert!((rows * 4).is_multiple_of(tile.threads()) && (cols * 4).is_multiple_of(tile.threads()));
        }
    }
}
