//! The interpreter on small programs whose results follow from the PTX ISA: conversions, bit operations, barriers,
//! tensor copies, matrix instructions, clusters; and that faults are faults.

mod pair;
mod tcgen05;
mod time;

use ptx_interpreter::{Arg, Buffer, Kernel, Launch, TensorFloat, TensorMap};

/// A module with one kernel `f` of so many pointers, and tensor maps in front of them.
fn module(maps: usize, pointers: usize, directives: &str, body: &str) -> Kernel {
    let names = |i: usize| format!("f_param_{i}");
    let maps = (0..maps).map(|i| format!(".param .align 64 .b8 {}[128]", names(i)));
    let first = maps.len();
    let pointers = (first..first + pointers).map(|i| format!(".param .u64 {}", names(i)));
    let params = maps.chain(pointers).collect::<Vec<_>>().join(",\n");
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry f(\n{params}\n)\n{directives}\n{{\n\
         .reg .pred %p<9>;\n.reg .f32 %f<99>;\n.reg .b16 %h<9>;\n.reg .b32 %r<99>;\n.reg .b64 %d<99>;\n{body}\nret;\n}}\n"
    );
    Kernel::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs it on these buffers; the parameters are the maps and then the buffers.
fn run(
    kernel: &Kernel,
    grid: u32,
    threads: u32,
    maps: Vec<TensorMap>,
    buffers: &mut [Vec<u8>],
    seed: u64,
) -> Result<u64, String> {
    let args = (0..maps.len()).map(Arg::Map).chain((0..buffers.len()).map(Arg::Buffer));
    let launch = Launch {
        grid: [grid, 1, 1],
        block: [threads, 1, 1],
        args: args.collect(),
        // SAFETY: the vectors outlive the run and nobody else uses them.
        buffers: buffers.iter_mut().map(|buffer| unsafe { Buffer::new(buffer.as_mut_ptr(), buffer.len()) }).collect(),
        maps,
        seed,
        limit: 100_000,
        ..Launch::default()
    };
    kernel.run(&launch).map_err(|error| error.to_string())
}

/// A buffer whose address is a multiple of 16, of the allocator's own accord.
fn zeros(len: usize) -> Vec<u8> {
    vec![0; len.max(4096)]
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// Loads the pointers to %d1, %d2 and the thread's index to %r1; %d3 and %d4 are the pointers advanced by words.
const THREAD: &str = "ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %d5, %r1, 4; add.s64 %d3, %d1, %d5; add.s64 %d4, %d2, %d5;";

/// One word for each of these through `code`, which reads %r2 or %f2 and writes %r3.
fn map_words(inputs: &[u32], code: &str) -> Vec<u32> {
    let body = format!("{THREAD} ld.global.u32 %r2, [%d3]; mov.b32 %f2, %r2; {code} st.global.u32 [%d4], %r3;");
    let mut buffers = [bytes_of(inputs, u32::to_le_bytes), zeros(inputs.len() * 4)];
    run(&module(0, 2, "", &body), 1, inputs.len() as u32, vec![], &mut buffers, 0).unwrap();
    words(&buffers[1])[..inputs.len()].to_vec()
}

#[test]
fn fp8_conversions_round_to_even_and_saturate() {
    let cases: [(f32, u32, u32); 14] = [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x80),
        (1.0, 0x38, 0x3c),
        (f32::NAN, 0x7f, 0x7f),
        (f32::INFINITY, 0x7e, 0x7b),
        (f32::NEG_INFINITY, 0xfe, 0xfb),
        (463.0, 0x7e, 0x5f),
        (1e30, 0x7e, 0x7b),
        // Ties: 17 between 16 and 18, 19 between 18 and 20; 1.125 and 1.375 between fours.
        (17.0, 0x58, 0x4c),
        (19.0, 0x5a, 0x4d),
        (1.125, 0x39, 0x3c),
        (1.375, 0x3b, 0x3e),
        // Half of the least subnormal of E4M3, and a little more.
        (0.0009765625, 0x00, 0x14),
        (0.0009765626, 0x01, 0x14),
    ];
    let inputs: Vec<u32> = cases.iter().map(|case| case.0.to_bits()).collect();
    for (format, want) in [("e4m3", cases.map(|case| case.1)), ("e5m2", cases.map(|case| case.2))] {
        let code =
            format!("mov.f32 %f3, 0f40000000; cvt.rn.satfinite.{format}x2.f32 %h1, %f3, %f2; cvt.u32.u16 %r3, %h1;");
        let got = map_words(&inputs, &code);
        assert!(got.iter().all(|word| word >> 8 == 0x40), "the first source, 2, goes to the high byte: {got:x?}");
        assert_eq!(got.iter().map(|word| word & 0xff).collect::<Vec<_>>(), want, "{format}");
    }
    let codes = [0x0001, 0x7f7e, 0xff38, 0x8008];
    let f16 = map_words(&codes, "cvt.u16.u32 %h1, %r2; cvt.rn.f16x2.e4m3x2 %r3, %h1;");
    assert_eq!(f16, [0x0000_1800, 0x7fff_5f00, 0x7fff_3c00, 0x8000_2400]);
}

