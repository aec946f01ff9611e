//! Collectives on host memory, with counts of their traffic.

use crate::collective::Operation;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::host::serve;
#[cfg(feature = "mpi")]
use crate::mpi::Element;
use crate::pending::Pending;
use crate::traffic::received;

impl Communicator {
    /// Concatenates the shards of all ranks. All have the same length.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn all_gather(&self, label: &str, shard: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        let operation = Operation::AllGather;
        let sent = size_of_val(&shard[..]);
        let pending =
            serve!(self.host(), operation, label, Pending::ready(shard), |world| world.all_gather(label, shard))?;
        self.count(operation, label, sent);
        Ok(pending)
    }

    /// Exchanges words: chunk `r` goes to rank `r`. Returns the chunks from all ranks for this one,
    /// rank 0's first.
    ///
    /// # Errors
    /// [`CommError::Uneven`] if the chunks cannot be equal; the engine's errors.
    pub fn all_to_all(&self, label: &str, words: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        let operation = Operation::AllToAll;
        self.check_chunks(operation, label, words.len())?;
        let sent = size_of_val(&words[..]);
        let pending =
            serve!(self.host(), operation, label, Pending::ready(words), |world| world.all_to_all(label, words))?;
        self.count(operation, label, sent);
        Ok(pending)
    }

    /// Sums over all ranks and keeps this rank's chunk; rank 0 has the first. The order of
    /// summation depends only on the number of ranks and the length. For two ranks the sum is `a +
    /// b`.
    ///
    /// # Errors
    /// [`CommError::Uneven`] if the chunks cannot be equal; the engine's errors.
    pub fn reduce_scatter_sum(&self, label: &str, all: Vec<f32>) -> Result<Pending<Vec<f32>>, CommError> {
        let operation = Operation::ReduceScatterSum;
        self.check_chunks(operation, label, all.len())?;
        let sent = size_of_val(&all[..]);
        let pending =
            serve!(self.host(), operation, label, Pending::ready(all), |world| world.reduce_scatter_sum(label, all))?;
        self.count(operation, label, sent);
        Ok(pending)
    }

    /// Sums over all ranks, the same on each, summed in the order of
    /// [`reduce_scatter_sum`](Self::reduce_scatter_sum).
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn all_reduce_sum(&self, label: &str, values: Vec<f32>) -> Result<Pending<Vec<f32>>, CommError> {
        self.all_reduce(Operation::AllReduceSum, label, values)
    }

    /// Sums over all ranks in f64, the same on each.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn all_reduce_sum_f64(&self, label: &str, values: Vec<f64>) -> Result<Pending<Vec<f64>>, CommError> {
        self.all_reduce(Operation::AllReduceSumF64, label, values)
    }

    /// Maximum of the words over all ranks. For the bits of floats with sign 0 this is the largest
    /// float; NaN exceeds all others.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn all_reduce_max_bits(&self, label: &str, bits: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        self.all_reduce(Operation::AllReduceMaxBits, label, bits)
    }

    /// Words of rank `root`. Other ranks pass a vector of the same length, which is overwritten.
    ///
    /// # Errors
    /// [`CommError::NoSuchRoot`]; the engine's errors.
    pub fn broadcast(&self, label: &str, root: usize, words: Vec<u32>) -> Result<Pending<Vec<u32>>, CommError> {
        let world_size = self.world_size();
        if root >= world_size {
            return Err(CommError::NoSuchRoot { label: label.into(), root, world_size });
        }
        let bytes = size_of_val(&words[..]) as u64;
        let (sent, received) = if self.rank() == root { (bytes, 0) } else { (0, bytes) };
        let operation = Operation::Broadcast;
        let pending =
            serve!(self.host(), operation, label, Pending::ready(words), |world| world.broadcast(label, root, words))?;
        self.counter().lock().add(operation, label, sent, received);
        Ok(pending)
    }

    /// Bytes of each rank, of any length, such as configurations and other metadata.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn all_gather_bytes(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let operation = Operation::AllGatherBytes;
        let alone = || vec![bytes.to_vec()];
        let all = serve!(self.host(), operation, label, alone(), |world| world.all_gather_bytes(label, bytes))?;
        let received = all.iter().map(Vec::len).sum::<usize>() - bytes.len();
        self.counter().lock().add(operation, label, bytes.len() as u64, received as u64);
        Ok(all)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn barrier(&self, label: &str) -> Result<(), CommError> {
        let operation = Operation::Barrier;
        serve!(self.host(), operation, label, (), |world| world.barrier(label))?;
        self.counter().lock().add(operation, label, 0, 0);
        Ok(())
    }

    fn all_reduce<T: Element>(
        &self,
        operation: Operation,
        label: &str,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, CommError> {
        let sent = size_of_val(&values[..]);
        let pending = serve!(self.host(), operation, label, Pending::ready(values), |world| world
            .all_reduce(operation, label, values))?;
        self.count(operation, label, sent);
        Ok(pending)
    }

    /// Checks that the elements divide into equal chunks for all ranks.
    fn check_chunks(&self, operation: Operation, label: &str, elements: usize) -> Result<(), CommError> {
        let world_size = self.world_size();
        if elements.is_multiple_of(world_size) {
            return Ok(());
        }
        Err(CommError::Uneven { operation: operation.name(), label: label.into(), elements, world_size })
    }

    fn count(&self, operation: Operation, label: &str, sent: usize) {
        let sent = sent as u64;
        self.counter().lock().add(operation, label, sent, received(operation, sent, self.world_size() as u64));
    }
}

/// Any type: a world of one reduces nothing.
#[cfg(not(feature = "mpi"))]
trait Element {}
#[cfg(not(feature = "mpi"))]
impl<T> Element for T {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Count;

    #[test]
    fn a_world_of_one_gives_back_what_it_gets() {
        let comm = Communicator::solo();
        assert_eq!(comm.all_gather("a", vec![1, 2]).unwrap().wait().unwrap(), [1, 2]);
        assert_eq!(comm.all_gather_bytes("b", b"xyz").unwrap(), [b"xyz"]);
        assert_eq!(comm.reduce_scatter_sum("c", vec![1.5, 2.5]).unwrap().wait().unwrap(), [1.5, 2.5]);
        assert_eq!(comm.all_reduce_sum("d", vec![3.5]).unwrap().wait().unwrap(), [3.5]);
        assert_eq!(comm.all_reduce_sum_f64("e", vec![4.5]).unwrap().wait().unwrap(), [4.5]);
        assert_eq!(comm.all_reduce_max_bits("f", vec![5]).unwrap().wait().unwrap(), [5]);
        assert_eq!(comm.broadcast("g", 0, vec![6]).unwrap().wait().unwrap(), [6]);
        assert_eq!(comm.all_to_all("g", vec![7]).unwrap().wait().unwrap(), [7]);
        comm.barrier("h").unwrap();
        let traffic = comm.traffic();
        assert_eq!(traffic.total(), Count { calls: 9, sent: 8 + 3 + 8 + 4 + 8 + 4 + 4 + 4, received: 0 });
        assert_eq!(traffic.label("e"), Count { calls: 1, sent: 8, received: 0 });
    }

    #[test]
    fn no_other_rank_can_send() {
        let error = Communicator::solo().broadcast("seed", 1, vec![0]).unwrap_err();
        assert_eq!(error.to_string(), "broadcast of \"seed\": there is no rank 1 among 1 to send it");
    }
}
