//! `wgmma`: the warps of a warpgroup issue together. A wait reads the operands from shared memory
//! and writes the accumulators; operands may also be read at a random earlier time. Until the wait,
//! accumulators in flight hold NaN, and registers of A must keep their values.
//!
//! Products are exact; [`Accumulator`] describes their addition to the f32 accumulator.

use super::accumulator::{Accumulator, Factor, Right};
use super::flow::Flow;
use super::instr::Wgmma;
use super::operand::ElementType;
use super::state::{Cluster, Machine, Wait, Warp};
use super::table::Op;
use super::tensor_memory::Matrix;
use super::tma::element;
use super::warpgroup::{Accumulators, Gathered, Held, Issued};

/// Poison of a register in flight.
const IN_FLIGHT: u64 = 0x7fff_dead;

/// Handles a register copy while accumulators are in flight. Returns true if `a` is one of them:
/// the copy is then made once its value is known. The compiler copies accumulators from one
/// variable to the next between operations; finally they share one register.
pub(crate) fn follow(warp: &mut Warp, d: u32, a: u32) -> Result<bool, String> {
    let original = warp.moved.iter().find(|(copy, _)| *copy == a).map_or(a, |(_, original)| *original);
    if warp.in_flight.contains(&d) {
        if !warp.moved.iter().any(|(copy, _)| *copy == d) {
            return Err("overwrites an accumulator that wgmma has in flight".into());
        }
        warp.moved.retain(|(copy, _)| *copy != d);
        warp.in_flight.retain(|register| *register != d);
    }
    if !warp.in_flight.contains(&original) {
        return Ok(false);
    }
    warp.moved.push((d, original));
    warp.in_flight.push(d);
    Ok(true)
}

/// Replaces accumulators in flight by their copies, if an operation uses the copies. Returns the
/// old name of the first.
fn rename(warp: &mut Warp, registers: &[u32]) -> Result<Option<u32>, String> {
    let old = |warp: &Warp, d: u32| warp.moved.iter().find(|(copy, _)| *copy == d).map(|(_, original)| *original);
    let Some(first) = old(warp, registers[0]) else { return Ok(None) };
    let originals: Option<Vec<u32>> = registers.iter().map(|d| old(warp, *d)).collect();
    let originals = originals.ok_or("some of the accumulators are copies of others in flight")?;
    warp.in_flight.retain(|register| !originals.contains(register));
    warp.moved.retain(|(copy, _)| !registers.contains(copy));
    Ok(Some(first))
}

