//! Tensor memory of a block, and the queued products, copies of scales and commits of its threads.

use std::collections::VecDeque;

use super::convert::ue8m0;
use super::operand::ElementType;
use super::tma::swizzled;

pub(crate) const LANES: usize = 128;
pub(crate) const COLUMNS: usize = 512;

/// Queued operation of a thread.
#[derive(Clone, Debug)]
pub(crate) enum Pending {
    /// Copy of scales from shared memory to four columns.
    Copy {
        column: usize,
        from: Matrix,
    },
    Product(Box<Product>),
    /// Arrivals at mbarriers: blocks and offsets.
    Commit {
        barriers: Vec<(usize, usize)>,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub column: usize,
    pub shape: Shape,
    pub a: Matrix,
    pub b: Matrix,
    /// First columns of the scales of A and B.
    pub scales: Option<[usize; 2]>,
    pub keep: bool,
}

impl Pending {
    /// Columns that it writes, and other columns that it reads.
    pub(crate) fn columns(&self) -> (core::ops::Range<usize>, Vec<core::ops::Range<usize>>) {
        match self {
            Pending::Copy { column, .. } => (*column..column + 4, vec![]),
            Pending::Product(product) => {
                let [rows, n] = [LANES, product.shape.n];
                let scales = product.scales.map(|[a, b]| vec![a..a + rows.div_ceil(32), b..b + n.div_ceil(32)]);
                (product.column..product.column + n, scales.unwrap_or_default())
            }
            Pending::Commit { .. } => (0..0, vec![]),
        }
    }
}

pub(crate) fn overlap(a: &core::ops::Range<usize>, b: &core::ops::Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Tensor memory of a block.
#[derive(Debug, Default)]
pub(crate) struct Tensor {
    /// `[lane][column]`; empty until the first allocation.
    pub words: Vec<u32>,
    /// First column and number of columns of each allocation.
    pub taken: Vec<(usize, usize)>,
    pub relinquished: bool,
    /// Joint request of a warp with one of the pair's other block, pending or just done.
    pub together: Option<Together>,
    /// Operations by thread, in issue order.
    pub queues: Vec<(usize, VecDeque<Pending>)>,
}

/// Joint allocation or deallocation of a pair's tensor memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Together {
    pub warp: usize,
    pub gives_back: bool,
    /// First column; 0 until it is allocated.
    pub column: usize,
    pub columns: usize,
    pub done: bool,
}

impl Tensor {
    /// Whether an operation is pending.
    pub(crate) fn is_pending(&self) -> bool {
        self.queues.iter().any(|(_, queue)| !queue.is_empty())
    }

