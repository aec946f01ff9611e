//! Quality of a cast: signal, noise, and counts of saturated and flushed elements.
//!
//! One launch reads the matrix and its operand once. Each cube writes a row of partial sums, which
//! the host adds in f64.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::element_type::ElementType;
use crate::format::{F32_INF, decode};
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::grid::{UNITS, fold};
use crate::load::{Geometry, element, load_vector};
use crate::mx::{e8m0_byte, e8m0_inverse_bits};
use crate::ptx::cvt::Isa;
use crate::scale::scale_index;
use crate::version::Version;
use crate::view::Checked;
use crate::{Format, Granularity, KernelError, MatrixView, Operand, row_words};

/// Values in a row of partials: signal, noise, saturated, flushed, not finite.
const FIELDS: usize = 5;

/// Quads per unit from which another cube pays off.
const QUADS_PER_UNIT: usize = 4;

/// Cubes that fill a large device.
const MANY_CUBES: usize = 1024;

/// Quads of 2^20 elements. f32 counts up to that are exact.
const MAX_QUADS: usize = 1 << 18;

/// f32 ulps beyond FMAX / scale that do not count as saturated. The scale, its inverse and the
/// product here are each rounded once.
const SLACK: u32 = 4;

/// Quality of a cast. `x̂ = value(code) · inv_scale`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Health {
    /// Elements of the matrix.
    pub elements: u64,
    /// `Σ x²` over the elements where `x` and `x̂` are finite.
    pub signal: f64,
    /// `Σ (x - x̂)²` over the same elements.
    pub noise: f64,
    /// Elements beyond the format's largest value, `|x| · scale > FMAX`, including infinities.
    pub saturated: u64,
    /// Nonzero elements whose code is zero.
    pub flushed: u64,
    /// Elements where `x` or `x̂` is not finite.
    pub non_finite: u64,
}

impl Health {
    /// Sums the partials that [`health()`] wrote for a matrix of `elements`, in rows of five.
    pub fn from_partials(elements: u64, partials: &[f32]) -> Self {
        let sum = |field| partials.chunks_exact(FIELDS).map(|row| f64::from(row[field])).sum::<f64>();
        Self {
            elements,
            signal: sum(0),
            noise: sum(1),
            saturated: sum(2) as u64,
            flushed: sum(3) as u64,
            non_finite: sum(4) as u64,
        }
    }

    /// Signal to quantization noise ratio, `10 log10(signal / noise)` in dB. Infinite without
    /// noise. `None` without signal or if either is not finite.
    pub fn sqnr_db(&self) -> Option<f64> {
        let finite = self.signal.is_finite() && self.noise.is_finite();
        (finite && self.signal > 0.0).then(|| 10.0 * (self.signal / self.noise).log10())
    }

    /// Fraction of saturated elements, 0 to 1.
    pub fn saturated_share(&self) -> f64 {
        self.share(self.saturated)
    }

    /// Fraction of elements flushed to zero, 0 to 1.
    pub fn flushed_share(&self) -> f64 {
        self.share(self.flushed)
    }

    fn share(&self, count: u64) -> f64 {
        if self.elements == 0 { 0.0 } else { count as f64 / self.elements as f64 }
    }
}

/// Bits of the largest |x| that does not count as saturated.
pub(crate) fn saturation_limit(inv_scale: f32, format: Format) -> u32 {
    ((format.max() * inv_scale).to_bits() & 0x7fff_ffff) + SLACK
}

/// Rows of partial sums that [`health()`] writes for an operand `[rows, k]`.
pub const fn health_len(rows: usize, k: usize) -> usize {
    let quads = rows.saturating_mul(k.div_ceil(4));
    let parallel = quads.div_ceil(UNITS as usize * QUADS_PER_UNIT);
    let parallel = if parallel > MANY_CUBES { MANY_CUBES } else { parallel };
    let exact = quads.div_ceil(MAX_QUADS);
    if exact > parallel { exact } else { parallel }
}

