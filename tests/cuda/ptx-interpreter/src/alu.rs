//! Arithmetic instructions on the lanes of a warp: `d = f(a, b, c)` by opcode and type, as the PTX
//! ISA defines.

use half::{bf16, f16};

use super::bits::{bfe, prmt, shift_left};
use super::float::{bf16_bits, f16_bits, f32_bits, f32_of, f64_of, fma_down, larger, nan_or, smaller};

/// Value of a register in each lane; unused high bits are zero.
pub(crate) type Lanes = [u64; 32];

/// Applies an instruction to the lanes of a mask. The registers are d, a, b, c.
pub(crate) type Alu = fn(&mut [Lanes], u32, &[u32; 4]);

/// Destination and sources; unused sources are register 0.
fn apply(regs: &mut [Lanes], mask: u32, o: &[u32; 4], f: impl Fn(u64, u64, u64) -> u64) {
    let (a, b, c) = (regs[o[1] as usize], regs[o[2] as usize], regs[o[3] as usize]);
    let d = &mut regs[o[0] as usize];
    if mask == u32::MAX {
        for lane in 0..32 {
            d[lane] = f(a[lane], b[lane], c[lane]);
        }
    } else {
        for lane in 0..32 {
            if mask >> lane & 1 != 0 {
                d[lane] = f(a[lane], b[lane], c[lane]);
            }
        }
    }
}

fn apply1(regs: &mut [Lanes], mask: u32, o: &[u32; 4], f: impl Fn(u64) -> u64) {
    let a = regs[o[1] as usize];
    let d = &mut regs[o[0] as usize];
    if mask == u32::MAX {
        for lane in 0..32 {
            d[lane] = f(a[lane]);
        }
    } else {
        for lane in 0..32 {
            if mask >> lane & 1 != 0 {
                d[lane] = f(a[lane]);
            }
        }
    }
}

macro_rules! one {
    ($f:expr) => {
        Some((1, (|regs, mask, o| apply1(regs, mask, o, $f)) as Alu))
    };
}

macro_rules! two {
    ($f:expr) => {
        Some((2, (|regs, mask, o| apply(regs, mask, o, |a, b, _| $f(a, b))) as Alu))
    };
}

macro_rules! three {
    ($f:expr) => {
        Some((3, (|regs, mask, o| apply(regs, mask, o, $f)) as Alu))
    };
}

/// Integer operation on two operands, for each named type.
macro_rules! ints {
    ($ty:expr, |$a:ident, $b:ident| $value:expr, $($name:literal => $int:ty, $bits:ty);+) => {
        match $ty {
            $($name => two!(|a: u64, b: u64| { let ($a, $b) = (a as $int, b as $int); ($value) as $bits as u64 }),)+
            _ => None,
        }
    };
}

macro_rules! all_ints {
    ($ty:expr, |$a:ident, $b:ident| $value:expr) => {
        ints!($ty, |$a, $b| $value,
            "u16" => u16, u16; "s16" => i16, u16; "b16" => u16, u16; "u32" => u32, u32; "s32" => i32, u32;
            "b32" => u32, u32; "u64" => u64, u64; "s64" => i64, u64; "b64" => u64, u64)
    };
}

fn halves(bits: u64) -> [u16; 2] {
    [bits as u16, (bits >> 16) as u16]
}

fn joined([low, high]: [u16; 2]) -> u64 {
    u64::from(low) | u64::from(high) << 16
}

/// Operation on f16 or bf16: exact in f64, rounded once.
macro_rules! small {
    ($ty:expr, |$a:ident, $b:ident, $c:ident| $value:expr, $arity:ident) => {
        match $ty {
            "f16" => $arity!(|a: u64, b: u64, c: u64| {
                let [$a, $b, $c] = [a, b, c].map(|v| f16::from_bits(v as u16).to_f64());
                u64::from(f16_bits($value))
            }),
            "bf16" => $arity!(|a: u64, b: u64, c: u64| {
                let [$a, $b, $c] = [a, b, c].map(|v| bf16::from_bits(v as u16).to_f64());
                u64::from(bf16_bits($value))
            }),
            "f16x2" => $arity!(|a: u64, b: u64, c: u64| {
                joined([0, 1].map(|i| {
                    let [$a, $b, $c] = [a, b, c].map(|v| f16::from_bits(halves(v)[i]).to_f64());
                    f16_bits($value)
                }))
            }),
            "bf16x2" => $arity!(|a: u64, b: u64, c: u64| {
                joined([0, 1].map(|i| {
                    let [$a, $b, $c] = [a, b, c].map(|v| bf16::from_bits(halves(v)[i]).to_f64());
                    bf16_bits($value)
                }))
            }),
            _ => None,
        }
    };
}