    /// Checks that nothing is pending or allocated when the block exits.
    pub(crate) fn check_exit(&self) -> Result<(), String> {
        if self.is_pending() {
            return Err("products are under way when the block exits".into());
        }
        if !self.taken.is_empty() {
            return Err("the block exits and has not given its tensor memory back".into());
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, columns: usize) -> Result<usize, String> {
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

    /// Deallocates columns that [`take`](Self::take) allocated.
    pub(crate) fn give_back(&mut self, column: usize, columns: usize) -> Result<(), String> {
        let at = self.taken.iter().position(|taken| *taken == (column, columns));
        let at = at.ok_or_else(|| format!("gives back {columns} columns at {column:#x}, not taken so"))?;
        if self.is_pending() {
            return Err("gives tensor memory back while products are under way".into());
        }
        self.taken.swap_remove(at);
        Ok(())
    }

    pub(crate) fn check(&self, columns: &core::ops::Range<usize>) -> Result<(), String> {
        if self.together.is_some_and(|together| together.gives_back && !together.done) {
            return Err("uses tensor memory that a block of the pair gives back".into());
        }
        if self.taken.iter().any(|(first, len)| columns.start >= *first && columns.end <= first + len) {
            Ok(())
        } else {
            Err(format!("columns {columns:?} of tensor memory, of which {:?} are taken", self.taken))
        }
    }

    /// Whether a pending operation writes some of the columns.
    pub(crate) fn is_written(&self, columns: &core::ops::Range<usize>) -> bool {
        self.queues.iter().flat_map(|(_, queue)| queue).any(|pending| overlap(&pending.columns().0, columns))
    }

    /// Checks whether `thread` may issue an operation that uses this memory. None is a thread of
    /// another block.
    pub(crate) fn check_given(&self, thread: Option<usize>, pending: &Pending) -> Result<(), String> {
        let (written, read) = pending.columns();
        if !matches!(pending, Pending::Commit { .. }) {
            self.check(&written)?;
            read.iter().try_for_each(|columns| self.check(columns))?;
        }
        for (other, queue) in &self.queues {
            for before in queue {
                let (its_written, its_read) = before.columns();
                if Some(*other) != thread
                    && (overlap(&its_written, &written) || read.iter().any(|r| overlap(r, &its_written)))
                {
                    return Err("uses what another thread's products or copies write".into());
                }
                if its_read.iter().any(|read| overlap(read, &written)) {
                    return Err("overwrites scales that a product before it may not have read".into());
                }
            }
        }
        Ok(())
    }

    pub(crate) fn give(&mut self, thread: usize, pending: Pending) {
        match self.queues.iter_mut().find(|(other, _)| *other == thread) {
            Some((_, queue)) => queue.push_back(pending),
            None => self.queues.push((thread, VecDeque::from([pending]))),
        }
    }

    pub(crate) fn word(&mut self, lane: usize, column: usize) -> &mut u32 {
        &mut self.words[lane * COLUMNS + column]
    }

    /// Scale of row `row` of the scales at `column`, from byte `byte` of its word. The word is in
    /// lane `row mod 32`, column `row / 32`, repeated in each 32 lanes.
    pub(crate) fn scale(&mut self, column: usize, row: usize, byte: u32) -> Result<f64, String> {
        let words = [0, 1, 2, 3].map(|part| *self.word(32 * part + row % 32, column + row / 32));
        if words.iter().any(|word| *word != words[0]) {
            return Err("scales are not the same in each 32 lanes".into());
        }
        Ok(ue8m0((words[0] >> (8 * byte)) as u8))
    }
}

/// Matrix in shared memory by its descriptor (PTX ISA, *shared memory descriptor*).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub start: usize,
    pub leading: usize,
    pub stride: usize,
    pub swizzle: usize,
}

impl Matrix {
    pub(crate) fn of(descriptor: u64) -> Result<Self, String> {
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

    /// The same for `wgmma`, whose descriptors have fewer fields.
    pub(crate) fn of_warpgroup(descriptor: u64) -> Result<Self, String> {
        let field = |at: u32| ((descriptor >> at & 0x3fff) << 4) as usize;
        let swizzle = [0, 128, 64, 32][(descriptor >> 62) as usize];
        if descriptor >> 49 & 7 != 0 {
            return Err("a base offset in a matrix descriptor is not modelled".into());
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// Address of the 16 bytes at byte `byte` of a row. Groups of eight rows are `stride` apart. A
    /// swizzled row spans the swizzle's bytes; otherwise a row has 16 bytes, and the next 16 are
    /// `leading` further.
    pub(crate) fn chunk(&self, row: usize, byte: usize) -> usize {
        let group = self.start + row / 8 * self.stride;
        match self.swizzle {
            0 => group + byte / 16 * self.leading + row % 8 * 16,
            width => swizzled(group + row % 8 * width + byte, width),
        }
    }

    pub(crate) fn chunks(&self, rows: usize, bytes: usize) -> Vec<usize> {
        (0..rows).flat_map(|row| (0..bytes / 16).map(move |i| self.chunk(row, 16 * i))).collect()
    }

    /// Addresses of the 16 bytes of each eight rows, for each of 16 steps of the contraction. The
    /// 16-bit elements of 64 rows are contiguous in a step, and eight steps are swizzled together.
    /// The next eight steps are `stride` further, the next 64 rows `leading` (PTX ISA, *Canonical
    /// layouts*; CUTLASS, `mma_traits_sm90_gmma.hpp`).
    pub(crate) fn chunks_of_columns(&self, rows: usize) -> Result<Vec<usize>, String> {
        if self.swizzle != 128 || !self.start.is_multiple_of(1024) {
            return Err(
                "contiguous rows without 128-byte swizzle, or not from a multiple of 1024 bytes on, are not modelled"
                    .into(),
            );
        }
        let chunk = |k: usize, row: usize| {
            let part = self.start + row / 64 * self.leading + k / 8 * self.stride;
            swizzled(part + k % 8 * 128 + row % 64 * 2, 128)
        };
        Ok((0..16).flat_map(|k| (0..rows).step_by(8).map(move |row| chunk(k, row))).collect())
    }
}

/// Instruction descriptor (PTX ISA, *instruction descriptor*).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub n: usize,
    pub types: [ElementType; 2],
    /// Bytes of the scale words that belong to A and B.
    pub scale_bytes: [u32; 2],
}

impl Shape {
    /// Shape of a product over `blocks` blocks. Each has [`LANES`] rows of the sums and of A, and
    /// its share of the rows of B.
    pub(crate) fn of(descriptor: u32, block_scale: bool, blocks: usize) -> Result<Self, String> {
        let bits = |from: u32, count: u32| descriptor >> from & ((1 << count) - 1);
        // Sparsity, saturation, reserved, negation, transposition; then other bits that the kind
        // fixes.
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
        if m != LANES * blocks || !n.is_multiple_of(16 * blocks) || !(16..=256).contains(&n) {
            return Err(format!("a product of {m} by {n} in {blocks} blocks is not modelled, or not possible"));
        }
        let scale_bytes = if block_scale { [bits(29, 2), bits(4, 2)] } else { [0; 2] };
        Ok(Self { n, types: [ty(7)?, ty(10)?], scale_bytes })
    }
}
