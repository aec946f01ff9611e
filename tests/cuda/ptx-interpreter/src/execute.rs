//! Execution of each instruction for one warp. Warp collectives, copies and wgmma are in separate
//! modules.

use super::barrier::Mbarrier;
use super::bits::{insert, lop3};
use super::exec::{check_flight, meet, set_predicate};
use super::flow::{Flow, lanes};
use super::instr::{AtomicOp, Barrier, Logic};
use super::memory::{SHARED, shared_parts, space_of};
use super::operand::Addr;
use super::reader::bits;
use super::state::{Cluster, Issue, Machine, Wait, Warp, read, write};
use super::table::Op;

impl Machine<'_> {
    pub(super) fn execute(&mut self, issue: Issue, op: &Op) -> Result<Flow, String> {
        let Issue { cluster, rank, warp, mask, group, pc } = issue;
        match op {
            Op::Nop => {}
            Op::Setp { compare, d: (d, d2), a, b, combine } => {
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
                        // SAFETY: `locate` checked the range.
                        let value = unsafe { read(from.add(i * bytes), bytes) };
                        let unused = 64 - 8 * bytes as u32;
                        // Narrow signed values are sign-extended to the register of 16, 32 or 64
                        // bits. Its readers use only the bits of their type.
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
                        // SAFETY: `locate` checked the range.
                        unsafe { write(to.add(i * bytes), bytes, warp.registers[*s as usize][lane]) };
                    }
                }
            }
            Op::Atomic { op, ty, d, address, a, b } => {
                for lane in lanes(mask) {
                    let bytes = bits(ty) as usize / 8;
                    let at = (address.space, warp.address(address, lane), lane);
                    let place = self.locate(cluster, rank, warp, at, bytes, true)?;
                    // SAFETY: `locate` checked the range.
                    let old = unsafe { read(place, bytes) };
                    let [a, b] = [a, b].map(|s| warp.registers[*s as usize][lane]);
                    let new = atomic(*op, ty, old, a, b)?;
                    // SAFETY: `locate` checked the range.
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
            Op::Isspacep { d: (d, _), a, space } => {
                let holds = lanes(mask)
                    .filter(|lane| space_of(warp.registers[*a as usize][*lane]) == *space)
                    .fold(0, |holds, lane| holds | 1 << lane);
                set_predicate(warp, *d, mask, holds);
            }
            Op::Trap => return Err("the kernel traps".into()),
            Op::Timer { d, from, bits } => {
                let value = cluster.clock >> from & (u64::MAX >> (64 - bits));
                lanes(mask).for_each(|lane| warp.registers[*d as usize][lane] = value);
            }
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
                if matches!(op, Barrier::Arrive { .. }) && warp.unsignalled & mask != 0 {
                    return Err("no tcgen05.fence::before_thread_sync since the thread read tensor memory".into());
                }
                for lane in lanes(mask) {
                    let value = value.map(|value| warp.registers[value as usize][lane] as u32);
                    let old = mbarrier(cluster, rank, warp, address, lane, *op, value)?;
                    if let Some(d) = d {
                        warp.registers[*d as usize][lane] = old;
                    }
                }
            }
            Op::MbarrierWait { p: (p, _), address, value, parity, may_block } => {
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
                warp.unordered |= done;
                if done != mask {
                    // A blocking wait is retried when the phase is over. Lanes that wait for other
                    // barriers than the first lane's are rechecked then.
                    return Ok(if *may_block {
                        Flow::Stay(mask & !done, wait)
                    } else {
                        Flow::Then(mask & !done, Wait::Turn)
                    });
                }
            }
            Op::FenceProxy => cluster.blocks[rank].shared.fence(warp.id),
            Op::CpAsync { .. } | Op::CpAsyncCommit | Op::CpAsyncWait { .. } | Op::CpAsyncArrive { .. } => {
                self.copy(Issue { cluster, rank, warp, mask, group, pc }, op)?;
            }
            Op::BulkLoad { .. } | Op::BulkStore { .. } | Op::BulkCommit | Op::BulkWait { .. } => {
                self.bulk(Issue { cluster, rank, warp, mask, group, pc }, op)?;
            }
            Op::TensorBefore
            | Op::TensorAfter
            | Op::TensorCommit { .. }
            | Op::TensorCopy { .. }
            | Op::TensorMma { .. } => return self.tensor_op(cluster, rank, warp, op, mask),
            Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {
                if mask != warp.live {
                    return Ok(meet(warp, group, mask, warp.live, pc));
                }
                return self.wgmma(cluster, rank, warp, op);
            }
            _ => return self.warp_op(Issue { cluster, rank, warp, mask, group, pc }, op),
        }
        Ok(Flow::Next)
    }
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
    let mask = if bits(ty) == 64 { u64::MAX } else { (1 << bits(ty)) - 1 };
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
