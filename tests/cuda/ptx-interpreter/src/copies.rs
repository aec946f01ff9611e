//! Asynchronous copies: `cp.async`, and bulk copies of bytes and tensor boxes. They complete as
//! late as the program allows, or at a random earlier time (see
//! [`Launch::seed`](super::Launch::seed)).

use super::flow::lanes;
use super::instr::Bulk;
use super::memory::shared_parts;
use super::state::{BulkLoad, BulkStore, Cluster, Copy, Issue, Machine, Place, Warp, read};
use super::table::Op;
use super::tma::{add, swizzled};

impl Machine<'_> {
    /// Executes `cp.async` and its commits and waits.
    pub(crate) fn copy(&mut self, issue: Issue, op: &Op) -> Result<(), String> {
        let Issue { cluster, rank, warp, mask, .. } = issue;
        match op {
            Op::CpAsync { to, from, size, source_size } => {
                for lane in lanes(mask) {
                    let source_size = source_size.map(|size| warp.registers[size as usize][lane] as usize);
                    let size = *size as usize;
                    let copy = Copy {
                        lane,
                        to: *to,
                        to_address: warp.address(to, lane),
                        from_address: warp.address(from, lane),
                        size,
                        source_size: source_size.unwrap_or(size).min(size),
                        group: None,
                    };
                    if self.random.now() {
                        self.finish_copy(cluster, rank, warp, copy)?;
                    } else {
                        warp.copies.push(copy);
                    }
                }
            }
            Op::CpAsyncCommit => {
                for copy in warp.copies.iter_mut().filter(|copy| copy.group.is_none() && mask >> copy.lane & 1 != 0) {
                    copy.group = Some(warp.copy_groups[copy.lane]);
                }
                lanes(mask).for_each(|lane| warp.copy_groups[lane] += 1);
            }
            Op::CpAsyncWait { pending } => {
                let groups = warp.copy_groups;
                let due = |copy: &Copy| {
                    mask >> copy.lane & 1 != 0 && copy.group.is_some_and(|group| group + pending < groups[copy.lane])
                };
                // `wait_all` is a commit and a wait for it.
                let (now, later) = std::mem::take(&mut warp.copies).into_iter().partition(due);
                warp.copies = later;
                for copy in now {
                    self.finish_copy(cluster, rank, warp, copy)?;
                }
            }
            Op::CpAsyncArrive { address, increment } => {
                let (now, later) =
                    std::mem::take(&mut warp.copies).into_iter().partition(|copy| mask >> copy.lane & 1 != 0);
                warp.copies = later;
                for copy in now {
                    self.finish_copy(cluster, rank, warp, copy)?;
                }
                for lane in lanes(mask) {
                    let at = Self::shared_address(address, warp.address(address, lane))?;
                    let (owner, offset) = shared_parts(at, rank);
                    let mut state = cluster.mbarrier(owner, offset)?;
                    if *increment {
                        // The program's count does not include this arrival.
                        state.pending += 1;
                    }
                    state.arrive(1, false)?;
                    cluster.set_mbarrier(owner, offset, state.bits())?;
                }
            }
            _ => unreachable!("no copy"),
        }
        Ok(())
    }

    fn finish_copy(&mut self, cluster: &mut Cluster, rank: usize, warp: &mut Warp, copy: Copy) -> Result<(), String> {
        let mut bytes = vec![0; copy.size];
        if copy.source_size > 0 {
            let from = self.global.locate(copy.from_address, copy.source_size)?;
            // SAFETY: `locate` checked the range.
            bytes[..copy.source_size].copy_from_slice(unsafe { std::slice::from_raw_parts(from, copy.source_size) });
        }
        let at = (copy.to.space, copy.to_address, copy.lane);
        let to = self.locate(cluster, rank, warp, at, copy.size, true)?;
        // SAFETY: `locate` checked the range.
        unsafe { std::slice::from_raw_parts_mut(to, copy.size) }.copy_from_slice(&bytes);
        Ok(())
    }

    /// Executes bulk copies and their commits and waits.
    pub(crate) fn bulk(&mut self, issue: Issue, op: &Op) -> Result<(), String> {
        let Issue { cluster, rank, warp, mask, .. } = issue;
        match op {
            Op::BulkLoad { to, from, barrier, multicast, pair } => {
                for lane in lanes(mask) {
                    let from = self.place(warp, from, lane)?;
                    let [to, barrier] = [to, barrier].map(|address| {
                        let at = Self::shared_address(address, warp.address(address, lane))?;
                        Ok::<_, String>(shared_parts(at, rank))
                    });
                    let ((to_rank, offset), (barrier_rank, barrier)) = (to?, barrier?);
                    if to_rank != barrier_rank && !(*pair && to_rank ^ 1 == barrier_rank) {
                        return Err("a bulk load into one block reports to an mbarrier of another".into());
                    }
                    let ranks = match multicast {
                        None => vec![to_rank],
                        Some(mask) => {
                            let mask = warp.registers[*mask as usize][lane] as u32;
                            if mask == 0 || mask >> cluster.blocks.len() != 0 {
                                return Err(format!("multicast to {mask:#b}, with {} blocks", cluster.blocks.len()));
                            }
                            lanes(mask).collect()
                        }
                    };
                    self.check_aligned(&from, offset)?;
                    for rank in ranks {
                        // In a pair the signalled block has the parity of the mbarrier's block.
                        let barrier_rank = if *pair { rank & !1 | barrier_rank & 1 } else { rank };
                        let load = BulkLoad { from: from.clone(), rank, offset, barrier: (barrier_rank, barrier) };
                        if self.random.now() {
                            self.deliver(cluster, load)?;
                        } else {
                            cluster.loads.push(load);
                        }
                    }
                }
            }
            Op::BulkStore { to, from, add } => {
                for lane in lanes(mask) {
                    let to = self.place(warp, to, lane)?;
                    let at = Self::shared_address(from, warp.address(from, lane))?;
                    let (owner, offset) = shared_parts(at, rank);
                    if owner != rank {
                        return Err("a bulk store reads another block's shared memory".into());
                    }
                    self.check_aligned(&to, offset)?;
                    let len = self.bytes(&to);
                    cluster.blocks[rank].shared.check_async_read(offset, len)?;
                    let store = BulkStore { lane, to, offset, add: *add, group: None };
                    if self.random.now() {
                        self.finish_store(cluster, rank, &store)?;
                    } else {
                        warp.stores.push(store);
                    }
                }
            }
            Op::BulkCommit => {
                for store in warp.stores.iter_mut().filter(|store| store.group.is_none() && mask >> store.lane & 1 != 0)
                {
                    store.group = Some(warp.store_groups[store.lane]);
                }
                lanes(mask).for_each(|lane| warp.store_groups[lane] += 1);
            }
            Op::BulkWait { pending } => {
                let groups = warp.store_groups;
                let due = |store: &BulkStore| {
                    mask >> store.lane & 1 != 0
                        && store.group.is_some_and(|group| group.saturating_add(*pending) < groups[store.lane])
                };
                let (now, later): (Vec<_>, _) = std::mem::take(&mut warp.stores).into_iter().partition(due);
                warp.stores = later;
                for store in now {
                    self.finish_store(cluster, rank, &store)?;
                }
            }
            _ => unreachable!("no bulk copy"),
        }
        Ok(())
    }

    fn place(&mut self, warp: &Warp, bulk: &Bulk, lane: usize) -> Result<Place, String> {
        Ok(match bulk {
            Bulk::Tensor { map, coords } => {
                let address = warp.registers[*map as usize][lane];
                let at = self.global.locate(address, 128)?;
                // SAFETY: `locate` checked the range.
                let (tag, index) = unsafe { (read(at, 8), read(at.add(8), 8) as usize) };
                let map = self.maps.get(index).filter(|_| tag == MAP_TAG).ok_or("no tensor map is at the address")?;
                if coords.len() != map.dims.len() {
                    return Err(format!("{} coordinates for a tensor of {} dimensions", coords.len(), map.dims.len()));
                }
                let coords = coords.iter().map(|coord| warp.registers[*coord as usize][lane] as i32).collect();
                Place::Tensor { map: index, coords }
            }
            Bulk::Bytes { address, size } => {
                let (address, size) = (warp.address(address, lane), warp.registers[*size as usize][lane] as usize);
                if !size.is_multiple_of(16) || !address.is_multiple_of(16) {
                    return Err(format!("a bulk copy of {size} bytes at {address:#x}: multiples of 16 are asked for"));
                }
                Place::Bytes { address, size }
            }
        })
    }

    fn bytes(&self, place: &Place) -> usize {
        match place {
            Place::Tensor { map, .. } => self.maps[*map].box_bytes(),
            Place::Bytes { size, .. } => *size,
        }
    }

    fn check_aligned(&self, place: &Place, offset: usize) -> Result<(), String> {
        let align = if matches!(place, Place::Tensor { .. }) { 128 } else { 16 };
        if offset.is_multiple_of(align) {
            Ok(())
        } else {
            Err(format!("shared memory at {offset}, which is not aligned to {align} bytes"))
        }
    }

    /// Completes a load: writes its bytes and counts them at its mbarrier.
    pub(crate) fn deliver(&mut self, cluster: &mut Cluster, load: BulkLoad) -> Result<(), String> {
        let BulkLoad { from, rank, offset, barrier } = load;
        let len = self.bytes(&from);
        for rank in [rank, barrier.0] {
            if cluster.blocks.get(rank).is_none_or(|block| block.live_warps == 0) {
                return Err(format!("bytes arrive in block {rank}, which has exited"));
            }
        }
        let shared = cluster.shared(rank)?;
        shared.locate(offset, len)?;
        shared.note_async_write(offset, len);
        match from {
            Place::Bytes { address, size } => {
                let source = self.global.locate(address, size)?;
                // SAFETY: `locate` checked the range.
                shared.bytes[offset..offset + size]
                    .copy_from_slice(unsafe { std::slice::from_raw_parts(source, size) });
            }
            Place::Tensor { map, coords } => {
                let map = &self.maps[map];
                let base = self.global.buffers[map.buffer].address(map.buffer);
                let row_bytes = map.row_bytes();
                let mut row = vec![0; row_bytes];
                for (i, part) in map.rows(&coords).into_iter().enumerate() {
                    row.fill(map.fill());
                    if let Some((start, range)) = part {
                        let address = base.wrapping_add((start + range.start as i64) as u64);
                        let source = self.global.locate(address, range.len())?;
                        // SAFETY: `locate` checked the range.
                        row[range.clone()].copy_from_slice(unsafe { std::slice::from_raw_parts(source, range.len()) });
                    }
                    for (chunk, bytes) in row.chunks(16).enumerate() {
                        let at = swizzled(offset + i * row_bytes + chunk * 16, map.swizzle);
                        shared.locate(at, 16)?;
                        shared.bytes[at..at + 16].copy_from_slice(bytes);
                    }
                }
            }
        }
        let mut state = cluster.mbarrier(barrier.0, barrier.1)?;
        state.complete(len as u32)?;
        cluster.set_mbarrier(barrier.0, barrier.1, state.bits())
    }

    fn finish_store(&mut self, cluster: &mut Cluster, rank: usize, store: &BulkStore) -> Result<(), String> {
        let shared = cluster.shared(rank)?;
        match &store.to {
            Place::Bytes { address, size } => {
                shared.locate(store.offset, *size)?;
                let to = self.global.locate(*address, *size)?;
                // SAFETY: `locate` checked the range.
                unsafe { std::slice::from_raw_parts_mut(to, *size) }
                    .copy_from_slice(&shared.bytes[store.offset..store.offset + size]);
            }
            Place::Tensor { map, coords } => {
                let map = &self.maps[*map];
                let base = self.global.buffers[map.buffer].address(map.buffer);
                let row_bytes = map.row_bytes();
                let mut row = vec![0; row_bytes];
                for (i, part) in map.rows(coords).into_iter().enumerate() {
                    let Some((start, range)) = part else { continue };
                    for (chunk, bytes) in row.chunks_mut(16).enumerate() {
                        let at = swizzled(store.offset + i * row_bytes + chunk * 16, map.swizzle);
                        shared.locate(at, 16)?;
                        bytes.copy_from_slice(&shared.bytes[at..at + 16]);
                    }
                    let address = base.wrapping_add((start + range.start as i64) as u64);
                    let to = self.global.locate(address, range.len())?;
                    // SAFETY: `locate` checked the range.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, range.len()) };
                    if store.add {
                        add(to, &row[range], map.float, map.element);
                    } else {
                        to.copy_from_slice(&row[range]);
                    }
                }
            }
        }
        Ok(())
    }
}

/// First 8 bytes of the 128 bytes of a tensor map; its index follows.
pub(crate) const MAP_TAG: u64 = 0x5445_4e53_4f52_4d41;
