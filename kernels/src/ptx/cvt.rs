//! Instructions of CUDA devices that convert between floating-point formats, and byte permutation.

use cubecl::prelude::*;

use crate::Format;
use crate::arch::{CudaArch, cuda_arch};
use crate::denylist::{Disabled, device_key};

/// Instructions that a kernel may use in addition to CubeCL's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Isa {
    /// None: integer arithmetic and shared memory.
    Portable,
    /// PTX of Ampere: warp shuffles, `prmt`, `cvt.f32.f16`, `div.rn.f32`.
    Ptx,
    /// [`Ptx`](Self::Ptx), and `cvt.rn.satfinite` to FP8.
    PtxFp8,
}

impl Isa {
    /// Best instructions of this client's device that are not disabled.
    pub(crate) fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        Self::left(client).unwrap_or(Self::Portable)
    }

    /// Best instructions of this client's device that are not disabled. `None` if all are.
    pub(crate) fn left<R: Runtime>(client: &ComputeClient<R>) -> Option<Self> {
        Self::among(cuda_arch(client), &Disabled::on(device_key(client)))
    }

    /// Best instructions of an architecture that are not disabled. `None` if all are.
    pub(crate) fn among(arch: Option<CudaArch>, disabled: &Disabled) -> Option<Self> {
        let is_there = |isa| match isa {
            Self::PtxFp8 => arch >= Some(CudaArch::Sm89),
            Self::Ptx => arch.is_some(),
            Self::Portable => true,
        };
        let kinds = [Self::PtxFp8, Self::Ptx, Self::Portable];
        kinds.into_iter().find(|&isa| is_there(isa) && !disabled.contains(isa))
    }

    pub(crate) const fn has_ptx(self) -> bool {
        !matches!(self, Self::Portable)
    }

    pub(crate) const fn has_fp8_cvt(self) -> bool {
        matches!(self, Self::PtxFp8)
    }
}

ptx! {
    /// Codes of four f32, the first in the low byte. Rounded to nearest even, saturating; infinity
    /// gives the largest code.
    ///
    /// NaN gives a NaN code that the PTX ISA does not specify.
    // The first source of a pair is the upper byte.
    pub(crate) fn cvt_satfinite(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Format) -> u32 {
        pure "{{.reg .b16 lo, hi; cvt.rn.satfinite.{format}x2.f32 lo, {b}, {a}; \
              cvt.rn.satfinite.{format}x2.f32 hi, {d}, {c}; mov.b32 {out}, {{lo, hi}};}}"
    }

    /// f32 of the f16 in the lower or upper half of a word. Exact.
    pub(crate) fn cvt_f32_f16(word: u32, #[comptime] upper: bool) -> f32 {
        pure "{{.reg .b16 lo, hi; mov.b32 {{lo, hi}}, {word}; cvt.f32.f16 {out}, {half};}}",
        half = if upper { "hi" } else { "lo" }
    }

    /// f16 of the two codes in the lower or upper half of a word. Exact; the first is in the low
    /// half.
    pub(crate) fn cvt_f16x2(word: u32, #[comptime] upper: bool, #[comptime] format: Format) -> u32 {
        pure "{{.reg .b16 lo, hi; mov.b32 {{lo, hi}}, {word}; cvt.rn.f16x2.{format}x2 {out}, {half};}}",
        half = if upper { "hi" } else { "lo" }
    }

    /// bf16 of two codes in the lower half of a word, times `scale`. Products in f32, rounded to
    /// nearest even.
    pub(crate) fn cvt_bf16(codes: u32, scale: f32, #[comptime] format: Format) -> u32 {
        pure "{{.reg .b16 a, b; .reg .b32 halves; .reg .f32 x, y; mov.b32 {{a, b}}, {codes}; \
              cvt.rn.f16x2.{format}x2 halves, a; mov.b32 {{a, b}}, halves; cvt.f32.f16 x, a; cvt.f32.f16 y, b; \
              mul.rn.f32 x, x, {scale}; mul.rn.f32 y, y, {scale}; cvt.rn.bf16x2.f32 {out}, y, x;}}"
    }

    /// `2^x` with a relative error of 2⁻²². Subnormal results are 0.
    pub(crate) fn exp2_approx(x: f32) -> f32 { pure "ex2.approx.ftz.f32 {out}, {x};" }

    /// `a / b`, correctly rounded, including subnormals.
    pub(crate) fn div_rn(a: f32, b: f32) -> f32 { pure "div.rn.f32 {out}, {a}, {b};" }

    fn prmt(a: u32, b: u32, #[comptime] selector: u32) -> u32 { pure "prmt.b32 {out}, {a}, {b}, 0x{selector:04x};" }
}

/// Selects four of the eight bytes of `a` and `b`, as PTX's `prmt.b32`. Byte `i` of the result is
/// the one with the index in nibble `i` of `selector`, counted from the low byte of `a`.
#[cube]
pub(crate) fn permute(a: u32, b: u32, #[comptime] selector: u32, #[comptime] isa: Isa) -> u32 {
    if comptime!(isa.has_ptx()) {
        prmt(a, b, selector)
    } else {
        let mut word = 0u32.runtime();
        #[unroll]
        for i in 0..4u32 {
            let from = comptime!((selector >> (4 * i)) & 7);
            let source = if comptime!(from < 4) { a } else { b };
            word |= ((source >> comptime!(8 * (from % 4))) & 0xffu32) << comptime!(8 * i);
        }
        word
    }
}
