//! `cvt`: integers, f32, f64, f16, bf16 and the 8-bit formats, with the roundings of the PTX ISA.

use half::{bf16, f16};

/// Type of a `cvt` operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    U(u32),
    S(u32),
    F16,
    Bf16,
    F32,
    F64,
    /// In the upper 19 bits of a word.
    Tf32,
    F16x2,
    Bf16x2,
    E4m3x2,
    E5m2x2,
    Ue8m0x2,
}

impl Ty {
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "u8" | "b8" => Ty::U(8),
            "u16" | "b16" => Ty::U(16),
            "u32" | "b32" => Ty::U(32),
            "u64" | "b64" => Ty::U(64),
            "s8" => Ty::S(8),
            "s16" => Ty::S(16),
            "s32" => Ty::S(32),
            "s64" => Ty::S(64),
            "f16" => Ty::F16,
            "bf16" => Ty::Bf16,
            "f32" => Ty::F32,
            "tf32" => Ty::Tf32,
            "f64" => Ty::F64,
            "f16x2" => Ty::F16x2,
            "bf16x2" => Ty::Bf16x2,
            "e4m3x2" => Ty::E4m3x2,
            "e5m2x2" => Ty::E5m2x2,
            "ue8m0x2" => Ty::Ue8m0x2,
            _ => return None,
        })
    }
}

/// Rounding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// A `cvt` of one or two sources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Convert {
    pub to: Ty,
    pub from: Ty,
    pub round: Round,
    /// Rounds to an integral value in a floating-point format.
    pub integral: bool,
    pub saturate: bool,
    pub satfinite: bool,
    pub relu: bool,
}

impl Convert {
    pub(crate) fn of(parts: &[&str]) -> Option<Self> {
        let [.., to, from] = parts else { return None };
        let mut convert = Convert {
            to: Ty::of(to)?,
            from: Ty::of(from)?,
            round: Round::Nearest,
            integral: false,
            saturate: false,
            satfinite: false,
            relu: false,
        };
        for modifier in &parts[1..parts.len() - 2] {
            match *modifier {
                "rn" => {}
                "rna" if *to == "tf32" => {}
                "rz" => convert.round = Round::Zero,
                "rm" => convert.round = Round::Down,
                "rp" => convert.round = Round::Up,
                "rni" | "rzi" | "rmi" | "rpi" => {
                    convert.integral = true;
                    convert.round = match *modifier {
                        "rni" => Round::Nearest,
                        "rzi" => Round::Zero,
                        "rmi" => Round::Down,
                        _ => Round::Up,
                    };
                }
                "sat" => convert.saturate = true,
                "satfinite" => convert.satfinite = true,
                "relu" => convert.relu = true,
                _ => return None,
            }
        }
        Some(convert)
    }

    /// Converts `a`. Packed results also take `b`, which is written to the low half.
    pub(crate) fn apply(&self, a: u64, b: u64) -> u64 {
        match (self.to, self.from) {
            (Ty::U(to), Ty::U(from)) => self.integer(i128::from(a & ones(from)), to, false),
            (Ty::S(to), Ty::U(from)) => self.integer(i128::from(a & ones(from)), to, true),
            (Ty::U(to), Ty::S(from)) => self.integer(i128::from(signed(a, from)), to, false),
            (Ty::S(to), Ty::S(from)) => self.integer(i128::from(signed(a, from)), to, true),
            (Ty::E4m3x2 | Ty::E5m2x2, Ty::F32) => {
                let [low, high] = [b, a].map(|v| f64::from(f32::from_bits(v as u32)));
                self.fp8(low) | self.fp8(high) << 8
            }
            (Ty::E4m3x2 | Ty::E5m2x2, Ty::F16x2) => {
                let [low, high] = [a, a >> 16].map(|v| f16::from_bits(v as u16).to_f64());
                self.fp8(low) | self.fp8(high) << 8
            }
            (Ty::Ue8m0x2, Ty::F32) => {
                let [low, high] = [b, a].map(|v| self.ue8m0(f32::from_bits(v as u32)));
                low | high << 8
            }
            (Ty::F16x2, Ty::E4m3x2 | Ty::E5m2x2) => {
                let decode = if self.from == Ty::E4m3x2 { e4m3 } else { e5m2 };
                let [low, high] = [a, a >> 8].map(|code| {
                    let value = decode(code as u8);
                    u64::from(if value.is_nan() { 0x7fff } else { f16::from_f32(value).to_bits() })
                });
                low | high << 16
            }
            (Ty::Bf16x2, Ty::Ue8m0x2) => {
                let [low, high] = [a, a >> 8].map(|code| bf16_from(ue8m0(code as u8), Round::Nearest));
                low | high << 16
            }
            // Ties away from zero.
            (Ty::Tf32, Ty::F32) if f32::from_bits(a as u32).is_nan() => 0x7fff_ffff,
            (Ty::Tf32, Ty::F32) => (a + 0x1000) & 0xffff_e000,
            (Ty::F16x2 | Ty::Bf16x2, Ty::F32) => {
                let part = Convert { to: if self.to == Ty::F16x2 { Ty::F16 } else { Ty::Bf16 }, ..*self };
                part.apply(b, 0) | part.apply(a, 0) << 16
            }
            (to, Ty::U(bits)) => self.integer_to(i128::from(a & ones(bits)), to),
            (to, Ty::S(bits)) => self.integer_to(i128::from(signed(a, bits)), to),
            (to, from) => self.float(value(a, from), to, from),
        }
    }

