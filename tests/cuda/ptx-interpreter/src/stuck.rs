//! Handling of a cluster in which nothing can run and nothing is in flight: time passes, or it is a
//! deadlock.
//!
//! `%globaltimer` is a clock of each cluster that otherwise stands still. It advances by a second,
//! and every waiting `mbarrier.try_wait` returns that the phase is not complete. The PTX ISA allows
//! this after a system-dependent time. So a wait for a phase that completes takes no time, and a
//! loop with a timeout of some seconds iterates once per second. A loop that only reads the clock
//! never ends.

use super::flow::lanes;
use super::state::{Cluster, Machine, Wait};
use super::table::Op;

const SECOND: u64 = 1_000_000_000;

/// Clock limit, after which a cluster in which nothing can run is a deadlock even if it reads the
/// clock.
const MOST: u64 = 100 * SECOND;

impl Machine<'_> {
    /// Advances the clock by a second if the kernel reads it; returns whether any lane can run.
    pub(crate) fn pass_time(&self, cluster: &mut Cluster) -> bool {
        let looks = self.kernel.code.iter().any(|instr| matches!(instr.op, Op::Timer { .. }));
        if !looks || cluster.clock >= MOST {
            return false;
        }
        cluster.stuck = self.waits(cluster);
        cluster.clock += SECOND;
        let mut any = false;
        for warp in cluster.blocks.iter_mut().flat_map(|block| &mut block.warps) {
            for lane in lanes(warp.blocked) {
                if matches!(warp.wait[lane], Wait::Mbarrier { .. }) {
                    // The predicate has been false since the wait began.
                    warp.pc[lane] += 1;
                    warp.wait[lane] = Wait::None;
                    warp.blocked &= !(1 << lane);
                    any = true;
                }
            }
        }
        any
    }

    pub(crate) fn deadlock(&self, cluster: &mut Cluster) -> String {
        let waits = self.waits(cluster);
        format!("{}: deadlock in the cluster at {:?}:\n{waits}", self.kernel.name, cluster.origin)
    }

    /// Waiting lanes with their instructions and barriers.
    fn waits(&self, cluster: &mut Cluster) -> String {
        let mut lines = vec![];
        for rank in 0..cluster.blocks.len() {
            for id in 0..cluster.blocks[rank].warps.len() {
                let mut groups: Vec<(u32, Wait, u32)> = vec![];
                let warp = &cluster.blocks[rank].warps[id];
                for lane in lanes(warp.live) {
                    let (pc, wait) = (warp.pc[lane], warp.wait[lane]);
                    match groups.iter_mut().find(|group| (group.0, group.1) == (pc, wait)) {
                        Some(group) => group.2 |= 1 << lane,
                        None => groups.push((pc, wait, 1 << lane)),
                    }
                }
                for (pc, wait, mask) in groups {
                    let state = match wait {
                        Wait::Bar { id, .. } => {
                            let barrier = cluster.blocks[rank].barriers[id];
                            let count = barrier.count.map_or("all".to_string(), |count| count.to_string());
                            format!("barrier {id}: {} of {count} threads", barrier.arrived)
                        }
                        Wait::Mbarrier { rank, offset, .. } => match cluster.mbarrier(rank, offset) {
                            Ok(state) => format!("mbarrier at {offset}: {state:?}"),
                            Err(error) => error,
                        },
                        wait => format!("{wait:?}"),
                    };
                    // A lane that waits behind a barrier is at the next instruction.
                    let at = match wait {
                        Wait::Bar { .. } | Wait::Cluster { .. } | Wait::Warpgroup { .. } => pc - 1,
                        _ => pc,
                    };
                    let text = &self.kernel.text[at as usize];
                    lines.push(format!("  block {rank} warp {id} lanes {mask:#x}: {at}: {text}: waits for {state}"));
                }
            }
        }
        lines.join("\n")
    }
}

impl Cluster {
    /// Appends the stuck state to an error if time has passed.
    pub(crate) fn with_stuck(&self, error: String) -> String {
        match self.clock / SECOND {
            0 => error,
            seconds => format!("{error}\nafter {seconds} s in which nothing went on:\n{}", self.stuck),
        }
    }
}
