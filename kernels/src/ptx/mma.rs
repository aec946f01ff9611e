//! A warp's FP8 products (`mma.sync`), the loads that feed them (`ldmatrix`) and asynchronous copies to shared memory.
//!
//! Of `D [16, 8] += A [16, 32] · B [8, 32]ᵀ` lane `l` holds, with `g = l / 4` and `t = l mod 4`, four codes to a word,
//!
//! ```text
//! A: rows g, g + 8, g, g + 8, at k = 4 t, 4 t, 4 t + 16, 4 t + 16        B: row g, at k = 4 t, 4 t + 16
//! D: rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1, 2 t, 2 t + 1
//! ```
//!
//! Source: PTX ISA, *Matrix fragments for mma.m16n8k32*. Addresses are bytes in the shared window.

use cubecl::prelude::*;

use super::{asm, name, operand, pure_asm};
use crate::Format;

/// Which instruction multiplies FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MmaKind {
    /// The plain one, of sm_89.
    Plain,
    /// The block-scaled one of sm_120, all scales one: it has twice the rate of the plain one, whose f32 accumulation is
    /// halved on consumer devices.
    UnitScales,
}

/// Four E8M0 scales of `2^(0x7f - 127) = 1`.
const UNIT_SCALES: &str = "0x7f7f7f7fu";

/// Starts a copy of 16 bytes from word `index` of `from` to the address `to`, both multiples of 16 bytes: `bytes` of them
/// are read, 0 or 16, and the rest is zero.
#[cube]
pub(crate) fn copy_chunk(to: u32, from: &Array<u32>, index: u32, bytes: u32) {
    intrinsic!(|scope| {
        let index = operand(scope, *index.expand);
        let from = name(&from.expand);
        let inputs = [
            ("r", operand(scope, *to.expand)),
            ("l", format!("{from} + {index}")),
            ("r", operand(scope, *bytes.expand)),
        ];
        asm(scope, "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n", &[], &inputs);
    })
}

/// Closes a group of copies.
#[cube]
pub(crate) fn commit_copies() {
    intrinsic!(|scope| { asm(scope, "cp.async.commit_group;\n", &[], &[]) })
}

/// Waits for all but the last `pending` groups of this thread's copies.
#[cube]
pub(crate) fn wait_copies(#[comptime] pending: u32) {
    intrinsic!(|scope| { asm(scope, &format!("cp.async.wait_group {pending};\n"), &[], &[]) })
}

/// Loads four matrices of eight rows of 16 bytes into `fragments[place..place + 4]`: lane `l` gives the address of row
/// `l mod 8` of matrix `l / 8`, and gets of each the word `l mod 4` of row `l / 4`.
#[cube]
pub(crate) fn load_matrices(fragments: &mut Array<u32>, #[comptime] place: u32, address: u32) {
    intrinsic!(|scope| {
        let address = operand(scope, *address.expand);
        let fragments = name(&fragments.expand);
        let outputs = [0, 1, 2, 3].map(|i| ("=r", format!("{fragments}[{}]", place + i)));
        let template = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n";
        asm(scope, template, &outputs, &[("r", address)]);
    })
}

/// `sums[d..d + 4] += a[a..a + 4] · b[b..b + 2]ᵀ` for `places = [d, a, b]`; with `fresh`, from zero instead.
#[cube]
pub(crate) fn mma_fp8(
    sums: &mut Array<f32>,
    a: &Array<u32>,
    b: &Array<u32>,
    #[comptime] places: [u32; 3],
    #[comptime] formats: [Format; 2],
    #[comptime] kind: MmaKind,
    #[comptime] fresh: bool,
) {
    intrinsic!(|scope| {
        let (sums, a, b) = (name(&sums.expand), name(&a.expand), name(&b.expand));
        let [d, first_a, first_b] = places;
        let [format_a, format_b] = formats;
        let constraint = if fresh { "=f" } else { "+f" };
        let outputs: Vec<_> = (d..d + 4).map(|i| (constraint, format!("{sums}[{i}]"))).collect();
        let codes_a = (first_a..first_a + 4).map(|i| ("r", format!("{a}[{i}]")));
        let mut inputs: Vec<_> = codes_a.chain((first_b..first_b + 2).map(|i| ("r", format!("{b}[{i}]")))).collect();
        let old = if fresh {
            inputs.push(("f", "0.0f".into()));
            "{%10, %10, %10, %10}"
        } else {
            "{%0, %1, %2, %3}"
        };
        let types = format!("f32.{format_a}.{format_b}.f32");
        let registers = format!("{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {old}");
        let template = match kind {
            MmaKind::Plain => format!("mma.sync.aligned.m16n8k32.row.col.{types} {registers};\n"),
            MmaKind::UnitScales => {
                let scales = 4 + inputs.len();
                inputs.push(("r", UNIT_SCALES.into()));
                format!(
                    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.{types}.ue8m0 \
                     {registers}, %{scales}, {{0, 0}}, %{scales}, {{0, 0}};\n"
                )
            }
        };
        pure_asm(scope, &template, &outputs, &inputs);
    })
}