    fn integer(&self, value: i128, bits: u32, signed: bool) -> u64 {
        let value = if self.saturate { clamp(value, bits, signed) } else { value };
        value as u64 & ones(bits)
    }

    fn integer_to(&self, value: i128, to: Ty) -> u64 {
        // 64-bit integers do not fit a double. Round to odd first, so that only the second rounding
        // counts.
        let mut near = value as f64;
        if near as i128 != value && to != Ty::F64 {
            let down = if (near.abs() as i128) > value.abs() { near.to_bits() - 1 } else { near.to_bits() };
            near = f64::from_bits(down | 1);
        }
        self.float(near, to, Ty::F64)
    }

    fn float(&self, value: f64, to: Ty, from: Ty) -> u64 {
        let mut value = value;
        if self.integral || matches!(to, Ty::U(_) | Ty::S(_)) {
            value = integral(value, self.round);
        }
        if self.relu && (value < 0.0 || value.is_sign_negative()) && !value.is_nan() {
            value = 0.0;
        }
        if self.saturate && !matches!(to, Ty::U(_) | Ty::S(_)) {
            value = if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) };
        }
        match to {
            // Out-of-range values are clamped; NaN becomes 0.
            Ty::U(bits) => clamp(if value.is_nan() { 0 } else { value as i128 }, bits, false) as u64 & ones(bits),
            Ty::S(bits) => clamp(if value.is_nan() { 0 } else { value as i128 }, bits, true) as u64 & ones(bits),
            Ty::F64 => value.to_bits(),
            Ty::F32 if value.is_nan() => 0x7fff_ffff,
            Ty::F32 => u64::from(f32_from(value, self.round).to_bits()),
            Ty::F16 => f16_from(value, self.round),
            Ty::Bf16 => bf16_from(value, self.round),
            _ => unreachable!("decoding admits no cvt from {from:?} to {to:?}"),
        }
    }

    fn fp8(&self, value: f64) -> u64 {
        let value = if self.relu && value <= 0.0 { 0.0 } else { value };
        u64::from(if self.to == Ty::E4m3x2 { to_fp8(value, 3, 7, 448.0) } else { to_fp8(value, 2, 15, 57344.0) })
    }

    /// |value| rounded to a power of two, as a biased exponent.
    fn ue8m0(&self, value: f32) -> u64 {
        if value.is_nan() {
            return 0xff;
        }
        let exact = f64::from(value.abs());
        if exact == 0.0 {
            return 0;
        }
        let exponent = if exact.is_infinite() { 128 } else { exponent(exact) };
        let below = exact.is_finite() && exact != 2f64.powi(exponent);
        let up = below && self.round == Round::Up;
        (exponent + i32::from(up) + 127).clamp(0, 254) as u64
    }

    /// Whether decoding accepts this conversion.
    pub(crate) fn known(&self) -> bool {
        use Ty::{Bf16, Bf16x2, E4m3x2, E5m2x2, F16, F16x2, F32, F64, S, Tf32, U, Ue8m0x2};
        let scalar = |ty| matches!(ty, U(_) | S(_) | F16 | Bf16 | F32 | F64);
        (scalar(self.to) && scalar(self.from))
            || matches!(
                (self.to, self.from),
                (F16x2 | Bf16x2 | Ue8m0x2 | Tf32, F32) | (Bf16x2, Ue8m0x2) | (F16x2, E4m3x2 | E5m2x2)
            )
            || (matches!((self.to, self.from), (E4m3x2 | E5m2x2, F32 | F16x2)) && self.satfinite)
    }

    /// Whether it packs two sources.
    pub(crate) fn packs(&self) -> bool {
        self.from == Ty::F32 && matches!(self.to, Ty::F16x2 | Ty::Bf16x2 | Ty::E4m3x2 | Ty::E5m2x2 | Ty::Ue8m0x2)
    }
}

