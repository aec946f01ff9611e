//! `tcgen05`: tensor memory, and the products and copies that single threads issue.
//!
//! Operations of a thread execute in issue order, but at any time until a commit reports them; with
//! seed 0 when nothing else can run. Loads of tensor memory execute at their wait; until then their
//! registers hold poison. Tensor memory starts as NaN, and is allocated at the highest free
//! addresses.
//!
//! With `.cta_group::2` an instruction covers a pair of blocks, and either may issue it.
//! Descriptors and addresses refer to the same offsets in both.
//!
//! A product has 256 rows. Block 0 of the pair holds the first 128 rows of A and of the sums, and
//! the first half of the rows of B. Block 1 holds the others. Each block has the scales of its rows
//! of A and of all rows of B. A copy reads each block's shared memory and writes its own tensor
//! memory.
//!
//! The PTX ISA orders a copy before later products, and products with the same sums. It does not
//! promise that a product reads its scales before a later copy overwrites them, so such a copy is
//! an error. Products and their scales are exact; [`Accumulator`] describes their addition to the
//! f32 accumulator.

use super::accumulator::{Accumulator, Factor, Right};
use super::flow::{Flow, lanes};
use super::memory::{Shared, shared_parts};
use super::operand::ElementType;
use super::state::{Cluster, Machine, Wait, Warp};
use super::table::Op;
use super::tensor_memory::{LANES, Matrix, Pending, Product, Shape, Tensor};
use super::tma::element;

/// Poison of a register that a pending load writes.
const IN_FLIGHT: u64 = 0x7fff_dead;

/// Lane and column of an address.
fn parts(address: u64) -> (usize, usize) {
    ((address >> 16 & 0xffff) as usize, (address & 0xffff) as usize)
}

