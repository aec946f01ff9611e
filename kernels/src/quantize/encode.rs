//! Encodes elements in registers, in the words that they were loaded in: four codes per word, and
//! 4x4 codes transposed.
//!
//! `raw[first..]` are words of [`load_vector`](crate::load::load_vector). A quad of elements is
//! four words of f32, or two of 16-bit floats.

use cubecl::prelude::*;

use crate::Format;
use crate::element_type::ElementType;
use crate::format::{F32_INF, encode_scaled};
use crate::grid::UNITS;
use crate::load::element;
use crate::ptx::cvt::{Isa, cvt_satfinite, permute};
use crate::scale::scale_bits;
use crate::view::Checked;

/// Compile-time parameters of a cast, except for the source of its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Encoding {
    pub(super) element_type: ElementType,
    pub(super) cast: crate::Cast,
    pub(super) isa: Isa,
    /// Whether rows of `x` end at a vector boundary.
    aligned: bool,
    /// Whether each scale comes from the amax of the elements that it scales, so that it is NaN if
    /// one of them is. False if `cvt` casts, which does not need it.
    nan_by_scale: bool,
}

impl Encoding {
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, x: &Checked, cast: crate::Cast) -> Self {
        let isa = Isa::of(client);
        Self {
            element_type: x.element_type,
            cast,
            isa,
            aligned: x.has_vector_loads(),
            nan_by_scale: !isa.has_fp8_cvt(),
        }
    }

    /// This encoding for a scale from a given amax, independent of the elements of `x`.
    pub(super) fn of_given_amax(self) -> Self {
        Self { nan_by_scale: false, ..self }
    }

    /// Words of a quad of elements.
    pub(super) const fn quad_words(self) -> u32 {
        4 / self.element_type.per_word()
    }

    /// Quads in 32 bytes of elements, which is also the words of their codes.
    pub(super) const fn sector_quads(self) -> u32 {
        self.element_type.sector_len() / 4
    }

    /// Whether scales may be so large that a subnormal element has a nonzero code. All of these
    /// scales are at least 2^-126, and powers of two or NaN.
    const fn has_subnormals(self) -> bool {
        self.cast.granularity.is_mx()
    }
}

/// Codes of the sector that starts at `raw[first]`, in column `col`, with one scale for all.
#[cube]
pub(super) fn encode_sector(
    raw: &Array<u32>,
    #[comptime] first: u32,
    scale: &Array<f32>,
    col: u32,
    cols: u32,
    #[comptime] encoding: Encoding,
) -> Array<u32> {
    let quads = comptime!(encoding.sector_quads());
    let mut words = Array::<u32>::new(comptime!(quads as usize));
    #[unroll]
    for q in 0..quads {
        let word = encode_quad(raw, comptime!(first + q * encoding.quad_words()), scale, 0u32, true, encoding);
        words[q as usize] = zero_past_end(word, col + comptime!(4 * q), cols, encoding);
    }
    words
}

/// Codes of the quad that starts at `raw[first]`. Element `j` is scaled by `scales[scale + j]`, or
/// all by `scales[scale]`.
///
/// The codes equal [`encode_scaled`] on every path. `cvt.rn.satfinite` rounds, saturates and treats
/// subnormals in the same way, and gives the same code for an infinite product and an infinity. The
/// PTX ISA does not specify which NaN it writes.
#[cube]
pub(super) fn encode_quad(
    raw: &Array<u32>,
    #[comptime] first: u32,
    scales: &Array<f32>,
    #[comptime] scale: u32,
    #[comptime] one_scale: bool,
    #[comptime] encoding: Encoding,
) -> u32 {
    let mut bits = Array::<u32>::new(4usize);
    let mut factors = Array::<f32>::new(4usize);
    #[unroll]
    for j in 0..4u32 {
        bits[j as usize] = element(raw, first, j, comptime!(encoding.element_type), comptime!(encoding.isa));
        factors[j as usize] = scales[comptime!((if one_scale { scale } else { scale + j }) as usize)];
    }
    if comptime!(encoding.isa.has_fp8_cvt()) {
        let codes = cvt_satfinite(
            f32::reinterpret(bits[0]) * factors[0],
            f32::reinterpret(bits[1]) * factors[1],
            f32::reinterpret(bits[2]) * factors[2],
            f32::reinterpret(bits[3]) * factors[3],
            encoding.cast.format,
        );
        canonicalize_nan(codes, encoding.cast.format)
    } else {
        let mut word = 0u32.runtime();
        #[unroll]
        for j in 0..4u32 {
            let (bits, factor) = if comptime!(encoding.has_subnormals() && !encoding.isa.has_ptx()) {
                normalized(bits[j as usize], factors[j as usize])
            } else {
                (bits[j as usize], factors[j as usize])
            };
            let code = encode_scaled(bits, factor, encoding.nan_by_scale, encoding.cast.format);
            word |= code << comptime!(8 * j);
        }
        word
    }
}

