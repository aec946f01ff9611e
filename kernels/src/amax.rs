//! `amax = max |x|` over a tensor, exact, NaN in, NaN out; and the scale that follows from it.
//!
//! Two launches and no atomics: partial maxima per cube, then one cube folds them. Nothing is uploaded and the host never
//! waits. The maximum is taken over the bits of |x|, which order like the values, with NaN on top.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::format::{F32_INF, F32_NAN};
use crate::grid::{UNITS, cube_max};
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::view::{Checked, Geometry, Source, all_loaded, load_vector, max_magnitude, widen};
use crate::{Cast, Format, KernelError, MatrixView, ScaleMode};

/// Vectors of 16 bytes that a unit has in flight.
const IN_FLIGHT: u32 = 4;

/// Cubes on an SM: with 256 units each they have 128 KiB in flight, four times what the memory of an H200 needs
/// to stay busy (4.8 TB/s for 0.8 µs over 132 SMs, 29 KB).
const CUBES_PER_SM: u32 = 8;

/// SMs of a device that does not tell.
const SMS: u32 = 128;

/// `max |x|` as f32 `[1]` on the device; NaN if `x` holds one.
///
/// `x` is any strided `[rows, cols]` view of f32, f16 or bf16.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`UnsupportedDtype`](KernelError::UnsupportedDtype),
/// [`OutOfBounds`](KernelError::OutOfBounds), [`Misaligned`](KernelError::Misaligned),
/// [`TooLarge`](KernelError::TooLarge).
pub fn amax<R: Runtime>(client: &ComputeClient<R>, x: &MatrixView) -> Result<Handle, KernelError> {
    let x = Checked::new(client, x)?;
    let Partials { handle, count } = launch_partials(client, &x);
    Ok(fold_partials(client, handle, count as usize, x.source))
}

/// amax f32 `[1]` from `count` raw magnitudes.
pub(crate) fn fold_partials<R: Runtime>(
    client: &ComputeClient<R>,
    partials: Handle,
    count: usize,
    source: Source,
) -> Handle {
    let amax = client.empty(4);
    // SAFETY: the kernel reads `count` words, which the caller allocated, and writes one.
    unsafe {
        fold_amax::launch_unchecked::<R>(
            client,
            CubeCount::new_single(),
            CubeDim::new_1d(UNITS),
            ArrayArg::from_raw_parts(partials, count),
            ArrayArg::from_raw_parts(amax.clone(), 1),
            count as u32,
            source,
            Isa::of(client),
        );
    }
    amax
}

/// amax, scale and inverse scale on the device, f32, one of each per group.
pub(crate) struct Scaling {
    pub(crate) amax: Handle,
    pub(crate) scale: Handle,
    pub(crate) inv_scale: Handle,
}

/// Launches what computes the scale of `x` under `cast`.
pub(crate) fn scaling<R: Runtime>(client: &ComputeClient<R>, x: &Checked, cast: Cast) -> Scaling {
    let partials = launch_partials(client, x);
    let out = Scaling { amax: client.empty(4), scale: client.empty(4), inv_scale: client.empty(4) };
    // SAFETY: the kernel reads `partials.count` words and writes one word of each output, the sizes given here.
    unsafe {
        fold_scale::launch_unchecked::<R>(
            client,
            CubeCount::new_single(),
            CubeDim::new_1d(UNITS),
            ArrayArg::from_raw_parts(partials.handle, partials.count as usize),
            ArrayArg::from_raw_parts(out.amax.clone(), 1),
            ArrayArg::from_raw_parts(out.scale.clone(), 1),
            ArrayArg::from_raw_parts(out.inv_scale.clone(), 1),
            partials.count,
            x.source,
            cast.format,
            cast.scale_mode,
            Isa::of(client),
        );
    }
    out
}

/// Raw magnitudes, one per cube of the first launch.
struct Partials {
    handle: Handle,
    count: u32,
}