impl Machine<'_> {
    /// Issues an operation of one thread.
    pub(crate) fn tensor_op(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &Op,
        mask: u32,
    ) -> Result<Flow, String> {
        match op {
            Op::TensorBefore => warp.unsignalled &= !mask,
            Op::TensorAfter => warp.unordered &= !mask,
            _ => {
                let lane = mask.trailing_zeros() as usize;
                if mask.count_ones() != 1 {
                    return Err("more than one thread gives this".into());
                }
                let pending = self.pending(cluster, rank, warp, op, lane)?;
                let thread = warp.id * 32 + lane;
                let group = self.group(cluster, rank)?;
                cluster.check_runs(group.clone())?;
                for other in group {
                    let own = (other == rank).then_some(thread);
                    cluster.blocks[other].tensor.check_given(own, &pending)?;
                }
                cluster.blocks[rank].tensor.give(thread, pending);
                if self.random.now() {
                    while self.advance_tensor(cluster, rank)? {}
                }
            }
        }
        Ok(Flow::Next)
    }

    fn pending(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &Warp,
        op: &Op,
        lane: usize,
    ) -> Result<Pending, String> {
        let value = |register: u32| warp.registers[register as usize][lane];
        if !matches!(op, Op::TensorCommit { .. }) && warp.unordered >> lane & 1 != 0 {
            return Err("no tcgen05.fence::after_thread_sync since the thread waited".into());
        }
        let column = |address: u64| match parts(address) {
            (0, column) => Ok(column),
            (lane, _) => Err(format!("begins in lane {lane} of tensor memory")),
        };
        let group = self.group(cluster, rank)?;
        let matrix = |descriptor: u64, rows: usize, bytes: usize| -> Result<Matrix, String> {
            let matrix = Matrix::of(descriptor)?;
            for at in matrix.chunks(rows, bytes) {
                for block in &cluster.blocks[group.clone()] {
                    block.shared.check_async_read(at, 16)?;
                }
            }
            Ok(matrix)
        };
        Ok(match op {
            Op::TensorCommit { barrier, multicast } => {
                let at = Self::shared_address(barrier, warp.address(barrier, lane))?;
                let (owner, offset) = shared_parts(at, rank);
                let barriers = match multicast {
                    None => vec![(owner, offset)],
                    Some(mask) => {
                        let mask = value(*mask) as u32;
                        if mask == 0 || mask >> cluster.blocks.len() != 0 {
                            return Err(format!("multicast to {mask:#b}, with {} blocks", cluster.blocks.len()));
                        }
                        lanes(mask).map(|rank| (rank, offset)).collect()
                    }
                };
                Pending::Commit { barriers }
            }
            Op::TensorCopy { to, from } => {
                let from = matrix(value(*from), 32, 16)?;
                if from.swizzle != 0 {
                    return Err("a swizzled copy is not modelled".into());
                }
                Pending::Copy { column: column(warp.address(to, lane))?, from }
            }
            Op::TensorMma { d, a, b, instruction, scales, keep } => {
                let shape = Shape::of(value(*instruction) as u32, scales.is_some(), group.len())?;
                let scales = match scales {
                    None => None,
                    Some([a, b]) => Some([column(warp.address(a, lane))?, column(warp.address(b, lane))?]),
                };
                let keep = (warp.predicates[keep.0 as usize] >> lane & 1 != 0) != keep.1;
                let (a, b) = (matrix(value(*a), LANES, 32)?, matrix(value(*b), shape.n / group.len(), 32)?);
                Pending::Product(Box::new(Product {
                    column: column(warp.address(d, lane))?,
                    shape,
                    a,
                    b,
                    scales,
                    keep,
                }))
            }
            _ => unreachable!("the caller asks for these alone"),
        })
    }

    /// Executes the first operation in some thread's queue; returns whether there was one.
    pub(crate) fn advance_tensor(&mut self, cluster: &mut Cluster, rank: usize) -> Result<bool, String> {
        let queues = &mut cluster.blocks[rank].tensor.queues;
        let mut queues: Vec<_> = queues.iter_mut().filter(|(_, queue)| !queue.is_empty()).collect();
        if queues.is_empty() {
            return Ok(false);
        }
        let which = self.random.below(queues.len());
        let pending = queues[which].1.pop_front().expect("not empty");
        let group = self.group(cluster, rank)?;
        match pending {
            Pending::Commit { barriers } => {
                for barrier in barriers {
                    // In a pair each signal travels separately.
                    if group.len() == 1 || self.random.now() {
                        cluster.signal(barrier)?;
                    } else {
                        cluster.signals.push(barrier);
                    }
                }
            }
            Pending::Copy { column, from } => {
                for block in &mut cluster.blocks[group] {
                    for row in 0..32 {
                        let at = from.chunk(row, 0);
                        block.shared.locate(at, 16)?;
                        for i in 0..4 {
                            let bytes = &block.shared.bytes[at + 4 * i..at + 4 * i + 4];
                            let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                            for part in 0..4 {
                                *block.tensor.word(32 * part + row, column + i) = word;
                            }
                        }
                    }
                }
            }
            Pending::Product(product) => {
                let (blocks, [type_a, type_b]) = (&mut cluster.blocks[group], product.shape.types);
                let rows_b = product.shape.n / blocks.len();
                let mut b = vec![];
                for block in &mut *blocks {
                    b.extend(operand(&mut block.shared, product.b, rows_b, type_b)?);
                }
                for block in blocks {
                    let (mut a, mut b) = (operand(&mut block.shared, product.a, LANES, type_a)?, b.clone());
                    if let Some(columns) = product.scales {
                        for (i, values) in [&mut a, &mut b].into_iter().enumerate() {
                            for (row, values) in values.chunks_mut(32).enumerate() {
                                let scale = block.tensor.scale(columns[i], row, product.shape.scale_bytes[i])?;
                                values.iter_mut().for_each(|value| *value = value.scaled(scale));
                            }
                        }
                    }
                    multiply(&mut block.tensor, &product, &a, b, self.accumulator);
                }
            }
        }
        Ok(true)
    }

    /// Executes a warp-wide operation.
    pub(crate) fn tensor_warp_op(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &Op,
    ) -> Result<Flow, String> {
        if warp.live != u32::MAX {
            return Err("lanes of the warp have exited".into());
        }
        match op {
            Op::TensorAlloc { slot, columns } => {
                let columns = warp.registers[*columns as usize][0] as usize;
                let group = self.group(cluster, rank)?;
                let Some(column) = cluster.take_columns(group, rank, warp.id, columns)? else {
                    return Ok(Flow::Stay(u32::MAX, Wait::Peer));
                };
                let at = (slot.space, warp.address(slot, 0), 0);
                let to = self.locate(cluster, rank, warp, at, 4, true)?;
                // SAFETY: `locate` checked the range.
                unsafe { super::state::write(to, 4, column as u64) };
            }
            Op::TensorDealloc { address, columns } => {
                let [column, columns] = [address, columns].map(|register| warp.registers[*register as usize][0]);
                let group = self.group(cluster, rank)?;
                if !cluster.give_columns_back(group, rank, warp.id, [column as usize, columns as usize])? {
                    return Ok(Flow::Stay(u32::MAX, Wait::Peer));
                }
            }
            Op::TensorRelinquish => cluster.blocks[rank].tensor.relinquished = true,
            Op::TensorLoad { d, address } => {
                if warp.unordered != 0 {
                    return Err("no tcgen05.fence::after_thread_sync since the thread waited".into());
                }
                let addresses = [0; 32].iter().enumerate().map(|(lane, _)| warp.address(address, lane));
                let addresses: Vec<u64> = addresses.collect();
                if addresses.iter().any(|other| *other != addresses[0]) {
                    return Err("the address differs between lanes".into());
                }
                let (lane, column) = parts(addresses[0]);
                if lane != warp.id % 4 * 32 {
                    return Err(format!("warp {} reads from lane {lane} of tensor memory on", warp.id));
                }
                let columns = column..column + d.len();
                for other in self.group(cluster, rank)? {
                    let tensor = &cluster.blocks[other].tensor;
                    tensor.check(&columns)?;
                    if tensor.is_written(&columns) {
                        return Err("reads tensor memory that a product or copy under way writes".into());
                    }
                }
                d.iter().for_each(|register| warp.registers[*register as usize] = [IN_FLIGHT; 32]);
                warp.tensor_loads.push((d.clone(), column));
                warp.unsignalled = u32::MAX;
            }
            Op::TensorWait => {
                let first = warp.id % 4 * 32;
                for (registers, column) in std::mem::take(&mut warp.tensor_loads) {
                    for (i, register) in registers.iter().enumerate() {
                        for lane in lanes(u32::MAX) {
                            let word = *cluster.blocks[rank].tensor.word(first + lane, column + i);
                            warp.registers[*register as usize][lane] = u64::from(word);
                        }
                    }
                }
            }
            _ => unreachable!("the caller asks for these alone"),
        }
        Ok(Flow::Next)
    }
}

