//! `amax = max |x|` over a tensor. Exact; a NaN in x gives NaN.
//!
//! No atomics: a launch leaves one partial maximum per cube. Every cube of the kernel that needs
//! the amax folds all of them. Nothing is uploaded and the host never waits. The maximum is taken
//! over the bits of |x|, which order like the values, with NaN above all.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::element_type::ElementType;
use crate::format::{F32_INF, F32_NAN};
use crate::grid::{CPU_PLANE, UNITS, cube_max, is_cpu};
use crate::load::{Cursor, Geometry, all_loaded, load_vector, magnitude, max_magnitude, widen};
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::view::Checked;
use crate::words::words;
use crate::{KernelError, MatrixView};

/// 16-byte vectors that a unit has in flight.
const IN_FLIGHT: u32 = 4;

/// Cubes per SM. With 256 units each they have 128 KiB in flight. An H200 needs 29 KB per SM to
/// keep its memory busy (4.8 TB/s for 0.8 µs over 132 SMs).
const CUBES_PER_SM: u32 = 8;

/// Cubes on a CPU, a few per core, and the minimum rounds of a cube. Starting a cube takes as long
/// as dozens of loads.
const CPU_CUBES: u32 = 64;
const CPU_ROUNDS: u32 = 8;

/// Partial maxima that a unit loads at a time when folding. [`find_maxima`] leaves at most
/// `UNITS · FOLDED`: one round.
const FOLDED: u32 = 4;

/// Number of SMs if the device does not report it.
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
    Ok(find_maxima(client, &x).fold(client))
}

/// Raw magnitudes on the device. The largest is the amax.
pub(crate) struct Maxima {
    handle: Handle,
    /// Index of the first one in `handle`.
    base: usize,
    count: usize,
    element_type: ElementType,
    /// Whether there is only one, so that no cube has to fold.
    is_amax: bool,
}

impl Maxima {
    /// The first `count` words of `handle`, as magnitudes of `element_type`.
    pub(crate) fn partial(handle: Handle, count: usize, element_type: ElementType) -> Self {
        Self { handle, base: 0, count, element_type, is_amax: false }
    }

    /// A known amax: the first element of a checked f32 vector.
    pub(crate) fn of_amax(amax: &Checked) -> Self {
        let (handle, base) = amax.memory();
        Self { handle, base, count: 1, element_type: ElementType::F32, is_amax: true }
    }

    /// Folds into one maximum with a launch. Returns it with its handle.
    pub(crate) fn folded<R: Runtime>(&self, client: &ComputeClient<R>) -> (Self, Handle) {
        let amax = self.fold(client);
        (Self { handle: amax.clone(), base: 0, count: 1, element_type: ElementType::F32, is_amax: true }, amax)
    }

    /// Launches the fold to the largest, f32 `[1]`.
    pub(crate) fn fold<R: Runtime>(&self, client: &ComputeClient<R>) -> Handle {
        let amax = words(client, 1);
        let isa = Isa::of(client);
        // SAFETY: the kernel writes one word.
        unsafe {
            fold_amax::launch_unchecked::<R>(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d(UNITS),
                self.arg(),
                ArrayArg::from_raw_parts(amax.clone(), 1),
                isa,
                Version::of(client),
            );
        }
        amax
    }

    /// Kernel argument.
    pub(crate) fn arg<R: Runtime>(&self) -> MaximaArrayLaunch<R> {
        // SAFETY: constructors receive a handle with at least this many words.
        let values = unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.base + self.count) };
        MaximaArrayLaunch::new(values, self.base as u32, self.count as u32, self.element_type, self.is_amax)
    }
}

/// [`Maxima`] in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MaximaArray {
    values: Array<u32>,
    base: u32,
    count: u32,
    #[cube(comptime)]
    element_type: ElementType,
    #[cube(comptime)]
    is_amax: bool,
}

#[cube]
impl MaximaArray {
    /// f32 bits of the largest, in every unit of the cube. Every NaN becomes the canonical one.
    pub(crate) fn amax(&self, #[comptime] isa: Isa) -> u32 {
        if comptime!(self.is_amax) {
            amax_bits(
                magnitude(self.values[self.base as usize], comptime!(self.element_type)),
                comptime!(self.element_type),
            )
        } else {
            let mut largest = 0u32.runtime();
            let mut first = UNIT_POS;
            while first < self.count {
                #[unroll]
                for i in 0..FOLDED {
                    let at = min(first + comptime!(i * UNITS), self.count - 1);
                    largest = max(largest, self.values[(self.base + at) as usize]);
                }
                first += comptime!(FOLDED * UNITS);
            }
            amax_bits(cube_max(largest, isa), comptime!(self.element_type))
        }
    }
}

