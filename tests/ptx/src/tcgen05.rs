//! `tcgen05`: tensor memory, and the products and copies that single threads give.
//!
//! What a thread gives happens in the order in which it was given, but otherwise at any time until a commit says that it
//! has: by seed 0 when nothing else can go on. Loads of tensor memory happen when they are waited for; their registers hold
//! poison until then. Tensor memory starts as NaN, and its addresses as high as can be.
//!
//! The PTX ISA orders a copy before the products after it, and products to the same sums; that a product has read its scales
//! before a later copy overwrites them is not promised, so such a copy is an error. Products and their scales are exact; how those
//! of one instruction are added to the f32 accumulator is in [`Accumulator`].

use std::collections::VecDeque;

use super::accumulator::{Accumulator, Factor, Right};
use super::convert::ue8m0;
use super::exec::{Flow, lanes};
use super::instr::{ElementType, TensorOp, TensorWarpOp};
use super::memory::shared_parts;
use super::state::{Cluster, Machine, Warp};
use super::tma::{element, swizzled};

const LANES: usize = 128;
const COLUMNS: usize = 512;

/// Poison of a register that a load will write.
const IN_FLIGHT: u64 = 0x7fff_dead;

/// What a thread has given to the tensor cores.
#[derive(Clone, Debug)]
enum Pending {
    /// Scales from shared memory to four columns.
    Copy {
        column: usize,
        from: Matrix,
    },
    Product(Box<Product>),
    /// An arrival at the mbarrier of a block.
    Commit {
        rank: usize,
        offset: usize,
    },
}

#[derive(Clone, Debug)]
struct Product {
    column: usize,
    shape: Shape,
    a: Matrix,
    b: Matrix,
    /// First columns of the scales of A and B.
    scales: Option<[usize; 2]>,
    keep: bool,
}

impl Pending {
    /// Columns that it writes, and those that it reads beside them.
    fn columns(&self) -> (core::ops::Range<usize>, Vec<core::ops::Range<usize>>) {
        match self {
            Pending::Copy { column, .. } => (*column..column + 4, vec![]),
            Pending::Product(product) => {
                let [m, n] = [product.shape.m, product.shape.n];
                let scales = product.scales.map(|[a, b]| vec![a..a + m.div_ceil(32), b..b + n.div_ceil(32)]);
                (product.column..product.column + n, scales.unwrap_or_default())
            }
            Pending::Commit { .. } => (0..0, vec![]),
        }
    }
}