macro_rules! float_two {
    ($ty:expr, |$a:ident, $b:ident| $value:expr) => {
        match $ty {
            "f32" => two!(|a, b| {
                let ($a, $b) = (f32_of(a), f32_of(b));
                f32_bits($value)
            }),
            "f64" => two!(|a, b| {
                let ($a, $b) = (f64_of(a), f64_of(b));
                ($value).to_bits()
            }),
            _ => small!($ty, |$a, $b, _c| $value, three_as_two),
        }
    };
}

macro_rules! three_as_two {
    ($f:expr) => {
        Some((2, (|regs, mask, o| apply(regs, mask, o, $f)) as Alu))
    };
}

/// Function of an opcode that computes one register from up to three, with its number of sources.
pub(crate) fn alu(parts: &[&str]) -> Option<(usize, Alu)> {
    let (name, ty) = (parts[0], *parts.last()?);
    let has = |modifier: &str| parts[1..].contains(&modifier);
    if (name, ty) == ("fma", "f32") && parts[1..] == ["rm", "f32"] {
        return three!(|a, b, c| f32_bits(fma_down(f32_of(a), f32_of(b), f32_of(c))));
    }
    let approximate = matches!(name, "ex2" | "lg2" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh" | "div");
    if has("sat") || has("cc") || (!approximate && ["ftz", "rz", "rm", "rp"].iter().any(|modifier| has(modifier))) {
        return None;
    }
    match name {
        "mov" | "cvta" => one!(|a| a),
        "add" => all_ints!(ty, |a, b| a.wrapping_add(b)).or_else(|| float_two!(ty, |a, b| a + b)),
        "sub" => all_ints!(ty, |a, b| a.wrapping_sub(b)).or_else(|| float_two!(ty, |a, b| a - b)),
        "mul" if has("lo") => all_ints!(ty, |a, b| a.wrapping_mul(b)),
        "mul" if has("hi") => match ty {
            "u32" => two!(|a: u64, b: u64| (a * b) >> 32),
            "s32" => two!(|a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32 as u64),
            "u64" => two!(|a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
            "s64" => two!(|a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
            _ => None,
        },
        "mul" if has("wide") => match ty {
            "u16" => two!(|a: u64, b: u64| (a & 0xffff) * (b & 0xffff)),
            "u32" => two!(|a: u64, b: u64| (a & 0xffff_ffff) * (b & 0xffff_ffff)),
            "s16" => two!(|a, b| (i32::from(a as i16) * i32::from(b as i16)) as u32 as u64),
            "s32" => two!(|a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64),
            _ => None,
        },
        "mul" => float_two!(ty, |a, b| a * b),
        "mul24" => match ty {
            "u32" => two!(|a: u64, b: u64| ((a & 0xff_ffff) * (b & 0xff_ffff)) as u32 as u64),
            _ => None,
        },
        "mad" if has("lo") => match ty {
            "u16" | "s16" => three!(|a, b, c| (a as u16).wrapping_mul(b as u16).wrapping_add(c as u16) as u64),
            "u32" | "s32" => three!(|a, b, c| (a as u32).wrapping_mul(b as u32).wrapping_add(c as u32) as u64),
            "u64" | "s64" => three!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            _ => None,
        },
        "mad" if has("hi") => match ty {
            "u32" => three!(|a, b, c| (((a * b) >> 32) as u32).wrapping_add(c as u32) as u64),
            _ => None,
        },
        "mad" if has("wide") => match ty {
            "u16" => three!(|a, b, c| ((a * b) as u32).wrapping_add(c as u32) as u64),
            "u32" => three!(|a: u64, b: u64, c: u64| (a * b).wrapping_add(c)),
            "s32" => three!(|a, b, c: u64| ((i64::from(a as i32) * i64::from(b as i32)) as u64).wrapping_add(c)),
            _ => None,
        },
        "fma" | "mad" => match ty {
            "f32" => three!(|a, b, c| f32_bits(f32_of(a).mul_add(f32_of(b), f32_of(c)))),
            "f64" => three!(|a, b, c| f64_of(a).mul_add(f64_of(b), f64_of(c)).to_bits()),
            // The product is exact in f64. The sum of f16 or bf16 operands loses only bits far
            // below half a unit.
            _ if !has("relu") => small!(ty, |a, b, c| a * b + c, three),
            _ => None,
        },
        "div" => match ty {
            "u16" => two!(|a, b| u64::from((a as u16).checked_div(b as u16).unwrap_or(u16::MAX))),
            "u32" => two!(|a, b| u64::from((a as u32).checked_div(b as u32).unwrap_or(u32::MAX))),
            "s32" => {
                two!(|a, b| if b as i32 == 0 { 0xffff_ffff } else { (a as i32).wrapping_div(b as i32) as u32 as u64 })
            }
            "u64" => two!(|a: u64, b: u64| a.checked_div(b).unwrap_or(u64::MAX)),
            "s64" => two!(|a, b| if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 }),
            "f32" => two!(|a, b| f32_bits(f32_of(a) / f32_of(b))),
            "f64" => two!(|a, b| (f64_of(a) / f64_of(b)).to_bits()),
            _ => None,
        },
        "rem" => match ty {
            "u16" => two!(|a, b| u64::from((a as u16).checked_rem(b as u16).unwrap_or(a as u16))),
            "u32" => two!(|a, b| u64::from((a as u32).checked_rem(b as u32).unwrap_or(a as u32))),
            "s32" => two!(|a, b| if b as i32 == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 as u64 }),
            "u64" => two!(|a: u64, b: u64| a.checked_rem(b).unwrap_or(a)),
            "s64" => two!(|a, b| if b == 0 { a } else { (a as i64).wrapping_rem(b as i64) as u64 }),
            _ => None,
        },
        "min" | "max" if parts.len() == 2 || has("NaN") || has("xorsign") => min_max(name, ty, has("NaN")),
        "abs" => match ty {
            "s16" => one!(|a| u64::from((a as i16).unsigned_abs())),
            "s32" => one!(|a| u64::from((a as i32).unsigned_abs())),
            "s64" => one!(|a| (a as i64).unsigned_abs()),
            "f32" => one!(|a| a & 0x7fff_ffff),
            "f64" => one!(|a| a & (u64::MAX >> 1)),
            "f16" | "bf16" => one!(|a| a & 0x7fff),
            "f16x2" | "bf16x2" => one!(|a| a & 0x7fff_7fff),
            _ => None,
        },
        "neg" => match ty {
            "s16" => one!(|a| u64::from((a as u16).wrapping_neg())),
            "s32" => one!(|a| u64::from((a as u32).wrapping_neg())),
            "s64" => one!(|a: u64| a.wrapping_neg()),
            "f32" => one!(|a| a ^ 0x8000_0000),
            "f64" => one!(|a| a ^ 1 << 63),
            "f16" | "bf16" => one!(|a| a ^ 0x8000),
            "f16x2" | "bf16x2" => one!(|a| a ^ 0x8000_8000),
            _ => None,
        },
        // The sign of the first operand, and the magnitude of the second.
        "copysign" => match ty {
            "f32" => two!(|a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff)),
            "f64" => two!(|a, b| (a & 1 << 63) | (b & (u64::MAX >> 1))),
            _ => None,
        },
        "and" => two!(|a: u64, b: u64| a & b),
        "or" => two!(|a: u64, b: u64| a | b),
        "xor" => two!(|a: u64, b: u64| a ^ b),
        "not" => match ty {
            "b16" => one!(|a| u64::from(!(a as u16))),
            "b32" => one!(|a| u64::from(!(a as u32))),
            "b64" => one!(|a: u64| !a),
            _ => None,
        },
        "cnot" => one!(|a| u64::from(a == 0)),
        "shl" => match ty {
            "b16" => two!(|a, b| shift_left(a, b & 0xffff_ffff, 16)),
            "b32" => two!(|a, b| shift_left(a, b & 0xffff_ffff, 32)),
            "b64" => two!(|a, b| shift_left(a, b & 0xffff_ffff, 64)),
            _ => None,
        },
        "shr" => match ty {
            "u16" | "b16" | "u32" | "b32" | "u64" | "b64" => two!(|a: u64, b: u64| {
                let by = b & 0xffff_ffff;
                if by > 63 { 0 } else { a >> by }
            }),
            "s16" => two!(|a, b: u64| ((a as i16) >> (b & 0xffff_ffff).min(15)) as u16 as u64),
            "s32" => two!(|a, b: u64| ((a as i32) >> (b & 0xffff_ffff).min(31)) as u32 as u64),
            "s64" => two!(|a, b: u64| ((a as i64) >> (b & 0xffff_ffff).min(63)) as u64),
            _ => None,
        },
        "shf" => match (has("l"), has("wrap")) {
            (true, true) => three!(|a, b, c| ((b << 32 | a) << (c & 31) >> 32) as u32 as u64),
            (true, false) => three!(|a, b, c: u64| ((b << 32 | a) << (c & 0xffff_ffff).min(32) >> 32) as u32 as u64),
            (false, true) => three!(|a, b, c| ((b << 32 | a) >> (c & 31)) as u32 as u64),
            (false, false) => three!(|a, b, c: u64| ((b << 32 | a) >> (c & 0xffff_ffff).min(32)) as u32 as u64),
        },
        "prmt" if parts.len() == 2 => three!(prmt),
        "bfe" => match ty {
            "u32" => three!(|a, b, c| bfe(a, b, c, 32, false)),
            "s32" => three!(|a, b, c| bfe(a, b, c, 32, true)),
            "u64" => three!(|a, b, c| bfe(a, b, c, 64, false)),
            "s64" => three!(|a, b, c| bfe(a, b, c, 64, true)),
            _ => None,
        },
        "popc" => one!(|a: u64| u64::from(a.count_ones())),
        "clz" => match ty {
            "b32" => one!(|a| u64::from((a as u32).leading_zeros())),
            "b64" => one!(|a: u64| u64::from(a.leading_zeros())),
            _ => None,
        },
        "brev" => match ty {
            "b32" => one!(|a| u64::from((a as u32).reverse_bits())),
            "b64" => one!(|a: u64| a.reverse_bits()),
            _ => None,
        },
        "bfind" if !has("shiftamt") => match ty {
            "u32" => one!(|a| u64::from(31u32.wrapping_sub((a as u32).leading_zeros()))),
            "u64" => one!(|a: u64| u64::from(63u32.wrapping_sub(a.leading_zeros()))),
            _ => None,
        },
        "sad" => match ty {
            "u32" => three!(|a, b, c| u64::from((a as u32).abs_diff(b as u32).wrapping_add(c as u32))),
            _ => None,
        },
        _ => transcendental(name, ty),
    }
}

