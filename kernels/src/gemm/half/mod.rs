//! The GEMM of GPUs with f16 or bf16 matrix units but none for FP8: codes are decoded in the tile, then cooperative
//! matrix products with f32 accumulators.
//!
//! Both formats decode exactly to f16. Where an operand has E8M0 scales, both are decoded to bf16, and its codes times their
//! scales: a value of at most four significant bits times a power of two is a bf16, exactly down to 2^-126 and in steps of 2^-133
//! below. Products are exact in f32. How the sum is rounded is the device's: NVIDIA's
//! units keep f32 accumulators whose additions truncate (Fasi et al., *Numerical behavior of NVIDIA tensor cores*); of
//! others little is published. It is not the short accumulator that FP8 has, so `use_fast_accum` changes nothing.
//!
//! A block of threads makes a tile of the output ([`Tile`]), 32 codes of the contraction a step. A step's codes are in
//! registers while the step before is multiplied, then decoded into the other of two stages of shared memory. Cooperative
//! matrices do not tell which unit holds which element, so sums reach their scales through shared memory.

mod decode;
mod kernel;

use cubecl::features::{MmaConfig, Plane, TypeUsage};
use cubecl::prelude::*;

use super::problem::ProblemLaunch;
use super::{Gemm, GemmShape};
use crate::grid::fold;
use crate::source::Source;
use crate::version::Version;
use crate::{Format, Granularity};

/// Codes of the contraction in a step.
const STEP: u32 = 32;

/// Elements from one row to the next in shared memory: with eight of padding, the rows that a matrix load reads at a time
/// lie in different banks, and stay aligned to 16 bytes.
const PITCH: u32 = STEP + 8;

/// A cube's part of the output, and how it is cut among planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Rows, columns.
    size: [u32; 2],
    /// Planes along the rows, along the columns.
    planes: [u32; 2],
}

/// Largest first; the second fits into 32 KiB of shared memory.
const TILES: [Tile; 2] = [Tile { size: [128, 128], planes: [2, 4] }, Tile { size: [64, 64], planes: [2, 2] }];

impl Tile {
    const fn plane_count(self) -> u32 {
        self.planes[0] * self.planes[1]
    }

    /// Rows and columns of a plane's part.
    const fn part(self) -> [u32; 2] {
        [self.size[0] / self.planes[0], self.size[1] / self.planes[1]]
    }

    /// Elements of one operand's rows, then the other's, in one of the two stages.
    const fn stage(self) -> u32 {
        (self.size[0] + self.size[1]) * PITCH
    }

    /// Elements of the planes' strips, `strip` rows of each part, in which sums go to the units that scale them.
    const fn strips(self, strip: u32) -> u32 {
        self.plane_count() * strip * self.part()[1]
    }

    /// Bytes of the stages, the strips and the scales.
    const fn shared_bytes(self, strip: u32) -> usize {
        (2 * self.stage() * 2 + self.strips(strip) * 4 + (self.size[0] + self.size[1]) * 4) as usize
    }
}

/// What codes are decoded to: f16, or for E8M0 scales, whose exponents have eight bits, bf16.
pub(super) const fn element(granularities: [Granularity; 2]) -> Source {
    if Granularity::any_mx(granularities) { Source::Bf16 } else { Source::F16 }
}

/// The matrix units of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Unit {
    /// m, n and k of one product; 16 or 8 each.
    shape: [u32; 3],
    /// Units of a plane: 32 or 64.
    plane: u32,
    /// Whether a plane can wait for itself alone.
    plane_sync: bool,
}

impl Unit {
    /// The units of this client's device for products of `element` and f32 sums; `None` if it has none that the kernel can
    /// use, or cannot calculate with such elements.
    pub(super) fn of<R: Runtime>(client: &ComputeClient<R>, element: Source) -> Option<Self> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        if !properties.features.type_usage(element.storage()).contains(TypeUsage::Arithmetic) {
            return None;
        }
        let shape = [16, 8].map(|side| MmaConfig {
            a_type: element.storage(),
            b_type: element.storage(),
            cd_type: Source::F32.storage(),
            m: side,
            n: side,
            k: side,
        });
        let shape = shape.into_iter().find(|shape| properties.features.matmul.cmma.contains(shape))?;
        let plane = hardware.plane_size_max;
        let unit = Self {
            shape: [shape.m, shape.n, shape.k],
            plane,
            plane_sync: properties.features.plane.contains(Plane::Sync),
        };
        // A plane of unknown size cannot be given a part of the tile.
        let fits = hardware.plane_size_min == plane && matches!(plane, 32 | 64);
        fits.then_some(unit)
    }
}

