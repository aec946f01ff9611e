//! Warp-wide instructions: shuffles, votes, matrix loads and products, with the fragment layouts of
//! the PTX ISA.

use half::f16;

use super::accumulator::{Accumulator, Factor, Right};
use super::convert::ue8m0;
use super::exec::{meet, set_predicate};
use super::execute::atomic;
use super::float::f32_bits;
use super::flow::{Flow, lanes};
use super::instr::{Mma, Shuffle, Vote, Wmma};
use super::operand::{Addr, ElementType};
use super::state::{Cluster, Issue, Machine, Warp, read, write};
use super::table::Op;
use super::tma::element;

impl Machine<'_> {
    pub(crate) fn warp_op(&mut self, issue: Issue, op: &Op) -> Result<Flow, String> {
        let Issue { cluster, rank, warp, mask, group, pc } = issue;
        // Participating lanes: the member mask, or all lanes for `.aligned`.
        let members = match op {
            Op::SyncWarp { mask: members }
            | Op::Shuffle { mask: members, .. }
            | Op::Vote { mask: members, .. }
            | Op::Ballot { mask: members, .. }
            | Op::Match { mask: members, .. }
            | Op::Redux { mask: members, .. }
            | Op::Elect { mask: members, .. } => {
                warp.registers[*members as usize][mask.trailing_zeros() as usize] as u32 & warp.live
            }
            Op::Activemask { .. } => mask,
            _ => warp.live,
        };
        if mask & members != mask {
            return Err(format!("lanes {:#x} are not in the member mask {members:#x}", mask & !members));
        }
        if mask != members {
            return Ok(meet(warp, group, mask, members, pc));
        }
        match op {
            Op::SyncWarp { .. } => {}
            Op::Shuffle { kind, d, a, b, c, .. } => shuffle(warp, *kind, *d, [*a, *b, *c], mask)?,
            Op::Ballot { d, p, .. } => {
                let value = warp.predicates[p.0 as usize] ^ if p.1 { u32::MAX } else { 0 };
                lanes(mask).for_each(|lane| warp.registers[*d as usize][lane] = u64::from(value & mask));
            }
            Op::Vote { kind, d: (d, _), p, .. } => {
                let value = warp.predicates[p.0 as usize] ^ if p.1 { u32::MAX } else { 0 };
                let votes = value & mask;
                let holds = match kind {
                    Vote::All => votes == mask,
                    Vote::Any => votes != 0,
                    Vote::Uniform => votes == 0 || votes == mask,
                };
                set_predicate(warp, *d, mask, if holds { u32::MAX } else { 0 });
            }
            Op::Match { d: (d, p), a, all, .. } => {
                let values = warp.registers[*a as usize];
                let same = |lane: usize| {
                    lanes(mask).filter(|other| values[*other] == values[lane]).fold(0u32, |same, l| same | 1 << l)
                };
                let everywhere = same(mask.trailing_zeros() as usize) == mask;
                for lane in lanes(mask) {
                    let value = if !all {
                        same(lane)
                    } else if everywhere {
                        mask
                    } else {
                        0
                    };
                    warp.registers[*d as usize][lane] = u64::from(value);
                }
                if let Some(p) = p {
                    set_predicate(warp, *p, mask, if everywhere { u32::MAX } else { 0 });
                }
            }
            Op::Redux { op, signed, d, a, .. } => {
                let values = warp.registers[*a as usize];
                let ty = if *signed { "s32" } else { "u32" };
                let mut all = lanes(mask).map(|lane| values[lane]);
                let first = all.next().unwrap_or(0);
                let result = all.try_fold(first, |sum, value| atomic(*op, ty, sum, value, 0))?;
                lanes(mask).for_each(|lane| warp.registers[*d as usize][lane] = result);
            }
            Op::Elect { d: (d, p), .. } => {
                let leader = mask.trailing_zeros();
                lanes(mask).for_each(|lane| warp.registers[*d as usize][lane] = u64::from(leader));
                if let Some(p) = p {
                    set_predicate(warp, *p, mask, 1 << leader);
                }
            }
            Op::Activemask { d } => lanes(mask).for_each(|lane| warp.registers[*d as usize][lane] = u64::from(mask)),
            Op::Ldmatrix { d, address, transposed } => {
                let rows = self.matrix_rows(cluster, rank, warp, address, d.len(), false)?;
                for (matrix, d) in d.iter().enumerate() {
                    for lane in 0..32 {
                        let pair = [0, 1].map(|i| {
                            let (row, column) = (lane / 4, lane % 4 * 2 + i);
                            let (row, column) = if *transposed { (column, row) } else { (row, column) };
                            // SAFETY: `locate` checked 16 bytes at each row.
                            unsafe { read(rows[matrix * 8 + row].add(column * 2), 2) }
                        });
                        warp.registers[*d as usize][lane] = pair[0] | pair[1] << 16;
                    }
                }
            }
            Op::Stmatrix { s, address, transposed } => {
                let rows = self.matrix_rows(cluster, rank, warp, address, s.len(), true)?;
                for (matrix, s) in s.iter().enumerate() {
                    for lane in 0..32 {
                        let value = warp.registers[*s as usize][lane];
                        for i in 0..2 {
                            let (row, column) = (lane / 4, lane % 4 * 2 + i);
                            let (row, column) = if *transposed { (column, row) } else { (row, column) };
                            // SAFETY: `locate` checked 16 bytes at each row.
                            unsafe { write(rows[matrix * 8 + row].add(column * 2), 2, value >> (16 * i)) };
                        }
                    }
                }
            }
            Op::Mma(mma) => multiply(warp, mma, self.accumulator),
            Op::TensorAlloc { .. }
            | Op::TensorDealloc { .. }
            | Op::TensorRelinquish
            | Op::TensorLoad { .. }
            | Op::TensorWait => return self.tensor_warp_op(cluster, rank, warp, op),
            Op::Wmma(wmma) => self.wmma(cluster, rank, warp, wmma)?,
            _ => return Err("this instruction is not modelled".into()),
        }
        Ok(Flow::Next)
    }

    /// Addresses of the rows of `count` matrices, each 8 rows of 16 bytes. Lane `8 i + r` provides
    /// row r of matrix i.
    fn matrix_rows(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        address: &Addr,
        count: usize,
        write: bool,
    ) -> Result<Vec<*mut u8>, String> {
        if warp.live != u32::MAX {
            return Err("lanes of the warp have exited".into());
        }
        (0..count * 8)
            .map(|lane| {
                let at = (address.space, warp.address(address, lane), lane);
                self.locate(cluster, rank, warp, at, 16, write)
            })
            .collect()
    }

    /// The fragments are opaque; this layout is one that the ISA permits. Elements are in row-major
    /// order from lane 0 on, and repeat if there are more registers than elements.
    fn wmma(&mut self, cluster: &mut Cluster, rank: usize, warp: &mut Warp, op: &Wmma) -> Result<(), String> {
        let per_lane = |registers: usize, ty: ElementType| registers * if ty.bytes() == 4 { 1 } else { 2 };
        match op {
            Wmma::Move { registers, address, stride, size: [rows, columns], column, ty, store } => {
                let elements = per_lane(registers.len(), *ty);
                let per = elements / registers.len();
                for lane in 0..32 {
                    let stride = warp.registers[*stride as usize][lane] as usize;
                    let base = warp.address(address, lane);
                    for e in 0..elements {
                        let index = (lane * elements + e) % (rows * columns);
                        let (i, j) = (index / columns, index % columns);
                        let offset = if *column { j * stride + i } else { i * stride + j } * ty.bytes();
                        let at = (address.space, base + offset as u64, lane);
                        let place = self.locate(cluster, rank, warp, at, ty.bytes(), *store)?;
                        let (word, shift) = (&mut warp.registers[registers[e / per] as usize][lane], 16 * (e % per));
                        // SAFETY: `locate` checked the range.
                        unsafe {
                            if *store {
                                write(place, ty.bytes(), *word >> shift);
                            } else {
                                *word = read(place, ty.bytes()) << shift | if shift == 0 { 0 } else { *word };
                            }
                        }
                    }
                }
            }
            Wmma::Mma { d, a, b, c, ty, shape: [m, n, k] } => {
                let fragment = |warp: &Warp, registers: &[u32], ty: ElementType, count: usize| {
                    let elements = per_lane(registers.len(), ty);
                    let per = elements / registers.len();
                    let mut values = vec![0.0; count];
                    for lane in 0..32 {
                        for e in 0..elements {
                            let word = warp.registers[registers[e / per] as usize][lane] >> (16 * (e % per));
                            values[(lane * elements + e) % count] =
                                f64::from(element(&word.to_le_bytes()[..ty.bytes()], ty));
                        }
                    }
                    values
                };
                let (a, b) = (fragment(warp, a, *ty, m * k), fragment(warp, b, *ty, k * n));
                let c = fragment(warp, c, ElementType::F32, m * n);
                let mut sums = vec![0.0; m * n];
                for (sums, a) in sums.chunks_mut(*n).zip(a.chunks(*k)) {
                    for (a, b) in a.iter().zip(b.chunks(*n)) {
                        sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
                    }
                }
                for lane in 0..32 {
                    for (e, d) in d.iter().enumerate() {
                        let index = lane * (m * n / 32) + e;
                        warp.registers[*d as usize][lane] = f32_bits((c[index] + sums[index]) as f32);
                    }
                }
            }
        }
        Ok(())
    }
}