fn ones(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

fn signed(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)) as i64 >> (64 - bits)
}

fn clamp(value: i128, bits: u32, signed: bool) -> i128 {
    let (low, high) =
        if signed { (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) };
    value.clamp(low, high)
}

fn integral(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

/// Exact value of a floating-point source.
fn value(bits: u64, ty: Ty) -> f64 {
    match ty {
        Ty::F16 => f16::from_bits(bits as u16).to_f64(),
        Ty::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Ty::F32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}

pub(crate) fn exponent(value: f64) -> i32 {
    (value.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// Rounds `value` to a format with `mantissa` bits and smallest exponent `least`, without overflow.
fn quantum(value: f64, mantissa: i32, least: i32, round: Round) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let ulp = 2f64.powi(exponent(value.abs()).max(least) - mantissa);
    integral(value / ulp, round) * ulp
}

fn f32_from(value: f64, round: Round) -> f32 {
    match round {
        Round::Nearest => value as f32,
        _ => within(quantum(value, 23, -126, round), f64::from(f32::MAX), round) as f32,
    }
}

fn f16_from(value: f64, round: Round) -> u64 {
    if value.is_nan() {
        return 0x7fff;
    }
    let value = within(quantum(value, 10, -14, round), f64::from(f16::MAX), round);
    u64::from(f16::from_f64(value).to_bits())
}

fn bf16_from(value: f64, round: Round) -> u64 {
    if value.is_nan() {
        return 0x7fff;
    }
    let value = within(quantum(value, 7, -126, round), bf16::MAX.to_f64(), round);
    u64::from(bf16::from_f64(value).to_bits())
}

/// Overflow of a rounded value: infinity, or the largest number if the rounding is toward zero.
fn within(value: f64, max: f64, round: Round) -> f64 {
    let stays = match round {
        Round::Nearest => false,
        Round::Zero => true,
        Round::Down => value > 0.0,
        Round::Up => value < 0.0,
    };
    if value.abs() > max && value.is_finite() {
        (if stays { max } else { f64::INFINITY }).copysign(value)
    } else {
        value
    }
}

/// Code of a value in a format of 8 bits with this bias of the exponent and this largest value.
fn to_fp8(value: f64, mantissa: i32, bias: i32, max: f64) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let magnitude = quantum(value.abs(), mantissa, 1 - bias, Round::Nearest).min(max);
    let sign = u8::from(value.is_sign_negative()) << 7;
    sign | if magnitude < 2f64.powi(1 - bias) {
        (magnitude * 2f64.powi(mantissa + bias - 1)) as u8
    } else {
        let exponent = exponent(magnitude);
        ((exponent + bias) << mantissa) as u8 | ((magnitude / 2f64.powi(exponent) - 1.0) * 2f64.powi(mantissa)) as u8
    }
}

/// Value of an E4M3 code (OFP8: no infinities, NaN is S.1111.111).
pub(crate) fn e4m3(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        0x7f => f32::NAN,
        mantissa @ 0..8 => f32::from(mantissa) / 512.0,
        // The same fields in an f32, whose bias is 120 more.
        normal => f32::from_bits((u32::from(normal) << 20) + (120 << 23)),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Value of an E5M2 code, which is the high byte of an f16.
pub(crate) fn e5m2(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32()
}

/// Value of a UE8M0 code.
pub(crate) fn ue8m0(code: u8) -> f64 {
    if code == 0xff { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}
