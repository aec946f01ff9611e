//! Tensor memory: a block-scaled product with hand-written descriptors, and errors for omitted
//! steps.

use super::{module, run, small, words, zeros};

/// Statements that a test can omit or replace.
#[derive(Clone, Copy)]
struct Program {
    /// Descriptors of A and B without their address.
    operands: u64,
    instruction: u32,
    /// Code of the same thread after the product.
    then: &'static str,
    after_wait: &'static str,
    wait_load: &'static str,
    dealloc: &'static str,
}

/// Bytes of the scale words of A and B that the product uses.
const SCALE_IDS: [u32; 2] = [2, 1];

/// E4M3 by E4M3, N = 16, E8M0 scales, M = 128.
const INSTRUCTION: u32 = SCALE_IDS[1] << 4 | (16 >> 3) << 17 | 1 << 23 | (128 >> 7) << 27 | SCALE_IDS[0] << 29;

/// Core matrices of 8 rows of 16 bytes: 128 bytes apart along K, 256 along rows; not swizzled,
/// version 1.
const PLAIN: u64 = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46;

/// Rows of 32 bytes, swizzled by 32.
const SWIZZLED: u64 = 1 << 16 | (256 >> 4) << 32 | 1 << 46 | 6 << 61;

/// 32 rows of 16 bytes.
const SCALES: u64 = (128 >> 4) << 32 | 1 << 46;

const PROGRAM: Program = Program {
    operands: PLAIN,
    instruction: INSTRUCTION,
    then: "",
    after_wait: "tcgen05.fence::after_thread_sync;",
    wait_load: "tcgen05.wait::ld.sync.aligned;",
    dealloc: "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;",
};

fn plain_place(row: usize, k: usize) -> usize {
    row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16
}

fn swizzled_place(row: usize, k: usize) -> usize {
    row * 32 + (k ^ if row % 8 >= 4 { 16 } else { 0 })
}

/// Exponent of a row's scale.
fn exponent(row: usize, salt: usize) -> usize {
    (row * 5 + salt) % 7
}

/// `D [128][16] = (A · 2^e) [128][32] · (B · 2^f) [16][32]ᵀ`, with operands laid out by `place`.
fn product(program: Program, place: impl Fn(usize, usize) -> usize, seed: u64) -> Result<(), String> {
    let Program { operands, instruction, then, after_wait, wait_load, dealloc } = program;
    let copies = (0..11).map(|i| i * 512);
    let copies: String =
        copies.map(|at| format!("ld.global.u32 %r10, [%d4+{at}]; st.shared.u32 [%r4+{at}], %r10;")).collect();
    let registers = (10..26).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
    let stores: String = (0..16).map(|i| format!("st.global.f32 [%d6+{}], %f{};", 4 * i, 10 + i)).collect();
    // A, then B at byte 4096, the scales of A at 4608 and of B at 5120; the mbarrier, and the slot
    // of the address.
    let body = format!(
        ".shared .align 1024 .b8 s[6160]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1];
        shl.b32 %r2, %r1, 2; cvt.u64.u32 %d3, %r2; add.s64 %d4, %d1, %d3; mov.u32 %r3, s; add.u32 %r4, %r3, %r2;
        {copies} fence.proxy.async.shared::cta; setp.ne.u32 %p1, %r1, 0; setp.ge.u32 %p2, %r1, 32;
        @!%p1 mbarrier.init.shared::cta.b64 [%r3+6144], 1; @%p2 bra TAKEN;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+6152], 64;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        TAKEN: tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.u32 %r5, [%r3+6152]; add.u32 %r6, %r5, 16; add.u32 %r7, %r5, 20; @%p1 bra GIVEN;
        cvt.u64.u32 %d7, %r3; shr.u64 %d7, %d7, 4; or.b64 %d8, %d7, {operands}; add.s64 %d9, %d8, 256;
        or.b64 %d10, %d7, {SCALES}; add.s64 %d10, %d10, 288; add.s64 %d11, %d10, 32;
        tcgen05.cp.cta_group::1.32x128b.warpx4 [%r6], %d10; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r7], %d11;
        {{ .reg .pred p; setp.ne.b32 p, 0, 0;
        tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%r5], %d8, %d9, {instruction}, [%r6], [%r7], p; }}
        {then} add.u32 %r8, %r3, 6144; tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];
        GIVEN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3+6144], 0; @!%p3 bra GIVEN; {after_wait}
        shr.u32 %r9, %r1, 5; shl.b32 %r9, %r9, 21; add.u32 %r9, %r9, %r5;
        tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r9]; {wait_load}
        shl.b32 %r11, %r1, 6; cvt.u64.u32 %d5, %r11; add.s64 %d6, %d2, %d5; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        @%p2 bra END; {dealloc}
        END:"
    );
    let mut image = vec![0xff; 5632];
    for (i, (rows, base, scales)) in [(128, 0, 4608), (16, 4096, 5120)].into_iter().enumerate() {
        for row in 0..rows {
            for k in 0..32 {
                image[base + place(row, k)] = small(i * 1000 + row * 32 + k).0;
            }
            image[scales + row % 32 * 16 + row / 32 * 4 + SCALE_IDS[i] as usize] = 127 + exponent(row, i) as u8;
        }
    }
    let mut buffers = [image, zeros(128 * 64)];
    run(&module(0, 2, "", &body), 1, 128, vec![], &mut buffers, seed)?;
    let got: Vec<f32> = words(&buffers[1]).into_iter().map(f32::from_bits).collect();
    for (i, got) in got.iter().enumerate() {
        let (row, column) = (i / 16, i % 16);
        let sum: f32 = (0..32).map(|k| small(row * 32 + k).1 * small(1000 + column * 32 + k).1).sum();
        let want = sum * (1 << (exponent(row, 0) + exponent(column, 1))) as f32;
        if *got != want {
            return Err(format!("[{row}, {column}] is {got}, not {want}"));
        }
    }
    Ok(())
}

#[test]
fn block_scaled_products_read_their_descriptors() {
    for seed in 0..3 {
        product(PROGRAM, plain_place, seed).unwrap();
        product(Program { operands: SWIZZLED, ..PROGRAM }, swizzled_place, seed).unwrap();
    }
    product(PROGRAM, swizzled_place, 0).unwrap_err();
    let without_version = Program { operands: PLAIN & !(1 << 46), ..PROGRAM };
    assert!(product(without_version, plain_place, 0).unwrap_err().contains("bits from 46 on"));
    let other_scales = Program { instruction: INSTRUCTION ^ 3 << 29, ..PROGRAM };
    product(other_scales, plain_place, 0).unwrap_err();
    let ue4m3 = Program { instruction: INSTRUCTION & !(1 << 23), ..PROGRAM };
    assert!(product(ue4m3, plain_place, 0).unwrap_err().contains("bits from 23 on"));
}

#[test]
fn tensor_memory_is_ordered_by_what_the_program_says() {
    let fails = |program| product(program, plain_place, 0).unwrap_err();
    assert!(fails(Program { after_wait: "", ..PROGRAM }).contains("fence::after_thread_sync"));
    assert!(fails(Program { wait_load: "", ..PROGRAM }).contains("not"));
    assert!(fails(Program { dealloc: "", ..PROGRAM }).contains("given its tensor memory back"));
    let again = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r6], %d10;";
    assert!(fails(Program { then: again, ..PROGRAM }).contains("overwrites scales"));
    let outside = "add.u32 %r12, %r5, 64; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r12], %d10;";
    assert!(fails(Program { then: outside, ..PROGRAM }).contains("are taken"));
}