fn overlap(a: &core::ops::Range<usize>, b: &core::ops::Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// A block's tensor memory.
#[derive(Debug, Default)]
pub(crate) struct Tensor {
    /// `[lane][column]`; empty until some is taken.
    words: Vec<u32>,
    /// First column and number of columns of what is taken.
    taken: Vec<(usize, usize)>,
    relinquished: bool,
    /// By thread, in the order in which it was given.
    queues: Vec<(usize, VecDeque<Pending>)>,
}

impl Tensor {
    /// Whether something has not happened yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.queues.iter().any(|(_, queue)| !queue.is_empty())
    }

    /// What is wrong when the block exits.
    pub(crate) fn check_exit(&self) -> Result<(), String> {
        if self.is_pending() {
            return Err("products are under way when the block exits".into());
        }
        if !self.taken.is_empty() {
            return Err("the block exits and has not given its tensor memory back".into());
        }
        Ok(())
    }

    fn take(&mut self, columns: usize) -> Result<usize, String> {
        if !columns.is_power_of_two() || !(32..=COLUMNS).contains(&columns) {
            return Err(format!("{columns} columns: a power of two from 32 to 512 is asked for"));
        }
        if self.relinquished {
            return Err("takes tensor memory after giving that up".into());
        }
        let free =
            |first: &usize| !self.taken.iter().any(|(at, len)| overlap(&(*first..first + columns), &(*at..at + len)));
        let first = (0..=COLUMNS - columns).rev().step_by(columns).find(free).ok_or("no tensor memory is free")?;
        self.words.resize(LANES * COLUMNS, u32::MAX);
        self.taken.push((first, columns));
        Ok(first)
    }

    fn check(&self, columns: &core::ops::Range<usize>) -> Result<(), String> {
        if self.taken.iter().any(|(first, len)| columns.start >= *first && columns.end <= first + len) {
            Ok(())
        } else {
            Err(format!("columns {columns:?} of tensor memory, of which {:?} are taken", self.taken))
        }
    }

    /// What is pending that writes some of the columns.
    fn is_written(&self, columns: &core::ops::Range<usize>) -> bool {
        self.queues.iter().flat_map(|(_, queue)| queue).any(|pending| overlap(&pending.columns().0, columns))
    }

    fn give(&mut self, thread: usize, pending: Pending) -> Result<(), String> {
        let (written, read) = pending.columns();
        if !matches!(pending, Pending::Commit { .. }) {
            self.check(&written)?;
            read.iter().try_for_each(|columns| self.check(columns))?;
        }
        for (other, queue) in &self.queues {
            for before in queue {
                let (its_written, its_read) = before.columns();
                if *other != thread
                    && (overlap(&its_written, &written) || read.iter().any(|r| overlap(r, &its_written)))
                {
                    return Err("uses what another thread's products or copies write".into());
                }
                if its_read.iter().any(|read| overlap(read, &written)) {
                    return Err("overwrites scales that a product before it may not have read".into());
                }
            }
        }
        match self.queues.iter_mut().find(|(other, _)| *other == thread) {
            Some((_, queue)) => queue.push_back(pending),
            None => self.queues.push((thread, VecDeque::from([pending]))),
        }
        Ok(())
    }

    fn word(&mut self, lane: usize, column: usize) -> &mut u32 {
        &mut self.words[lane * COLUMNS + column]
    }

    /// The scale of row `row` of those that begin at `column`, byte `byte` of its word: in lane `row mod 32`, column
    /// `row / 32`, the same in each 32 lanes.
    fn scale(&mut self, column: usize, row: usize, byte: u32) -> Result<f64, String> {
        let words = [0, 1, 2, 3].map(|part| *self.word(32 * part + row % 32, column + row / 32));
        if words.iter().any(|word| *word != words[0]) {
            return Err("scales are not the same in each 32 lanes".into());
        }
        Ok(ue8m0((words[0] >> (8 * byte)) as u8))
    }
}

/// A matrix in shared memory by its descriptor (PTX ISA, *shared memory descriptor*), contraction-major.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    start: usize,
    leading: usize,
    stride: usize,
    swizzle: usize,
}

impl Matrix {
    fn of(descriptor: u64) -> Result<Self, String> {
        let bits = |from: u32, count: u32| descriptor >> from & ((1 << count) - 1);
        for (from, count, value) in [(14, 2, 0), (30, 2, 0), (46, 3, 1), (49, 3, 0), (52, 1, 0), (53, 8, 0)] {
            if bits(from, count) != value {
                return Err(format!("bits from {from} on of the descriptor {descriptor:#x} are {}", bits(from, count)));
            }
        }
        let swizzle = match bits(61, 3) {
            0 => 0,
            2 => 128,
            4 => 64,
            6 => 32,
            other => return Err(format!("swizzle {other} is not modelled")),
        };
        let offset = |from: u32| bits(from, 14) as usize * 16;
        Ok(Self { start: offset(0), leading: offset(16), stride: offset(32), swizzle })
    }

    /// Where 16 bytes from byte `byte` of a row on lie: groups of eight rows are `stride` apart; swizzled rows have as many
    /// bytes as the swizzle spans, others 16, with the next 16 `leading` further on.
    fn chunk(&self, row: usize, byte: usize) -> usize {
        let group = self.start + row / 8 * self.stride;
        match self.swizzle {
            0 => group + byte / 16 * self.leading + row % 8 * 16,
            width => swizzled(group + row % 8 * width + byte, width),
        }
    }

    fn chunks(&self, rows: usize, bytes: usize) -> Vec<usize> {
        (0..rows).flat_map(|row| (0..bytes / 16).map(move |i| self.chunk(row, 16 * i))).collect()
    }
}

/// An instruction descriptor (PTX ISA, *instruction descriptor*).
#[derive(Clone, Copy, Debug)]
struct Shape {
    m: usize,
    n: usize,
    types: [ElementType; 2],
    /// Bytes of the words of scales that are A's and B's.
    scale_bytes: [u32; 2],
}

