//! Ranks of a job, or a part of them, and their collectives on host memory.

use std::fmt;
use std::sync::Arc;

use burn_float8::shard_hooks::Exchange;
use parking_lot::Mutex;

use super::collective::Operation;
#[cfg(feature = "mpi")]
use super::launch::timeout;
use super::launch::{Launch, Lookup, variable};
#[cfg(feature = "mpi")]
use super::mpi::{Element, Group, connect};
#[cfg(feature = "nccl")]
use super::nccl::NcclComm;
use super::pending::Pending;
use super::traffic::{Traffic, received};
use crate::error::ShardError;

/// Handle to the ranks of one job, or to a [`split`](Self::split) part of them. Cheap to clone.
///
/// All ranks call every collective in the same order, from any thread. `label` names the purpose,
/// such as the layer, in errors.
///
/// After an error of a collective every later one returns [`ShardError::Dead`]. When the last clone
/// is then dropped, the job ends within a second unless the process has returned first, so print
/// the error at once.
///
/// Without an error, dropping the last clone waits until every rank has dropped its own, at most
/// for the time limit.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    rank: usize,
    local_rank: usize,
    world_size: usize,
    /// Dropped before MPI ends.
    #[cfg(feature = "nccl")]
    nccl: Option<Arc<NcclComm>>,
    #[cfg(feature = "mpi")]
    group: Option<Group>,
    traffic: Arc<Mutex<Traffic>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.world_size())
    }
}

impl Communicator {
    /// World of one rank, whose collectives return their input.
    pub fn solo() -> Self {
        Self(Arc::new(Inner {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            #[cfg(feature = "nccl")]
            nccl: None,
            #[cfg(feature = "mpi")]
            group: None,
            traffic: Arc::default(),
        }))
    }

    /// World that mpirun, or srun with PMIx, started; one rank without a launcher.
    ///
    /// A collective has a time limit, the same on every rank: `FLOAT8_COMM_TIMEOUT` in seconds,
    /// else 300. It must exceed the longest local step of a rank, such as writing a checkpoint.
    ///
    /// Worlds of several ranks also install a panic hook: a panic of any thread, caught or not,
    /// ends the job. Call this once in each process. MPI requires that the thread that created the
    /// communicator also drops it.
    ///
    /// # Errors
    /// Invalid variables; a build without the feature `mpi`; an MPI that does not confirm the
    /// launcher.
    pub fn from_env() -> Result<Self, ShardError> {
        Self::from_variables(&variable)
    }

    fn from_variables(lookup: Lookup) -> Result<Self, ShardError> {
        match Launch::read(lookup)? {
            None | Some(Launch { world_size: 1, .. }) => Ok(Self::solo()),
            #[cfg(feature = "mpi")]
            Some(launch) => Ok(Self::of(connect(launch, timeout(lookup)?)?, Arc::default())),
            #[cfg(not(feature = "mpi"))]
            Some(Launch { world_size, .. }) => Err(ShardError::Launcher(format!(
                "mpirun started {world_size} ranks, but this program is built without the feature \"mpi\": build it with that feature"
            ))),
        }
    }

    #[cfg(feature = "mpi")]
    fn of(group: Group, traffic: Arc<Mutex<Traffic>>) -> Self {
        let (rank, local_rank, world_size) = (group.rank(), group.world.local_rank, group.size());
        Self(Arc::new(Inner {
            rank,
            local_rank,
            world_size,
            #[cfg(feature = "nccl")]
            nccl: None,
            group: Some(group),
            traffic,
        }))
    }

