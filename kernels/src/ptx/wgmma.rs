//! Matrix products of a warpgroup (`wgmma`): FP8, bf16 or f16 operands in shared memory, or A in
//! registers, and f32 accumulators in registers.
//!
//! Position of a thread's accumulator `i` in a product 64 by N, with `w` the warp in the group and
//! `l` the lane:
//!
//! ```text
//! row = 16 w + l / 4 + 8 (i / 2 mod 2)        col = 8 (i / 4) + 2 (l mod 4) + i mod 2
//! ```
//!
//! Source: PTX ISA, *Asynchronous warpgroup level matrix instructions*.

use cubecl::ir::Variable;
use cubecl::prelude::*;

use super::{Operand, asm, elements, input, places};
use crate::Format;

/// Descriptor of an operand in shared memory, with 128-byte swizzle. `address` is a multiple of
/// 1024; for contiguous contractions plus the bytes of the contraction to skip.
///
/// | [`Major`] | 128 bytes | groups of eight, 1024 bytes each, follow each other |
/// | --- | --- | --- |
/// | `K` | a row, along the contraction | rows |
/// | `Mn` | 64 rows, for one step of the contraction | steps; the next 64 rows are `leading` bytes further |
///
/// | bits | field | |
/// | --- | --- | --- |
/// | 0–13 | start address / 16 | |
/// | 16–29 | leading byte offset / 16 | unused for `K`: `leading` is 16 |
/// | 32–45 | stride byte offset / 16 | 64: from one group of eight to the next |
/// | 62–63 | swizzle | 1: 128 bytes |
///
/// Source: PTX ISA, *Canonical layouts*; CUTLASS, `mma_traits_sm90_gmma.hpp`.
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] leading: u32) -> u64 {
    let layout = comptime!((u64::from(leading / 16) << 16) | (64u64 << 32) | (1u64 << 62));
    u64::cast_from((address & 0x3ffffu32) >> 4u32) | layout
}

/// Accumulators of a product `n` wide, as operands. The compiler moves no access to them across a
/// statement with these operands.
fn accumulators(acc: &Variable, n: u32) -> Vec<Operand> {
    elements("+f", acc, 0..n / 2)
}

/// Orders earlier writes to the accumulators of products `n` wide before the next products.
#[cube]
pub(crate) fn wgmma_fence(acc: &mut Array<f32>, #[comptime] n: u32) {
    intrinsic!(|scope| {
        asm(scope, "wgmma.fence.sync.aligned;\n", &accumulators(&acc.expand, n), &[]);
    })
}

/// Waits until all but the last `pending` groups of products, `n` wide, are done.
#[cube]
pub(crate) fn wgmma_wait(acc: &mut Array<f32>, #[comptime] n: u32, #[comptime] pending: u32) {
    intrinsic!(|scope| {
        let template = format!("wgmma.wait_group.sync.aligned {pending};\n");
        asm(scope, &template, &accumulators(&acc.expand, n), &[]);
    })
}

/// Accumulators of two products, and words of A, as operands.
fn registers(acc: [&Variable; 2], words: &Variable, [n, second_n, count]: [u32; 3]) -> Vec<Operand> {
    let mut all = accumulators(acc[0], n);
    all.extend(accumulators(acc[1], second_n));
    all.extend(elements("+r", words, 0..count));
    all
}

/// [`wgmma_fence`] for accumulators of two products, and for words of A. `counts` are the widths of
/// the products, each possibly 0, and the number of words.
#[cube]
pub(crate) fn wgmma_fence_all(
    acc: &mut Array<f32>,
    second: &mut Array<f32>,
    words: &mut Array<u32>,
    #[comptime] counts: [u32; 3],
) {
    intrinsic!(|scope| {
        let registers = registers([&acc.expand, &second.expand], &words.expand, counts);
        asm(scope, "wgmma.fence.sync.aligned;\n", &registers, &[]);
    })
}

