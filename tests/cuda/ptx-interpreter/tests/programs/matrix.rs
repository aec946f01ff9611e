//! Matrix instructions of warps and warpgroups: loads, operand layouts in shared memory, and the
//! time of results.

use super::{module, run, small, words, zeros};

/// `D [64][16] = A [64][32] · B [16][32]ᵀ + 1`, with operands laid out by `place`.
fn wgmma(descriptor: u64, place: impl Fn(usize, usize) -> usize, wait: &str, seed: u64) -> Result<(), String> {
    let registers = (10..18).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
    let ones = (10..18).map(|i| format!("mov.f32 %f{i}, 0f3F800000;")).collect::<String>();
    let stores = (10..18).map(|i| format!("st.global.f32 [%d6+{}], %f{i};", (i - 10) * 4)).collect::<String>();
    // Each thread copies 32 bytes of the shared memory image: 2048 bytes of A and 2048 of B, of
    // which 512 are used.
    let body = format!(
        ".shared .align 1024 .b8 s[4096]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1];
        shl.b32 %r2, %r1, 5; cvt.u64.u32 %d3, %r2; add.s64 %d4, %d1, %d3; mov.u32 %r3, s; add.u32 %r4, %r3, %r2;
        ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d4]; st.shared.v4.u32 [%r4], {{%r10, %r11, %r12, %r13}};
        ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d4+16]; st.shared.v4.u32 [%r4+16], {{%r10, %r11, %r12, %r13}};
        fence.proxy.async.shared::cta; bar.sync 0; {ones} cvt.u64.u32 %d7, %r3; shr.u64 %d7, %d7, 4; or.b64 %d8, %d7, {descriptor};
        add.s64 %d9, %d8, 128; wgmma.fence.sync.aligned; {{ .reg .pred p; setp.ne.b32 p, 1, 0;
        wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {{{registers}}}, %d8, %d9, p, 1, 1; }} wgmma.commit_group.sync.aligned; {wait}
        add.s64 %d6, %d2, %d3; {stores}"
    );
    let mut image = vec![0xff; 4096];
    for (rows, base, salt) in [(64, 0, 0), (16, 2048, 1000)] {
        for row in 0..rows {
            for k in 0..32 {
                image[base + place(row, k)] = small(salt + row * 32 + k).0;
            }
        }
    }
    let mut buffers = [image, zeros(4096)];
    run(&module(0, 2, "", &body), 1, 128, vec![], &mut buffers, seed)?;
    let got: Vec<f32> = words(&buffers[1]).into_iter().map(f32::from_bits).collect();
    for (i, got) in got.iter().enumerate() {
        let (thread, register) = (i / 8, i % 8);
        let row = thread / 32 * 16 + thread % 32 / 4 + register / 2 % 2 * 8;
        let column = register / 4 * 8 + thread % 4 * 2 + register % 2;
        let want: f32 = 1.0 + (0..32).map(|k| small(row * 32 + k).1 * small(1000 + column * 32 + k).1).sum::<f32>();
        if *got != want {
            return Err(format!("[{row}, {column}] is {got}, not {want}"));
        }
    }
    Ok(())
}

#[test]
fn wgmma_reads_its_layouts_and_shows_results_when_waited_for() {
    // Core matrices of 8 rows of 16 bytes: 128 bytes apart along K, 256 along rows.
    let plain = (128 >> 4) << 16 | (256 >> 4) << 32;
    let plain_place = |row: usize, k: usize| row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16;
    // Rows of 32 bytes; rows 4 to 7 of each 8 have their two chunks exchanged.
    let swizzled = 3 << 62 | 1 << 16 | (256 >> 4) << 32;
    let swizzled_place = |row: usize, k: usize| row * 32 + (k ^ if row % 8 >= 4 { 16 } else { 0 });
    for seed in 0..3 {
        wgmma(plain, plain_place, "wgmma.wait_group.sync.aligned 0;", seed).unwrap();
        wgmma(swizzled, swizzled_place, "wgmma.wait_group.sync.aligned 0;", seed).unwrap();
    }
    assert!(wgmma(plain, swizzled_place, "wgmma.wait_group.sync.aligned 0;", 0).is_err());
    assert!(wgmma(plain, plain_place, "wgmma.wait_group.sync.aligned 1;", 0).unwrap_err().contains("in flight"));
}

#[test]
fn mma_takes_what_ldmatrix_loads() {
    // A [16][32] and B [8][32] bytes, row-major; as 16-bit matrices of 8 by 8 they are four and
    // two.
    let body = ".shared .align 16 .b8 s[1024]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1];
        mul.wide.u32 %d3, %r1, 32; add.s64 %d4, %d1, %d3; mov.u32 %r2, s; shl.b32 %r3, %r1, 5; add.u32 %r4, %r2, %r3;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d4]; st.shared.v4.u32 [%r4], {%r10, %r11, %r12, %r13};
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d4+16]; st.shared.v4.u32 [%r4+16], {%r10, %r11, %r12, %r13}; bar.warp.sync -1;
        and.b32 %r5, %r1, 15; shl.b32 %r5, %r5, 5; and.b32 %r6, %r1, 16; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r2;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r5];
        and.b32 %r5, %r1, 7; shl.b32 %r5, %r5, 5; and.b32 %r6, %r1, 8; shl.b32 %r6, %r6, 1; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r2;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r5+512]; mov.f32 %f1, 0f00000000;
        mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f2, %f3, %f4, %f5}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f1, %f1, %f1, %f1};
        shr.u32 %r7, %r1, 2; and.b32 %r8, %r1, 3; mul.lo.u32 %r9, %r7, 32; mad.lo.u32 %r9, %r8, 8, %r9; cvt.u64.u32 %d5, %r9; add.s64 %d6, %d2, %d5;
        st.global.v2.f32 [%d6], {%f2, %f3}; st.global.v2.f32 [%d6+256], {%f4, %f5};";
    let mut image = vec![0; 1024];
    (0..768).for_each(|i| image[i] = small(i).0);
    let mut buffers = [image, zeros(512)];
    run(&module(0, 2, "", body), 1, 32, vec![], &mut buffers, 0).unwrap();
    for (i, got) in words(&buffers[1])[..128].iter().enumerate() {
        let (row, column) = (i / 8, i % 8);
        let want: f32 = (0..32).map(|k| small(row * 32 + k).1 * small(512 + column * 32 + k).1).sum();
        assert_eq!(f32::from_bits(*got), want, "[{row}, {column}]");
    }
}

#[test]
fn accumulators_in_flight_are_not_to_be_read() {
    let plain = (128 >> 4) << 16 | (256 >> 4) << 32;
    let place = |row: usize, k: usize| row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16;
    let add = "wgmma.wait_group.sync.aligned 1; add.f32 %f20, %f10, %f11;";
    // A copy receives the pending value.
    let copy = "mov.f32 %f30, %f10; mov.f32 %f31, %f30; wgmma.wait_group.sync.aligned 0; mov.f32 %f10, %f31;";
    wgmma(plain, place, copy, 0).unwrap();
    let error = wgmma(plain, place, add, 0).unwrap_err();
    assert!(error.contains("in flight"), "{error}");
}
