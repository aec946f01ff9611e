//! Tensor cores of sm_100 (`tcgen05`). One thread issues products of operands in shared memory.
//! Sums and block scales are in tensor memory.
//!
//! Tensor memory has 128 lanes of 512 columns of 32 bits. An address is `lane · 2^16 + column`. For
//! a product of 128 rows, row `i` is in lane `i`, and column `j` is `j` columns after the given
//! address. A warp can only read the 32 lanes starting at `32 (warp mod 4)`.
//!
//! Scales of 128 rows and four blocks of 32 take four columns. Word `c` of lane `l` has the four
//! scales of row `l + 32 c`, the first block in the low byte. The other groups of 32 lanes have the
//! same values (`32x128b.warpx4`).
//!
//! `ctas` is 1, or 2 for a pair of blocks of a cluster. It is the same in a whole kernel. A pair's
//! product has 256 rows. Each block has 128 rows of A, and 128 rows of the sums in its tensor
//! memory. It has half of the rows of B in its shared memory. One thread of either block issues the
//! product, with addresses that are the same in both. Both tensor memories hold scales, each copied
//! from the block's shared memory: scales of the block's rows of A, and of all rows of B.
//!
//! Source: PTX ISA, *TensorCore 5th generation family instructions*. Products and copies are
//! asynchronous. A copy precedes products that the same thread issues after it, and products to the
//! same sums are ordered. Everything else is ordered by [`tcgen05_commit`] and an mbarrier.

mod descriptor;

use cubecl::ir::{Scope, Variable};
use cubecl::prelude::*;

pub(crate) use descriptor::{fp8_instruction, mxfp8_instruction, operand_descriptor, scales_descriptor};

use super::{asm, elements, input, places};

ptx! {
    /// Allocates `columns` of tensor memory, a power of two from 32 to 512. Writes their address to
    /// the word of shared memory at `slot`. The warp cannot allocate more afterwards.
    ///
    /// All lanes of one warp must call it. In a pair, one warp of each block must call it, after
    /// both blocks are known to run.
    pub(crate) fn tmem_alloc(slot: u32, #[comptime] columns: u32, #[comptime] ctas: u32) {
        "tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [{slot}], {columns};\n\
         tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;\n"
    }

    /// Frees the columns of [`tmem_alloc`]. All lanes of the same warp must call it before the
    /// block ends. In a pair, neither block may still use the columns.
    pub(crate) fn tmem_dealloc(tmem: u32, #[comptime] columns: u32, #[comptime] ctas: u32) {
        "tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 {tmem}, {columns};\n"
    }

    /// Orders this thread's earlier accesses to tensor memory before its next signal.
    pub(crate) fn tcgen05_before_signal() { "tcgen05.fence::before_thread_sync;\n" }

    /// Orders this thread's later accesses to tensor memory after its last wait.
    pub(crate) fn tcgen05_after_wait() { "tcgen05.fence::after_thread_sync;\n" }

    /// Copies 32 rows of 16 bytes to four columns of tensor memory, in lanes 0 to 31 and again in
    /// each further 32 lanes.
    pub(crate) fn tmem_copy_scales(tmem: u32, scales: u64, #[comptime] ctas: u32) {
        "tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [{tmem}], {scales};\n"
    }
}

/// Arrives at an mbarrier of this block when all tensor core operations that this thread has issued
/// are done. In a pair, which must be the whole cluster, also arrives at the same address in the
/// other block.
#[cube]
pub(crate) fn tcgen05_commit(barrier: u32, #[comptime] ctas: u32) {
    intrinsic!(|scope| {
        let mut inputs = vec![input(scope, *barrier.expand)];
        let (qualifier, mask) = if ctas == 1 { ("", "") } else { (".multicast::cluster", ", %1") };
        if ctas == 2 {
            inputs.push(("h", "static_cast<uint16>(3)".into()));
        }
        let template = format!(
            "tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{qualifier}.b64 [%0]{mask};\n"
        );
        asm(scope, &template, &[], &inputs);
    })
}

/// `sums = A [M, 32] · B [N, 32]ᵀ`, added to `sums` unless `add` is zero. M, N and formats are in
/// the instruction descriptor ([`fp8_instruction`]).
#[cube]
pub(crate) fn mma_fp8(sums: u32, a: u64, b: u64, add: u32, #[comptime] instruction: u32, #[comptime] ctas: u32) {
    intrinsic!(|scope| {
        let (operands, kind) = ([*sums.expand, *a.expand, *b.expand], format!("cta_group::{ctas}.kind::f8f6f4"));
        product(scope, &kind, operands, &[], *add.expand, instruction);
    })
}

/// [`mma_fp8`] for operands with scales. The scales of a block's 128 rows of A and of N rows of B
/// are at `scales_a` and `scales_b` in tensor memory ([`mxfp8_instruction`]).
#[cube]
pub(crate) fn mma_mxfp8(
    sums: u32,
    a: u64,
    b: u64,
    scales_a: u32,
    scales_b: u32,
    add: u32,
    #[comptime] instruction: u32,
    #[comptime] ctas: u32,
) {
    intrinsic!(|scope| {
        let (operands, scales) = ([*sums.expand, *a.expand, *b.expand], [*scales_a.expand, *scales_b.expand]);
        let kind = format!("cta_group::{ctas}.kind::mxf8f6f4.block_scale.scale_vec::1X");
        product(scope, &kind, operands, &scales, *add.expand, instruction);
    })
}

/// Adds the statement of a product, with the addresses of both operands' scales if the kind has
/// scales.
fn product(
    scope: &mut Scope,
    kind: &str,
    [sums, a, b]: [Variable; 3],
    scales: &[Variable],
    add: Variable,
    instruction: u32,
) {
    let mut inputs = vec![input(scope, sums), input(scope, a), input(scope, b), ("r", format!("{instruction}u"))];
    inputs.extend(scales.iter().map(|scale| input(scope, *scale)));
    let places: String = (4..inputs.len()).map(|i| format!(", [%{i}]")).collect();
    let template = format!(
        "{{\n.reg .pred add;\nsetp.ne.b32 add, %{}, 0;\n\
         tcgen05.mma.{kind} [%0], %1, %2, %3{places}, add;\n}}\n",
        inputs.len()
    );
    inputs.push(input(scope, add));
    asm(scope, &template, &[], &inputs);
}

/// Loads `count` columns of this thread's lane, a power of two up to 128. Lane `l` of the warp
/// reads lane `l` after `tmem`. All lanes of the warp must call it with the same address.
#[cube]
pub(crate) fn tmem_load(to: &mut Array<f32>, tmem: u32, #[comptime] count: u32) {
    intrinsic!(|scope| {
        let (outputs, tmem) = (elements("=f", &to.expand, 0..count), input(scope, *tmem.expand));
        // One statement, so that nothing reads the registers before the wait.
        let template = format!(
            "tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{}}}, [%{count}];\n\
             tcgen05.wait::ld.sync.aligned;\n",
            places(count)
        );
        asm(scope, &template, &outputs, &[tmem]);
    })
}