/// Values of 32 bytes of each row of an operand in a block.
fn operand(shared: &mut Shared, matrix: Matrix, rows: usize, ty: ElementType) -> Result<Vec<Factor>, String> {
    let mut values = Vec::with_capacity(rows * 32);
    for at in matrix.chunks(rows, 32) {
        shared.locate(at, 16)?;
        let bytes = &shared.bytes[at..at + 16];
        values.extend(bytes.iter().map(|byte| Factor::new(f64::from(element(&[*byte], ty)), ty)));
    }
    Ok(values)
}

/// `d = a · bᵀ`, plus the previous `d` if `keep` is set: row i is in lane i, column j in the j-th
/// column.
fn multiply(tensor: &mut Tensor, product: &Product, a: &[Factor], b: Vec<Factor>, accumulator: Accumulator) {
    let accumulator = accumulator.of(product.shape.types);
    let b = Right::new(b, 32);
    let mut d = vec![0.0; product.shape.n];
    for (lane, a) in a.chunks(32).enumerate() {
        for (column, d) in d.iter_mut().enumerate() {
            let old = *tensor.word(lane, product.column + column);
            *d = if product.keep { f64::from(f32::from_bits(old)) } else { 0.0 };
        }
        accumulator.add_row(&mut d, a, &b);
        for (column, d) in d.iter().enumerate() {
            *tensor.word(lane, product.column + column) = super::float::f32_bits(*d as f32) as u32;
        }
    }
}
