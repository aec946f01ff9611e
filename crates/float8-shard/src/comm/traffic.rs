//! Traffic of this rank by operation.

use super::collective::Operation;

/// Number of calls and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of started collectives.
    pub calls: u64,
    /// Payload bytes that this rank gave: its shard, or the whole vector of a reduction.
    pub sent: u64,
    /// Payload bytes from the other ranks, as a ring of R ranks moves them:
    ///
    /// - a gather: R − 1 shards
    /// - a reduce-scatter, an exchange: R − 1 chunks
    /// - an all-reduced vector: 2 (R − 1) / R of it, rounded down
    pub received: u64,
}

/// Traffic of this rank, over all communicators that were split from one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic([Count; Operation::ALL.len()]);

impl Traffic {
    /// Count of `operation`.
    pub fn operation(&self, operation: Operation) -> Count {
        self.0[operation as usize]
    }

    /// Traffic after the snapshot `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| {
            let (now, then) = (self.0[i], earlier.0[i]);
            Count { calls: now.calls - then.calls, sent: now.sent - then.sent, received: now.received - then.received }
        }))
    }

    pub(super) fn add(&mut self, operation: Operation, sent: u64, received: u64) {
        let count = &mut self.0[operation as usize];
        *count = Count { calls: count.calls + 1, sent: count.sent + sent, received: count.received + received };
    }
}

/// Bytes received from other ranks if this rank gives `sent` bytes; 0 for a gather of bytes, whose
/// lengths differ.
pub(super) fn received(operation: Operation, sent: u64, world_size: u64) -> u64 {
    let others = world_size - 1;
    match operation {
        Operation::AllGather => sent * others,
        Operation::AllToAll | Operation::ReduceScatterSum => sent / world_size * others,
        Operation::AllReduceSum | Operation::AllReduceMaxBits => 2 * sent * others / world_size,
        Operation::AllGatherBytes => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_operation() {
        let mut traffic = Traffic::default();
        traffic.add(Operation::AllGather, 8, 24);
        let earlier = traffic;
        traffic.add(Operation::AllGather, 4, 12);
        traffic.add(Operation::ReduceScatterSum, 64, 48);
        assert_eq!(traffic.operation(Operation::AllGather), Count { calls: 2, sent: 12, received: 36 });
        let since = traffic.since(&earlier);
        assert_eq!(since.operation(Operation::AllGather), Count { calls: 1, sent: 4, received: 12 });
        assert_eq!(since.operation(Operation::ReduceScatterSum), Count { calls: 1, sent: 64, received: 48 });
        for (i, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, i);
            assert_eq!(received(operation, 400, 1), 0);
        }
        assert_eq!(received(Operation::AllGather, 100, 4), 300);
        assert_eq!(received(Operation::ReduceScatterSum, 400, 4), 300);
        assert_eq!(received(Operation::AllReduceSum, 400, 4), 600);
    }
}
