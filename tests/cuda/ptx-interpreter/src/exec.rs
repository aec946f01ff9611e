//! Execution of a warp. The runnable lanes with the smallest program counter run until they
//! diverge, reach others, wait, or use up their turn. So diverged lanes reconverge where the code
//! does.

use super::flow::{Flow, lanes};
use super::state::{Block, Cluster, Issue, Machine, Wait, Warp};
use super::table::Op;

impl Machine<'_> {
    /// Runs a warp for at most `fuel` instructions; returns the number executed.
    pub(crate) fn run_warp(&mut self, cluster: &mut Cluster, rank: usize, id: usize, fuel: u64) -> Result<u64, String> {
        let mut warp = std::mem::take(&mut cluster.blocks[rank].warps[id]);
        let start = self.executed;
        let mut at = 0;
        let result = self.run_lanes(cluster, rank, &mut warp, fuel, &mut at);
        cluster.blocks[rank].warps[id] = warp;
        let executed = self.executed - start;
        result.map(|()| executed).map_err(|error| {
            let text = &self.kernel.text[at as usize];
            format!(
                "{}: block {rank} of the cluster at {:?}, warp {id}, instruction {at}: {text}: {error}",
                self.kernel.name, cluster.origin
            )
        })
    }

    fn wake(&self, cluster: &mut Cluster, rank: usize, warp: &mut Warp) -> Result<(), String> {
        for lane in lanes(warp.blocked) {
            let over = match warp.wait[lane] {
                Wait::None | Wait::Turn => true,
                Wait::Warp => false,
                Wait::Bar { id, generation } => cluster.blocks[rank].barriers[id].generation != generation,
                Wait::Cluster { generation } => cluster.generation != generation,
                Wait::Mbarrier { rank, offset, value, parity } => {
                    cluster.mbarrier(rank, offset)?.is_over(value, parity)
                }
                Wait::Warpgroup { issued } => cluster.blocks[rank].warpgroups[warp.id / 4].issued >= issued,
                Wait::Peer => cluster.blocks[rank].tensor.together.is_none_or(|together| together.done),
            };
            if over {
                warp.blocked &= !(1 << lane);
                warp.wait[lane] = Wait::None;
            }
        }
        Ok(())
    }

    fn run_lanes(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        mut fuel: u64,
        at: &mut u32,
    ) -> Result<(), String> {
        self.wake(cluster, rank, warp)?;
        let kernel = self.kernel;
        'pick: loop {
            let mut runnable = warp.live & !warp.blocked;
            if runnable & !warp.patient != 0 {
                runnable &= !warp.patient;
            }
            if runnable == 0 {
                return Ok(());
            }
            let mut pc = lanes(runnable).map(|lane| warp.pc[lane]).min().expect("a lane is runnable");
            let group = lanes(runnable).filter(|lane| warp.pc[*lane] == pc).fold(0, |mask, lane| mask | 1 << lane);
            // Patient lanes reconverge like others.
            let others = warp.live & !warp.blocked & !group;
            let meet = lanes(others).map(|lane| warp.pc[lane]).filter(|other| *other > pc).min().unwrap_or(u32::MAX);
            loop {
                if fuel == 0 {
                    lanes(group).for_each(|lane| warp.pc[lane] = pc);
                    warp.patient = if others != 0 { group } else { 0 };
                    return Ok(());
                }
                fuel -= 1;
                self.executed += 1;
                *at = pc;
                let instr = &kernel.code[pc as usize];
                let mask = match instr.guard {
                    None => group,
                    Some((p, negated)) => {
                        let value = warp.predicates[p as usize];
                        group & if negated { !value } else { value }
                    }
                };
                match &instr.op {
                    Op::Alu(function, o) => {
                        if !warp.in_flight.is_empty() {
                            check_flight(warp, o)?;
                        }
                        function(&mut warp.registers, mask, o);
                    }
                    Op::Move { d, a } => {
                        if warp.in_flight.is_empty() || !super::wgmma::follow(warp, *d, *a)? {
                            let value = warp.registers[*a as usize];
                            let target = &mut warp.registers[*d as usize];
                            for lane in 0..32 {
                                target[lane] = if mask >> lane & 1 != 0 { value[lane] } else { target[lane] };
                            }
                        }
                    }
                    Op::Branch { target } => {
                        if mask == group {
                            pc = *target;
                            if others != 0 {
                                lanes(group).for_each(|lane| warp.pc[lane] = pc);
                                continue 'pick;
                            }
                            continue;
                        }
                        if mask != 0 {
                            lanes(group & !mask).for_each(|lane| warp.pc[lane] = pc + 1);
                            lanes(mask).for_each(|lane| warp.pc[lane] = *target);
                            continue 'pick;
                        }
                    }
                    Op::Exit => {
                        lanes(group & !mask).for_each(|lane| warp.pc[lane] = pc + 1);
                        exit(cluster, rank, warp, mask)?;
                        continue 'pick;
                    }
                    _ if mask == 0 => {}
                    op => match self.execute(Issue { cluster, rank, warp, mask, group, pc }, op)? {
                        Flow::Next => {}
                        Flow::Stay(staying, wait) => {
                            lanes(group).for_each(|lane| warp.pc[lane] = pc + u32::from(staying >> lane & 1 == 0));
                            block(warp, staying, wait);
                            continue 'pick;
                        }
                        Flow::Then(waiting, wait) => {
                            lanes(group).for_each(|lane| warp.pc[lane] = pc + 1);
                            block(warp, waiting, wait);
                            // The wait may already be over.
                            self.wake(cluster, rank, warp)?;
                            continue 'pick;
                        }
                    },
                }
                pc += 1;
                if pc >= meet {
                    lanes(group).for_each(|lane| warp.pc[lane] = pc);
                    continue 'pick;
                }
            }
        }
    }
}