#[test]
fn bits_are_permuted_inserted_and_extracted() {
    let x = [0x8123_4567, 0x0f1e_2d3c];
    assert_eq!(map_words(&x, "prmt.b32 %r3, %r2, 0x11223344, 0x71b0;"), [0x1145_ff67, 0x112d_003c]);
    assert_eq!(
        map_words(&x, "lop3.b32 %r3, %r2, 0xff00ff00, 0x0f0f0f0f, 0x6a;"),
        x.map(|x| (x & 0xff00_ff00) ^ 0x0f0f_0f0f)
    );
    assert_eq!(map_words(&x, "bfe.u32 %r3, %r2, 8, 12;"), x.map(|x| x >> 8 & 0xfff));
    assert_eq!(map_words(&x, "bfe.s32 %r3, %r2, 28, 8;"), x.map(|x| (x as i32 >> 28) as u32));
    assert_eq!(map_words(&x, "bfi.b32 %r3, 0xab, %r2, 4, 8;"), x.map(|x| x & !0xff0 | 0xab0));
    assert_eq!(map_words(&x, "shf.l.wrap.b32 %r3, %r2, %r2, 36;"), x.map(|x| x.rotate_left(4)));
    assert_eq!(map_words(&x, "shr.s32 %r3, %r2, 99;"), [u32::MAX, 0]);
    assert_eq!(map_words(&x, "mul.hi.s32 %r3, %r2, 16;"), x.map(|x| ((i64::from(x as i32) * 16) >> 32) as u32));
    assert_eq!(
        map_words(&x, "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %r2; mov.b32 %r3, {hi, lo}; }"),
        x.map(|x| x.rotate_left(16))
    );
}

#[test]
fn float_corners() {
    let x = [f32::NAN, -0.0, 3.5, -2.5, 1e-45].map(f32::to_bits);
    let min = map_words(&x, "min.f32 %f3, %f2, 0f00000000; mov.b32 %r3, %f3;");
    assert_eq!(min, [0, 0x8000_0000, 0, (-2.5f32).to_bits(), 0]);
    let max = map_words(&x, "max.NaN.f32 %f3, %f2, 0f00000000; mov.b32 %r3, %f3;");
    assert_eq!(max, [0x7fff_ffff, 0, 3.5f32.to_bits(), 0, 1]);
    assert_eq!(map_words(&x, "cvt.rni.s32.f32 %r3, %f2;"), [0, 0, 4, -2i32 as u32, 0]);
    assert_eq!(map_words(&x, "cvt.rzi.u32.f32 %r3, %f2;"), [0, 0, 3, 0, 0]);
    assert_eq!(map_words(&x, "setp.neu.f32 %p1, %f2, %f2; selp.u32 %r3, 1, 0, %p1;"), [1, 0, 0, 0, 0]);
    // The second source, which is the low half, of bf16 pairs.
    assert_eq!(
        map_words(&[0x3f80_8000, 0x3f81_8000], "cvt.rn.bf16x2.f32 %r3, 0f3F800000, %f2;"),
        [0x3f80_3f80, 0x3f80_3f82]
    );
}