/// Launches the kernel that leaves one partial maximum of `x` per cube.
pub(crate) fn find_maxima<R: Runtime>(client: &ComputeClient<R>, x: &Checked) -> Maxima {
    let x = if x.is_column_major() { x.clone().transpose() } else { x.clone() }.flatten();
    let per_row = x.cols.div_ceil(x.element_type.vector_len() as usize);
    let vectors = x.rows * per_row;
    let on_cpu = is_cpu(client);
    let (most, least) = if on_cpu {
        (CPU_CUBES, CPU_ROUNDS)
    } else {
        let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(SMS);
        ((sms * CUBES_PER_SM).min(UNITS * FOLDED), 1)
    };
    let count = vectors.div_ceil((UNITS * IN_FLIGHT * least) as usize).clamp(1, most as usize);
    let rounds = vectors.div_ceil(count * (UNITS * IN_FLIGHT) as usize);
    let handle = client.empty(count * 4);
    let isa = Isa::of(client);
    // SAFETY: `x` is checked and `load_vector` reads only inside it. Cube `i` of `count` writes
    // word `i`.
    unsafe {
        partial_maxima::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(count as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            x.array(),
            ArrayArg::from_raw_parts(handle.clone(), count),
            x.geometry(),
            per_row as u32,
            rounds as u32,
            x.rows == 1,
            on_cpu,
            x.element_type,
            isa,
            Version::of(client),
        );
    }
    Maxima::partial(handle, count, x.element_type)
}

/// Cubes step together through the vectors of `x`, row by row. On a CPU each plane reads a
/// contiguous part, in memory order.
#[cube(launch_unchecked)]
fn partial_maxima<N: Size>(
    x: &Array<Vector<u32, N>>,
    partials: &mut Array<u32>,
    geometry: Geometry,
    per_row: u32,
    rounds: u32,
    #[comptime] one_row: bool,
    #[comptime] on_cpu: bool,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let unit = ABSOLUTE_POS as u32;
    let (first, step) = if comptime!(on_cpu) {
        let part = rounds * comptime!(IN_FLIGHT * CPU_PLANE);
        (unit / CPU_PLANE * part + unit % CPU_PLANE, CPU_PLANE.runtime())
    } else {
        (unit, CUBE_COUNT as u32 * UNITS)
    };
    let mut at = Cursor::new(first, step, per_row, one_row);
    let words = comptime!((4 * IN_FLIGHT) as usize);
    let mut largest = 0u32.runtime();
    // Loads past the end repeat an element.
    for _ in 0..rounds {
        let mut raw = Array::<u32>::new(words);
        load_round(x, &geometry, &mut at, &mut raw, element_type, isa);
        all_loaded(isa);
        largest = largest_magnitude(largest, &raw, 0u32, comptime!(words as u32), element_type);
    }
    let largest = cube_max(largest, isa);
    if UNIT_POS == 0 {
        partials[CUBE_POS] = largest;
    }
}

/// Loads the next vectors of this unit, `step` apart.
#[cube]
fn load_round<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    at: &mut Cursor,
    raw: &mut Array<u32>,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
    #[unroll]
    for i in 0..IN_FLIGHT {
        let col = at.piece * comptime!(element_type.vector_len());
        load_vector(x, geometry, at.row, col, raw, comptime!(4 * i), element_type, isa);
        at.advance();
    }
}

/// The largest of `largest` and the magnitudes in `raw[first..first + words]`.
#[cube]
pub(crate) fn largest_magnitude(
    largest: u32,
    raw: &Array<u32>,
    #[comptime] first: u32,
    #[comptime] words: u32,
    #[comptime] element_type: ElementType,
) -> u32 {
    let mut largest = largest;
    #[unroll]
    for i in 0..words {
        largest = max_magnitude(largest, raw[comptime!((first + i) as usize)], element_type);
    }
    largest
}

/// f32 bits of a raw magnitude. Every NaN becomes the canonical one.
#[cube]
pub(crate) fn amax_bits(raw: u32, #[comptime] element_type: ElementType) -> u32 {
    let bits = widen(raw, element_type);
    select(bits > F32_INF, F32_NAN.runtime(), bits)
}

#[cube(launch_unchecked)]
fn fold_amax(maxima: &MaximaArray, amax: &mut Array<u32>, #[comptime] isa: Isa, #[comptime] _version: Version) {
    let bits = maxima.amax(isa);
    if UNIT_POS == 0 {
        amax[0] = bits;
    }
}
