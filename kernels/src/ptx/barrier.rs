//! mbarriers, fences, clusters and the registers of a warpgroup. Addresses are bytes in the shared window.

use cubecl::prelude::*;

use super::{asm, name, operand, statement};

/// Makes an mbarrier that completes a phase after `count` arrivals and the bytes that they announce.
#[cube]
pub(crate) fn mbarrier_init(barrier: u32, #[comptime] count: u32) {
    intrinsic!(|scope| {
        let barrier = operand(scope, *barrier.expand);
        let template = format!("mbarrier.init.shared::cta.b64 [%0], {count};\n");
        asm(scope, &template, &[], &[("r", barrier)]);
    })
}

/// Makes the mbarriers that this thread has made visible to the cluster and to TMA.
#[cube]
pub(crate) fn fence_mbarrier_init() {
    intrinsic!(|scope| { asm(scope, "fence.mbarrier_init.release.cluster;\n", &[], &[]) })
}

/// Arrives at an mbarrier of this block.
#[cube]
pub(crate) fn mbarrier_arrive(barrier: u32) {
    intrinsic!(|scope| {
        let barrier = operand(scope, *barrier.expand);
        asm(scope, "mbarrier.arrive.shared::cta.b64 _, [%0];\n", &[], &[("r", barrier)]);
    })
}

/// Arrives at the mbarrier that lies at `barrier` in block `rank` of the cluster, which then may have TMA overwrite what this thread
/// has read. It publishes no ordinary writes: `.release.cluster` would, by a fence of the whole GPU (`MEMBAR.ALL.GPU`).
#[cube]
pub(crate) fn mbarrier_arrive_remote(barrier: u32, rank: u32) {
    intrinsic!(|scope| {
        let inputs = [("r", operand(scope, *barrier.expand)), ("r", operand(scope, *rank.expand))];
        let template = "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n\
                        mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n";
        asm(scope, template, &[], &inputs);
    })
}

/// Where what lies at `address` in this block lies in block `rank` of the cluster, for instructions that take addresses of the cluster.
#[cube]
pub(crate) fn cluster_address(address: u32, rank: u32) -> u32 {
    intrinsic!(|scope| {
        let out = scope.create_local_mut(u32::as_type(scope));
        let inputs = [("r", operand(scope, *address.expand)), ("r", operand(scope, *rank.expand))];
        asm(scope, "mapa.shared::cluster.u32 %0, %1, %2;\n", &[("=r", name(&out))], &inputs);
        out.into()
    })
}

/// Arrives at an mbarrier of this block and announces `bytes` that TMA will bring.
#[cube]
pub(crate) fn mbarrier_arrive_expect_tx(barrier: u32, #[comptime] bytes: u32) {
    intrinsic!(|scope| {
        let barrier = operand(scope, *barrier.expand);
        let template = format!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], {bytes};\n");
        asm(scope, &template, &[], &[("r", barrier)]);
    })
}

/// Nanoseconds of a wait after which a barrier counts as stuck.
const STUCK: u64 = 10_000_000_000;

/// Waits until the phase of this parity is complete; a barrier that has just been made counts as having completed parity 1.
///
/// What TMA has brought is then visible, from whichever block, and what threads of this block wrote before they arrived. Ordinary
/// writes of other blocks are not: `.acquire.cluster` would see them, by emptying the SM's L1 cache at every wait (`CCTL.IVALL`).
///
/// With the name of a kernel to `trap`, a wait of ten seconds ends the launch as a failed assertion that names it.
#[cube]
pub(crate) fn mbarrier_wait(barrier: u32, parity: u32, #[comptime] trap: Option<&'static str>) {
    intrinsic!(|scope| {
        let inputs = [("r", operand(scope, *barrier.expand)), ("r", operand(scope, *parity.expand))];
        let Some(kernel) = trap else {
            let template = "{\n.reg .pred done;\nWAIT:\n\
                            mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\
                            @done bra DONE;\nbra WAIT;\nDONE:\n}\n";
            return asm(scope, template, &[], &inputs);
        };
        let template = format!(
            "{{\n.reg .pred done;\n.reg .b64 begin, now;\nmov.u64 begin, %globaltimer;\nWAIT:\n\
             mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n@done bra DONE;\n\
             mov.u64 now, %globaltimer;\nsub.u64 now, now, begin;\nsetp.lt.u64 done, now, {STUCK};\n\
             @done bra WAIT;\nDONE:\nselp.u32 %0, 0, 1, done;\n}}\n"
        );
        statement(scope, "{ unsigned stuck;");
        asm(scope, &template, &[("=r", "stuck".into())], &inputs);
        let message = "an mbarrier is complete within ten seconds";
        let fail = format!("__assertfail(\"{message}\", \"{kernel}\", 0, \"mbarrier_wait\", 1);");
        statement(scope, &format!("if (stuck) {fail} }}"));
    })
}

/// Makes this thread's ordinary writes to shared memory visible to TMA and the tensor cores.
#[cube]
pub(crate) fn fence_proxy_async() {
    intrinsic!(|scope| { asm(scope, "fence.proxy.async.shared::cta;\n", &[], &[]) })
}

/// Barrier `id` of the block's 16, for `threads` threads that all name it. 0 is `sync_cube`'s.
#[cube]
pub(crate) fn named_barrier(id: u32, #[comptime] threads: u32) {
    intrinsic!(|scope| {
        let id = operand(scope, *id.expand);
        asm(scope, &format!("barrier.cta.sync %0, {threads};\n"), &[], &[("r", id)]);
    })
}

/// All threads of the cluster meet.
#[cube]
pub(crate) fn cluster_sync() {
    intrinsic!(|scope| {
        let template = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";
        asm(scope, template, &[], &[]);
    })
}

/// Lowers the registers of each thread of the warpgroup to `count`, a multiple of 8.
#[cube]
pub(crate) fn setmaxnreg_dec(#[comptime] count: u32) {
    intrinsic!(|scope| { asm(scope, &format!("setmaxnreg.dec.sync.aligned.u32 {count};\n"), &[], &[]) })
}

/// Raises them, as soon as other warpgroups have given theirs away.
#[cube]
pub(crate) fn setmaxnreg_inc(#[comptime] count: u32) {
    intrinsic!(|scope| { asm(scope, &format!("setmaxnreg.inc.sync.aligned.u32 {count};\n"), &[], &[]) })
}