/// Quality of `operand` as a cast of `x [rows, k]`: f32 `[health_len(rows, k), 5]` on the device,
/// to be summed by [`Health::from_partials`].
///
/// For the transposed copy, `x` is the transposed view. The counts equal
/// [`reference::health`](crate::reference::health()). Signal and noise are f32 sums, so squares
/// below 1e-38 are lost.
///
/// # Errors
/// As [`quantize`](crate::quantize()) for `x` and as [`scaled_gemm`](crate::scaled_gemm) for the
/// operand; [`KernelError::ShapeMismatch`].
pub fn health<R: Runtime>(client: &ComputeClient<R>, x: &MatrixView, operand: &Operand) -> Result<Handle, KernelError> {
    let x = Checked::new(client, x)?;
    operand.check()?;
    let &Operand { rows, k, .. } = operand;
    if [x.rows, x.cols] != [rows, k] {
        return Err(KernelError::ShapeMismatch { x: [x.rows, x.cols], operand: [rows, k] });
    }
    let partials = health_len(rows, k);
    let out = client.empty(partials * FIELDS * 4);
    // SAFETY: `x` is checked and has the operand's size; `check` has checked codes and scales. Cube
    // `i` of `partials` writes row `i`, and spare cubes of a folded grid write none.
    unsafe {
        partial_health::launch_unchecked::<R>(
            client,
            fold(client, partials as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            x.array(),
            ArrayArg::from_raw_parts(operand.codes.clone(), rows * row_words(k)),
            ArrayArg::from_raw_parts(operand.inv_scale.clone(), operand.scales()),
            ArrayArg::from_raw_parts(out.clone(), partials * FIELDS),
            x.geometry(),
            row_words(k) as u32,
            partials as u32,
            x.element_type,
            operand.format,
            operand.granularity,
            Isa::of(client),
            Version::of(client),
        );
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn partial_health<N: Size>(
    x: &Array<Vector<u32, N>>,
    codes: &Array<u32>,
    inv_scales: &Array<u32>,
    out: &mut Array<f32>,
    geometry: Geometry,
    pitch: u32,
    partials: u32,
    #[comptime] element_type: ElementType,
    #[comptime] format: Format,
    #[comptime] granularity: Granularity,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let cube = CUBE_POS as u32;
    if cube >= partials {
        terminate!();
    }
    // 16 bytes of `x` at a time.
    let len = comptime!(element_type.vector_len());
    let per_row = geometry.cols.div_ceil(len);
    let pieces = geometry.rows * per_row;
    let blocks = geometry.cols.div_ceil(comptime!(BLOCK as u32));
    let mut sums = Array::<f32>::new(FIELDS);
    #[unroll]
    for field in 0..FIELDS {
        sums[field] = 0.0f32;
    }
    let mut raw = Array::<u32>::new(4usize);
    let mut piece = cube * UNITS + UNIT_POS;
    while piece < pieces {
        let row = piece / per_row;
        let col = piece % per_row * len;
        load_vector(x, &geometry, row, col, &mut raw, 0u32, element_type, isa);
        let scale = if comptime!(granularity.is_mx()) {
            e8m0_inverse_bits(e8m0_byte(inv_scales, row, col / comptime!(MX_BLOCK as u32), blocks))
        } else {
            inv_scales[scale_index(row, col / comptime!(BLOCK as u32), blocks, granularity) as usize]
        };
        let inv_scale = f32::reinterpret(scale);
        let limit = magnitude(inv_scale * comptime!(format.max())) + SLACK;
        #[unroll]
        for q in 0..comptime!(len / 4) {
            // Past the last column there is padding, which is zero.
            let packed = codes[(row * pitch + col / 4 + q) as usize];
            #[unroll]
            for j in 0..4u32 {
                let inside = col + comptime!(4 * q + j) < geometry.cols;
                let zero = 0u32.runtime();
                let bits = select(inside, element(&raw, 0u32, comptime!(4 * q + j), element_type, isa), zero);
                let mag = bits & 0x7fff_ffffu32;
                let code = (packed >> comptime!(8 * j)) & 0xffu32;
                let value = decode(code, format);
                let restored = value * inv_scale;
                // Decided from bits, since devices may assume finite floats. The factors are
                // checked too, because NaN may not propagate.
                let largest = max(max(magnitude(value), magnitude(inv_scale)), max(magnitude(restored), mag));
                let finite = largest < F32_INF;
                let x = f32::reinterpret(select(finite, bits, zero));
                let error = x - f32::reinterpret(select(finite, u32::reinterpret(restored), zero));
                sums[0] += x * x;
                sums[1] += error * error;
                sums[2] += count(mag == F32_INF || (mag < F32_INF && mag > limit));
                sums[3] += count(mag != 0u32 && (code & 0x7fu32) == 0u32);
                sums[4] += count(inside && !finite);
            }
        }
        piece += partials * UNITS;
    }

    let mut shared = SharedMemory::<f32>::new(comptime!(FIELDS * UNITS as usize));
    #[unroll]
    for field in 0..FIELDS {
        shared[comptime!(field * UNITS as usize) + UNIT_POS as usize] = sums[field];
    }
    sync_cube();
    let mut width = comptime!(UNITS / 2).runtime();
    while width > 0 {
        if UNIT_POS < width {
            #[unroll]
            for field in 0..FIELDS {
                let place = comptime!(field * UNITS as usize) + UNIT_POS as usize;
                shared[place] = shared[place] + shared[place + width as usize];
            }
        }
        sync_cube();
        width /= 2;
    }
    if UNIT_POS < comptime!(FIELDS as u32) {
        out[(cube * comptime!(FIELDS as u32) + UNIT_POS) as usize] = shared[(UNIT_POS * UNITS) as usize];
    }
}

#[cube]
fn magnitude(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7fff_ffffu32
}

#[cube]
fn count(yes: bool) -> f32 {
    select(yes, 1.0f32.runtime(), 0.0f32.runtime())
}
