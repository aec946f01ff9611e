//! GEMM for GPUs with f16 or bf16 matrix units but none for FP8. Decodes codes in the tile, then
//! multiplies cooperative matrices with f32 accumulators.
//!
//! Both formats decode exactly to f16. If an operand has E8M0 scales, both operands are decoded to
//! bf16, codes times scales. A value of at most four significant bits times a power of two is exact
//! in bf16 down to 2^-126. Smaller ones have steps of 2^-133. Products are exact in f32. The
//! rounding of sums depends on the device. NVIDIA's units keep f32 accumulators whose additions
//! truncate (Fasi et al., *Numerical behavior of NVIDIA tensor cores*). For others little is
//! published. None has the short accumulator of FP8, so `use_fast_accum` changes nothing.
//!
//! A thread block makes one output tile ([`HalfTile`]), with 32 codes of the contraction per step. A
//! step's codes are in registers while the previous step is multiplied. Then they are decoded into
//! the other of two stages of shared memory. The mapping of cooperative matrix elements to units is
//! unspecified, so sums pass through shared memory to be scaled.

mod decode;
mod kernel;

use cubecl::features::{MmaConfig, Plane, TypeUsage};
use cubecl::prelude::*;

use super::problem::ProblemLaunch;
use super::{Gemm, GemmShape};
use crate::element_type::ElementType;
use crate::grid::fold;
use crate::version::Version;
use crate::{Format, Granularity};

/// Contraction length of a step, in codes.
const STEP: u32 = 32;

/// Elements from one row to the next in shared memory. Eight are padding: the rows that a matrix
/// load reads at a time are in different banks and stay aligned to 16 bytes.
const PITCH: u32 = STEP + 8;

/// Output tile of a cube, and its split among planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HalfTile {
    /// Rows and columns.
    size: [u32; 2],
    /// Planes along the rows and along the columns.
    planes: [u32; 2],
}

/// Tiles, largest first. The second fits into 32 KiB of shared memory.
const TILES: [HalfTile; 2] =
    [HalfTile { size: [128, 128], planes: [2, 4] }, HalfTile { size: [64, 64], planes: [2, 2] }];

impl HalfTile {
    const fn plane_count(self) -> u32 {
        self.planes[0] * self.planes[1]
    }

    /// Rows and columns of a plane's part.
    const fn part(self) -> [u32; 2] {
        [self.size[0] / self.planes[0], self.size[1] / self.planes[1]]
    }

    /// Elements of both operands' rows in one of the two stages.
    const fn stage(self) -> u32 {
        (self.size[0] + self.size[1]) * PITCH
    }

    /// Elements of the planes' strips, `strip` rows of each part. Sums pass through them to the
    /// units that scale them.
    const fn strips(self, strip: u32) -> u32 {
        self.plane_count() * strip * self.part()[1]
    }

    /// Bytes of the stages, the strips and the scales.
    const fn shared_bytes(self, strip: u32) -> usize {
        (2 * self.stage() * 2 + self.strips(strip) * 4 + (self.size[0] + self.size[1]) * 4) as usize
    }
}

/// Element type after decoding: f16, or bf16 for E8M0 scales, which have eight exponent bits.
pub(super) const fn element(granularities: [Granularity; 2]) -> ElementType {
    if Granularity::any_mx(granularities) { ElementType::Bf16 } else { ElementType::F16 }
}

/// Matrix units of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Unit {
    /// m, n and k of one product, 16 or 8 each.
    shape: [u32; 3],
    /// Units of a plane: 32 or 64.
    plane: u32,
    /// Whether a plane can synchronize without the rest of the cube.
    plane_sync: bool,
}