impl Machine<'_> {
    pub(crate) fn wgmma(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &Op,
    ) -> Result<Flow, String> {
        match op {
            Op::WgmmaCommit => warp.groups.push_back(warp.issued),
            Op::WgmmaWait { pending } => {
                let mut until = None;
                while warp.groups.len() > *pending as usize {
                    until = warp.groups.pop_front();
                }
                if let Some(until) = until {
                    self.complete(cluster, rank, warp, until)?;
                }
            }
            Op::Wgmma(wgmma) => return self.issue(cluster, rank, warp, wgmma),
            _ => {}
        }
        Ok(Flow::Next)
    }

    fn issue(&mut self, cluster: &mut Cluster, rank: usize, warp: &mut Warp, op: &Wgmma) -> Result<Flow, String> {
        if warp.live != u32::MAX {
            return Err("lanes of the warp have exited".into());
        }
        let block = &mut cluster.blocks[rank];
        let group = block.warpgroups.get_mut(warp.id / 4).ok_or("the warp belongs to no whole warpgroup")?;
        let member = warp.id % 4;
        if op.transposed != [false; 2] && op.types[0].bytes() != 2 {
            return Err("only 16-bit operands can be M- or N-major".into());
        }
        if group.arrived == [false; 4] {
            group.instruction = Some(op.d[0]);
        } else if group.instruction != Some(op.d[0]) {
            return Err("the warps of the warpgroup issue different operations".into());
        }
        let renamed = rename(warp, &op.d)?;
        let uniform = |register: u32| -> Result<u64, String> {
            let values = warp.registers[register as usize];
            if values.iter().any(|value| *value != values[0]) {
                return Err("a descriptor differs between lanes".into());
            }
            Ok(values[0])
        };
        let from_registers = op.a.len() == 4;
        let keep = match op.scale_d {
            None => true,
            Some((p, negated)) => match warp.predicates[p as usize] ^ if negated { u32::MAX } else { 0 } {
                0 => false,
                u32::MAX => true,
                _ => return Err("scale-d differs between lanes".into()),
            },
        };
        group.gathered[member] = Some(Gathered {
            accumulators: op.d.iter().map(|d| warp.registers[*d as usize]).collect(),
            a: from_registers.then(|| op.a.iter().map(|a| warp.registers[*a as usize]).collect()),
            descriptors: [if from_registers { 0 } else { uniform(op.a[0])? }, uniform(op.b)?],
            keep,
            renamed,
        });
        group.arrived[member] = true;
        for d in op.d.iter() {
            warp.registers[*d as usize] = [IN_FLIGHT; 32];
        }
        if !warp.in_flight.contains(&op.d[0]) {
            warp.in_flight.extend(op.d.iter());
        }
        warp.issued += 1;
        let issued = warp.issued;
        if from_registers {
            let held = |a: &u32| Held { register: *a, values: warp.registers[*a as usize], until: issued };
            warp.held.extend(op.a.iter().map(held));
        }
        if group.arrived != [true; 4] {
            return Ok(Flow::Then(u32::MAX, Wait::Warpgroup { issued }));
        }
        group.arrived = [false; 4];
        group.issued = issued;
        let gathered = std::mem::take(&mut group.gathered).map(|gathered| gathered.expect("all have arrived"));
        let first = &gathered[0];
        if gathered.iter().any(|other| other.descriptors != first.descriptors || other.keep != first.keep) {
            return Err("descriptors or scale-d differ between the warps of the warpgroup".into());
        }
        let a_registers = from_registers.then(|| a_elements(&gathered, op.types[0]));
        let mut operation = Issued {
            index: issued,
            n: op.n,
            types: op.types,
            negate: op.negate,
            transposed: op.transposed,
            d: op.d[0],
            keep: first.keep,
            operands: None,
            a_registers,
            descriptors: first.descriptors,
        };
        if let Some(old) = first.renamed {
            let all = group.flight.iter_mut().find(|flight| flight.registers[0] == old);
            let all = all.filter(|flight| flight.registers.len() == op.d.len());
            all.ok_or("accumulators in flight are copied to another shape")?.registers = op.d.clone();
            group.queue.iter_mut().filter(|issued| issued.d == old).for_each(|issued| issued.d = op.d[0]);
        }
        let flight = group.flight.iter_mut().find(|flight| flight.registers[0] == op.d[0]);
        match flight {
            Some(flight) if flight.registers == op.d => {
                for (warp, gathered) in gathered.into_iter().enumerate() {
                    if std::mem::take(&mut flight.taken[warp]) {
                        flight.values[warp] = gathered.accumulators;
                    }
                }
                flight.last = issued;
            }
            Some(_) => return Err("accumulators in flight are used with another shape".into()),
            None => {
                let registers = op.d.clone();
                let values = gathered.map(|gathered| gathered.accumulators);
                group.flight.push(Accumulators { registers, values, last: issued, taken: [false; 4] });
            }
        }
        check_operands(cluster, rank, &operation)?;
        if self.random.now() {
            read_operands(cluster, rank, &mut operation)?;
        }
        cluster.blocks[rank].warpgroups[warp.id / 4].queue.push(operation);
        Ok(Flow::Next)
    }

    /// Completes all operations up to number `until` and gives the warp its accumulators.
    fn complete(&mut self, cluster: &mut Cluster, rank: usize, warp: &mut Warp, until: u64) -> Result<(), String> {
        if warp.held.iter().any(|held| held.until <= until && held.values != warp.registers[held.register as usize]) {
            return Err("a register of A was overwritten while wgmma had it in flight".into());
        }
        warp.held.retain(|held| held.until > until);
        let index = warp.id / 4;
        let Some(group) = cluster.blocks[rank].warpgroups.get_mut(index) else { return Ok(()) };
        let queue = std::mem::take(&mut group.queue);
        let (now, later) = queue.into_iter().partition(|operation: &Issued| operation.index <= until);
        group.queue = later;
        for mut operation in now {
            read_operands(cluster, rank, &mut operation)?;
            let group = &mut cluster.blocks[rank].warpgroups[index];
            let flight = group.flight.iter_mut().find(|flight| flight.registers[0] == operation.d);
            multiply(&operation, flight.ok_or("accumulators are not in flight")?, self.accumulator);
        }
        let group = &mut cluster.blocks[rank].warpgroups[index];
        let member = warp.id % 4;
        let copies = warp.moved.clone();
        for flight in group.flight.iter_mut().filter(|flight| flight.last <= until && !flight.taken[member]) {
            for (register, values) in flight.registers.iter().zip(&flight.values[member]) {
                warp.registers[*register as usize] = *values;
            }
            flight.taken[member] = true;
            warp.in_flight.retain(|register| !flight.registers.contains(register));
            for (copy, original) in copies.iter().copied() {
                let Some(at) = flight.registers.iter().position(|register| *register == original) else { continue };
                warp.registers[copy as usize] = flight.values[member][at];
                warp.moved.retain(|(moved, _)| *moved != copy);
                warp.in_flight.retain(|register| *register != copy);
            }
        }
        group.flight.retain(|flight| flight.taken != [true; 4]);
        Ok(())
    }
}