#[test]
fn lanes_diverge_meet_and_exchange() {
    let inputs: Vec<u32> = (0..64).map(|i| i * i).collect();
    let code = "setp.lt.u32 %p1, %r1, 20; @%p1 bra LOW; add.s32 %r2, %r2, 1000; bra.uni MEET; LOW: add.s32 %r2, %r2, 1;
        MEET: shfl.sync.bfly.b32 %r3|%p2, %r2, 16, 31, 0xffffffff; @!%p2 mov.u32 %r3, 7;";
    let changed = |i: usize| inputs[i] + if i < 20 { 1 } else { 1000 };
    assert_eq!(map_words(&inputs, code), (0..64).map(|i| changed(i ^ 16)).collect::<Vec<_>>());
    let ballot = map_words(&inputs, "and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 1; vote.sync.ballot.b32 %r3, %p1, -1;");
    assert!(ballot.iter().all(|votes| *votes == 0xaaaa_aaaa));
    let sum = map_words(&inputs, "redux.sync.add.s32 %r3, %r2, 0xffffffff;");
    assert_eq!((sum[0], sum[63]), ((0..32).map(|i| i * i).sum(), (32..64).map(|i| i * i).sum()));
}

#[test]
fn faults_are_reported_where_they_are() {
    let body = |code: &str| format!("{THREAD} {code}");
    let fails = |code: &str, shared: &str, threads: u32| {
        let kernel = module(0, 2, "", &format!("{shared} {}", body(code)));
        run(&kernel, 1, threads, vec![], &mut [zeros(4096), zeros(4096)], 0).unwrap_err()
    };
    let outside = fails("st.global.u32 [%d3+4093], %r1;", "", 1);
    assert!(outside.contains("not aligned"), "{outside}");
    let outside = fails("st.global.u32 [%d3+4096], %r1;", "", 1);
    assert!(outside.contains("4 bytes at 4096 of buffer 0") && outside.contains("st.global.u32"), "{outside}");
    let outside = fails("ld.shared.u32 %r2, [s+64];", ".shared .align 4 .b8 s[64];", 1);
    assert!(outside.contains("of shared memory"), "{outside}");
    let deadlock = fails("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 64;", "", 64);
    assert!(deadlock.contains("deadlock") && deadlock.contains("barrier 1: 32 of 64"), "{deadlock}");
    let unknown = fails("tanh.approx.s99 %r2, %r1;", "", 1);
    assert!(unknown.contains("not modelled"), "{unknown}");
    let endless = fails("AGAIN: ld.volatile.global.u32 %r2, [%d1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra AGAIN;", "", 1);
    assert!(endless.contains("still running"), "{endless}");
    let barrier = fails("mbarrier.arrive.shared.b64 _, [s];", ".shared .align 8 .b8 s[8];", 1);
    assert!(barrier.contains("not initialized"), "{barrier}");
    let twice = "mbarrier.init.shared.b64 [s], 2; mbarrier.arrive.shared.b64 _, [s], 3;";
    assert!(fails(twice, ".shared .align 8 .b8 s[8];", 1).contains("3 arrivals"));
}

#[test]
fn named_barriers_order_producer_and_consumer() {
    // Warp 0 consumes what warps 1 and 2 write; barrier 2 says that it is there.
    let body = format!(
        "{THREAD} .shared .align 4 .b8 s[256]; sub.u32 %r4, %r1, 32; shl.b32 %r5, %r4, 2; mov.u32 %r6, s; add.u32 %r6, %r6, %r5;
        setp.ge.u32 %p1, %r1, 32; @%p1 bra PRODUCE; bar.sync 2, 96; shl.b32 %r5, %r1, 2; mov.u32 %r6, s; add.u32 %r6, %r6, %r5;
        ld.shared.u32 %r7, [%r6]; ld.shared.u32 %r8, [%r6+128]; add.u32 %r3, %r7, %r8; st.global.u32 [%d4], %r3; ret;
        PRODUCE: st.shared.u32 [%r6], %r1; bar.arrive 2, 96;"
    );
    for seed in 0..4 {
        let mut buffers = [zeros(4), zeros(4096)];
        run(&module(0, 2, "", &body), 1, 96, vec![], &mut buffers, seed).unwrap();
        assert_eq!(words(&buffers[1])[..32], (0..32).map(|i| 32 + i + 64 + i).collect::<Vec<u32>>());
    }
}

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

