//! Dequantizes operands: any operand to f32, and operands with E8M0 scales to bf16,
//! `value(code) · 2^(byte - 127)`.
//!
//! A value has at most four significant bits. So the product is exact in bf16 if its last bit is at
//! least 2^-133: always from 2^-126 up, and mostly below. Other small products are rounded to
//! nearest even. Products of 2^128 or more become infinite.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::format::{F32_INF, decode};
use crate::granularity::{BLOCK, MX_BLOCK};
use crate::grid::{UNITS, cube_first, fold};
use crate::mx::{e8m0_byte, e8m0_inverse_bits};
use crate::operand::check_size;
use crate::ptx::cvt::{Isa, cvt_bf16};
use crate::scale::scale_word;
use crate::version::Version;
use crate::{Format, Granularity, KernelError, Operand, row_words};

/// bf16 infinity, and the NaN that the kernel writes.
const BF16_INF: u32 = 0x7f80;
const BF16_NAN: u32 = 0x7fff;

/// Codes that a unit converts at a time, and how often it does so.
const PIECE: usize = 8;
const PIECES: u32 = 4;

/// Dequantizes an operand of any granularity to f32 `[rows, k]` without padding. Each
/// `value(code) · inv_scale` is rounded once.
///
/// Equals [`reference::dequantize_into`](crate::reference::dequantize_into) bit for bit, with two
/// exceptions: devices may flush f32 subnormals, and the bits of a NaN may differ.
///
/// # Errors
/// As [`scaled_gemm`](crate::scaled_gemm) for the operand.
pub fn dequantize_to_f32<R: Runtime>(client: &ComputeClient<R>, operand: &Operand) -> Result<Handle, KernelError> {
    operand.check()?;
    let &Operand { rows, k, format, granularity, .. } = operand;
    check_size(rows, k, k)?;
    let out = client.empty(rows * k * 4);
    let words = rows * row_words(k);
    let width = if k.is_multiple_of(4) { 4 } else { 1 };
    // SAFETY: the operand is checked. Words are guarded by their count, and stores by the row
    // length.
    unsafe {
        dequantize_f32::launch_unchecked::<R>(
            client,
            fold(client, words.div_ceil(UNITS as usize) as u32),
            CubeDim::new_1d(UNITS),
            width,
            operand.codes_array(1),
            operand.scales_array(),
            ArrayArg::from_raw_parts(out.clone(), rows * k / width),
            words as u32,
            row_words(k) as u32,
            k as u32,
            format,
            granularity,
            Version::of(client),
        );
    }
    Ok(out)
}

/// Each unit takes one word, so a warp's reads and writes are contiguous.
#[cube(launch_unchecked)]
fn dequantize_f32<N: Size>(
    codes: &Array<u32>,
    inv_scales: &Array<u32>,
    out: &mut Array<Vector<f32, N>>,
    words: u32,
    row_words: u32,
    k: u32,
    #[comptime] format: Format,
    #[comptime] granularity: Granularity,
    #[comptime] _version: Version,
) {
    let word = cube_first(UNITS) + UNIT_POS;
    if word < words {
        let (row, place) = (word / row_words, word % row_words);
        let blocks = k.div_ceil(comptime!(BLOCK as u32));
        let scale = if comptime!(granularity.is_mx()) {
            e8m0_inverse_bits(e8m0_byte(inv_scales, row, place / comptime!(MX_BLOCK as u32 / 4), blocks))
        } else {
            scale_word(inv_scales, row, place / comptime!(BLOCK as u32 / 4), blocks, granularity)
        };
        let scale = f32::reinterpret(scale);
        let packed = codes[word as usize];
        let width = N::value();
        if comptime!(width == 4) {
            let mut values = Vector::<f32, N>::empty();
            #[unroll]
            for i in 0..4u32 {
                values[i as usize] = decode((packed >> comptime!(8 * i)) & 0xffu32, format) * scale;
            }
            if place * 4 < k {
                out[(row * (k / 4) + place) as usize] = values;
            }
        } else {
            #[unroll]
            for i in 0..4u32 {
                let col = place * 4 + i;
                if col < k {
                    let value = decode((packed >> comptime!(8 * i)) & 0xffu32, format) * scale;
                    out[(row * k + col) as usize] = Vector::new(value);
                }
            }
        }
    }
}

