//! Asynchronous copies: late until a wait, clipped and swizzled by a tensor map, to one block or to
//! a cluster.

use ptx_interpreter::{TensorFloat, TensorMap};

use super::{THREAD, bytes_of, module, run, words, zeros};

#[test]
fn cp_async_is_late() {
    let code = |wait: &str| {
        format!(
            "{THREAD} .shared .align 16 .b8 s[512]; shl.b32 %r4, %r1, 4; mov.u32 %r5, s; add.u32 %r5, %r5, %r4; cvt.u64.u32 %d6, %r4;
            add.s64 %d7, %d1, %d6; cp.async.cg.shared.global [%r5], [%d7], 16; cp.async.commit_group; {wait}
            ld.shared.u32 %r3, [%r5]; st.global.u32 [%d4], %r3;"
        )
    };
    let source: Vec<u32> = (0..1024).collect();
    let go = |wait: &str| {
        let mut buffers = [bytes_of(&source, u32::to_le_bytes), zeros(4096)];
        run(&module(0, 2, "", &code(wait)), 1, 32, vec![], &mut buffers, 0).unwrap();
        words(&buffers[1])[..32].to_vec()
    };
    assert_eq!(go("cp.async.wait_group 0;"), (0..32).map(|i| 4 * i).collect::<Vec<_>>());
    assert_eq!(go("cp.async.wait_group 1;"), [u32::MAX; 32], "not waited for: poison");
}

/// 16 rows of 32 f32, whose first 13 rows of 24 form the tensor; boxes of 8 rows of 128 bytes,
/// swizzled.
pub(super) fn map(buffer: usize) -> TensorMap {
    TensorMap {
        buffer,
        dims: vec![24, 13],
        strides: vec![128],
        tile: vec![32, 8],
        element: 4,
        float: Some(TensorFloat::F32),
        swizzle: 128,
        nan_fill: false,
    }
}

const BARRIER: &str = ".shared .align 1024 .b8 s[1024]; .shared .align 8 .b8 bar[8];";

#[test]
fn tensor_loads_clip_swizzle_and_arrive_late() {
    let code = |wait: &str| {
        format!(
            "{BARRIER} mov.u32 %r1, %tid.x; ld.param.u64 %d1, [f_param_2]; mov.b64 %d2, f_param_0; setp.ne.u32 %p1, %r1, 0; @%p1 bra GO;
            mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
            mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %d9, [bar], 1024; mov.u32 %r2, s; mov.u32 %r4, bar;
            cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d2, {{4, 7}}], [%r4];
            GO: bar.sync 0; {wait} shl.b32 %r5, %r1, 5; mov.u32 %r6, s; add.u32 %r6, %r6, %r5; mul.wide.u32 %d5, %r1, 32; add.s64 %d6, %d1, %d5;
            ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6]; st.global.v4.u32 [%d6], {{%r10, %r11, %r12, %r13}};
            ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6+16]; st.global.v4.u32 [%d6+16], {{%r10, %r11, %r12, %r13}};"
        )
    };
    let source: Vec<u32> = (0..1024).map(|i| i + 1).collect();
    let go = |wait: &str| {
        let mut buffers = [bytes_of(&source, u32::to_le_bytes), zeros(1024)];
        run(&module(1, 2, "", &code(wait)), 1, 32, vec![map(0)], &mut buffers, 0).map(|_| words(&buffers[1]))
    };
    let got = go("W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0; @!%p2 bra W;").unwrap();
    for row in 0..8 {
        for column in 0..32 {
            let (r, c) = (7 + row, 4 + column);
            let want = if r < 13 && c < 24 { source[r * 32 + c] } else { 0 };
            let chunk = (column / 4) ^ row;
            assert_eq!(got[row * 32 + chunk * 4 + column % 4], want, "[{row}, {column}]");
        }
    }
    let missing = go("").unwrap_err();
    assert!(missing.contains("bulk load"), "{missing}");
    let wrong = go("W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 1; @!%p2 bra W;").unwrap_err();
    assert!(wrong.contains("bulk load"), "{wrong}");
    let never = "mbarrier.arrive.shared::cta.b64 %d9, [bar+0]; ".to_string();
    assert!(go(&never).is_err());
}