/// 16 rows of 32 f32, of which 13 rows of 24 are the tensor; boxes of 8 rows of 128 bytes, swizzled.
fn map(buffer: usize) -> TensorMap {
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

/// Codes of small E4M3 integers: 0, ±1, ±2, ±3.
fn small(i: usize) -> (u8, f32) {
    let codes = [0x00, 0x38, 0x40, 0x44, 0xb8, 0xc0, 0xc4];
    let values = [0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0];
    let at = (i * 7919 + i / 5) % 7;
    (codes[at], values[at])
}

/// `D [64][16] = A [64][32] · B [16][32]ᵀ + 1`, of operands laid out by `place`.
fn wgmma(descriptor: u64, place: impl Fn(usize, usize) -> usize, wait: &str, seed: u64) -> Result<(), String> {
    let registers = (10..18).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
    let ones = (10..18).map(|i| format!("mov.f32 %f{i}, 0f3F800000;")).collect::<String>();
    let stores = (10..18).map(|i| format!("st.global.f32 [%d6+{}], %f{i};", (i - 10) * 4)).collect::<String>();
    // Each thread copies 32 bytes of the image of shared memory, 2048 of A and 2048 of B (of which 512 count).
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
    // Core matrices of 8 rows of 16 bytes: along K 128 bytes apart, along rows 256.
    let plain = (128 >> 4) << 16 | (256 >> 4) << 32;
    let plain_place = |row: usize, k: usize| row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16;
    // Rows of 32 bytes, the two chunks of which are exchanged in rows 4 to 7 of 8.
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
    // A [16][32] and B [8][32] bytes, row-major; as 16-bit matrices of 8 by 8 they are four and two.
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
fn clusters_multicast_and_arrive_remotely() {
    // Block 0 loads one box into both blocks; block 1 tells block 0 that it has read.
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
            // Every second chunk of a row of 8 chunks; which one stands there depends on the row.
            let row = i % 32 / 4;
            let chunk = (i % 4 * 2) ^ row;
            assert_eq!(*got, if chunk < 6 { source[row * 32 + chunk * 4] } else { 0 }, "{i}");
        }
    }
    let deadlock = go(33, 0).unwrap_err();
    assert!(deadlock.contains("deadlock") && deadlock.contains("pending: 1"), "{deadlock}");
}

#[test]
fn blocks_that_wait_for_later_blocks_are_run_beside_them() {
    // Each block but the last waits until the next one has raised its flag.
    let body =
        "ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d3, %r1, 4;
        add.s64 %d4, %d1, %d3; setp.eq.u32 %p1, %r1, 2; @%p1 bra RAISE;
        AGAIN: ld.acquire.gpu.global.u32 %r2, [%d4+4]; setp.eq.u32 %p2, %r2, 0; @%p2 bra AGAIN;
        RAISE: add.u32 %r3, %r2, 1; @%p1 mov.u32 %r3, 1; st.release.gpu.global.u32 [%d4], %r3;";
    let mut buffers = [zeros(16), zeros(4)];
    let kernel = module(0, 2, "", body);
    let args = vec![Arg::Buffer(0), Arg::Buffer(1)];
    // SAFETY: the vectors outlive the run and nobody else uses them.
    let memory = buffers.each_mut().map(|buffer| unsafe { Buffer::new(buffer.as_mut_ptr(), buffer.len()) });
    let launch = Launch { grid: [3, 1, 1], block: [1, 1, 1], args, buffers: memory.to_vec(), ..Launch::default() };
    kernel.run(&launch).unwrap();
    assert_eq!(words(&buffers[0])[..3], [3, 2, 1]);
}

#[test]
fn accumulators_in_flight_are_not_to_be_read() {
    let plain = (128 >> 4) << 16 | (256 >> 4) << 32;
    let place = |row: usize, k: usize| row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16;
    let add = "wgmma.wait_group.sync.aligned 1; add.f32 %f20, %f10, %f11;";
    // A copy is one of the value that is coming.
    let copy = "mov.f32 %f30, %f10; mov.f32 %f31, %f30; wgmma.wait_group.sync.aligned 0; mov.f32 %f10, %f31;";
    wgmma(plain, place, copy, 0).unwrap();
    let error = wgmma(plain, place, add, 0).unwrap_err();
    assert!(error.contains("in flight"), "{error}");
}