    /// Ranks that give the same `color`, in the order of their ranks here. All ranks call it. With
    /// NCCL, the parts have it too.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn split(&self, color: usize) -> Result<Self, ShardError> {
        let own = (color as u64).to_le_bytes();
        let _colors = self.all_gather_bytes("split", &own)?;
        #[cfg(feature = "mpi")]
        if let Some(group) = &self.0.group {
            let part: Vec<usize> = (0.._colors.len()).filter(|rank| _colors[*rank] == own).collect();
            let split = Self::of(group.split(color, &part), self.0.traffic.clone());
            #[cfg(feature = "nccl")]
            if let Some(nccl) = self.nccl() {
                return split.with_nccl(Some(nccl.device()));
            }
            return Ok(split);
        }
        Ok(self.clone())
    }

    /// The ranks with this rank's `color`, `size` of them. All ranks call it.
    pub(crate) fn group(&self, size: usize, color: usize) -> Result<Self, ShardError> {
        match size {
            1 => Ok(Self::solo()),
            all if all == self.world_size() => Ok(self.clone()),
            _ => self.split(color),
        }
    }

    /// Adds NCCL between the CUDA devices of these ranks. `device` is the ordinal of this rank's
    /// device; the default is its local rank. All ranks call it. A world of one, or one that
    /// already has NCCL, is returned unchanged.
    ///
    /// # Errors
    /// Missing NCCL, CUDA or device, reported on every rank.
    #[cfg(feature = "nccl")]
    pub fn with_nccl(&self, device: Option<usize>) -> Result<Self, ShardError> {
        if self.world_size() == 1 || self.has_nccl() {
            return Ok(self.clone());
        }
        let nccl = Some(Arc::new(NcclComm::connect(self, device)?));
        Ok(Self(Arc::new(Inner { nccl, ..Inner::clone(&self.0) })))
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn nccl(&self) -> Option<&NcclComm> {
        self.0.nccl.as_deref()
    }

    /// Whether NCCL connects the ranks' CUDA devices.
    pub fn has_nccl(&self) -> bool {
        #[cfg(feature = "nccl")]
        return self.0.nccl.is_some();
        #[cfg(not(feature = "nccl"))]
        false
    }

    #[cfg(feature = "nccl")]
    pub(super) fn counter(&self) -> &Arc<Mutex<Traffic>> {
        &self.0.traffic
    }

    /// Index of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Index among the ranks of this machine.
    pub fn local_rank(&self) -> usize {
        self.0.local_rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size
    }

    /// Traffic of this rank since the start.
    pub fn traffic(&self) -> Traffic {
        *self.0.traffic.lock()
    }

    /// Concatenates the shards of all ranks. All have the same length.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn all_gather(&self, label: &str, shard: Vec<u32>) -> Result<Pending<Vec<u32>>, ShardError> {
        self.start(Operation::AllGather, label, shard)
    }

    /// Exchanges words: chunk `r` goes to rank `r`. Returns the chunks from all ranks for this one,
    /// rank 0's first.
    ///
    /// # Errors
    /// [`ShardError::Input`] if the chunks cannot be equal; the errors of the ranks.
    pub fn all_to_all(&self, label: &str, words: Vec<u32>) -> Result<Pending<Vec<u32>>, ShardError> {
        self.check_chunks(Operation::AllToAll, label, words.len())?;
        self.start(Operation::AllToAll, label, words)
    }

    /// Exchanges words of any number: the first `sent[0]` go to rank 0. Returns the words from all ranks,
    /// rank 0's first. Each pair of ranks gives the same number.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn all_to_all_v(
        &self,
        label: &str,
        words: Vec<u32>,
        exchange: Exchange,
    ) -> Result<Pending<Vec<u32>>, ShardError> {
        let others = exchange.received.iter().sum::<usize>() - exchange.received[self.rank()];
        self.0.traffic.lock().add(Operation::AllToAll, 4 * words.len() as u64, 4 * others as u64);
        #[cfg(feature = "mpi")]
        if let Some(group) = &self.0.group {
            return group.all_to_all_v(label, words, exchange);
        }
        #[cfg(not(feature = "mpi"))]
        let _ = label;
        Ok(Pending::ready(words))
    }

    /// Sums over all ranks and keeps this rank's chunk; rank 0 has the first. The order of
    /// summation depends only on the number of ranks and the length. For two ranks the sum is `a +
    /// b`.
    ///
    /// # Errors
    /// [`ShardError::Input`] if the chunks cannot be equal; the errors of the ranks.
    pub fn reduce_scatter_sum(&self, label: &str, all: Vec<f32>) -> Result<Pending<Vec<f32>>, ShardError> {
        self.check_chunks(Operation::ReduceScatterSum, label, all.len())?;
        self.start(Operation::ReduceScatterSum, label, all)
    }

    /// Sums over all ranks, the same on each.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn all_reduce_sum(&self, label: &str, values: Vec<f32>) -> Result<Pending<Vec<f32>>, ShardError> {
        self.start(Operation::AllReduceSum, label, values)
    }

    /// Maximum of the words over all ranks. For the bits of floats with sign 0 this is the largest
    /// float; NaN exceeds all others.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn all_reduce_max_bits(&self, label: &str, bits: Vec<u32>) -> Result<Pending<Vec<u32>>, ShardError> {
        self.start(Operation::AllReduceMaxBits, label, bits)
    }

    /// Bytes of each rank, of any length, such as configurations and other metadata.
    ///
    /// # Errors
    /// The errors of the ranks.
    pub fn all_gather_bytes(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ShardError> {
        let all = self.gather_bytes(label, bytes)?;
        let received = all.iter().map(Vec::len).sum::<usize>() - bytes.len();
        self.0.traffic.lock().add(Operation::AllGatherBytes, bytes.len() as u64, received as u64);
        Ok(all)
    }

    fn gather_bytes(&self, _label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ShardError> {
        #[cfg(feature = "mpi")]
        if let Some(group) = &self.0.group {
            return group.all_gather_bytes(_label, bytes);
        }
        Ok(vec![bytes.to_vec()])
    }

    fn start<T: Element>(
        &self,
        operation: Operation,
        _label: &str,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, ShardError> {
        let sent = size_of_val(&values[..]) as u64;
        self.0.traffic.lock().add(operation, sent, received(operation, sent, self.world_size() as u64));
        #[cfg(feature = "mpi")]
        if let Some(group) = &self.0.group {
            return group.start(operation, _label, values);
        }
        Ok(Pending::ready(values))
    }

    /// Checks that the elements divide into equal chunks for all ranks.
    fn check_chunks(&self, operation: Operation, label: &str, elements: usize) -> Result<(), ShardError> {
        let ranks = self.world_size();
        if elements.is_multiple_of(ranks) {
            return Ok(());
        }
        let reason = format!("{elements} elements cannot be split among {ranks} ranks; pad them to a multiple");
        Err(ShardError::Input { operation: operation.name(), label: label.into(), reason })
    }
}

/// Any type: a world of one reduces nothing.
#[cfg(not(feature = "mpi"))]
trait Element {}
#[cfg(not(feature = "mpi"))]
impl<T> Element for T {}

#[cfg(test)]
mod tests {
    use super::super::traffic::Count;
    use super::*;

    fn started(variables: &[(&str, &str)]) -> Result<Communicator, ShardError> {
        let lookup = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        Communicator::from_variables(&lookup)
    }

    #[test]
    fn one_rank_needs_no_engine() {
        for variables in [&[][..], &[("PMI_SIZE", "1")]] {
            let comm = started(variables).unwrap();
            assert_eq!((comm.rank(), comm.local_rank(), comm.world_size()), (0, 0, 1));
            assert_eq!(comm.split(7).unwrap().world_size(), 1);
            assert_eq!(format!("{comm:?}"), "Communicator(rank 0 of 1)");
        }
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_build_without_mpi_says_so() {
        let error = started(&[("OMPI_COMM_WORLD_SIZE", "2")]).unwrap_err();
        assert!(error.to_string().contains("2 ranks, but this program is built without"), "{error}");
    }

    #[test]
    fn a_world_of_one_gives_back_what_it_gets() {
        let comm = Communicator::solo();
        assert_eq!(comm.all_gather("a", vec![1, 2]).unwrap().wait().unwrap(), [1, 2]);
        assert_eq!(comm.all_gather_bytes("b", b"xyz").unwrap(), [b"xyz"]);
        assert_eq!(comm.reduce_scatter_sum("c", vec![1.5, 2.5]).unwrap().wait().unwrap(), [1.5, 2.5]);
        assert_eq!(comm.all_reduce_sum("d", vec![3.5]).unwrap().wait().unwrap(), [3.5]);
        assert_eq!(comm.all_reduce_max_bits("e", vec![5]).unwrap().wait().unwrap(), [5]);
        assert_eq!(comm.all_to_all("f", vec![7]).unwrap().wait().unwrap(), [7]);
        for (operation, sent) in Operation::ALL.into_iter().zip([8, 3, 4, 8, 4, 4]) {
            assert_eq!(comm.traffic().operation(operation), Count { calls: 1, sent, received: 0 });
        }
    }
}