#[test]
fn tensor_stores_need_fences_and_waits() {
    let code = |fence: &str, wait: &str, kind: &str| {
        format!(
            "{BARRIER} mov.u32 %r1, %tid.x; mov.b64 %d2, f_param_0; shl.b32 %r5, %r1, 5; mov.u32 %r2, s; add.u32 %r6, %r2, %r5;
            mov.f32 %f1, 0f3F800000; st.shared.v4.f32 [%r6], {{%f1, %f1, %f1, %f1}}; st.shared.v4.f32 [%r6+16], {{%f1, %f1, %f1, %f1}};
            {fence} bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
            {kind}.2d.global.shared::cta{} [%d2, {{0, 8}}], [%r2]; cp.async.bulk.commit_group; {wait} END:",
            if kind.contains("reduce") { ".add.tile.bulk_group" } else { ".tile.bulk_group" }
        )
    };
    let go = |fence: &str, wait: &str, kind: &str, seed: u64| {
        let mut buffers = [bytes_of(&[2.0f32; 1024], f32::to_le_bytes), zeros(4)];
        let result = run(&module(1, 2, "", &code(fence, wait, kind)), 1, 32, vec![map(0)], &mut buffers, seed);
        result.map(|_| words(&buffers[0]).into_iter().map(f32::from_bits).collect::<Vec<_>>())
    };
    let (fence, wait, store) =
        ("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.tensor");
    for (kind, value) in [(store, 1.0), ("cp.reduce.async.bulk.tensor", 3.0)] {
        for seed in 0..3 {
            let got = go(fence, wait, kind, seed).unwrap();
            for (i, got) in got.iter().enumerate() {
                let (r, c) = (i / 32, i % 32);
                assert_eq!(*got, if (8..13).contains(&r) && c < 24 { value } else { 2.0 }, "[{r}, {c}]");
            }
        }
    }
    assert!(go("", wait, store, 0).unwrap_err().contains("fence.proxy.async"));
    assert!(go(fence, "", store, 0).unwrap_err().contains("exits before its bulk store"));
}

#[test]
fn clusters_multicast_and_arrive_remotely() {
    // Block 0 loads one box into both blocks; block 1 notifies block 0 after reading it.
    let code = |arrivals: u32| {
        format!(
            "{BARRIER} .shared .align 8 .b8 done[8]; mov.u32 %r1, %tid.x; mov.u32 %r20, %cluster_ctarank; ld.param.u64 %d1, [f_param_2];
            mov.b64 %d2, f_param_0; setp.ne.u32 %p1, %r1, 0; @%p1 bra GO; mbarrier.init.shared.b64 [bar], 1; mbarrier.init.shared.b64 [done], {arrivals};
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024; GO: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
            setp.eq.u32 %p2, %r1, 0; setp.eq.and.u32 %p3, %r20, 0, %p2; @!%p3 bra WAIT; mov.u32 %r2, s; mov.u32 %r4, bar; mov.u16 %h1, 3;
            cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d2, {{0, 0}}], [%r4], %h1;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [bar], 0; @!%p4 bra WAIT;
            shl.b32 %r5, %r1, 5; mov.u32 %r6, s; add.u32 %r6, %r6, %r5; ld.shared.u32 %r7, [%r6]; shl.b32 %r8, %r20, 5; add.u32 %r8, %r8, %r1;
            mul.wide.u32 %d5, %r8, 4; add.s64 %d6, %d1, %d5; st.global.u32 [%d6], %r7;
            setp.eq.u32 %p5, %r20, 0; @%p5 bra LAST; mov.u32 %r9, done; mapa.shared::cluster.u32 %r10, %r9, 0;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10]; bra.uni END;
            LAST: mbarrier.try_wait.parity.shared::cta.b64 %p4, [done], 0; @!%p4 bra LAST; END:"
        )
    };
    let source: Vec<u32> = (0..1024).map(|i| i + 1).collect();
    let go = |arrivals: u32, seed: u64| {
        let kernel = module(1, 2, ".explicitcluster\n.reqnctapercluster 2, 1, 1", &code(arrivals));
        let mut buffers = [bytes_of(&source, u32::to_le_bytes), zeros(1024)];
        run(&kernel, 2, 32, vec![map(0)], &mut buffers, seed).map(|_| words(&buffers[1])[..64].to_vec())
    };
    for seed in 0..4 {
        let got = go(32, seed).unwrap();
        for (i, got) in got.iter().enumerate() {
            // Every second chunk of a row of 8 chunks; the swizzle of the row determines which one.
            let row = i % 32 / 4;
            let chunk = (i % 4 * 2) ^ row;
            assert_eq!(*got, if chunk < 6 { source[row * 32 + chunk * 4] } else { 0 }, "{i}");
        }
    }
    let deadlock = go(33, 0).unwrap_err();
    assert!(deadlock.contains("deadlock") && deadlock.contains("pending: 1"), "{deadlock}");
}