/// 16-byte chunks of operand 0 (A) or 1 (B): rows of 32 bytes, or the rows' elements step by step.
fn chunks(operation: &Issued, side: usize) -> Result<Vec<usize>, String> {
    let (matrix, rows) = (Matrix::of_warpgroup(operation.descriptors[side])?, [64, operation.n][side]);
    if operation.transposed[side] { matrix.chunks_of_columns(rows) } else { Ok(matrix.chunks(rows, 32)) }
}

fn check_operands(cluster: &mut Cluster, rank: usize, operation: &Issued) -> Result<(), String> {
    let first = usize::from(operation.a_registers.is_some());
    for side in first..2 {
        for at in chunks(operation, side)? {
            cluster.shared(rank)?.check_async_read(at, 16)?;
        }
    }
    Ok(())
}

fn read_operands(cluster: &mut Cluster, rank: usize, operation: &mut Issued) -> Result<(), String> {
    if operation.operands.is_some() {
        return Ok(());
    }
    let shared = cluster.shared(rank)?;
    let a_registers = operation.a_registers.take();
    let mut matrix = |side: usize| -> Result<Vec<f32>, String> {
        let (ty, rows) = (operation.types[side], [64, operation.n][side]);
        let k = 32 / ty.bytes();
        let mut values = Vec::with_capacity(rows * k);
        for at in chunks(operation, side)? {
            shared.locate(at, 16)?;
            values.extend(shared.bytes[at..at + 16].chunks(ty.bytes()).map(|bits| element(bits, ty)));
        }
        if operation.transposed[side] {
            values = (0..rows * k).map(|i| values[i % k * rows + i / k]).collect();
        }
        Ok(values)
    };
    let b = matrix(1)?;
    let a = a_registers.map_or_else(|| matrix(0), Ok)?;
    operation.operands = Some((a, b));
    Ok(())
}

/// A `[64][k]` from the registers of four warps, with E elements per register. Register `r` of lane
/// `l` has the elements of row `l / 4 + 8 (r % 2)`, starting at `(l % 4) E + (r / 2) 4 E`.
fn a_elements(gathered: &[Gathered; 4], ty: ElementType) -> Vec<f32> {
    let per = 4 / ty.bytes();
    let k = 8 * per;
    let mut a = vec![0.0; 64 * k];
    for (warp, gathered) in gathered.iter().enumerate() {
        for (r, values) in gathered.a.as_ref().expect("A is in registers").iter().enumerate() {
            for lane in 0..32 {
                let row = warp * 16 + lane / 4 + 8 * (r % 2);
                let bytes = (values[lane] as u32).to_le_bytes();
                for (e, bits) in bytes.chunks(ty.bytes()).enumerate() {
                    a[row * k + lane % 4 * per + r / 2 * 4 * per + e] = element(bits, ty);
                }
            }
        }
    }
    a
}

/// `d = a · bᵀ + d`. Accumulator `4 j + 2 h + i` of lane l is at row `l / 4 + 8 h`, column `8 j + 2
/// (l % 4) + i` of the warp's 16 rows.
fn multiply(operation: &Issued, flight: &mut Accumulators, accumulator: Accumulator) {
    let (a, b) = operation.operands.as_ref().expect("read before");
    let k = a.len() / 64;
    let accumulator = accumulator.of(operation.types);
    let sign = if operation.negate[0] != operation.negate[1] { -1.0 } else { 1.0 };
    let factors = |values: &[f32], sign: f64, ty| -> Vec<Factor> {
        values.iter().map(|value| Factor::new(f64::from(*value) * sign, ty)).collect()
    };
    let b = Right::new(factors(b, 1.0, operation.types[1]), k);
    let mut d = vec![0.0; operation.n];
    for (row, a) in factors(a, sign, operation.types[0]).chunks(k).enumerate() {
        let values = &mut flight.values[row / 16];
        let place = |column: usize| (column / 8 * 4 + row % 16 / 8 * 2 + column % 2, row % 8 * 4 + column % 8 / 2);
        for (column, d) in d.iter_mut().enumerate() {
            let (register, lane) = place(column);
            *d = if operation.keep { f64::from(f32::from_bits(values[register][lane] as u32)) } else { 0.0 };
        }
        accumulator.add_row(&mut d, a, &b);
        for (column, d) in d.iter().enumerate() {
            let (register, lane) = place(column);
            values[register][lane] = super::float::f32_bits(*d as f32);
        }
    }
}
