//! Grid sizes, and maxima and sums over a cube.

use cubecl::prelude::*;

use crate::ptx::cvt::Isa;

/// Maximum vector width of a CPU, in units. GPUs have wider planes.
pub(crate) const CPU_PLANE: u32 = 8;

/// Whether the device's units are lanes of a CPU's vectors: a software driver, or a CPU runtime.
///
/// There a barrier costs as much as dozens of operations, and so does a load with a separate
/// address per unit. The vectors of a cube run one after another: each completes a loop before the
/// next begins.
pub(crate) fn is_cpu<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let hardware = &client.properties().hardware;
    hardware.num_cpu_cores.is_some() || hardware.plane_size_max <= CPU_PLANE
}

/// Units per cube, except in GEMMs, which choose theirs: four planes of 64 or eight of 32. Also the
/// limit that WebGPU guarantees.
pub(crate) const UNITS: u32 = 256;

/// Elements per unit in one round of a kernel whose cubes stride through the elements.
pub(crate) const EACH: usize = 8;

/// Maximum cubes of such a kernel.
pub(crate) const MOST_CUBES: usize = 1024;

/// Number of cubes that stride through `elements` elements.
pub(crate) fn elementwise_cubes(elements: usize) -> usize {
    elements.div_ceil(UNITS as usize * EACH).min(MOST_CUBES)
}

/// Grid of at least `cubes` cubes, folded so that no dimension exceeds the device's limit (65535 on
/// wgpu).
///
/// A kernel uses `CUBE_POS` as its index and exits unless it is below `cubes`.
pub(crate) fn fold<R: Runtime>(client: &ComputeClient<R>, cubes: u32) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0;
    let x = cubes.min(limit);
    CubeCount::Static(x, cubes.div_ceil(x), 1)
}

/// First of the `each` items of this cube. Spare cubes of a folded grid get items past the last.
/// None wraps around, even if there are nearly 2^32.
#[cube]
pub(crate) fn cube_first(#[comptime] each: u32) -> u32 {
    min(CUBE_POS as u32, comptime!(u32::MAX / each)) * each
}

/// Rows of tiles in a band.
const BAND: u32 = 8;

/// Row and column of tile `number` of `rows` by `cols`, in bands of rows, each column by column.
/// Cubes that run at the same time then cover roughly a square of the output and share operands in
/// L2.
#[cube]
pub(crate) fn banded_tile(number: u32, rows: u32, cols: u32) -> (u32, u32) {
    let first = number / (BAND * cols) * BAND;
    // Spare cubes of a folded grid get rows past the last one, and their band may be empty.
    let height = clamp(rows - first, 1u32, BAND);
    let within = number % (BAND * cols);
    (first + within % height, within / height)
}

/// Maximum of `value` over the cube, in every unit. Synchronizes the cube: all [`UNITS`] units must
/// call it.
#[cube]
pub(crate) fn cube_max(value: u32, #[comptime] isa: Isa) -> u32 {
    lanes_max(value, UNITS, isa)
}

/// Maximum of `value` over each `lanes` adjacent units, in every one of them. `lanes` is a power of
/// two. All [`UNITS`] units must call it.
#[cube]
pub(crate) fn lanes_max(value: u32, #[comptime] lanes: u32, #[comptime] isa: Isa) -> u32 {
    lanes_fold(value, lanes, Fold::Max, isa)
}

/// Sum of `value` over each `lanes` adjacent units, like [`lanes_max`], always in the same order.
/// The cube must be synchronized between two calls.
#[cube]
pub(crate) fn lanes_sum(value: f32, #[comptime] lanes: u32, #[comptime] isa: Isa) -> f32 {
    f32::reinterpret(lanes_fold(u32::reinterpret(value), lanes, Fold::Sum, isa))
}

/// Operation that folds the values of adjacent units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Max,
    /// Sum of f32 values, given as bits.
    Sum,
}

#[cube]
fn folded(a: u32, b: u32, #[comptime] fold: Fold) -> u32 {
    if comptime!(fold == Fold::Max) { max(a, b) } else { u32::reinterpret(f32::reinterpret(a) + f32::reinterpret(b)) }
}

/// Units of a warp on every CUDA device.
const WARP: u32 = 32;

#[cube]
fn lanes_fold(value: u32, #[comptime] lanes: u32, #[comptime] fold: Fold, #[comptime] isa: Isa) -> u32 {
    if comptime!(isa.has_ptx()) { warps_fold(value, lanes, fold) } else { shared_fold(value, lanes, fold) }
}

/// Folds by shuffles within warps, then across warps through shared memory. At most one barrier.
#[cube]
fn warps_fold(value: u32, #[comptime] lanes: u32, #[comptime] fold: Fold) -> u32 {
    let mut result = value;
    #[unroll]
    for step in 0..comptime!(lanes.min(WARP).ilog2()) {
        result = folded(result, plane_shuffle_xor(result, comptime!(1u32 << step)), fold);
    }
    let warps = comptime!(lanes / WARP);
    if comptime!(warps > 1) {
        let mut shared = SharedMemory::<u32>::new(comptime!((UNITS / WARP) as usize));
        let lane = UNIT_POS % WARP;
        if lane == 0 {
            shared[(UNIT_POS / WARP) as usize] = result;
        }
        sync_cube();
        result = strided_fold(&shared, UNIT_POS / lanes * warps, warps, 1u32, fold);
    }
    result
}

/// Values that one unit folds in [`shared_fold`]: the square root of [`UNITS`]. Halving step by
/// step needs a barrier per step, and barriers are slow where a CPU core runs a cube's units one
/// after another.
const FOLDED: u32 = 16;

/// Folds through shared memory, with at most two barriers.
#[cube]
fn shared_fold(value: u32, #[comptime] lanes: u32, #[comptime] fold: Fold) -> u32 {
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let part = comptime!(lanes.min(FOLDED));
    let parts = comptime!(lanes / part);
    shared[UNIT_POS as usize] = value;
    sync_cube();
    if comptime!(parts > 1) {
        if UNIT_POS.is_multiple_of(part) {
            // No other unit accesses these values before the barrier.
            shared[UNIT_POS as usize] = strided_fold(&shared, UNIT_POS, part, 1u32, fold);
        }
        sync_cube();
        strided_fold(&shared, UNIT_POS / lanes * lanes, parts, part, fold)
    } else {
        strided_fold(&shared, UNIT_POS / lanes * lanes, part, 1u32, fold)
    }
}

/// Fold of `count` values from `first` on, `stride` apart.
#[cube]
fn strided_fold(
    values: &SharedMemory<u32>,
    first: u32,
    #[comptime] count: u32,
    #[comptime] stride: u32,
    #[comptime] fold: Fold,
) -> u32 {
    let mut result = values[first as usize];
    #[unroll]
    for i in 1..count {
        result = folded(result, values[(first + comptime!(i * stride)) as usize], fold);
    }
    result
}
