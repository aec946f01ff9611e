//! Bit operations of the PTX ISA on the values of one lane.

/// `shl` of `bits`: zero once all bits are shifted out.
pub(super) fn shift_left(value: u64, by: u64, bits: u64) -> u64 {
    let mask = u64::MAX >> (64 - bits);
    if by >= bits { 0 } else { (value << by) & mask }
}

/// Byte-wise selection. The sign bit of a selector replicates the byte's sign.
pub(super) fn prmt(a: u64, b: u64, select: u64) -> u64 {
    let bytes = a & 0xffff_ffff | b << 32;
    (0..4).fold(0, |value, i| {
        let select = select >> (4 * i);
        let byte = bytes >> (8 * (select & 7)) & 0xff;
        let byte = if select & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        value | byte << (8 * i)
    })
}

/// `bfe`: a bit field, zero- or sign-extended. Beyond the value, bits are zeros or its sign.
pub(super) fn bfe(value: u64, position: u64, length: u64, bits: u64, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let end = (position + length).min(bits);
    let taken = end.saturating_sub(position);
    if taken == 0 && !(signed && length > 0) {
        return 0;
    }
    let sign_at = if length == 0 { return 0 } else { (position + length - 1).min(bits - 1) };
    let field = if taken == 0 { 0 } else { value >> position & (u64::MAX >> (64 - taken)) };
    let negative = signed && value >> sign_at & 1 != 0;
    let all = u64::MAX >> (64 - bits);
    let field = if negative && taken < 64 { field | all << taken } else { field };
    field & all
}

/// `bfi`: replaces bits of `base` by the low bits of `field`.
pub(super) fn insert(field: u64, base: u64, position: u64, length: u64, bits: u64) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= bits || length == 0 {
        return base;
    }
    let length = length.min(bits - position);
    let mask = (u64::MAX >> (64 - length)) << position;
    base & !mask | field << position & mask
}

/// `lop3`: applies the truth table `table` to three bits.
pub(super) fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let terms = [!a & !b & !c, !a & !b & c, !a & b & !c, !a & b & c, a & !b & !c, a & !b & c, a & b & !c, a & b & c];
    terms.into_iter().enumerate().fold(0, |value, (i, term)| value | term & (table >> i & 1).wrapping_neg())
}
