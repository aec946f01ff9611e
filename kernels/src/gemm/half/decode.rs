//! Decodes codes to f16, or with their E8M0 scales to bf16, by shifts and one or two exact
//! products.

use cubecl::prelude::*;

use crate::Format;
use crate::element_type::ElementType;
use crate::gemm::problem::Problem;
use crate::mx::e8m0_inverse_bits;

/// Sixteen codes.
pub(super) type Chunk = Vector<u32, Const<4>>;

/// Four decoded codes.
pub(super) type Halves<E> = Vector<E, Const<4>>;

/// Chunks in a block of 32.
const BLOCK_CHUNKS: u32 = 2;

/// Scale of a chunk's block of 32, as bf16 in both halves of a word.
#[cube]
pub(super) fn chunk_scales(problem: &Problem, row: u32, chunk: u32, #[comptime] side: usize) -> u32 {
    let bits = e8m0_inverse_bits(problem.e8m0(row, chunk / BLOCK_CHUNKS, side));
    // Powers of two and the NaN have zero low bits.
    bits | (bits >> 16u32)
}

/// Decodes the four codes of a word to `E`, times `scales` if scaled. Exact, except for bf16
/// subnormals. NaN stays NaN.
#[cube]
pub(super) fn decode_halves<E: Float>(
    word: u32,
    scales: u32,
    #[comptime] format: Format,
    #[comptime] element: ElementType,
    #[comptime] scaled: bool,
) -> Halves<E> {
    let mut pair = Vector::<u32, Const<2>>::empty();
    #[unroll]
    for i in 0..2u32 {
        let codes = word >> comptime!(16 * i);
        let codes = (codes & 0xffu32) | ((codes & 0xff00u32) << 8u32);
        pair[i as usize] = if comptime!(element == ElementType::F16) {
            f16_pair::<E>(codes, format)
        } else {
            let values = bf16_pair::<E>(codes, format);
            if comptime!(scaled) { multiply_pair::<E>(values, scales) } else { values }
        };
    }
    Halves::<E>::reinterpret(pair)
}

#[cube]
fn multiply_pair<E: Float>(a: u32, b: u32) -> u32 {
    u32::reinterpret(Vector::<E, Const<2>>::reinterpret(a) * Vector::<E, Const<2>>::reinterpret(b))
}

/// Two codes, each in the low byte of a half word, as f16.
///
/// E5M2 is the upper byte of f16. E4M3's exponent and mantissa, placed under f16's five exponent
/// bits, give the value times 2⁻⁸, including subnormals. Only NaN needs separate treatment.
#[cube]
fn f16_pair<E: Float>(codes: u32, #[comptime] format: Format) -> u32 {
    if comptime!(matches!(format, Format::E5m2)) {
        codes << 8u32
    } else {
        let magnitude = codes & 0x007f_007fu32;
        let bits = ((codes & 0x0080_0080u32) << 8u32) | (magnitude << 7u32);
        let halves = Vector::<E, Const<2>>::reinterpret(bits) * Vector::new(E::new(256.0));
        // 0x80 where the magnitude is 0x7f, then ones in the whole exponent and the next bit.
        let nan = ((magnitude + 0x0001_0001u32) & 0x0080_0080u32) * 0xfcu32;
        u32::reinterpret(halves) | nan
    }
}

/// Two codes, each in the low byte of a half word, as bf16.
///
/// Exponent and mantissa, placed under bf16's eight exponent bits, give the value times
/// `2^(bias - 127)`, including subnormals. Only NaN and infinity need separate treatment; their
/// mantissas are already correct.
#[cube]
fn bf16_pair<E: Float>(codes: u32, #[comptime] format: Format) -> u32 {
    let magnitude = codes & 0x007f_007fu32;
    let bits = ((codes & 0x0080_0080u32) << 8u32) | (magnitude << comptime!(7 - format.mantissa_bits()));
    let rebias = comptime!(f32::from_bits((254 - format.bias()) << 23));
    let halves = Vector::<E, Const<2>>::reinterpret(bits) * Vector::new(E::new(rebias));
    // 0x80 from the first special magnitude up, then ones in the whole exponent.
    let carry = comptime!(0x0001_0001 * (0x7f - format.max_code() as u32));
    let special = ((magnitude + carry) & 0x0080_0080u32) * 0xffu32;
    u32::reinterpret(halves) | special
}