/// Dequantizes a [`Block1x32`](Granularity::Block1x32) operand to bf16 `[rows, 4 · row_words(k)]`
/// on the device. Rows are padded with zeros to 32 bytes. Two values share a `u32` word, the first
/// in the low half, so that devices without 16-bit types can run it.
///
/// Gives the same bits on every device as
/// [`reference::dequantize_mx`](crate::reference::dequantize_mx). Every NaN is `0x7fff`.
///
/// # Errors
/// [`KernelError::UnfitGranularity`] for other granularities. Otherwise as
/// [`scaled_gemm`](crate::scaled_gemm) for the operand.
pub fn dequantize_mx<R: Runtime>(client: &ComputeClient<R>, operand: &Operand) -> Result<Handle, KernelError> {
    operand.check()?;
    let granularity = operand.granularity;
    // Only with E8M0 scales is the product of code and scale a bf16.
    let reason = "operands cannot be written as bf16 exactly: only 1x32";
    if granularity.is_mx() {
        Ok(to_bf16(client, operand, Isa::of(client)))
    } else {
        Err(KernelError::UnfitGranularity { granularity, reason })
    }
}

/// Runs [`dequantize_mx`] on a checked operand, with these instructions.
pub(crate) fn to_bf16<R: Runtime>(client: &ComputeClient<R>, operand: &Operand, isa: Isa) -> Handle {
    let pieces = operand.rows * row_words(operand.k) * 4 / PIECE;
    let out = client.empty(pieces * PIECE * 2);
    // SAFETY: the caller has checked the lengths of codes and scales. A unit stays below `pieces`.
    unsafe {
        dequantize::launch_unchecked::<R>(
            client,
            fold(client, pieces.div_ceil((UNITS * PIECES) as usize) as u32),
            CubeDim::new_1d(UNITS),
            operand.codes_array(PIECE / 4),
            operand.scales_array(),
            ArrayArg::from_raw_parts(out.clone(), pieces),
            pieces as u32,
            (row_words(operand.k) * 4 / PIECE) as u32,
            operand.k.div_ceil(BLOCK) as u32,
            operand.format,
            isa,
            Version::of(client),
        );
    }
    out
}

#[cube(launch_unchecked)]
fn dequantize(
    codes: &Array<Vector<u32, Const<2>>>,
    inv_scales: &Array<u32>,
    out: &mut Array<Vector<u32, Const<4>>>,
    pieces: u32,
    row_pieces: u32,
    blocks: u32,
    #[comptime] format: Format,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let first = CUBE_POS as u32 * comptime!(UNITS * PIECES) + UNIT_POS;
    let mut held = Array::<Vector<u32, Const<2>>>::new(comptime!(PIECES as usize));
    let mut bytes = Array::<u32>::new(comptime!(PIECES as usize));
    #[unroll]
    for i in 0..PIECES {
        // Units past the end load the last piece and do not store it.
        let piece = min(first + comptime!(i * UNITS), pieces - 1);
        held[i as usize] = codes[piece as usize];
        let block = piece % row_pieces / comptime!((MX_BLOCK / PIECE) as u32);
        bytes[i as usize] = e8m0_byte(inv_scales, piece / row_pieces, block, blocks);
    }
    #[unroll]
    for i in 0..PIECES {
        let piece = first + comptime!(i * UNITS);
        let mut words = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for pair in 0..4u32 {
            let pairs = held[i as usize][comptime!((pair / 2) as usize)] >> comptime!(pair % 2 * 16);
            let byte = bytes[i as usize];
            words[pair as usize] = if comptime!(isa.has_fp8_cvt()) {
                cvt_bf16(pairs, f32::reinterpret(e8m0_inverse_bits(byte)), format)
            } else {
                let low = scaled_bf16(pairs & 0xffu32, byte, format);
                low | (scaled_bf16((pairs >> 8u32) & 0xffu32, byte, format) << 16u32)
            };
        }
        if piece < pieces {
            out[piece as usize] = words;
        }
    }
}

/// bf16 of a code times `2^(byte - 127)`, in integers because devices may flush subnormal products.
#[cube]
fn scaled_bf16(code: u32, byte: u32, #[comptime] format: Format) -> u32 {
    let sign = (code & 0x80u32) << 8u32;
    // Zero or normal; infinity or NaN from f32's infinity on.
    let value = u32::reinterpret(decode(code & 0x7fu32, format));
    // Sum of the f32's and the scale's exponents, so biased twice.
    let exponent = (value >> 23u32) + byte;
    let normal = min((value + (byte << 23u32) - comptime!(127u32 << 23)) >> 16u32, BF16_INF);
    // Below the smallest normal, the significand with its leading one shifts right.
    let shift = clamp(128u32 - min(exponent, 128u32), 1u32, 24u32);
    let significand = ((value >> 16u32) & 0x7fu32) | 0x80u32;
    let odd = (significand >> shift) & 1u32;
    let subnormal = (significand + (1u32 << (shift - 1u32)) - 1u32 + odd) >> shift;
    let finite = select(value == 0u32, 0u32.runtime(), select(exponent < 128u32, subnormal, normal));
    let infinite = select(value == F32_INF, BF16_INF.runtime(), finite);
    let is_nan = value > F32_INF || byte == 255u32;
    select(is_nan, BF16_NAN.runtime(), sign | infinite)
}
