//! A warp's execution: the runnable lanes with the least program counter go on together until they part, meet others, wait or
//! have used up their turn, so lanes that parted meet again where the code does.

use super::alu::{insert, lop3};
use super::barrier::Mbarrier;
use super::instr::{Addr, AtomicOp, Barrier, Logic, Op};
use super::memory::{SHARED, shared_parts, space_of};
use super::state::{Block, Cluster, Machine, Wait, Warp, read, write};

/// What an instruction does to the lanes that reached it.
pub(crate) enum Flow {
    /// All go on.
    Next,
    /// Lanes of the mask stay at the instruction, to try again when what they wait for has happened.
    Stay(u32, Wait),
    /// All go on to the next instruction, but lanes of the mask wait before it.
    Then(u32, Wait),
}

pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 != 0)
}

impl Machine<'_> {
    /// Runs a warp for at most `fuel` instructions; how many it was.
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
            // Patient lanes meet others again like any.
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
                    op => match self.execute(cluster, rank, warp, op, mask, group, pc)? {
                        Flow::Next => {}
                        Flow::Stay(staying, wait) => {
                            lanes(group).for_each(|lane| warp.pc[lane] = pc + u32::from(staying >> lane & 1 == 0));
                            block(warp, staying, wait);
                            continue 'pick;
                        }
                        Flow::Then(waiting, wait) => {
                            lanes(group).for_each(|lane| warp.pc[lane] = pc + 1);
                            block(warp, waiting, wait);
                            // It may be over already.
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

    #[allow(clippy::too_many_arguments)]
    fn execute(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &Op,
        mask: u32,
        group: u32,
        pc: u32,
    ) -> Result<Flow, String> {
        match op {
            Op::Nop => {}
            Op::Setp { compare, d, d2, a, b, combine } => {
                let holds = compare(&warp.registers[*a as usize], &warp.registers[*b as usize]);
                let (first, second) = match combine {
                    None => (holds, !holds),
                    Some((logic, (p, negated))) => {
                        let value = warp.predicates[*p as usize] ^ if *negated { u32::MAX } else { 0 };
                        (combined(*logic, holds, value), combined(*logic, !holds, value))
                    }
                };
                set_predicate(warp, *d, mask, first);
                if let Some(d2) = d2 {
                    set_predicate(warp, *d2, mask, second);
                }
            }
            Op::Predicate { logic, d, a, b } => {
                let [a, b] =
                    [a, b].map(|(p, negated)| warp.predicates[*p as usize] ^ if *negated { u32::MAX } else { 0 });
                set_predicate(warp, *d, mask, combined(*logic, a, b));
            }
            Op::Selp { d, a, b, p } => {
                let value = warp.predicates[p.0 as usize] ^ if p.1 { u32::MAX } else { 0 };
                let (a, b) = (warp.registers[*a as usize], warp.registers[*b as usize]);
                let d = &mut warp.registers[*d as usize];
                for lane in 0..32 {
                    let chosen = if value >> lane & 1 != 0 { a[lane] } else { b[lane] };
                    d[lane] = if mask >> lane & 1 != 0 { chosen } else { d[lane] };
                }
            }
            Op::Lop3 { d, s, table } => {
                for lane in lanes(mask) {
                    let [a, b, c] = s.map(|s| warp.registers[s as usize][lane] as u32);
                    warp.registers[*d as usize][lane] = u64::from(lop3(a, b, c, *table));
                }
            }
            Op::Bfi { d, s, bits } => {
                for lane in lanes(mask) {
                    let [field, base, position, length] = s.map(|s| warp.registers[s as usize][lane]);
                    warp.registers[*d as usize][lane] = insert(field, base, position, length, *bits);
                }
            }
            Op::Convert { convert, d, a, b } => {
                for lane in lanes(mask) {
                    let [a, b] = [a, b].map(|s| warp.registers[*s as usize][lane]);
                    warp.registers[*d as usize][lane] = convert.apply(a, b);
                }
            }
            Op::Pack { d, parts, bits } => {
                for lane in lanes(mask) {
                    let value = parts.iter().rev().fold(0, |value, part| {
                        let part = warp.registers[*part as usize][lane] & (u64::MAX >> (64 - bits));
                        (if *bits == 64 { 0 } else { value << bits }) | part
                    });
                    warp.registers[*d as usize][lane] = value;
                }
            }
            Op::Unpack { parts, a, bits } => {
                for lane in lanes(mask) {
                    let mut value = warp.registers[*a as usize][lane];
                    for part in parts {
                        warp.registers[*part as usize][lane] = value & (u64::MAX >> (64 - bits));
                        value = if *bits == 64 { 0 } else { value >> bits };
                    }
                }
            }
            Op::Load { d, address, bytes, signed } => {
                let bytes = *bytes as usize;
                for lane in lanes(mask) {
                    let at = (address.space, warp.address(address, lane), lane);
                    let from = self.locate(cluster, rank, warp, at, bytes * d.len(), false)?;
                    for (i, d) in d.iter().enumerate() {
                        // SAFETY: located.
                        let value = unsafe { read(from.add(i * bytes), bytes) };
                        let unused = 64 - 8 * bytes as u32;
                        // Narrow signed values are sign-extended to the register, which may have 16, 32 or 64 bits; its
                        // readers take as many as their type has.
                        let value = if *signed { ((value << unused) as i64 >> unused) as u64 } else { value };
                        let value = if *signed && bytes == 4 { value & 0xffff_ffff } else { value };
                        warp.registers[*d as usize][lane] = value;
                    }
                }
            }
            Op::Store { s, address, bytes } => {
                let bytes = *bytes as usize;
                check_flight(warp, s)?;
                for lane in lanes(mask) {
                    let at = (address.space, warp.address(address, lane), lane);
                    let to = self.locate(cluster, rank, warp, at, bytes * s.len(), true)?;
                    for (i, s) in s.iter().enumerate() {
                        // SAFETY: located.
                        unsafe { write(to.add(i * bytes), bytes, warp.registers[*s as usize][lane]) };
                    }
                }
            }
            Op::Atomic { op, ty, d, address, a, b } => {
                for lane in lanes(mask) {
                    let bytes = super::decode::bits(ty) as usize / 8;
                    let at = (address.space, warp.address(address, lane), lane);
                    let place = self.locate(cluster, rank, warp, at, bytes, true)?;
                    // SAFETY: located.
                    let old = unsafe { read(place, bytes) };
                    let [a, b] = [a, b].map(|s| warp.registers[*s as usize][lane]);
                    let new = atomic(*op, ty, old, a, b)?;
                    // SAFETY: located.
                    unsafe { write(place, bytes, new) };
                    warp.registers[*d as usize][lane] = old;
                }
            }
            Op::ToShared { d, a, to_generic } => {
                for lane in lanes(mask) {
                    let value = warp.registers[*a as usize][lane];
                    warp.registers[*d as usize][lane] =
                        if *to_generic { (value & 0xffff_ffff) + SHARED } else { value.wrapping_sub(SHARED) };
                }
            }
            Op::Isspacep { d, a, space } => {
                let holds = lanes(mask)
                    .filter(|lane| space_of(warp.registers[*a as usize][*lane]) == *space)
                    .fold(0, |holds, lane| holds | 1 << lane);
                set_predicate(warp, *d, mask, holds);
            }
            Op::Trap => return Err("the kernel traps".into()),
            Op::Unknown => return Err("this instruction is not modelled".into()),
            Op::Bar { id, count, wait, aligned } => {
                if *aligned && mask != warp.live {
                    return Ok(meet(warp, group, mask, warp.live, pc));
                }
                warp.blocked &= !mask;
                let lane = mask.trailing_zeros() as usize;
                let id = warp.registers[*id as usize][lane] as usize;
                let count = count.map(|count| warp.registers[count as usize][lane] as u32);
                let block = &mut cluster.blocks[rank];
                let live = block.live_warps * 32;
                let barrier = block.barriers.get_mut(id).ok_or_else(|| format!("barrier {id} of 16"))?;
                let generation = barrier.generation;
                barrier.arrive(if *aligned { 32 } else { mask.count_ones() }, count, live)?;
                if *wait {
                    return Ok(Flow::Then(mask, Wait::Bar { id, generation }));
                }
            }
            Op::ClusterArrive => {
                for lane in lanes(mask) {
                    warp.cluster_generation[lane] = cluster.generation;
                }
                cluster.arrived += mask.count_ones();
                cluster.turn();
            }
            Op::ClusterWait => {
                let waiting = lanes(mask)
                    .filter(|lane| warp.cluster_generation[*lane] == cluster.generation)
                    .fold(0, |waiting, lane| waiting | 1 << lane);
                return Ok(Flow::Then(waiting, Wait::Cluster { generation: cluster.generation }));
            }
            Op::Mapa { d, a, rank: target, generic } => {
                for lane in lanes(mask) {
                    let target = warp.registers[*target as usize][lane];
                    if target as usize >= cluster.blocks.len() {
                        return Err(format!("block {target} of a cluster of {}", cluster.blocks.len()));
                    }
                    let offset = warp.registers[*a as usize][lane] & 0xff_ffff;
                    let address = (target + 1) << 24 | offset;
                    warp.registers[*d as usize][lane] = if *generic { address + SHARED } else { address };
                }
            }
            Op::Mbarrier { op, d, address, value } => {
                for lane in lanes(mask) {
                    let value = value.map(|value| warp.registers[value as usize][lane] as u32);
                    let old = mbarrier(cluster, rank, warp, address, lane, *op, value)?;
                    warp.registers[*d as usize][lane] = old;
                }
            }
            Op::MbarrierWait { p, address, value, parity, may_block } => {
                let (mut done, mut wait) = (0, Wait::None);
                for lane in lanes(mask) {
                    let at = Self::shared_address(address, warp.address(address, lane))?;
                    let (owner, offset) = shared_parts(at, rank);
                    if owner != rank {
                        return Err("waiting at another block's mbarrier".into());
                    }
                    let value = warp.registers[*value as usize][lane];
                    if cluster.mbarrier(owner, offset)?.is_over(value, *parity) {
                        done |= 1 << lane;
                    } else if wait == Wait::None {
                        wait = Wait::Mbarrier { rank: owner, offset, value, parity: *parity };
                    }
                }
                set_predicate(warp, *p, mask, done);
                if done != mask {
                    // A wait that may block does: it is tried again when the phase is over. Lanes that wait for something
                    // else than the first of them look again then.
                    return Ok(if *may_block {
                        Flow::Stay(mask & !done, wait)
                    } else {
                        Flow::Then(mask & !done, Wait::Turn)
                    });
                }
            }
            Op::FenceProxy => cluster.blocks[rank].shared.fence(warp.id),
            Op::CpAsync { .. } | Op::CpAsyncCommit | Op::CpAsyncWait { .. } | Op::CpAsyncArrive { .. } => {
                self.copy(cluster, rank, warp, op, mask)?;
            }
            Op::BulkLoad { .. } | Op::BulkStore { .. } | Op::BulkCommit | Op::BulkWait { .. } => {
                self.bulk(cluster, rank, warp, op, mask)?;
            }
            Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {
                if mask != warp.live {
                    return Ok(meet(warp, group, mask, warp.live, pc));
                }
                return self.wgmma(cluster, rank, warp, op);
            }
            _ => return self.warp_op(cluster, rank, warp, op, mask, group, pc),
        }
        Ok(Flow::Next)
    }
}

fn block(warp: &mut Warp, mask: u32, wait: Wait) {
    if wait == Wait::None {
        return;
    }
    warp.blocked |= mask;
    lanes(mask).for_each(|lane| warp.wait[lane] = wait);
}

/// Lanes wait at an instruction for those of `needed`; or those that wait there come along. The caller goes on if all are there.
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

/// Accumulators of `wgmma` may be neither read nor written between its issue and the wait for it.
fn check_flight(warp: &Warp, registers: &[u32]) -> Result<(), String> {
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
    // Who waits for lanes of the warp need not wait for these.
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

fn combined(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

fn mbarrier(
    cluster: &mut Cluster,
    rank: usize,
    warp: &Warp,
    address: &Addr,
    lane: usize,
    op: Barrier,
    value: Option<u32>,
) -> Result<u64, String> {
    let at = Machine::shared_address(address, warp.address(address, lane))?;
    if !at.is_multiple_of(8) {
        return Err(format!("an mbarrier at {at}, which is not aligned to 8 bytes"));
    }
    let (owner, offset) = shared_parts(at, rank);
    if cluster.blocks.get(owner).is_some_and(|block| owner != rank && block.live_warps == 0) {
        return Err(format!("block {owner} has exited"));
    }
    let mut state = match op {
        Barrier::Init => Mbarrier::new(value.ok_or("no count")?)?,
        _ => cluster.mbarrier(owner, offset)?,
    };
    let old = state.bits();
    match op {
        Barrier::Init => {}
        Barrier::Invalidate => {
            cluster.set_mbarrier(owner, offset, u64::MAX)?;
            return Ok(0);
        }
        Barrier::ExpectTx => state.expect(value.unwrap_or(0))?,
        Barrier::CompleteTx => state.complete(value.unwrap_or(0))?,
        Barrier::Arrive { expect, drop } => {
            if expect {
                state.expect(value.unwrap_or(0))?;
            }
            state.arrive(if expect { 1 } else { value.unwrap_or(1) }, drop)?;
        }
    }
    cluster.set_mbarrier(owner, offset, state.bits())?;
    Ok(old)
}

pub(crate) fn atomic(op: AtomicOp, ty: &str, old: u64, a: u64, b: u64) -> Result<u64, String> {
    use half::{bf16, f16};
    let unknown = || format!("atomic {op:?} of {ty} is not modelled");
    let signed = |value: u64| if ty == "s32" { i64::from(value as i32) } else { value as i64 };
    let mask = if super::decode::bits(ty) == 64 { u64::MAX } else { (1 << super::decode::bits(ty)) - 1 };
    let pair = |f: &dyn Fn(u16, u16) -> u16| {
        u64::from(f(old as u16, a as u16)) | u64::from(f((old >> 16) as u16, (a >> 16) as u16)) << 16
    };
    let f16_sum = |x, y| f16::from_f32(f16::from_bits(x).to_f32() + f16::from_bits(y).to_f32()).to_bits();
    let bf16_sum = |x, y| bf16::from_f32(bf16::from_bits(x).to_f32() + bf16::from_bits(y).to_f32()).to_bits();
    Ok(match op {
        AtomicOp::Add => match ty {
            "f32" => u64::from((f32::from_bits(old as u32) + f32::from_bits(a as u32)).to_bits()),
            "f64" => (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
            "f16" => u64::from(f16_sum(old as u16, a as u16)),
            "bf16" => u64::from(bf16_sum(old as u16, a as u16)),
            "f16x2" => pair(&f16_sum),
            "bf16x2" => pair(&bf16_sum),
            _ => old.wrapping_add(a) & mask,
        },
        AtomicOp::Min | AtomicOp::Max if ty.starts_with(['f', 'b']) => return Err(unknown()),
        AtomicOp::Min if ty.starts_with('s') => signed(old).min(signed(a)) as u64 & mask,
        AtomicOp::Max if ty.starts_with('s') => signed(old).max(signed(a)) as u64 & mask,
        AtomicOp::Min => old.min(a),
        AtomicOp::Max => old.max(a),
        AtomicOp::And => old & a,
        AtomicOp::Or => old | a,
        AtomicOp::Xor => old ^ a,
        AtomicOp::Exchange => a,
        AtomicOp::Cas => {
            if old == a {
                b
            } else {
                old
            }
        }
        AtomicOp::Increment => {
            if old >= a {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Decrement => {
            if old == 0 || old > a {
                a
            } else {
                old - 1
            }
        }
    })
}
