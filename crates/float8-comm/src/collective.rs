//! What a collective is called, to ranks and in errors: its number, operation, label and bytes.

use std::fmt;

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Each rank gives words, and gets those of all ranks, in the order of the ranks.
    AllGather,
    /// Each rank gives bytes, not all equally many, and gets those of all ranks, in the order of the ranks.
    AllGatherBytes,
    /// Each rank gives every rank a chunk of its own, and gets one from every rank.
    AllToAll,
    /// Sums of f32 over all ranks, of which each rank gets its own chunk.
    ReduceScatterSum,
    /// Sums of f32 over all ranks, which every rank gets.
    AllReduceSum,
    /// Sums of f64 over all ranks, which every rank gets.
    AllReduceSumF64,
    /// The largest words over all ranks, compared as unsigned.
    AllReduceMaxBits,
    /// One rank's words, which every rank gets.
    Broadcast,
    /// Waits until all ranks are there.
    Barrier,
}

impl Operation {
    /// Each of them.
    pub const ALL: [Self; 9] = [
        Self::AllGather,
        Self::AllGatherBytes,
        Self::AllToAll,
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
            Self::AllToAll => "all_to_all",
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
    /// The other rank's collective.
    pub other: Collective,
}