fn launch_partials<R: Runtime>(client: &ComputeClient<R>, x: &Checked) -> Partials {
    let x = if x.is_column_major() { x.clone().transpose() } else { x.clone() }.flatten();
    let per_row = x.cols.div_ceil(x.source.vector_len() as usize);
    let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(SMS);
    let most = sms * CUBES_PER_SM;
    let count = (x.rows * per_row).div_ceil((UNITS * IN_FLIGHT) as usize).clamp(1, most as usize) as u32;
    let handle = client.empty(count as usize * 4);
    // SAFETY: `x` is checked, `load_vector` reads only inside it, and cube `i` of `count` writes word `i` of `count`.
    unsafe {
        partial_maxima::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(count),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            x.array(),
            ArrayArg::from_raw_parts(handle.clone(), count as usize),
            x.geometry(),
            per_row as u32,
            x.source,
            Isa::of(client),
        );
    }
    Partials { handle, count }
}

/// Where a unit is in a matrix of rows of vectors.
#[derive(CubeType)]
struct Cursor {
    row: u32,
    vector: u32,
}

/// Cubes go through the vectors of `x` in step, row by row.
#[cube(launch_unchecked)]
fn partial_maxima<N: Size>(
    x: &Array<Vector<u32, N>>,
    partials: &mut Array<u32>,
    geometry: Geometry,
    per_row: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    let step = CUBE_COUNT as u32 * UNITS;
    let mut at = Cursor { row: ABSOLUTE_POS as u32 / per_row, vector: ABSOLUTE_POS as u32 % per_row };
    let words = comptime!((4 * IN_FLIGHT) as usize);
    let mut largest = 0u32.runtime();
    // The same number of rounds for the whole cube. Loads past the end repeat an element.
    let vectors = geometry.rows * per_row;
    let mut first = CUBE_POS as u32 * UNITS;
    while first < vectors {
        let mut raw = Array::<u32>::new(words);
        load_round(x, &geometry, &mut at, step, per_row, &mut raw, source, isa);
        all_loaded(isa);
        #[unroll]
        for i in 0..words {
            largest = max_magnitude(largest, raw[i], source);
        }
        first += step * IN_FLIGHT;
    }
    let largest = cube_max(largest, isa);
    if UNIT_POS == 0 {
        partials[CUBE_POS] = largest;
    }
}

/// The next vectors of this unit, `step` apart.
#[cube]
fn load_round<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    at: &mut Cursor,
    step: u32,
    per_row: u32,
    raw: &mut Array<u32>,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    let (row_step, vector_step) = (step / per_row, step % per_row);
    #[unroll]
    for i in 0..IN_FLIGHT {
        let col = at.vector * comptime!(source.vector_len());
        load_vector(x, geometry, at.row, col, raw, comptime!(4 * i), source, isa);
        at.vector += vector_step;
        let carry = at.vector >= per_row;
        at.vector -= select(carry, per_row, 0u32.runtime());
        at.row += row_step + select(carry, 1u32.runtime(), 0u32.runtime());
    }
}

/// f32 bits of a raw magnitude, with one NaN for all.
#[cube]
pub(crate) fn amax_bits(raw: u32, #[comptime] source: Source) -> u32 {
    let bits = widen(raw, source);
    select(bits > F32_INF, F32_NAN.runtime(), bits)
}

/// Partial maxima that a unit has in flight when they are folded.
const FOLDED: u32 = 8;

/// f32 bits of the largest of `count` raw magnitudes.
#[cube]
fn fold(partials: &Array<u32>, count: u32, #[comptime] source: Source, #[comptime] isa: Isa) -> u32 {
    let mut largest = 0u32.runtime();
    let mut first = UNIT_POS;
    while first < count {
        #[unroll]
        for i in 0..FOLDED {
            largest = max(largest, partials[min(first + comptime!(i * UNITS), count - 1) as usize]);
        }
        first += comptime!(FOLDED * UNITS);
    }
    amax_bits(cube_max(largest, isa), source)
}

#[cube(launch_unchecked)]
fn fold_amax(
    partials: &Array<u32>,
    amax: &mut Array<u32>,
    count: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    let bits = fold(partials, count, source, isa);
    if UNIT_POS == 0 {
        amax[0] = bits;
    }
}

#[cube(launch_unchecked)]
fn fold_scale(
    partials: &Array<u32>,
    amax: &mut Array<u32>,
    scale: &mut Array<u32>,
    inv_scale: &mut Array<u32>,
    count: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
    #[comptime] isa: Isa,
) {
    let bits = fold(partials, count, source, isa);
    if UNIT_POS == 0 {
        let multiplier = scale_bits(bits, format, mode, isa);
        amax[0] = bits;
        scale[0] = multiplier;
        inv_scale[0] = inverse_bits(multiplier, isa);
    }
}
