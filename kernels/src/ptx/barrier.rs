//! mbarriers, fences, clusters and warpgroup registers. Addresses are bytes in the shared window.

use cubecl::prelude::*;

use super::{asm, input};

ptx! {
    /// Initializes an mbarrier that completes a phase after `count` arrivals and their announced
    /// bytes.
    pub(crate) fn mbarrier_init(barrier: u32, #[comptime] count: u32) {
        "mbarrier.init.shared::cta.b64 [{barrier}], {count};\n"
    }

    /// Makes this thread's initialized mbarriers visible to the cluster and to TMA.
    pub(crate) fn fence_mbarrier_init() { "fence.mbarrier_init.release.cluster;\n" }

    /// Arrives at an mbarrier of this block.
    pub(crate) fn mbarrier_arrive(barrier: u32) { "mbarrier.arrive.shared::cta.b64 _, [{barrier}];\n" }

    /// Arrives at the mbarrier at `barrier` in block `rank` of the cluster. TMA may then overwrite
    /// what this thread has read. Does not publish ordinary writes: `.release.cluster` would need a
    /// fence of the whole GPU (`MEMBAR.ALL.GPU`).
    pub(crate) fn mbarrier_arrive_remote(barrier: u32, rank: u32) {
        "{{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, {barrier}, {rank};\n\
         mbarrier.arrive.shared::cluster.b64 _, [remote];\n}}\n"
    }

    /// Cluster address in block `rank` of `address` in this block, for instructions that take
    /// cluster addresses.
    pub(crate) fn cluster_address(address: u32, rank: u32) -> u32 {
        "mapa.shared::cluster.u32 {out}, {address}, {rank};\n"
    }

    /// Arrives at an mbarrier of this block and announces `bytes` from TMA.
    pub(crate) fn mbarrier_arrive_expect_tx(barrier: u32, #[comptime] bytes: u32) {
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};\n"
    }

    /// Makes this thread's ordinary writes to shared memory visible to TMA and the tensor cores.
    pub(crate) fn fence_proxy_async() { "fence.proxy.async.shared::cta;\n" }

    /// Barrier `id` of the block's 16, for `threads` threads that all use it. `sync_cube` uses 0.
    pub(crate) fn named_barrier(id: u32, #[comptime] threads: u32) { "barrier.cta.sync {id}, {threads};\n" }

    /// Arrives at a [`named_barrier`] without waiting.
    pub(crate) fn named_barrier_arrive(id: u32, #[comptime] threads: u32) { "barrier.cta.arrive {id}, {threads};\n" }

    /// Synchronizes all threads of the cluster.
    pub(crate) fn cluster_sync() {
        "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
    }

    /// Lowers the registers of each thread of the warpgroup to `count`, a multiple of 8.
    pub(crate) fn setmaxnreg_dec(#[comptime] count: u32) { "setmaxnreg.dec.sync.aligned.u32 {count};\n" }

    /// Raises the registers to `count`, as soon as other warpgroups have released theirs.
    pub(crate) fn setmaxnreg_inc(#[comptime] count: u32) { "setmaxnreg.inc.sync.aligned.u32 {count};\n" }
}

/// Nanoseconds of waiting after which a barrier counts as stuck.
const STUCK: u64 = 10_000_000_000;

/// Waits until the phase of this parity is complete. A new barrier counts as having completed
/// parity 1.
///
/// Bytes that TMA has loaded are then visible, from any block, and also writes that threads of this
/// block made before they arrived. Ordinary writes of other blocks are not. `.acquire.cluster`
/// would make them visible, but it empties the SM's L1 cache at every wait (`CCTL.IVALL`).
///
/// With `traps`, a wait of ten seconds traps and the launch fails. The clock is read only after a
/// first failed wait.
///
/// Waits while `wgmma` is in flight must not trap: `ptxas` serializes the products if the loop has
/// a trap.
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
