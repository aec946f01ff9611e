//! Instruction descriptors of `tcgen05.mma`, and shared memory descriptors of `tcgen05.mma` and
//! `tcgen05.cp`.
//!
//! Sources: PTX ISA, *tcgen05 instruction descriptor* and *tcgen05 shared memory descriptor*.
//! CUTLASS has the same fields in `cute/arch/mma_sm100_desc.hpp`.

use cubecl::prelude::*;

use crate::Format;

/// Address or offset in units of 16 bytes, for bits 0–13 and the stride fields of a shared memory
/// descriptor.
const fn encode(bytes: u32) -> u64 {
    ((bytes & 0x3_ffff) >> 4) as u64
}

/// Bits 46–48, a fixed value.
const VERSION: u64 = 0b001 << 46;

/// Bits 61–63: rows of 128 bytes with swizzled 16-byte pieces.
const SWIZZLE_128B: u64 = 2 << 61;

/// Descriptor of an operand without its address: rows of 128 bytes along the contraction, with
/// 128-byte swizzle. Groups of eight rows (1024 bytes) follow each other.
///
/// | bits | field | |
/// | --- | --- | --- |
/// | 0–13 | start address / 16 | |
/// | 16–29 | leading dimension byte offset / 16 | unused where swizzled and contraction-major; 1 |
/// | 32–45 | stride dimension byte offset / 16 | 64: from eight rows to the next |
/// | 46–48 | fixed | 1 |
/// | 49–51 | base offset | 0: rows begin at multiples of 1024 bytes |
/// | 52 | leading dimension mode | 0: an offset |
/// | 61–63 | swizzle | 2: 128 bytes |
const OPERAND: u64 = (1 << 16) | (encode(1024) << 32) | VERSION | SWIZZLE_128B;

/// Descriptor, without its address, of 32 rows of 16 bytes, as `tcgen05.cp.32x128b` reads them.
/// Groups of eight rows (128 bytes) follow each other, without swizzle. There is one column of 16
/// bytes, so the leading dimension has no offset.
const SCALES: u64 = (encode(128) << 32) | VERSION;

/// Descriptor of an operand in shared memory. `address` is a multiple of 1024, plus the bytes of
/// the contraction to skip.
#[cube]
pub(crate) fn operand_descriptor(address: u32) -> u64 {
    u64::cast_from((address & 0x3ffffu32) >> 4u32) | comptime!(OPERAND)
}

/// Descriptor of 512 bytes of scales, 128 rows by four blocks. The address is a multiple of 16.
#[cube]
pub(crate) fn scales_descriptor(address: u32) -> u64 {
    u64::cast_from((address & 0x3ffffu32) >> 4u32) | comptime!(SCALES)
}

/// `atype` and `btype` of both kinds.
const fn element(format: Format) -> u32 {
    match format {
        Format::E4m3 => 0,
        Format::E5m2 => 1,
    }
}

/// Instruction descriptor of `kind::f8f6f4` for `D [rows, cols]` in f32 and contraction-major
/// operands.
///
/// | bits | field | |
/// | --- | --- | --- |
/// | 0–3 | sparsity, saturation | 0 |
/// | 4–5 | type of D | 1: f32 |
/// | 7–9, 10–12 | types of A, of B | 0: e4m3, 1: e5m2 |
/// | 13, 14 | negate A, B | 0 |
/// | 15, 16 | transpose A, B | 0: contraction-major |
/// | 17–22 | N / 8 | |
/// | 24–28 | M / 16 | |
/// | 30–31 | shift of `.ws` | 0 |
///
/// M is 64, 128, or 256 for a pair of blocks. N is a multiple of M / 8 and at most 256.
pub(crate) const fn fp8_instruction(rows: u32, cols: u32, formats: [Format; 2]) -> u32 {
    let n_step = rows / 8;
    assert!(matches!(rows, 64 | 128 | 256) && cols.is_multiple_of(n_step), "no such M");
    assert!(cols >= 8 && cols <= 256 && cols.is_multiple_of(8), "no such N");
    (1 << 4) | (element(formats[0]) << 7) | (element(formats[1]) << 10) | ((cols / 8) << 17) | ((rows / 16) << 24)
}