impl Shape {
    fn of(descriptor: u32, block_scale: bool) -> Result<Self, String> {
        let bits = |from: u32, count: u32| descriptor >> from & ((1 << count) - 1);
        // Sparsity, saturation, reserved, negation, transposition; what else the kind fixes.
        let mut fixed = vec![(0, 4, 0), (6, 1, 0), (13, 2, 0), (15, 2, 0)];
        if block_scale {
            fixed.extend([(23, 1, 1), (24, 3, 0), (31, 1, 0)]);
        } else {
            fixed.extend([(4, 2, 1), (23, 1, 0), (29, 1, 0), (30, 2, 0)]);
        }
        for (from, count, value) in fixed {
            if bits(from, count) != value {
                return Err(format!("bits from {from} on of the descriptor {descriptor:#x} are {}", bits(from, count)));
            }
        }
        let ty = |from: u32| match bits(from, 3) {
            0 => Ok(ElementType::E4m3),
            1 => Ok(ElementType::E5m2),
            other => Err(format!("operands of type {other} are not modelled")),
        };
        let m = if block_scale { bits(27, 2) << 7 } else { bits(24, 5) << 4 } as usize;
        let n = (bits(17, 6) << 3) as usize;
        if m != 128 || !n.is_multiple_of(16) || !(16..=256).contains(&n) {
            return Err(format!("a product of {m} by {n} is not modelled, or not possible"));
        }
        let scale_bytes = if block_scale { [bits(29, 2), bits(4, 2)] } else { [0; 2] };
        Ok(Self { m, n, types: [ty(7)?, ty(10)?], scale_bytes })
    }
}

/// Lane and column of an address.
fn parts(address: u64) -> (usize, usize) {
    ((address >> 16 & 0xffff) as usize, (address & 0xffff) as usize)
}

