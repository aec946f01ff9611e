//! Cubes and blocks: how many to launch, and the maximum or sum over a block.

use cubecl::prelude::*;

use crate::ptx::cvt::Isa;

/// Widest vectors of a CPU, in units. GPUs have wider planes.
pub(crate) const CPU_PLANE: u32 = 8;

/// Whether the device's units are lanes of a CPU's vectors: of a software driver, or of a runtime for CPUs. There a barrier, and a
/// load of an address that each unit has for itself, cost as much as dozens of operations, and the vectors of a cube run one after
/// another: each goes through a loop to its end before the next begins.
pub(crate) fn is_cpu<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let hardware = &client.properties().hardware;
    hardware.num_cpu_cores.is_some() || hardware.plane_size_max <= CPU_PLANE
}

/// Units of a cube of all kernels but GEMMs, which choose their own: four planes of 64 or eight of 32, and WebGPU's guaranteed limit.
pub(crate) const UNITS: u32 = 256;

/// A grid of at least `cubes` cubes, folded so that no dimension exceeds the device's limit (65535 on wgpu).
///
/// A kernel finds its number as `CUBE_POS` and leaves if that is not below `cubes`.
pub(crate) fn fold<R: Runtime>(client: &ComputeClient<R>, cubes: u32) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0;
    let x = cubes.min(limit);
    CubeCount::Static(x, cubes.div_ceil(x), 1)
}

/// The first of the `each` items of this cube. The spare cubes of a folded grid get ones past the last, and none wraps around, though
/// there may be nearly 2^32.
#[cube]
pub(crate) fn cube_first(#[comptime] each: u32) -> u32 {
    min(CUBE_POS as u32, comptime!(u32::MAX / each)) * each
}

/// Rows of tiles that are gone through together.
const BAND: u32 = 8;

/// Row and column of tile `number` of `rows` by `cols`: bands of rows, each column by column. Cubes that run at the same time
/// then make about a square of the output and share operands in L2.
#[cube]
pub(crate) fn banded_tile(number: u32, rows: u32, cols: u32) -> (u32, u32) {
    let first = number / (BAND * cols) * BAND;
    // Of the spare cubes of a folded grid, which get rows past the last one, a band may be empty.
    let height = clamp(rows - first, 1u32, BAND);
    let within = number % (BAND * cols);
    (first + within % height, within / height)
}

/// The maximum of `value` over the cube, in every unit. All [`UNITS`] units must call it, and it synchronizes them.
#[cube]
pub(crate) fn cube_max(value: u32, #[comptime] isa: Isa) -> u32 {
    lanes_max(value, UNITS, isa)
}

/// The maximum of `value` over each `lanes` neighbouring units, in every one of them; `lanes` is a power of two. All
/// [`UNITS`] units must call it.
#[cube]
pub(crate) fn lanes_max(value: u32, #[comptime] lanes: u32, #[comptime] isa: Isa) -> u32 {
    lanes_fold(value, lanes, Fold::Max, isa)
}

/// The sum of `value` over each `lanes` neighbouring units, as [`lanes_max`]; always in the same order. Between two calls the cube must
/// be synchronized.
#[cube]
pub(crate) fn lanes_sum(value: f32, #[comptime] lanes: u32, #[comptime] isa: Isa) -> f32 {
    f32::reinterpret(lanes_fold(u32::reinterpret(value), lanes, Fold::Sum, isa))
}

/// How two values of neighbouring units become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Max,
    /// Of the bits of f32.
    Sum,
}

#[cube]
fn folded(a: u32, b: u32, #[comptime] fold: Fold) -> u32 {
    if comptime!(fold == Fold::Max) { max(a, b) } else { u32::reinterpret(f32::reinterpret(a) + f32::reinterpret(b)) }
}

/// Units of a warp, on every CUDA device.
const WARP: u32 = 32;

#[cube]
fn lanes_fold(value: u32, #[comptime] lanes: u32, #[comptime] fold: Fold, #[comptime] isa: Isa) -> u32 {
    if comptime!(isa.has_ptx()) { warps_fold(value, lanes, fold) } else { shared_fold(value, lanes, fold) }
}

/// By shuffles within warps, whose results then meet in shared memory: at most one barrier.
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

/// Units whose values one of them folds in [`shared_fold`], the square root of [`UNITS`]. Halving them step by step would take a barrier
/// a step, and barriers are slow where a CPU core runs a cube's units one after another.
const FOLDED: u32 = 16;

/// Through shared memory, with at most two barriers.
#[cube]
fn shared_fold(value: u32, #[comptime] lanes: u32, #[comptime] fold: Fold) -> u32 {
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let part = comptime!(lanes.min(FOLDED));
    let parts = comptime!(lanes / part);
    shared[UNIT_POS as usize] = value;
    sync_cube();
    if comptime!(parts > 1) {
        if UNIT_POS.is_multiple_of(part) {
            // Nobody else reads or writes these before the barrier.
            shared[UNIT_POS as usize] = strided_fold(&shared, UNIT_POS, part, 1u32, fold);
        }
        sync_cube();
        strided_fold(&shared, UNIT_POS / lanes * lanes, parts, part, fold)
    } else {
        strided_fold(&shared, UNIT_POS / lanes * lanes, part, 1u32, fold)
    }
}

/// What `count` values from `first` on, `stride` apart, become.
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