impl Unit {
    /// Matrix units of this client's device for products of `element` with f32 sums. `None` if
    /// there are none that the kernel can use, or the device has no arithmetic for `element`.
    pub(super) fn of<R: Runtime>(client: &ComputeClient<R>, element: ElementType) -> Option<Self> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        if !properties.features.type_usage(element.storage()).contains(TypeUsage::Arithmetic) {
            return None;
        }
        let shape = [16, 8].map(|side| MmaConfig {
            a_type: element.storage(),
            b_type: element.storage(),
            cd_type: ElementType::F32.storage(),
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
        // With an unknown plane size the tile cannot be split.
        let fits = hardware.plane_size_min == plane && matches!(plane, 32 | 64);
        fits.then_some(unit)
    }
}

/// Tiles that a device with matrix units can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    /// Largest first; not empty.
    tiles: &'static [HalfTile],
}

impl Units {
    /// `None` if the device has no units for this element, or no tile fits.
    pub(super) fn of<R: Runtime>(client: &ComputeClient<R>, element: ElementType) -> Option<Self> {
        let (unit, hardware) = (Unit::of(client, element)?, &client.properties().hardware);
        let fits = |tile: &HalfTile| {
            tile.plane_count() * unit.plane <= hardware.max_units_per_cube
                && tile.shared_bytes(unit.shape[0]) <= hardware.max_shared_memory_size
        };
        // A device that fits one tile fits all smaller ones.
        let tiles: &[HalfTile] = &TILES;
        Some(Self { tiles: &tiles[tiles.iter().position(fits)?..] })
    }

    #[cfg(test)]
    pub(super) const fn all() -> Self {
        Self { tiles: &TILES }
    }

    /// Size of the largest tile with at least one tile per SM, otherwise of the smallest.
    pub(super) fn tile(self, shape: &GemmShape, sms: u32) -> [u32; 2] {
        let is_large = |size: &[u32; 2]| shape.product[0] > size[0] as usize / 2 && shape.tiles(*size) >= sms;
        let sizes = || self.tiles.iter().map(|tile| tile.size);
        sizes().find(is_large).or(sizes().next_back()).expect("a tile fits")
    }
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HalfConfig {
    tile: HalfTile,
    unit: Unit,
    formats: [Format; 2],
    /// Element type after decoding.
    element: ElementType,
    /// Whether scales change along the contraction.
    by_block: bool,
}

impl HalfConfig {
    /// Units of a cube.
    const fn units(self) -> u32 {
        self.unit.plane * self.tile.plane_count()
    }

    /// Products that a plane makes along the rows and along the columns.
    const fn products(self) -> [u32; 2] {
        let [rows, cols] = self.tile.part();
        [rows / self.unit.shape[0], cols / self.unit.shape[1]]
    }

    /// Sums that a unit scales: one column, in every `plane / columns`-th row of the plane's part.
    const fn sums(self) -> u32 {
        let [rows, cols] = self.tile.part();
        rows * cols / self.unit.plane
    }
}

/// Launches the kernel.
///
/// # Panics
/// If the device has no matrix units for it. Selection of the path checks this.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, gemm: &Gemm) {
    let element = element(gemm.shape().granularities);
    let unit = Unit::of(client, element).expect("the path asks for them");
    let (m, n, matrices) = gemm.matrices();
    let tile = TILES.into_iter().find(|tile| tile.size == gemm.plan.size()).expect("selected among them");
    let config = HalfConfig { tile, unit, formats: gemm.formats(), element, by_block: gemm.shape().by_block() };
    // SAFETY: `scaled_gemm` has checked the sizes of codes, scales and bias. Loads are guarded by
    // the operands' rows and words, stores by `m` and `n`.
    unsafe {
        kernel::gemm_half::launch_unchecked::<R>(
            client,
            fold(client, gemm.shape().tiles(tile.size)),
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
                // A unit has the same column in all strips, and the units cover whole rows of a
                // strip.
                assert!(plane % part_cols == 0 && side % (plane / part_cols) == 0 && part_rows % side == 0);
            }
        }
        assert!(TILES[1].shared_bytes(16) <= 32 * 1024);
    }
}