impl Machine<'_> {
    /// What one thread gives.
    pub(crate) fn tensor_op(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &TensorOp,
        mask: u32,
    ) -> Result<Flow, String> {
        match op {
            TensorOp::Before => warp.unsignalled &= !mask,
            TensorOp::After => warp.unordered &= !mask,
            _ => {
                let lane = mask.trailing_zeros() as usize;
                if mask.count_ones() != 1 {
                    return Err("more than one thread gives this".into());
                }
                let pending = self.pending(cluster, rank, warp, op, lane)?;
                cluster.blocks[rank].tensor.give(warp.id * 32 + lane, pending)?;
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
        op: &TensorOp,
        lane: usize,
    ) -> Result<Pending, String> {
        let value = |register: u32| warp.registers[register as usize][lane];
        if !matches!(op, TensorOp::Commit { .. }) && warp.unordered >> lane & 1 != 0 {
            return Err("no tcgen05.fence::after_thread_sync since the thread waited".into());
        }
        let column = |address: u64| match parts(address) {
            (0, column) => Ok(column),
            (lane, _) => Err(format!("begins in lane {lane} of tensor memory")),
        };
        let matrix = |descriptor: u64, rows: usize, bytes: usize| -> Result<Matrix, String> {
            let matrix = Matrix::of(descriptor)?;
            for at in matrix.chunks(rows, bytes) {
                cluster.blocks[rank].shared.check_async_read(at, 16)?;
            }
            Ok(matrix)
        };
        Ok(match op {
            TensorOp::Commit { barrier } => {
                let at = Self::shared_address(barrier, warp.address(barrier, lane))?;
                let (rank, offset) = shared_parts(at, rank);
                Pending::Commit { rank, offset }
            }
            TensorOp::Copy { to, from } => {
                let from = matrix(value(*from), 32, 16)?;
                if from.swizzle != 0 {
                    return Err("a swizzled copy is not modelled".into());
                }
                Pending::Copy { column: column(warp.address(to, lane))?, from }
            }
            TensorOp::Mma { d, a, b, instruction, scales, keep } => {
                let shape = Shape::of(value(*instruction) as u32, scales.is_some())?;
                let scales = match scales {
                    None => None,
                    Some([a, b]) => Some([column(warp.address(a, lane))?, column(warp.address(b, lane))?]),
                };
                let keep = (warp.predicates[keep.0 as usize] >> lane & 1 != 0) != keep.1;
                let (a, b) = (matrix(value(*a), shape.m, 32)?, matrix(value(*b), shape.n, 32)?);
                Pending::Product(Box::new(Product {
                    column: column(warp.address(d, lane))?,
                    shape,
                    a,
                    b,
                    scales,
                    keep,
                }))
            }
            TensorOp::Before | TensorOp::After => unreachable!("fences give nothing"),
        })
    }

    /// Lets the first of what some thread has given happen; whether there was any.
    pub(crate) fn advance_tensor(&mut self, cluster: &mut Cluster, rank: usize) -> Result<bool, String> {
        let block = &mut cluster.blocks[rank];
        let mut queues: Vec<_> = block.tensor.queues.iter_mut().filter(|(_, queue)| !queue.is_empty()).collect();
        if queues.is_empty() {
            return Ok(false);
        }
        let which = self.random.below(queues.len());
        let pending = queues[which].1.pop_front().expect("not empty");
        match pending {
            Pending::Commit { rank, offset } => {
                if cluster.blocks.get(rank).is_none_or(|block| block.live_warps == 0) {
                    return Err(format!("a commit arrives in block {rank}, which has exited"));
                }
                let mut state = cluster.mbarrier(rank, offset)?;
                state.arrive(1, false)?;
                cluster.set_mbarrier(rank, offset, state.bits())?;
            }
            Pending::Copy { column, from } => {
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
            Pending::Product(product) => {
                let mut operand = |matrix: Matrix, rows: usize, ty: ElementType| -> Result<Vec<Factor>, String> {
                    let mut values = Vec::with_capacity(rows * 32);
                    for at in matrix.chunks(rows, 32) {
                        block.shared.locate(at, 16)?;
                        let bytes = &block.shared.bytes[at..at + 16];
                        values.extend(bytes.iter().map(|byte| Factor::new(f64::from(element(&[*byte], ty)), ty)));
                    }
                    Ok(values)
                };
                let mut a = operand(product.a, product.shape.m, product.shape.types[0])?;
                let mut b = operand(product.b, product.shape.n, product.shape.types[1])?;
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
        Ok(true)
    }

    /// What all lanes of a warp do together.
    pub(crate) fn tensor_warp_op(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        op: &TensorWarpOp,
    ) -> Result<(), String> {
        if warp.live != u32::MAX {
            return Err("lanes of the warp have exited".into());
        }
        match op {
            TensorWarpOp::Alloc { slot, columns } => {
                let columns = warp.registers[*columns as usize][0] as usize;
                let address = cluster.blocks[rank].tensor.take(columns)? as u64;
                let at = (slot.space, warp.address(slot, 0), 0);
                let to = self.locate(cluster, rank, warp, at, 4, true)?;
                // SAFETY: located.
                unsafe { super::state::write(to, 4, address) };
            }
            TensorWarpOp::Dealloc { address, columns } => {
                let [address, columns] = [address, columns].map(|register| warp.registers[*register as usize][0]);
                let tensor = &mut cluster.blocks[rank].tensor;
                let at = tensor.taken.iter().position(|taken| *taken == (address as usize, columns as usize));
                let at = at.ok_or_else(|| format!("gives back {columns} columns at {address:#x}, not taken so"))?;
                if tensor.is_pending() {
                    return Err("gives tensor memory back while products are under way".into());
                }
                tensor.taken.swap_remove(at);
            }
            TensorWarpOp::Relinquish => cluster.blocks[rank].tensor.relinquished = true,
            TensorWarpOp::Load { d, address } => {
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
                let tensor = &cluster.blocks[rank].tensor;
                tensor.check(&columns)?;
                if tensor.is_written(&columns) {
                    return Err("reads tensor memory that a product or copy under way writes".into());
                }
                d.iter().for_each(|register| warp.registers[*register as usize] = [IN_FLIGHT; 32]);
                warp.tensor_loads.push((d.clone(), column));
                warp.unsignalled = u32::MAX;
            }
            TensorWarpOp::Wait => {
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
        }
        Ok(())
    }
}

/// `d = a · bᵀ`, added to what `d` holds if that is kept: row i in lane i, column j in the j-th column.
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
            *tensor.word(lane, product.column + column) = super::alu::f32_bits(*d as f32) as u32;
        }
    }
}