fn shuffle(
    warp: &mut Warp,
    kind: Shuffle,
    (d, p): (u32, Option<u32>),
    [a, b, c]: [u32; 3],
    mask: u32,
) -> Result<(), String> {
    let values = warp.registers[a as usize];
    let mut inside = 0;
    for lane in lanes(mask) {
        let [b, c] = [b, c].map(|s| warp.registers[s as usize][lane] as usize);
        let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
        let most = lane & segment | clamp & !segment & 31;
        let least = lane & segment;
        let (from, valid) = match kind {
            Shuffle::Up => (lane.wrapping_sub(b), lane as isize - b as isize >= most as isize),
            Shuffle::Down => (lane + b, lane + b <= most),
            Shuffle::Butterfly => (lane ^ b, lane ^ b <= most),
            Shuffle::Index => (least | b & !segment & 31, (least | b & !segment & 31) <= most),
        };
        let from = if valid { from } else { lane };
        if mask >> from & 1 == 0 {
            return Err(format!("lane {lane} reads lane {from}, which does not take part"));
        }
        inside |= u32::from(valid) << lane;
        warp.registers[d as usize][lane] = values[from];
    }
    if let Some(p) = p {
        set_predicate(warp, p, mask, inside);
    }
    Ok(())
}

/// `d = a · b + c` for 16 × 8 sums. E is the number of elements per register, and lane l = 4 g + t.
///
/// - Register r of A: row `g + 8 (r % 2)`, from column `t E + (r / 2) 4 E` on.
/// - Register r of B: column g, from row `t E + r 4 E` on.
/// - Element `2 h + i` of C and D: row `g + 8 h`, column `2 t + i`.
fn multiply(warp: &mut Warp, mma: &Mma, accumulator: Accumulator) {
    let k = mma.k;
    let accumulator = accumulator.of(mma.types);
    let per = 4 / mma.types[0].bytes();
    let mut a = vec![Factor::new(0.0, mma.types[0]); 16 * k];
    let mut b = vec![Factor::new(0.0, mma.types[1]); 8 * k];
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        let gather = |register: u32, ty: ElementType, target: &mut [Factor], at: usize| {
            let bytes = (warp.registers[register as usize][lane] as u32).to_le_bytes();
            for (e, bits) in bytes.chunks(ty.bytes()).enumerate() {
                target[at + e] = Factor::new(f64::from(element(bits, ty)), ty);
            }
        };
        for (r, register) in mma.a.iter().enumerate() {
            gather(*register, mma.types[0], &mut a, (g + 8 * (r % 2)) * k + t * per + r / 2 * 4 * per);
        }
        for (r, register) in mma.b.iter().enumerate() {
            gather(*register, mma.types[1], &mut b, g * k + t * per + r * 4 * per);
        }
    }
    // Scales: row `g + 8 h` is in lane `4 g + 2 thread + h`, column g in lane `4 g + thread`.
    let scale = |(register, byte, _): (u32, u32, u32), lane: usize| {
        ue8m0((warp.registers[register as usize][lane] >> (8 * byte)) as u8)
    };
    if let Some([of_a, of_b]) = mma.scales {
        for (row, a) in a.chunks_mut(k).enumerate() {
            let scale = scale(of_a, row % 8 * 4 + of_a.2 as usize * 2 + row / 8);
            a.iter_mut().for_each(|a| *a = a.scaled(scale));
        }
        for (column, b) in b.chunks_mut(k).enumerate() {
            let scale = scale(of_b, column * 4 + of_b.2 as usize);
            b.iter_mut().for_each(|b| *b = b.scaled(scale));
        }
    }
    let b = Right::new(b, k);
    // Register of C or D, lane, and bit of an element: f16 sums share a register.
    let place = |row: usize, column: usize| {
        let (h, i) = (row / 8, column % 2);
        let (register, shift) = if mma.half { (h, 16 * i) } else { (2 * h + i, 0) };
        (register, row % 8 * 4 + column / 2, shift)
    };
    let mut sums = [[0.0; 8]; 16];
    for (row, sums) in sums.iter_mut().enumerate() {
        for (column, sum) in sums.iter_mut().enumerate() {
            let (register, lane, shift) = place(row, column);
            let bits = warp.registers[mma.c[register] as usize][lane] >> shift;
            *sum = if mma.half { f16::from_bits(bits as u16).to_f64() } else { f64::from(f32::from_bits(bits as u32)) };
        }
        accumulator.add_row(sums, &a[row * k..][..k], &b);
    }
    for (row, sums) in sums.iter().enumerate() {
        for (column, sum) in sums.iter().enumerate() {
            let (register, lane, shift) = place(row, column);
            let word = &mut warp.registers[mma.d[register] as usize][lane];
            let bits = if mma.half { u64::from(f16::from_f64(*sum).to_bits()) } else { f32_bits(*sum as f32) };
            *word = if shift == 0 { bits } else { *word | bits << shift };
        }
    }
}
