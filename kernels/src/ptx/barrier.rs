//! mbarriers, fences, clusters and the registers of a warpgroup. Addresses are bytes in the shared window.

use cubecl::prelude::*;

use super::{asm, input};

ptx! {
    /// Makes an mbarrier that completes a phase after `count` arrivals and the bytes that they announce.
    pub(crate) fn mbarrier_init(barrier: u32, #[comptime] count: u32) {
        "mbarrier.init.shared::cta.b64 [{barrier}], {count};\n"
    }

    /// Makes the mbarriers that this thread has made visible to the cluster and to TMA.
    pub(crate) fn fence_mbarrier_init() { "fence.mbarrier_init.release.cluster;\n" }

    /// Arrives at an mbarrier of this block.
    pub(crate) fn mbarrier_arrive(barrier: u32) { "mbarrier.arrive.shared::cta.b64 _, [{barrier}];\n" }

    /// Arrives at the mbarrier that lies at `barrier` in block `rank` of the cluster, which then may have TMA overwrite what this thread
    /// has read. It publishes no ordinary writes: `.release.cluster` would, by a fence of the whole GPU (`MEMBAR.ALL.GPU`).
    pub(crate) fn mbarrier_arrive_remote(barrier: u32, rank: u32) {
        "{{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, {barrier}, {rank};\n\
         mbarrier.arrive.shared::cluster.b64 _, [remote];\n}}\n"
    }

    /// Where what lies at `address` in this block lies in block `rank` of the cluster, for instructions that take addresses of the
    /// cluster.
    pub(crate) fn cluster_address(address: u32, rank: u32) -> u32 {
        "mapa.shared::cluster.u32 {out}, {address}, {rank};\n"
    }

    /// Arrives at an mbarrier of this block and announces `bytes` that TMA will bring.
    pub(crate) fn mbarrier_arrive_expect_tx(barrier: u32, #[comptime] bytes: u32) {
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};\n"
    }

    /// Makes this thread's ordinary writes to shared memory visible to TMA and the tensor cores.
    pub(crate) fn fence_proxy_async() { "fence.proxy.async.shared::cta;\n" }

    /// Barrier `id` of the block's 16, for `threads` threads that all name it. 0 is `sync_cube`'s.
    pub(crate) fn named_barrier(id: u32, #[comptime] threads: u32) { "barrier.cta.sync {id}, {threads};\n" }

    /// All threads of the cluster meet.
    pub(crate) fn cluster_sync() {
        "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
    }

    /// Lowers the registers of each thread of the warpgroup to `count`, a multiple of 8.
    pub(crate) fn setmaxnreg_dec(#[comptime] count: u32) { "setmaxnreg.dec.sync.aligned.u32 {count};\n" }

    /// Raises them, as soon as other warpgroups have given theirs away.
    pub(crate) fn setmaxnreg_inc(#[comptime] count: u32) { "setmaxnreg.inc.sync.aligned.u32 {count};\n" }
}

/// Nanoseconds of a wait after which a barrier counts as stuck.
const STUCK: u64 = 10_000_000_000;

/// Waits until the phase of this parity is complete; a barrier that has just been made counts as having completed parity 1.
///
/// What TMA has brought is then visible, from whichever block, and what threads of this block wrote before they arrived. Ordinary
/// writes of other blocks are not: `.acquire.cluster` would see them, by emptying the SM's L1 cache at every wait (`CCTL.IVALL`).
///
/// With `traps`, a wait of ten seconds traps: the launch fails. The clock is read only after a first wait in vain.
///
/// Waits beside `wgmma` in flight do not trap: `ptxas` serializes the products if the loop holds a trap.
#[cube]
pub(crate) fn mbarrier_wait(barrier: u32, parity: u32, #[comptime] traps: bool) {
    intrinsic!(|scope| {
        let inputs = [input(scope, *barrier.expand), input(scope, *parity.expand)];
        let late = format!(
            "mov.u64 time, %globaltimer;\nsetp.eq.u64 late, end, 0;\n@late add.u64 end, time, {STUCK};\n\
             setp.gt.u64 late, time, end;\n@late trap;\n"
        );
        let template = format!(
            "{{\n.reg .pred done, late;\n.reg .b64 end, time;\nmov.u64 end, 0;\nWAIT:\n\
             mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\n{}bra WAIT;\nDONE:\n}}\n",
            if traps { &late } else { "" }
        );
        asm(scope, &template, &[], &inputs);
    })
}
