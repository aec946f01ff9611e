//! Small programs whose results follow from the PTX ISA: conversions, bit operations, barriers and
//! faults. Copies, matrix instructions, pairs of blocks and time have separate modules.

mod copies;
mod matrix;
mod pair;
mod tcgen05;
mod time;

use ptx_interpreter::{Arg, Buffer, Kernel, Launch, TensorMap};

/// Module with one kernel `f`, whose parameters are tensor maps followed by pointers.
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

/// Runs a kernel on these buffers; the parameters are the maps and then the buffers.
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
        // SAFETY: the vectors outlive the run and nothing else uses them.
        buffers: buffers.iter_mut().map(|buffer| unsafe { Buffer::new(buffer.as_mut_ptr(), buffer.len()) }).collect(),
        maps,
        seed,
        limit: 100_000,
        ..Launch::default()
    };
    kernel.run(&launch).map_err(|error| error.to_string())
}

/// Buffer that is large enough for the allocator to align it to 16 bytes.
fn zeros(len: usize) -> Vec<u8> {
    vec![0; len.max(4096)]
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// Loads the pointers to %d1, %d2 and the thread's index to %r1; %d3 and %d4 are the pointers plus
/// one word per thread.
const THREAD: &str = "ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %d5, %r1, 4; add.s64 %d3, %d1, %d5; add.s64 %d4, %d2, %d5;";

/// Maps each input word through `code`, which reads %r2 or %f2 and writes %r3.
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
        // Ties: 17 between 16 and 18, 19 between 18 and 20; 1.125 and 1.375 between quarters.
        (17.0, 0x58, 0x4c),
        (19.0, 0x5a, 0x4d),
        (1.125, 0x39, 0x3c),
        (1.375, 0x3b, 0x3e),
        // Half of the smallest E4M3 subnormal, and slightly more.
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
    let near = [0x3f80_1000, 0x3f80_0fff, 0xbf80_3000, 0x7fc0_0000];
    let want = [0x3f80_2000, 0x3f80_0000, 0xbf80_4000, 0x7fff_ffff];
    assert_eq!(map_words(&near, "cvt.rna.tf32.f32 %r3, %f2;"), want);
    assert_eq!(map_words(&x, "setp.neu.f32 %p1, %f2, %f2; selp.u32 %r3, 1, 0, %p1;"), [1, 0, 0, 0, 0]);
    // The second source is the low half of bf16 pairs.
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
    // Warp 0 consumes the words of warps 1 and 2; barrier 2 signals that they are written.
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

/// Codes of small E4M3 integers: 0, ±1, ±2, ±3.
fn small(i: usize) -> (u8, f32) {
    let codes = [0x00, 0x38, 0x40, 0x44, 0xb8, 0xc0, 0xc4];
    let values = [0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0];
    let at = (i * 7919 + i / 5) % 7;
    (codes[at], values[at])
}

#[test]
fn blocks_that_wait_for_later_blocks_are_run_beside_them() {
    // Each block except the last waits until the next one has raised its flag.
    let body =
        "ld.param.u64 %d1, [f_param_0]; ld.param.u64 %d2, [f_param_1]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d3, %r1, 4;
        add.s64 %d4, %d1, %d3; setp.eq.u32 %p1, %r1, 2; @%p1 bra RAISE;
        AGAIN: ld.acquire.gpu.global.u32 %r2, [%d4+4]; setp.eq.u32 %p2, %r2, 0; @%p2 bra AGAIN;
        RAISE: add.u32 %r3, %r2, 1; @%p1 mov.u32 %r3, 1; st.release.gpu.global.u32 [%d4], %r3;";
    let mut buffers = [zeros(16), zeros(4)];
    let kernel = module(0, 2, "", body);
    let args = vec![Arg::Buffer(0), Arg::Buffer(1)];
    // SAFETY: the vectors outlive the run and nothing else uses them.
    let memory = buffers.each_mut().map(|buffer| unsafe { Buffer::new(buffer.as_mut_ptr(), buffer.len()) });
    let launch = Launch { grid: [3, 1, 1], block: [1, 1, 1], args, buffers: memory.to_vec(), ..Launch::default() };
    kernel.run(&launch).unwrap();
    assert_eq!(words(&buffers[0])[..3], [3, 2, 1]);
}