/// Element and scale with the same product, for devices that treat a subnormal element as zero. The
/// element becomes an integer of up to 23 bits, and its unit, 2^-149, moves to the scale.
#[cube]
fn normalized(bits: u32, scale: f32) -> (u32, f32) {
    let mag = bits & 0x7fff_ffffu32;
    let integer = u32::reinterpret(f32::cast_from(mag)) | (bits & 0x8000_0000u32);
    let scale_bits = u32::reinterpret(scale);
    let unit = comptime!(149u32 << 23);
    // A scale that is too small for this takes the product below every code.
    let lowered = select(scale_bits > unit, scale_bits - unit, 0u32.runtime());
    let lowered = select(scale_bits > F32_INF, scale_bits, lowered);
    let is_subnormal = mag < 0x0080_0000u32;
    (select(is_subnormal, integer, bits), f32::reinterpret(select(is_subnormal, lowered, scale_bits)))
}

/// Transpose of 4x4 bytes: byte `i` of word `j` is byte `j` of `rows[i]`.
#[cube]
pub(super) fn transpose(rows: &Array<u32>, #[comptime] isa: Isa) -> Array<u32> {
    let mut columns = Array::<u32>::new(4usize);
    #[unroll]
    for pair in 0..2u32 {
        // Columns 2·pair and 2·pair + 1 of two rows, interleaved.
        let interleave = comptime!(if pair == 0 { 0x5140u32 } else { 0x7362u32 });
        let top = permute(rows[0], rows[1], interleave, isa);
        let bottom = permute(rows[2], rows[3], interleave, isa);
        columns[comptime!((2 * pair) as usize)] = permute(top, bottom, 0x5410u32, isa);
        columns[comptime!((2 * pair + 1) as usize)] = permute(top, bottom, 0x7632u32, isa);
    }
    columns
}

/// Replaces NaN codes by `0x7f`. One pass over four codes is cheaper than one per code.
#[cube]
fn canonicalize_nan(codes: u32, #[comptime] format: Format) -> u32 {
    // NaN are the magnitudes from 0x7f or 0x7d up. The sum sets the high bit of their bytes.
    let above = comptime!(match format {
        Format::E4m3 => 0x0101_0101u32,
        Format::E5m2 => 0x0303_0303u32,
    });
    let nan = ((codes & 0x7f7f_7f7fu32) + above) & 0x8080_8080u32;
    // All bits of such a byte except the highest.
    let ones = nan - (nan >> 7u32);
    (codes ^ (codes & nan)) | ones
}

/// Zeroes the codes of elements `at..at + 4` at `len` or beyond. Padding must be zero for any
/// scale, and a NaN scale would make it NaN.
#[cube]
pub(super) fn zero_past_end(word: u32, at: u32, len: u32, #[comptime] encoding: Encoding) -> u32 {
    // In an aligned row either all four or none are past the end.
    if comptime!(encoding.aligned) { select(at < len, word, 0u32.runtime()) } else { word & mask(at, len) }
}

/// Bits of the scale for an amax that each `lanes` adjacent units share. Only one of them does an
/// integer division. All units of the cube must call it.
#[cube]
pub(super) fn lanes_scale(amax: u32, #[comptime] lanes: u32, #[comptime] encoding: Encoding) -> u32 {
    let Encoding { cast, isa, .. } = comptime!(encoding);
    if comptime!(isa.has_ptx()) {
        scale_bits(amax, cast.format, cast.scale_mode, isa)
    } else {
        let mut scales = SharedMemory::<u32>::new(comptime!((UNITS / lanes) as usize));
        let slot = (UNIT_POS / lanes) as usize;
        let lane = UNIT_POS % lanes;
        if lane == 0 {
            scales[slot] = scale_bits(amax, cast.format, cast.scale_mode, isa);
        }
        sync_cube();
        scales[slot]
    }
}

/// Mask of the bytes of elements `at..at + 4` below `len`.
#[cube]
pub(super) fn mask(at: u32, len: u32) -> u32 {
    let inside = max(len, at) - at;
    // Avoids a shift by 32, which differs between devices.
    select(inside < 4, (1u32 << (8u32 * (inside & 3u32))) - 1u32, 0xffff_ffffu32.runtime())
}
