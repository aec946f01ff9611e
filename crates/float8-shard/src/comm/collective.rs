//! Description of a collective for other ranks and for errors: number, operation, label and bytes.

use std::fmt;

/// Kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Each rank gives words and receives the words of all ranks, in rank order.
    AllGather,
    /// Each rank gives bytes, of any length, and receives the bytes of all ranks, in rank order.
    AllGatherBytes,
    /// Each rank sends one chunk to every rank and receives one from every rank.
    AllToAll,
    /// Sums f32 over all ranks; each rank receives its chunk.
    ReduceScatterSum,
    /// Sums f32 over all ranks; every rank receives all sums.
    AllReduceSum,
    /// Maximum of the words over all ranks, compared as unsigned.
    AllReduceMaxBits,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 6] = [
        Self::AllGather,
        Self::AllGatherBytes,
        Self::AllToAll,
        Self::ReduceScatterSum,
        Self::AllReduceSum,
        Self::AllReduceMaxBits,
    ];

    /// Name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::AllGatherBytes => "all_gather_bytes",
            Self::AllToAll => "all_to_all",
            Self::ReduceScatterSum => "reduce_scatter_sum",
            Self::AllReduceSum => "all_reduce_sum",
            Self::AllReduceMaxBits => "all_reduce_max_bits",
        }
    }
}

#[cfg(feature = "cubecl")]
impl Operation {
    /// Rows of the result on device memory, of values with these rows on each of the ranks.
    ///
    /// # Panics
    /// Panics for an operation on host memory.
    pub(crate) fn rows_on_device(self, rows: usize, ranks: usize) -> usize {
        match self {
            Self::AllGather => rows * ranks,
            Self::ReduceScatterSum => rows / ranks,
            Self::AllReduceSum | Self::AllReduceMaxBits => rows,
            Self::AllToAll | Self::AllGatherBytes => unreachable!("{self:?} is not started on devices"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One collective as one rank calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Number from 1, in the order in which the rank started its collectives.
    pub number: u64,
    /// Operation.
    pub operation: Operation,
    /// Purpose, such as the layer. A long label from another rank is truncated.
    pub label: String,
    /// Bytes that the rank gives; 0 where the ranks may give different amounts.
    pub bytes: u64,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective {} ({} of {:?}, {} bytes)", self.number, self.operation, self.label, self.bytes)
    }
}

/// Rank that is missing from a collective that others wait in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// The rank.
    pub rank: usize,
    /// Its location.
    pub at: Whereabouts,
}

/// Location of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Whereabouts {
    /// It did not answer: it waits in no collective.
    Silent,
    /// It waits in another collective, or has given up there.
    In(Collective),
    /// It dropped its communicator after this collective.
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

/// First difference between the collectives of two ranks.
#[derive(Clone, Debug, thiserror::Error)]
#[error("ranks are in different collectives: rank {} is in {first}, rank {} in {other}", ranks[0], ranks[1])]
pub struct Difference {
    /// First rank of the communicator, and the first that differs from it.
    pub ranks: [usize; 2],
    /// The collective of the first.
    pub first: Collective,
    /// The collective of the other rank.
    pub other: Collective,
}
