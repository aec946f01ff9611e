//! Products of a warp (`mma.sync`), loads of their fragments (`ldmatrix`), and asynchronous copies to
//! shared memory.
//!
//! In `D [16, 8] += A [16, 32] · B [8, 32]ᵀ` lane `l` holds, with `g = l / 4` and `t = l mod 4`,
//! four codes per word,
//!
//! ```text
//! A: rows g, g + 8, g, g + 8, at k = 4 t, 4 t, 4 t + 16, 4 t + 16        B: row g, at k = 4 t, 4 t + 16
//! D: rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1, 2 t, 2 t + 1
//! ```
//!
//! f16 and bf16 have `A [16, 16]` and `B [8, 16]`, two elements per word at the same bytes.
//! Source: PTX ISA, *Matrix fragments for mma.m16n8k32* and *mma.m16n8k16*.
//! Addresses are bytes in the shared window.

use cubecl::prelude::*;

use super::{asm, element_address, elements, input, name, pure_asm};
use crate::Format;

/// Instruction that multiplies FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MmaKind {
    /// Plain instruction, for sm_89.
    Plain,
    /// Block-scaled instruction of sm_120, with an E8M0 scale per 32 codes. Operands without E8M0
    /// scales use ones. It has twice the rate of the plain one, whose f32 accumulation is halved on
    /// consumer devices.
    BlockScaled,
}

/// Source of the E8M0 scales of one operand's rows in a block-scaled product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScaleSource {
    /// All scales are one.
    Ones,
    /// Byte `byte` of word `word`. With `g = l / 4` and `t = l mod 4`, lane `l` supplies a scale:
    /// of row `g + 8 (t mod 2)` of A if `t / 2 = lanes`, or of row `g` of B if `t = lanes`.
    Word {
        /// Index in the lane's array.
        word: u32,
        /// 0 to 3; 0 is the low byte.
        byte: u32,
        /// Lanes that supply scales: 0 or 1 for A, 0 to 3 for B.
        lanes: u32,
    },
}

/// One of a warp's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    /// First index of its sums, of its codes of A, and of its codes of B.
    pub(crate) places: [u32; 3],
    pub(crate) formats: [Format; 2],
    /// Scales for the block-scaled instruction.
    pub(crate) scales: Option<[ScaleSource; 2]>,
    /// Whether the sums start from zero.
    pub(crate) fresh: bool,
}

/// Four E8M0 scales of `2^(0x7f - 127) = 1`.
const UNIT_SCALES: &str = "0x7f7f7f7fu";

/// Starts a copy of 16 bytes from word `index` of `from` to the address `to`, both aligned to 16
/// bytes. `bytes` of them are read, 0 or 16, and the rest is zero.
#[cube]
pub(crate) fn copy_chunk(to: u32, from: &Array<u32>, index: u32, bytes: u32) {
    intrinsic!(|scope| {
        let from = element_address(scope, &from.expand, *index.expand);
        let inputs = [input(scope, *to.expand), from, input(scope, *bytes.expand)];
        asm(scope, "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n", &[], &inputs);
    })
}

ptx! {
    /// Commits a group of copies.
    pub(crate) fn commit_copies() { "cp.async.commit_group;\n" }

    /// Waits for all but the last `pending` groups of this thread's copies.
    pub(crate) fn wait_copies(#[comptime] pending: u32) { "cp.async.wait_group {pending};\n" }
}

/// Loads four matrices of eight rows of 16 bytes into `fragments[place..place + 4]`. Lane `l`
/// supplies the address of row `l mod 8` of matrix `l / 8`. It receives word `l mod 4` of row
/// `l / 4` of each matrix.
#[cube]
pub(crate) fn load_matrices(fragments: &mut Array<u32>, #[comptime] place: u32, address: u32) {
    load_fragments(fragments, place, address, false);
}

/// Like [`load_matrices`], for transposed matrices of 16-bit elements: the lane receives elements
/// `l / 4` of rows `2 (l mod 4)` and the next.
#[cube]
pub(crate) fn load_matrices_transposed(fragments: &mut Array<u32>, #[comptime] place: u32, address: u32) {
    load_fragments(fragments, place, address, true);
}

#[cube]
fn load_fragments(fragments: &mut Array<u32>, #[comptime] place: u32, address: u32, #[comptime] transposed: bool) {
    intrinsic!(|scope| {
        let (outputs, address) = (elements("=r", &fragments.expand, place..place + 4), input(scope, *address.expand));
        let trans = if transposed { ".trans" } else { "" };
        let template = format!("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];\n");
        asm(scope, &template, &outputs, &[address]);
    })
}

/// `sums[d..d + 4] += a[a..a + 4] · b[b..b + 2]ᵀ` for `places = [d, a, b]`, of bf16 or f16.
#[cube]
pub(crate) fn mma_half(
    sums: &mut Array<f32>,
    a: &Array<u32>,
    b: &Array<u32>,
    #[comptime] places: [u32; 3],
    #[comptime] bf16: bool,
) {
    intrinsic!(|scope| {
        let [d, first_a, first_b] = places;
        let outputs = elements("+f", &sums.expand, d..d + 4);
        let mut inputs = elements("r", &a.expand, first_a..first_a + 4);
        inputs.extend(elements("r", &b.expand, first_b..first_b + 2));
        let of = if bf16 { "bf16" } else { "f16" };
        let template = format!(
            "mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, \
             {{%0, %1, %2, %3}};\n"
        );
        pure_asm(scope, &template, &outputs, &inputs);
    })
}

/// `sums[d..d + 4] += a[a..a + 4] · b[b..b + 2]ᵀ` for `places = [d, a, b]`, times the scales.
///
/// Source for the layout of scales: PTX ISA, *Block scaling for mma.sync*, with `scale_vec::1X`.
#[cube]
pub(crate) fn mma_fp8(
    sums: &mut Array<f32>,
    a: &Array<u32>,
    b: &Array<u32>,
    scales_a: &Array<u32>,
    scales_b: &Array<u32>,
    #[comptime] product: Product,
) {
    intrinsic!(|scope| {
        let Product { places: [d, first_a, first_b], formats: [format_a, format_b], scales, fresh } = product;
        let outputs = elements(if fresh { "=f" } else { "+f" }, &sums.expand, d..d + 4);
        let mut inputs = elements("r", &a.expand, first_a..first_a + 4);
        inputs.extend(elements("r", &b.expand, first_b..first_b + 2));
        let old = if fresh {
            inputs.push(("f", "0.0f".into()));
            "{%10, %10, %10, %10}"
        } else {
            "{%0, %1, %2, %3}"
        };
        let types = format!("f32.{format_a}.{format_b}.f32");
        let mut operands = format!("{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {old}");
        let (kind, scale_type) = match scales {
            Some(_) => (".kind::mxf8f6f4.block_scale.scale_vec::1X", ".ue8m0"),
            None => ("", ""),
        };
        let words = [name(&scales_a.expand), name(&scales_b.expand)];
        for (source, words) in scales.into_iter().flatten().zip(words) {
            let (value, selector) = match source {
                ScaleSource::Ones => (UNIT_SCALES.into(), "{0, 0}".into()),
                ScaleSource::Word { word, byte, lanes } => (format!("{words}[{word}]"), format!("{{{byte}, {lanes}}}")),
            };
            operands += &format!(", %{}, {selector}", 4 + inputs.len());
            inputs.push(("r", value));
        }
        let template = format!("mma.sync.aligned.m16n8k32.row.col{kind}.{types}{scale_type} {operands};\n");
        pure_asm(scope, &template, &outputs, &inputs);
    })
}
