//! Traffic of this rank, by operation and by label.

use std::collections::BTreeMap;
use std::ops::{AddAssign, Sub};

use crate::collective::Operation;

/// Number of calls and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of started collectives.
    pub calls: u64,
    /// Payload bytes that this rank gave: its shard, or the whole vector of a reduction. For a
    /// broadcast, only at the root.
    pub sent: u64,
    /// Payload bytes from the other ranks, as a ring of R ranks moves them:
    ///
    /// - a gather: R − 1 shards
    /// - a reduce-scatter: R − 1 chunks
    /// - an all-reduced vector: 2 (R − 1) / R of it, rounded down
    /// - a broadcast: all of it, except at its root
    pub received: u64,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.sent += other.sent;
        self.received += other.received;
    }
}

impl Sub for Count {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            calls: self.calls.saturating_sub(earlier.calls),
            sent: self.sent.saturating_sub(earlier.sent),
            received: self.received.saturating_sub(earlier.received),
        }
    }
}

/// Traffic of this rank. Messages of the compare mode are not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    counts: BTreeMap<Operation, BTreeMap<String, Count>>,
}

impl Traffic {
    /// Count of `operation`.
    pub fn operation(&self, operation: Operation) -> Count {
        sum(self.counts.get(&operation).into_iter().flat_map(BTreeMap::values))
    }

    /// Count of `label` over all operations.
    pub fn label(&self, label: &str) -> Count {
        sum(self.counts.values().filter_map(|labels| labels.get(label)))
    }

    /// Count of all collectives.
    pub fn total(&self) -> Count {
        sum(self.counts.values().flat_map(BTreeMap::values))
    }

    /// Operations and labels with their counts, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, &str, Count)> {
        self.counts
            .iter()
            .flat_map(|(operation, labels)| labels.iter().map(|(label, count)| (*operation, label.as_str(), *count)))
    }

    /// Traffic since `earlier` was taken.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (operation, label, count) in self.iter() {
            let before = earlier.counts.get(&operation).and_then(|labels| labels.get(label));
            let more = count - before.copied().unwrap_or_default();
            if more != Count::default() {
                counts.entry(operation).or_default().insert(label.into(), more);
            }
        }
        Self { counts }
    }

    pub(crate) fn add(&mut self, operation: Operation, label: &str, sent: u64, received: u64) {
        let labels = self.counts.entry(operation).or_default();
        let count = Count { calls: 1, sent, received };
        match labels.get_mut(label) {
            Some(total) => *total += count,
            None => _ = labels.insert(label.into(), count),
        }
    }
}

/// Bytes received from other ranks if this rank gives `sent` bytes. Not valid for gathers of
/// variable length or broadcasts.
pub(crate) fn received(operation: Operation, sent: u64, world_size: u64) -> u64 {
    let others = world_size - 1;
    match operation {
        Operation::AllGather => sent * others,
        Operation::AllToAll | Operation::ReduceScatterSum => sent / world_size * others,
        Operation::AllReduceSum | Operation::AllReduceSumF64 | Operation::AllReduceMaxBits => {
            2 * sent * others / world_size
        }
        Operation::AllGatherBytes | Operation::Broadcast | Operation::Barrier => 0,
    }
}

fn sum<'a>(counts: impl Iterator<Item = &'a Count>) -> Count {
    counts.fold(Count::default(), |mut total, count| {
        total += *count;
        total
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_operation_and_label() {
        let mut traffic = Traffic::default();
        traffic.add(Operation::AllGather, "wq", 8, 24);
        traffic.add(Operation::ReduceScatterSum, "wq", 64, 48);
        let earlier = traffic.clone();
        traffic.add(Operation::AllGather, "wk", 4, 12);
        traffic.add(Operation::AllGather, "wq", 8, 24);
        assert_eq!(traffic.operation(Operation::AllGather), Count { calls: 3, sent: 20, received: 60 });
        assert_eq!(traffic.label("wq"), Count { calls: 3, sent: 80, received: 96 });
        assert_eq!(traffic.total(), Count { calls: 4, sent: 84, received: 108 });
        let since = traffic.since(&earlier);
        let each: Vec<_> = since.iter().map(|(operation, label, count)| (operation, label, count.sent)).collect();
        assert_eq!(each, [(Operation::AllGather, "wk", 4), (Operation::AllGather, "wq", 8)]);
        assert_eq!(traffic.since(&traffic), Traffic::default());
    }

    #[test]
    fn a_ring_moves_what_the_docs_say() {
        assert_eq!(received(Operation::AllGather, 100, 4), 300);
        assert_eq!(received(Operation::ReduceScatterSum, 400, 4), 300);
        assert_eq!(received(Operation::AllReduceSum, 400, 4), 600);
        for operation in Operation::ALL {
            assert_eq!(received(operation, 400, 1), 0);
        }
    }
}
