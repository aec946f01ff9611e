//! `amax = max |x|` over a tensor, exact, NaN in, NaN out; and the scale that follows from it.
//!
//! Two launches and no atomics: partial maxima per cube, then one cube folds them. Nothing is uploaded and the host never
//! waits. The maximum is taken over the bits of |x|, which order like the values, with NaN on top.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::format::{F32_INF, F32_NAN};
use crate::grid::{UNITS, cube_max};
use crate::scale::{inverse_bits, scale_bits};
use crate::view::{Checked, Geometry, Source, load_quad, magnitude, widen};
use crate::{Cast, Format, KernelError, MatrixView, ScaleMode};

/// Largest number of partial maxima: eight cubes on each of 128 multiprocessors, four to fold per unit.
const MAX_PARTIALS: u64 = 1024;

/// Quads that a unit takes before another cube pays.
const QUADS_PER_UNIT: u64 = 4;

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
    let count = x.quads().div_ceil(u64::from(UNITS) * QUADS_PER_UNIT).clamp(1, MAX_PARTIALS) as u32;
    let handle = client.empty(count as usize * 4);
    // SAFETY: `x` is checked, `load_quad` reads only inside it, and cube `i` of `count` writes word `i` of `count`.
    unsafe {
        partial_maxima::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(count),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            ArrayArg::from_raw_parts(handle.clone(), count as usize),
            x.geometry(),
            x.source,
        );
    }
    Partials { handle, count }
}

#[cube(launch_unchecked)]
fn partial_maxima<N: Size>(
    x: &Array<Vector<u32, N>>,
    partials: &mut Array<u32>,
    geometry: Geometry,
    #[comptime] source: Source,
) {
    let quads_per_row = geometry.cols.div_ceil(4u32);
    let quads = geometry.rows * quads_per_row;
    let step = CUBE_COUNT as u32 * UNITS;
    let mut largest = 0u32.runtime();
    let mut quad = ABSOLUTE_POS as u32;
    while quad < quads {
        let raw = load_quad(x, &geometry, quad / quads_per_row, quad % quads_per_row * 4, source);
        #[unroll]
        for i in 0..4usize {
            largest = max(largest, magnitude(raw[i], source));
        }
        quad += step;
    }
    let largest = cube_max(largest);
    if UNIT_POS == 0 {
        partials[CUBE_POS] = largest;
    }
}

/// f32 bits of a raw magnitude, with one NaN for all.
#[cube]
pub(crate) fn amax_bits(raw: u32, #[comptime] source: Source) -> u32 {
    let bits = widen(raw, source);
    select(bits > F32_INF, F32_NAN.runtime(), bits)
}

/// f32 bits of the largest of `count` raw magnitudes.
#[cube]
fn fold(partials: &Array<u32>, count: u32, #[comptime] source: Source) -> u32 {
    let mut largest = 0u32.runtime();
    let mut i = UNIT_POS;
    while i < count {
        largest = max(largest, partials[i as usize]);
        i += UNITS;
    }
    amax_bits(cube_max(largest), source)
}

#[cube(launch_unchecked)]
fn fold_amax(partials: &Array<u32>, amax: &mut Array<u32>, count: u32, #[comptime] source: Source) {
    let bits = fold(partials, count, source);
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
) {
    let bits = fold(partials, count, source);
    if UNIT_POS == 0 {
        let multiplier = scale_bits(bits, format, mode);
        amax[0] = bits;
        scale[0] = multiplier;
        inv_scale[0] = inverse_bits(multiplier);
    }
}
