//! `setp`: comparisons by name and type.

use std::cmp::Ordering::{Equal, Greater, Less};

use half::{bf16, f16};

use super::alu::Lanes;
use super::float::f32_of;

/// Mask of the lanes in which a comparison holds.
pub(crate) type Compare = fn(&Lanes, &Lanes) -> u32;

fn each(a: &Lanes, b: &Lanes, holds: impl Fn(u64, u64) -> bool) -> u32 {
    (0..32).fold(0, |mask, lane| mask | u32::from(holds(a[lane], b[lane])) << lane)
}

/// Comparison for an opcode's modifier and type.
pub(crate) fn compare(name: &str, ty: &str) -> Option<Compare> {
    macro_rules! ordered {
        ($map:expr) => {
            Some(match name {
                "eq" => |a, b| each(a, b, |a, b| $map(a) == $map(b)),
                "ne" => |a, b| each(a, b, |a, b| $map(a) != $map(b)),
                "lt" | "lo" => |a, b| each(a, b, |a, b| $map(a) < $map(b)),
                "le" | "ls" => |a, b| each(a, b, |a, b| $map(a) <= $map(b)),
                "gt" | "hi" => |a, b| each(a, b, |a, b| $map(a) > $map(b)),
                "ge" | "hs" => |a, b| each(a, b, |a, b| $map(a) >= $map(b)),
                _ => return None,
            })
        };
    }
    // NaN is unordered: ordered comparisons are then false, and the `u` variants true.
    macro_rules! floats {
        ($map:expr, $($name:literal => $order:pat),+) => {
            match name {
                "num" => Some(|a, b| each(a, b, |a, b| !$map(a).is_nan() && !$map(b).is_nan())),
                "nan" => Some(|a, b| each(a, b, |a, b| $map(a).is_nan() || $map(b).is_nan())),
                $($name => Some(|a, b| each(a, b, |a, b| matches!($map(a).partial_cmp(&$map(b)), $order))),)+
                _ => None,
            }
        };
        ($map:expr) => {
            floats!($map,
                "eq" => Some(Equal), "ne" => Some(Less | Greater), "lt" => Some(Less), "le" => Some(Less | Equal),
                "gt" => Some(Greater), "ge" => Some(Greater | Equal), "equ" => None | Some(Equal),
                "neu" => None | Some(Less | Greater), "ltu" => None | Some(Less), "leu" => None | Some(Less | Equal),
                "gtu" => None | Some(Greater), "geu" => None | Some(Greater | Equal))
        };
    }
    match ty {
        "u16" | "b16" => ordered!(|v: u64| v as u16),
        "s16" => ordered!(|v: u64| v as i16),
        "u32" | "b32" => ordered!(|v: u64| v as u32),
        "s32" => ordered!(|v: u64| v as i32),
        "u64" | "b64" => ordered!(|v: u64| v),
        "s64" => ordered!(|v: u64| v as i64),
        "f32" => floats!(f32_of),
        "f64" => floats!(f64::from_bits),
        "f16" => floats!(|v: u64| f16::from_bits(v as u16).to_f32()),
        "bf16" => floats!(|v: u64| bf16::from_bits(v as u16).to_f32()),
        _ => None,
    }
}
