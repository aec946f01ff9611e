//! The GEMM of sm_89 and sm_120: FP8 tensor cores through `mma.sync`.
//!
//! A block of threads makes a tile of the output ([`Tile`]), 64 codes of the contraction a step. Copies to shared memory
//! run some steps ahead of the products (`cp.async`), rows and codes past the operand's end are filled with zeros. Each warp
//! multiplies its part of the tile from fragments that `ldmatrix` reads.
//!
//! For FP8 the accumulators of the tensor cores keep fewer bits than f32: about 14 on Hopper (DeepSeek-V3's technical
//! report), 13 of mantissa on Ada (Zhang et al., *SageAttention2*); of sm_120 nothing is published. So two steps, 128 of the
//! contraction, are summed there and then added to f32 registers; with `use_fast_accum` only where scales change.
//!
//! **E8M0 scales.** A product takes 32 of the contraction, one block of them. On sm_120 the tensor cores multiply by them: a lane's
//! scale register is a word of the tiles that scales lie in, the four of a row for 128 of the contraction, one a product. An
//! operand without such scales has unit scales there. On sm_89 each product is summed apart and added to f32 registers as
//!
//! ```text
//! total ← total + (sum · 2^(byte_a - 127)) · 2^(byte_b - 127)
//! ```
//!
//! two operations for 32 products, half as long as the products take at 1024 a cycle. `sum · 2^(byte_a - 127)` is exact while it is
//! normal; it is infinite where the sum of unscaled products is beyond f32 under the scale of A alone, which codes of e4m3 are not
//! for scales up to 2^105, those of e5m2 up to 2^91. No infinity meets a zero, as no scale is infinite or zero.
//!
//! | tile | threads | products of a warp | |
//! | --- | --- | --- | --- |
//! | 128 × 128 | 256 | 64 × 32 | |
//! | 64 × 64 | 128 | 32 × 32 | where the larger leave SMs idle |
//! | 32 × 64 | 128 | 32 × 16 | few rows |

mod kernel;
mod scales;

use cubecl::prelude::*;

use super::problem::ProblemLaunch;
use super::{Gemm, GemmShape};
use crate::ptx::mma::MmaKind;
use crate::version::Version;
use crate::{CudaArch, Format, Granularity, cuda_arch};

/// A block's part of the output, and how it is cut among warps and held in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Rows, columns.
    size: [u32; 2],
    /// Warps along the rows, along the columns.
    warps: [u32; 2],
    /// Steps that shared memory holds.
    stages: u32,
}

/// Largest first. Three stages of the first take 48 KiB, so that two blocks fit on an SM where their registers
/// do.
const TILES: [Tile; 3] = [
    Tile { size: [128, 128], warps: [2, 4], stages: 3 },
    Tile { size: [64, 64], warps: [2, 2], stages: 4 },
    Tile { size: [32, 64], warps: [1, 4], stages: 4 },
];

impl Tile {
    const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Products of 16 by 8 that a warp makes along the rows, along the columns.
    const fn products(self) -> [u32; 2] {
        [self.size[0] / self.warps[0] / 16, self.size[1] / self.warps[1] / 8]
    }

    /// The tile for an output, given how many tiles of a size it has: the one with the least work on the busiest of the SMs, the
    /// larger of equals.
    ///
    /// ```text
    /// work = ceil(tiles / SMs) · (rows · cols + 32 (rows + cols))
    /// ```
    ///
    /// The second term is traffic: an SM multiplies some 32 codes in the time of loading one.
    fn of(count: impl Fn([u32; 2]) -> u32, sms: u32) -> Self {
        let work = |tile: &Tile| {
            let [rows, cols] = tile.size;
            u64::from(count(tile.size).div_ceil(sms)) * u64::from(rows * cols + 32 * (rows + cols))
        };
        TILES.into_iter().min_by_key(work).expect("there are tiles")
    }
}

/// Rows and columns of the tile for a GEMM of this shape.
pub(super) fn tile(shape: &GemmShape, sms: u32) -> [u32; 2] {
    Tile::of(|size| shape.tiles(size), sms).size
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    tile: Tile,
    kind: MmaKind,
    formats: [Format; 2],
    /// Whether scales change along the contraction.
    by_block: bool,
    /// Whether the sums of each product are scaled: E8M0 scales, and an instruction that takes none.
    by_product: bool,
    accumulate: bool,
    fast_accum: bool,
    /// Whether f32 scales of B differ among the columns of a tile.
    scales_b_differ: bool,
}

impl Config {
    /// Whether sums of 128 of the contraction, or of each product, are added to f32 registers.
    const fn promotes(self) -> bool {
        self.by_block || self.by_product || !self.fast_accum
    }

    /// Row and column, among those of the thread, of its sum `i`.
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
    let config = Config {
        tile,
        kind,
        formats: gemm.formats(),
        by_block: gemm.by_block(),
        by_product: Granularity::any_mx(gemm.granularities()) && kind == MmaKind::Plain,
        accumulate: gemm.accumulate,
        fast_accum: gemm.use_fast_accum,
        scales_b_differ: gemm.shape().scales_b_differ(),
    };
    // Two neighbouring columns are one store where every row starts at an even element.
    let width = if n.is_multiple_of(2) { 2 } else { 1 };
    // SAFETY: `scaled_gemm` has checked that the codes, scales and bias have the sizes given here; copies read only inside
    // the rows and words of the operands, stores are guarded by `m` and `n`.
    unsafe {
        kernel::gemm_mma::launch_unchecked::<R>(
            client,
            CubeCount::Static(gemm.tiles(tile.size), 1, 1),
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
        let size = |m: u32, n: u32| Tile::of(|[rows, cols]| m.div_ceil(rows) * n.div_ceil(cols), 142).size;
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
            // `ldmatrix` brings two products' columns at a time, and a pass of copies takes whole swizzle periods.
            assert!(j.is_multiple_of(2) && (tile.threads() / 4).is_multiple_of(8));
            assert!((rows * 4).is_multiple_of(tile.threads()) && (cols * 4).is_multiple_of(tile.threads()));
        }
    }
}