/// Instruction descriptor of `kind::mxf8f6f4` for `D [rows, cols]` in f32, contraction-major
/// operands and E8M0 scales.
///
/// This product of 32 of the contraction uses byte `block` of the four in each word of scales. Bits
/// 0–3 and 7–22 are the same as in [`fp8_instruction`].
///
/// | bits | field | |
/// | --- | --- | --- |
/// | 4–5 | byte of B's scales | `block` |
/// | 23 | type of the scales | 1: ue8m0 |
/// | 27–28 | M / 128 | |
/// | 29–30 | byte of A's scales | `block` |
/// | 31 | K | 0: 32 |
///
/// M is 128, or 256 for a pair of blocks. N is a multiple of M / 8.
pub(crate) const fn mxfp8_instruction(rows: u32, cols: u32, formats: [Format; 2], block: u32) -> u32 {
    assert!(matches!(rows, 128 | 256), "no such M");
    assert!(cols >= 16 && cols <= 256 && cols.is_multiple_of(rows / 8), "no such N");
    assert!(block < 4, "a word has four scales");
    (block << 4)
        | (element(formats[0]) << 7)
        | (element(formats[1]) << 10)
        | ((cols / 8) << 17)
        | (1 << 23)
        | ((rows / 128) << 27)
        | (block << 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks fields of a descriptor: first bit, width, value. All other bits must be zero.
    fn check(descriptor: u64, bits: u32, fields: &[(u32, u32, u64)]) {
        let mut rest = descriptor;
        for (at, width, value) in fields {
            let mask = (1u64 << width) - 1;
            assert_eq!(descriptor >> at & mask, *value, "bits {at} to {} of {descriptor:#x}", at + width - 1);
            rest &= !(mask << at);
        }
        assert_eq!(rest, 0, "reserved bits of {descriptor:#x}");
        assert!(bits == 64 || descriptor >> bits == 0);
    }

    /// PTX ISA, instruction descriptor of `.kind::tf32`, `.kind::f16`, `.kind::f8f6f4` and
    /// `.kind::i8`.
    #[test]
    fn fields_of_fp8() {
        for (i, a) in Format::ALL.into_iter().enumerate() {
            for (j, b) in Format::ALL.into_iter().enumerate() {
                for (rows, cols) in [(256, 256), (256, 32), (128, 256), (128, 128), (128, 16), (64, 8), (64, 248)] {
                    let fields = [
                        (0, 2, 0),
                        (2, 1, 0),
                        (3, 1, 0),
                        (4, 2, 1),
                        (7, 3, i as u64),
                        (10, 3, j as u64),
                        (13, 2, 0),
                        (15, 2, 0),
                        (17, 6, u64::from(cols) >> 3),
                        (24, 5, u64::from(rows) >> 4),
                        (30, 2, 0),
                    ];
                    check(u64::from(fp8_instruction(rows, cols, [a, b])), 32, &fields);
                }
            }
        }
    }

    /// PTX ISA, instruction descriptor of `.kind::mxf8f6f4`. CUTLASS has M / 16 from bit 24 on,
    /// which is equal for 128 and 256.
    #[test]
    fn fields_of_mxfp8() {
        for (i, a) in Format::ALL.into_iter().enumerate() {
            for (j, b) in Format::ALL.into_iter().enumerate() {
                for (rows, cols) in [(128, 16), (128, 64), (128, 128), (128, 192), (256, 32), (256, 192), (256, 256)] {
                    for block in 0..4 {
                        let fields = [
                            (2, 1, 0),
                            (4, 2, u64::from(block)),
                            (7, 3, i as u64),
                            (10, 3, j as u64),
                            (13, 2, 0),
                            (15, 2, 0),
                            (17, 6, u64::from(cols) >> 3),
                            (23, 1, 1),
                            (24, 5, u64::from(rows) >> 4),
                            (29, 2, u64::from(block)),
                            (31, 1, 0),
                        ];
                        let descriptor = mxfp8_instruction(rows, cols, [a, b], block);
                        check(u64::from(descriptor), 32, &fields);
                        assert_eq!(descriptor >> 27 & 3, rows >> 7);
                    }
                }
            }
        }
    }

    /// PTX ISA, shared memory descriptor. Eight rows of 128 bytes are 1024 bytes, eight of 16 bytes
    /// 128.
    #[test]
    fn fields_of_shared_memory() {
        let operand = [(0, 14, 0), (16, 14, 1), (32, 14, 1024 >> 4), (46, 3, 1), (49, 3, 0), (52, 1, 0), (61, 3, 2)];
        check(OPERAND, 64, &operand);
        check(SCALES, 64, &[(0, 14, 0), (16, 14, 0), (32, 14, 128 >> 4), (46, 3, 1), (52, 1, 0), (61, 3, 0)]);
        assert_eq!(encode(0x3_fff0), 0x3fff);
        assert_eq!(encode(0x4_0010), 1);
    }
}
