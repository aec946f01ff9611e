//! A collective as ranks tell each other of it: its number, operation, label and bytes.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Shards of words, one after another.
    AllGather,
    /// Bytes of any length, one text a rank.
    AllGatherBytes,
    /// Sums of f32, of which each rank keeps its chunk.
    ReduceScatterSum,
    /// Sums of f32.
    AllReduceSum,
    /// Sums of f64.
    AllReduceSumF64,
    /// Largest of words.
    AllReduceMaxBits,
    /// One rank's words for all.
    Broadcast,
    /// Nothing but that all are there.
    Barrier,
}

impl Operation {
    /// Each of them.
    pub const ALL: [Self; 8] = [
        Self::AllGather,
        Self::AllGatherBytes,
        Self::ReduceScatterSum,
        Self::AllReduceSum,
        Self::AllReduceSumF64,
        Self::AllReduceMaxBits,
        Self::Broadcast,
        Self::Barrier,
    ];

    /// The method's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::AllGatherBytes => "all_gather_bytes",
            Self::ReduceScatterSum => "reduce_scatter_sum",
            Self::AllReduceSum => "all_reduce_sum",
            Self::AllReduceSumF64 => "all_reduce_sum_f64",
            Self::AllReduceMaxBits => "all_reduce_max_bits",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One collective of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// From 1, in the order in which the rank started them.
    pub number: u64,
    /// What it does.
    pub operation: Operation,
    /// What it is for: the layer. Of a long label that came from another rank, the beginning.
    pub label: String,
    /// Bytes that the rank gives to it; 0 where ranks may give different amounts.
    pub bytes: u64,
    hash: u64,
}

impl Collective {
    /// Bytes of [`encode`](Self::encode).
    pub(crate) const ENCODED: usize = 256;
    const HEAD: usize = 8 * 3 + 2;

    pub(crate) fn new(number: u64, operation: Operation, label: &str, bytes: u64) -> Self {
        // Its keys are constants, so ranks that run the same program agree.
        let mut hasher = DefaultHasher::new();
        label.hash(&mut hasher);
        Self { number, operation, label: label.into(), bytes, hash: hasher.finish() }
    }

    pub(crate) fn encode(&self) -> [u8; Self::ENCODED] {
        let mut out = [0; Self::ENCODED];
        out[..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.hash.to_le_bytes());
        out[24] = self.operation as u8;
        let label = &self.label.as_bytes()[..self.label.floor_char_boundary(Self::ENCODED - Self::HEAD)];
        out[25] = label.len() as u8;
        out[Self::HEAD..][..label.len()].copy_from_slice(label);
        out
    }

    /// None if these are not the bytes of one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let operation = Operation::ALL.into_iter().find(|operation| Some(&(*operation as u8)) == bytes.get(24))?;
        let label = bytes.get(Self::HEAD..Self::HEAD + usize::from(*bytes.get(25)?))?;
        let label = String::from_utf8_lossy(label).into_owned();
        Some(Self { number: word(0)?, operation, label, bytes: word(8)?, hash: word(16)? })
    }

    /// Whether two ranks' are parts of one. Labels that were cut are compared whole, by their hash.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        (self.number, self.operation, self.bytes, self.hash) == (other.number, other.operation, other.bytes, other.hash)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective {} ({} of {:?}, {} bytes)", self.number, self.operation, self.label, self.bytes)
    }
}

/// A rank that is not in the collective that others wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// The rank.
    pub rank: usize,
    /// Where it is instead.
    pub at: Whereabouts,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Whereabouts {
    /// It did not answer: it waits in no collective.
    Silent,
    /// It waits in another collective, or has given up there.
    In(Collective),
    /// Its communicator is dropped, after this collective.
    Left(u64),
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        match &self.at {
            Whereabouts::Silent => write!(f, "rank {rank} has not arrived, and waits in no collective"),
            Whereabouts::In(collective) => write!(f, "rank {rank} is in {collective} instead"),
            Whereabouts::Left(after) => write!(f, "rank {rank} has dropped its communicator after collective {after}"),
        }
    }
}

/// The first difference between the collectives of two ranks.
#[derive(Clone, Debug, thiserror::Error)]
#[error("ranks are in different collectives: rank 0 is in {first}, rank {rank} in {other}")]
pub struct Difference {
    /// The first rank that differs from rank 0.
    pub rank: usize,
    /// Rank 0's.
    pub first: Collective,
    /// That rank's.
    pub other: Collective,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_wire() {
        for operation in Operation::ALL {
            let record = Collective::new(u64::MAX, operation, "layers.3.wq", 1 << 40);
            assert_eq!(Collective::decode(&record.encode()), Some(record));
        }
        assert_eq!(Collective::decode(&[255; Collective::ENCODED]), None);
        assert_eq!(Collective::decode(&[0; 20]), None);
    }

    #[test]
    fn long_labels_are_cut_for_print_and_compared_whole() {
        let long = "é".repeat(400);
        let [a, b] = [long.clone() + "a", long + "b"].map(|label| Collective::new(1, Operation::Barrier, &label, 0));
        let [seen_a, seen_b] = [&a, &b].map(|record| Collective::decode(&record.encode()).unwrap());
        assert_eq!(seen_a.label, "é".repeat(115));
        assert_eq!(seen_a.label, seen_b.label);
        assert!(seen_a.matches(&a) && !seen_a.matches(&b) && !seen_a.matches(&seen_b));
    }
}
