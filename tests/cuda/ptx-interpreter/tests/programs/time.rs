//! Time and traps: a wait for an mbarrier that traps after ten seconds.

use ptx_interpreter::{Arg, Buffer, Kernel, Launch};

/// Kernel that traps if `body` leaves a value other than 0 in %r1.
///
/// Otherwise every thread writes 1 to its own word.
fn kernel(body: &str) -> Kernel {
    let text = format!(
        ".version 9.5\n.target sm_90a\n.address_size 64\n\n\t// .globl	f\n.visible .entry f(\n\t.param .u64 f_param_0\n)\n{{\n\t\
         .reg .pred \t%p<9>;\n\t.reg .b32 \t%r<29>;\n\t.reg .b64 \t%rd<29>;\n\t// demoted variable\n\t\
         .shared .align 8 .b8 bar[16];\n\n\tmov.u32 %r9, %tid.x;\n\tld.param.u64 %rd1, [f_param_0];\n\t\
         cvta.to.global.u64 %rd8, %rd1;\n\tmul.wide.u32 %rd9, %r9, 4;\n\tadd.s64 %rd10, %rd8, %rd9;\n\tmov.u32 %r1, 0;\n\
         {body}\n\tsetp.eq.s32 \t%p1, %r1, 0;\n\t@%p1 bra \t$L__BB0_2;\n\n\ttrap;\n\n$L__BB0_2:\n\tmov.u32 \t%r4, 1;\n\t\
         st.global.u32 [%rd10], %r4;\n\tret;\n\n}}\n"
    );
    Kernel::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Initializes two mbarriers, at `bar` and behind it, each for one arrival, and synchronizes all
/// threads.
const INIT: &str = "setp.ne.u32 %p2, %r9, 0; @%p2 bra READY; mbarrier.init.shared::cta.b64 [bar], 1;
    mbarrier.init.shared::cta.b64 [bar+8], 1; READY: bar.sync 0; mov.u32 %r2, bar;";

/// Sets %r1 to whether the first phase of the mbarrier at %r2 takes this many nanoseconds, like the
/// library's kernels.
fn wait(nanoseconds: u64) -> String {
    format!(
        "{{\n.reg .pred done;\n.reg .b64 begin, now;\nmov.u64 begin, %globaltimer;\nWAIT:\n\
         mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;\n@done bra DONE;\nmov.u64 now, %globaltimer;\n\
         sub.u64 now, now, begin;\nsetp.lt.u64 done, now, {nanoseconds};\n@done bra WAIT;\nDONE:\nselp.u32 %r1, 0, 1, done;\n}}\n"
    )
}

const TEN_SECONDS: u64 = 10_000_000_000;

/// Words that two warps write.
fn run(body: &str, seed: u64) -> Result<[u32; 64], String> {
    let mut out = [0u32; 64];
    // SAFETY: the array outlives the run and nothing else uses it.
    let buffer = unsafe { Buffer::new(out.as_mut_ptr().cast(), 256) };
    let launch = Launch {
        grid: [1; 3],
        block: [64, 1, 1],
        args: vec![Arg::Buffer(0)],
        buffers: vec![buffer],
        seed,
        limit: 100_000,
        ..Launch::default()
    };
    kernel(body).run(&launch).map(|_| out).map_err(|error| error.to_string())
}

#[test]
fn a_wait_that_nothing_completes_traps() {
    for seed in 0..3 {
        let error = run(&format!("{INIT} {}", wait(TEN_SECONDS)), seed).unwrap_err();
        assert!(error.contains("the kernel traps") && !error.contains("deadlock"), "{error}");
        assert!(error.contains("after 10 s") && error.contains("pending: 1") && error.contains("warp 1"), "{error}");
    }
}

/// The other thread's delay does not matter: a loop of many turns, or a wait.
#[test]
fn a_barrier_that_another_thread_completes_takes_no_time() {
    let arrive = "mbarrier.arrive.shared::cta.b64 _, [bar];";
    let slowly = format!(
        "{INIT} setp.ne.u32 %p3, %r9, 32; @%p3 bra OTHERS; mov.u32 %r3, 0; AGAIN: add.u32 %r3, %r3, 1;
        setp.lt.u32 %p4, %r3, 40000; @%p4 bra AGAIN; {arrive} OTHERS: {}",
        wait(1)
    );
    // Thread 32 waits for thread 33, which arrives after polling in vain for many turns.
    let in_turn = format!(
        "{INIT} setp.ne.u32 %p3, %r9, 33; @%p3 bra OTHERS; mov.u32 %r3, 0; AGAIN: add.u32 %r3, %r3, 1;
        mbarrier.test_wait.parity.shared::cta.b64 %p5, [bar], 0; setp.lt.u32 %p4, %r3, 5000; @%p4 bra AGAIN;
        mbarrier.arrive.shared::cta.b64 _, [bar+8]; OTHERS: setp.ne.u32 %p3, %r9, 32; @%p3 bra GO; add.u32 %r2, %r2, 8;
        {} {arrive} GO: mov.u32 %r2, bar; {}",
        wait(TEN_SECONDS),
        wait(1)
    );
    for seed in 0..3 {
        assert_eq!(run(&slowly, seed), Ok([1; 64]));
        assert_eq!(run(&in_turn, seed), Ok([1; 64]));
    }
}

/// Time passes for threads that gave up, and their later arrival completes the others' waits.
#[test]
fn waits_may_end_and_others_go_on() {
    let body = format!(
        "{INIT} mov.u64 %rd11, %globaltimer; setp.lt.u32 %p3, %r9, 32; @%p3 bra LONG; add.u32 %r2, %r2, 8; {}
        setp.ne.u32 %p4, %r9, 63; @%p4 bra END; mbarrier.arrive.shared::cta.b64 _, [bar]; bra.uni END; LONG: {}
        END: mov.u64 %rd12, %globaltimer; sub.u64 %rd12, %rd12, %rd11; mov.u32 %r5, %globaltimer_lo;
        mov.u32 %r6, %globaltimer_hi; cvt.u64.u32 %rd13, %r5; cvt.u64.u32 %rd14, %r6; shl.b64 %rd14, %rd14, 32;
        or.b64 %rd13, %rd13, %rd14; setp.ge.u64 %p5, %rd12, 6000000000; setp.eq.and.u64 %p5, %rd12, %rd13, %p5;
        selp.u32 %r4, 2, 3, %p5; st.global.u32 [%rd10], %r4; ret;",
        wait(6_000_000_000),
        wait(TEN_SECONDS)
    );
    for seed in 0..3 {
        assert_eq!(run(&body, seed), Ok([2; 64]));
    }
}

/// Loops without a timeout do not run forever, nor do loops that only read the clock.
#[test]
fn whoever_looks_at_the_clock_may_still_deadlock() {
    let endless = run(&format!("{INIT} {}", wait(u64::MAX)), 0).unwrap_err();
    assert!(endless.contains("deadlock") && endless.contains("pending: 1"), "{endless}");
    let other = format!("{INIT} mov.u64 %rd11, %globaltimer; setp.lt.u32 %p3, %r9, 32; @%p3 bar.sync 1, 64;");
    assert!(run(&other, 0).unwrap_err().contains("barrier 1: 32 of 64"));
    let looks = "mov.u64 %rd11, %globaltimer; AGAIN: mov.u64 %rd12, %globaltimer; sub.u64 %rd12, %rd12, %rd11;
        setp.lt.u64 %p3, %rd12, 1000; @%p3 bra AGAIN;";
    assert!(run(looks, 0).unwrap_err().contains("still running"));
}

/// A trap of one thread takes no time, and its error names the warp. Functions are not modelled.
#[test]
fn a_trap_and_a_call() {
    let error = run("setp.eq.u32 %p3, %r9, 37; selp.u32 %r1, 1, 0, %p3;", 0).unwrap_err();
    assert!(error.contains("warp 1") && error.contains("the kernel traps") && !error.contains("after"), "{error}");
    let error = run("call.uni (temp), vprintf, (%rd1, %rd2);", 0).unwrap_err();
    assert!(error.contains("vprintf") && error.contains("not modelled"), "{error}");
}