/// Waits until all but the last `pending` groups of products are done, with the arguments of
/// [`wgmma_fence_all`].
#[cube]
pub(crate) fn wgmma_wait_all(
    acc: &mut Array<f32>,
    second: &mut Array<f32>,
    words: &mut Array<u32>,
    #[comptime] counts: [u32; 3],
    #[comptime] pending: u32,
) {
    intrinsic!(|scope| {
        let registers = registers([&acc.expand, &second.expand], &words.expand, counts);
        asm(scope, &format!("wgmma.wait_group.sync.aligned {pending};\n"), &registers, &[]);
    })
}

/// Axis along which the elements of an operand are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Major {
    /// The contraction.
    K,
    /// The rows of A, or of B. Only for 16-bit elements.
    Mn,
}

/// Element type of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    /// Codes of A and of B, 32 of the contraction per product. The contraction is contiguous.
    Fp8([Format; 2]),
    /// bf16 or f16, 16 of the contraction per product.
    Half { bf16: bool, majors: [Major; 2] },
}

/// `acc [64, n] = A [64, _] · B [n, _]ᵀ` for the operands' descriptors, added to `acc` unless `add`
/// is zero.
#[cube]
pub(crate) fn wgmma(acc: &mut Array<f32>, a: u64, b: u64, add: u32, #[comptime] n: u32, #[comptime] element: Element) {
    intrinsic!(|scope| {
        let (count, inputs) = (n / 2, [*a.expand, *b.expand, *add.expand].map(|value| input(scope, value)));
        // No sign change.
        let (types, rest) = match element {
            Element::Fp8([a, b]) => (format!("k32.f32.{a}.{b}"), "1, 1".to_string()),
            Element::Half { bf16, majors } => {
                let (ty, [a, b]) =
                    (if bf16 { "bf16" } else { "f16" }, majors.map(|major| u32::from(major == Major::Mn)));
                (format!("k16.f32.{ty}.{ty}"), format!("1, 1, {a}, {b}"))
            }
        };
        let template = format!(
            "{{\n.reg .pred add;\nsetp.ne.b32 add, %{}, 0;\n\
             wgmma.mma_async.sync.aligned.m64n{n}{types} {{{}}}, %{count}, %{}, add, {rest};\n}}\n",
            count + 2,
            places(count),
            count + 1,
        );
        asm(scope, &template, &accumulators(&acc.expand, n), &inputs);
    })
}

/// `acc [64, n] += A [64, 16] · B [n, 16]ᵀ` for f16 or bf16. Four words from `first` on have the
/// elements of A that are rounded accumulators of a product, in their order. Rows of B are
/// contiguous.
#[cube]
pub(crate) fn wgmma_from_registers(
    acc: &mut Array<f32>,
    words: &Array<u32>,
    #[comptime] first: u32,
    b: u64,
    #[comptime] n: u32,
    #[comptime] bf16: bool,
) {
    intrinsic!(|scope| {
        let (count, ty) = (n / 2, if bf16 { "bf16" } else { "f16" });
        let mut inputs = elements("r", &words.expand, first..first + 4);
        inputs.extend([input(scope, *b.expand), ("r", "1".to_string())]);
        let a = (count..count + 4).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
        let template = format!(
            "{{\n.reg .pred add;\nsetp.ne.b32 add, %{}, 0;\n\
             wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} {{{}}}, {{{a}}}, %{}, add, 1, 1, 1;\n}}\n",
            count + 5,
            places(count),
            count + 4,
        );
        asm(scope, &template, &accumulators(&acc.expand, n), &inputs);
    })
}

ptx! {
    /// Commits a group of products.
    pub(crate) fn wgmma_commit() { "wgmma.commit_group.sync.aligned;\n" }

    /// Packs two f32 as 16-bit floats in a word, each rounded to nearest even, `low` in the low
    /// half.
    pub(crate) fn pack_half(low: f32, high: f32, #[comptime] bf16: bool) -> u32 {
        pure "cvt.rn.{to}.f32 {out}, {high}, {low};\n", to = if bf16 { "bf16x2" } else { "f16x2" }
    }
}