fn block(warp: &mut Warp, mask: u32, wait: Wait) {
    if wait == Wait::None {
        return;
    }
    warp.blocked |= mask;
    lanes(mask).for_each(|lane| warp.wait[lane] = wait);
}

/// Makes lanes wait at an instruction for the lanes of `needed`, or releases the lanes that already
/// wait there. The caller continues once all have arrived.
pub(crate) fn meet(warp: &mut Warp, group: u32, mask: u32, needed: u32, pc: u32) -> Flow {
    let waiting = lanes(warp.blocked)
        .filter(|lane| warp.wait[*lane] == Wait::Warp && warp.pc[*lane] == pc)
        .fold(0, |waiting, lane| waiting | 1 << lane);
    if (mask | waiting) & needed == needed {
        // All retry it together: they are the runnable lanes with this program counter.
        warp.blocked &= !waiting;
        warp.patient = 0;
        lanes(waiting).for_each(|lane| warp.wait[lane] = Wait::None);
        lanes(group & !mask).for_each(|lane| warp.pc[lane] = pc + 1);
        return Flow::Stay(mask, Wait::None);
    }
    Flow::Stay(mask, Wait::Warp)
}

/// Checks that no `wgmma` accumulator is read or written between its issue and its wait.
pub(super) fn check_flight(warp: &Warp, registers: &[u32]) -> Result<(), String> {
    match registers.iter().find(|register| warp.in_flight.contains(register)) {
        Some(_) => Err("touches an accumulator that wgmma has in flight".into()),
        None => Ok(()),
    }
}

fn exit(cluster: &mut Cluster, rank: usize, warp: &mut Warp, mask: u32) -> Result<(), String> {
    if let Some(store) = warp.stores.iter().find(|store| mask >> store.lane & 1 != 0) {
        return Err(format!("lane {} exits before its bulk store has read shared memory", store.lane));
    }
    warp.live &= !mask;
    // Lanes that wait for lanes of the warp no longer wait for these.
    for lane in lanes(warp.blocked & warp.live) {
        if warp.wait[lane] == Wait::Warp {
            warp.wait[lane] = Wait::None;
            warp.blocked &= !(1 << lane);
        }
    }
    cluster.live_threads -= mask.count_ones();
    cluster.turn();
    if warp.live == 0 {
        let Block { barriers, live_warps, .. } = &mut cluster.blocks[rank];
        *live_warps -= 1;
        for barrier in barriers {
            barrier.turn(*live_warps * 32)?;
        }
    }
    Ok(())
}

pub(crate) fn set_predicate(warp: &mut Warp, p: u32, mask: u32, value: u32) {
    let old = &mut warp.predicates[p as usize];
    *old = *old & !mask | value & mask;
}
