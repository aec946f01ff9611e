//! Codes to f16, or to bf16 with their E8M0 scale, by moving bits and one or two exact products.

use cubecl::prelude::*;

use crate::Format;
use crate::gemm::problem::Problem;
use crate::mx::e8m0_inverse_bits;
use crate::source::Source;

/// Sixteen codes.
pub(super) type Chunk = Vector<u32, Const<4>>;

/// Four decoded codes.
pub(super) type Halves<E> = Vector<E, Const<4>>;

/// Chunks in a block of 32.
const BLOCK_CHUNKS: u32 = 2;

/// The scale of the block of 32 that a chunk lies in, as bf16 in both halves of a word.
#[cube]
pub(super) fn chunk_scales(problem: &Problem, row: u32, chunk: u32, #[comptime] side: usize) -> u32 {
    let bits = e8m0_inverse_bits(problem.e8m0(row, chunk / BLOCK_CHUNKS, side));
    // Powers of two and the NaN have no low bits.
    bits | (bits >> 16u32)
}

/// The four codes of a word as `E`, times `scales` where they are scaled: exact, but for what is below bf16's normal values;
/// NaN stays NaN.
#[cube]
pub(super) fn decode_halves<E: Float>(
    word: u32,
    scales: u32,
    #[comptime] format: Format,
    #[comptime] element: Source,
    #[comptime] scaled: bool,
) -> Halves<E> {
    let mut pair = Vector::<u32, Const<2>>::empty();
    #[unroll]
    for i in 0..2u32 {
        let codes = word >> comptime!(16 * i);
        let codes = (codes & 0xffu32) | ((codes & 0xff00u32) << 8u32);
        pair[i as usize] = if comptime!(element == Source::F16) {
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
/// E5M2 is the upper byte of f16. E4M3's exponent and mantissa, put under f16's five bits of exponent, are the value times
/// 2⁻⁸, subnormals included; only its NaN would become a number.
#[cube]
fn f16_pair<E: Float>(codes: u32, #[comptime] format: Format) -> u32 {
    if comptime!(matches!(format, Format::E5m2)) {
        codes << 8u32
    } else {
        let magnitude = codes & 0x007f_007fu32;
        let bits = ((codes & 0x0080_0080u32) << 8u32) | (magnitude << 7u32);
        let halves = Vector::<E, Const<2>>::reinterpret(bits) * Vector::new(E::new(256.0));
        // 0x80 where the magnitude is 0x7f, then all ones in the exponent and its neighbour.
        let nan = ((magnitude + 0x0001_0001u32) & 0x0080_0080u32) * 0xfcu32;
        u32::reinterpret(halves) | nan
    }
}

/// Two codes, each in the low byte of a half word, as bf16.
///
/// Exponent and mantissa, put under bf16's eight bits of exponent, are the value times 2^(bias - 127), subnormals included; only
/// NaN and infinity would become numbers, whose mantissas are those of NaN and infinity.
#[cube]
fn bf16_pair<E: Float>(codes: u32, #[comptime] format: Format) -> u32 {
    let magnitude = codes & 0x007f_007fu32;
    let bits = ((codes & 0x0080_0080u32) << 8u32) | (magnitude << comptime!(7 - format.mantissa_bits()));
    let rebias = comptime!(f32::from_bits((254 - format.bias()) << 23));
    let halves = Vector::<E, Const<2>>::reinterpret(bits) * Vector::new(E::new(rebias));
    // 0x80 where the magnitude is that of the first special code or above, then all ones in the exponent.
    let carry = comptime!(0x0001_0001 * (0x7f - format.max_code() as u32));
    let special = ((magnitude + carry) & 0x0080_0080u32) * 0xffu32;
    u32::reinterpret(halves) | special
}