fn min_max(name: &str, ty: &str, nan: bool) -> Option<(usize, Alu)> {
    if name == "min" {
        if let Some(found) = all_ints!(ty, |a, b| a.min(b)) {
            return Some(found);
        }
    } else if let Some(found) = all_ints!(ty, |a, b| a.max(b)) {
        return Some(found);
    }
    macro_rules! floats {
        (|$a:ident, $b:ident| $value:expr) => {
            match ty {
                "f32" => two!(|a, b| {
                    let ($a, $b) = (f64::from(f32_of(a)), f64::from(f32_of(b)));
                    f32_bits($value as f32)
                }),
                "f64" => two!(|a, b| {
                    let ($a, $b) = (f64_of(a), f64_of(b));
                    ($value).to_bits()
                }),
                _ => small!(ty, |$a, $b, _c| $value, three_as_two),
            }
        };
    }
    match (name, nan) {
        ("min", false) => floats!(|a, b| smaller(a, b)),
        ("max", false) => floats!(|a, b| larger(a, b)),
        ("min", true) => floats!(|a, b| nan_or(a, b, smaller(a, b))),
        _ => floats!(|a, b| nan_or(a, b, larger(a, b))),
    }
}

fn transcendental(name: &str, ty: &str) -> Option<(usize, Alu)> {
    macro_rules! f32_only {
        (|$a:ident| $value:expr) => {
            match ty {
                "f32" => one!(|a| {
                    let $a = f64::from(f32_of(a));
                    f32_bits($value as f32)
                }),
                "f64" => one!(|a| {
                    let $a = f64_of(a);
                    ($value).to_bits()
                }),
                _ => small!(ty, |$a, _b, _c| $value, three_as_one),
            }
        };
    }
    macro_rules! three_as_one {
        ($f:expr) => {
            Some((1, (|regs, mask, o| apply(regs, mask, o, $f)) as Alu))
        };
    }
    match name {
        "rcp" => f32_only!(|a| 1.0 / a),
        // The square root in f64, rounded to f32, is correctly rounded.
        "sqrt" => f32_only!(|a| a.sqrt()),
        "rsqrt" => f32_only!(|a| 1.0 / a.sqrt()),
        "ex2" => f32_only!(|a| a.exp2()),
        "lg2" => f32_only!(|a| a.log2()),
        "sin" => f32_only!(|a| a.sin()),
        "cos" => f32_only!(|a| a.cos()),
        "tanh" => f32_only!(|a| a.tanh()),
        _ => None,
    }
}
