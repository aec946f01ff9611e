//! What becomes of a cluster in which nothing can go on and nothing is under way: time passes, or it is a deadlock.
//!
//! `%globaltimer` is a clock of each cluster that stands still otherwise. It moves by a second, and all that wait in an
//! `mbarrier.try_wait` are told that the phase is not complete, as the PTX ISA lets them after a time that depends on the
//! system. So a wait for what does come takes no time, however late that is, and a loop that gives up after some seconds comes
//! round as often. A loop that only looks at the clock never ends.

use super::flow::lanes;
use super::instr::Op;
use super::state::{Cluster, Machine, Wait};

const SECOND: u64 = 1_000_000_000;

/// Time after which a cluster in which nothing can go on is a deadlock, whoever looks at the clock.
const MOST: u64 = 100 * SECOND;

impl Machine<'_> {
    /// Lets a second pass, if the kernel looks at the clock; whether anything can go on.
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
                    // The predicate has been false since it began to wait.
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

    /// Who waits where for what.
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
                    // A lane behind a barrier stands at the next instruction.
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
    /// An error with what stood still before it, if time has passed.
    pub(crate) fn with_stuck(&self, error: String) -> String {
        match self.clock / SECOND {
            0 => error,
            seconds => format!("{error}\nafter {seconds} s in which nothing went on:\n{}", self.stuck),
        }
    }
}
