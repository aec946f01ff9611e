//! Pairs of blocks for `tcgen05` with `.cta_group::2`: which blocks form a pair, and joint
//! allocation of tensor memory by a warp of each.
//!
//! The PTX ISA leaves open whether the first warp waits for the other. Here it waits, and once it
//! deallocates, neither block may use tensor memory. Before the allocation the program must know
//! that the other block runs: a cluster barrier has been passed.

use core::ops::Range;

use super::state::{Cluster, Machine};
use super::tensor_memory::Together;

impl Machine<'_> {
    /// Blocks that a `tcgen05` instruction of block `rank` uses.
    pub(crate) fn group(&self, cluster: &Cluster, rank: usize) -> Result<Range<usize>, String> {
        if self.kernel.cta_group != Some(2) {
            return Ok(rank..rank + 1);
        }
        let pair = rank & !1..(rank | 1) + 1;
        if pair.end > cluster.blocks.len() {
            return Err(format!("block {rank} of a cluster of {} has no peer", cluster.blocks.len()));
        }
        Ok(pair)
    }
}

impl Cluster {
    /// Checks that no block of a group has exited.
    pub(crate) fn check_runs(&self, group: Range<usize>) -> Result<(), String> {
        match group.clone().find(|rank| self.blocks[*rank].live_warps == 0) {
            Some(exited) => Err(format!("block {exited} of the pair has exited")),
            None => Ok(()),
        }
    }

    /// Allocates columns in all blocks of a group. Returns the first column, or None if a warp of
    /// the other block must still ask.
    pub(crate) fn take_columns(
        &mut self,
        group: Range<usize>,
        rank: usize,
        warp: usize,
        columns: usize,
    ) -> Result<Option<usize>, String> {
        if group.len() == 1 {
            return self.blocks[rank].tensor.take(columns).map(Some);
        }
        if self.generation == 0 {
            return Err("nothing has said that the peer runs: no barrier of the cluster has been passed".into());
        }
        let asked = Together { warp, gives_back: false, column: 0, columns, done: false };
        self.together(group, rank, asked)
    }

    /// Deallocates columns in all blocks of a group. Returns false while a warp of the other block
    /// must still ask.
    pub(crate) fn give_columns_back(
        &mut self,
        group: Range<usize>,
        rank: usize,
        warp: usize,
        [column, columns]: [usize; 2],
    ) -> Result<bool, String> {
        if group.len() == 1 {
            return self.blocks[rank].tensor.give_back(column, columns).map(|()| true);
        }
        if self.blocks[group.clone()].iter().any(|block| block.tensor.is_pending()) {
            return Err("gives tensor memory back while products are under way".into());
        }
        let asked = Together { warp, gives_back: true, column, columns, done: false };
        self.together(group, rank, asked).map(|done| done.is_some())
    }

    /// Handles a joint request of one warp of each block. Returns the first column once both have
    /// asked.
    fn together(&mut self, group: Range<usize>, rank: usize, asked: Together) -> Result<Option<usize>, String> {
        if self.blocks[rank].tensor.together.is_none() {
            self.check_runs(group.clone())?;
        }
        let own = &mut self.blocks[rank].tensor.together;
        match own {
            Some(together) if together.warp != asked.warp => return Err("two warps of a block do this at once".into()),
            Some(together) if together.done => {
                let column = together.column;
                *own = None;
                return Ok(Some(column));
            }
            Some(_) => return Ok(None),
            None => *own = Some(asked),
        }
        let Some(peers) = self.blocks[rank ^ 1].tensor.together.filter(|together| !together.done) else {
            return Ok(None);
        };
        if (peers.gives_back, peers.column, peers.columns) != (asked.gives_back, asked.column, asked.columns) {
            return Err(format!("asks for {asked:?}, its peer for {peers:?}"));
        }
        let mut first = None;
        for block in &mut self.blocks[group] {
            let tensor = &mut block.tensor;
            let column = if asked.gives_back {
                tensor.give_back(asked.column, asked.columns).map(|()| asked.column)?
            } else {
                tensor.take(asked.columns)?
            };
            if *first.get_or_insert(column) != column {
                return Err("the blocks of the pair have not taken the same columns".into());
            }
            let together = tensor.together.as_mut().expect("both have asked");
            (together.column, together.done) = (column, true);
        }
        self.blocks[rank].tensor.together = None;
        Ok(first)
    }
}