/// The matrix units of a device, and the tiles that it can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    /// Largest first, at least one.
    tiles: &'static [Tile],
}

impl Units {
    /// `None` if the device has no units for this element, or no tile fits.
    pub(super) fn of<R: Runtime>(client: &ComputeClient<R>, element: Source) -> Option<Self> {
        let (unit, hardware) = (Unit::of(client, element)?, &client.properties().hardware);
        let fits = |tile: &Tile| {
            tile.plane_count() * unit.plane <= hardware.max_units_per_cube
                && tile.shared_bytes(unit.shape[0]) <= hardware.max_shared_memory_size
        };
        // Whatever holds a tile holds smaller ones.
        let tiles: &[Tile] = &TILES;
        Some(Self { tiles: &tiles[tiles.iter().position(fits)?..] })
    }

    #[cfg(test)]
    pub(super) const fn all() -> Self {
        Self { tiles: &TILES }
    }

    /// Rows and columns of the largest tile that gives each SM one; else of the smallest.
    pub(super) fn tile(self, shape: &GemmShape, sms: u32) -> [u32; 2] {
        let is_large = |size: &[u32; 2]| shape.product[0] > size[0] as usize / 2 && shape.tiles(*size) >= sms;
        let sizes = || self.tiles.iter().map(|tile| tile.size);
        sizes().find(is_large).or(sizes().next_back()).expect("a tile fits")
    }
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    tile: Tile,
    unit: Unit,
    formats: [Format; 2],
    /// What codes are decoded to.
    element: Source,
    /// Whether scales change along the contraction.
    by_block: bool,
    accumulate: bool,
}

impl Config {
    /// Units of a cube.
    const fn units(self) -> u32 {
        self.unit.plane * self.tile.plane_count()
    }

    /// Products that a plane makes along the rows, along the columns.
    const fn products(self) -> [u32; 2] {
        let [rows, cols] = self.tile.part();
        [rows / self.unit.shape[0], cols / self.unit.shape[1]]
    }

    /// Sums that a unit scales: its column's in every `plane / columns`-th row of the plane's part.
    const fn sums(self) -> u32 {
        let [rows, cols] = self.tile.part();
        rows * cols / self.unit.plane
    }
}

/// Launches the kernel.
///
/// # Panics
/// If the device has no units for it; the path asks for them.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let element = element(gemm.granularities());
    let unit = Unit::of(client, element).expect("the path asks for them");
    let (m, n, matrices) = gemm.matrices();
    let tile = TILES.into_iter().find(|tile| tile.size == gemm.plan.size()).expect("selected among them");
    let config =
        Config { tile, unit, formats: gemm.formats(), element, by_block: gemm.by_block(), accumulate: gemm.accumulate };
    // SAFETY: `scaled_gemm` has checked that the codes, scales and bias have the sizes given here; loads are guarded by
    // the rows and words of the operands, stores by `m` and `n`.
    unsafe {
        kernel::gemm_half::launch_unchecked::<R>(
            client,
            fold(client, gemm.tiles(tile.size)),
            CubeDim::new_2d(unit.plane, tile.plane_count()),
            gemm.a.codes_array(4),
            gemm.b.codes_array(4),
            ProblemLaunch::of(gemm, gemm.bias.as_ref()),
            ArrayArg::from_raw_parts(gemm.out.clone(), m * n * matrices),
            config,
            gemm.dtype,
            element.storage(),
            Version::of(client),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_share_the_tile() {
        for tile in TILES {
            let ([rows, cols], [part_rows, part_cols]) = (tile.size, tile.part());
            assert_eq!([part_rows * tile.planes[0], part_cols * tile.planes[1]], [rows, cols]);
            for (side, plane) in [(16, 32), (16, 64), (8, 32)] {
                // A unit keeps one column in all strips, and a strip is whole rows of units.
                assert!(plane % part_cols == 0 && side % (plane / part_cols) == 0 && part_rows % side == 0);
            }
        }
        assert!(TILES[1].shared_bytes(16) <= 32 * 1024);
    }
}
