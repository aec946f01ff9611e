//! [`ShardConfig`]: configuration of sharding, and the mesh of the ranks.
use serde::{Deserialize, Serialize};

use crate::comm::Communicator;
use crate::error::ShardError;

/// Lifetime of a gathered weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Reshard {
    /// When the optimizer replaces it: two gathers for each linear and step.
    #[default]
    AfterStep,
    /// After the GEMM that reads it: two gathers for each linear and micro-batch.
    AfterForward,
}

/// Dtype in which ranks exchange gradients of sharded parameters. MPI sums in f32 in either case;
/// NCCL sums in this dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum ReduceDtype {
    /// f32.
    #[default]
    F32,
    /// Each rank's gradient rounded to bf16: half the bytes.
    Bf16,
}

/// Sharding of a run over several ranks started by a launcher. No effect without a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct ShardConfig {
    /// Copies of the model. The number of ranks is `replicate` times `shard` times `tensor`.
    pub replicate: usize,
    /// Ranks that divide a copy. 1 keeps whole weights (DDP); -1 takes all the rest.
    pub shard: i64,
    /// Ranks that divide each linear and read the same batches (tensor parallelism). They divide key
    /// heads, the MLP's width and the vocabulary into multiples of 16, or of 128 with scales of blocks,
    /// and the tokens of a sequence likewise. No sample is generated after training.
    pub tensor: usize,
    /// When a gathered weight is freed.
    pub reshard: Reshard,
    /// Dtype of gradients exchanged between ranks. `bf16` halves the bytes: MPI adds them in f32,
    /// NCCL in bf16.
    pub reduce_dtype: ReduceDtype,
    /// Whether the ranks that divide a copy divide the experts of mixtures too (expert parallelism).
    /// Tokens then go to the ranks of their experts.
    pub experts: bool,
}

impl Default for ShardConfig {
    fn default() -> Self {
        Self {
            replicate: 1,
            shard: -1,
            tensor: 1,
            reshard: Reshard::default(),
            reduce_dtype: ReduceDtype::default(),
            experts: false,
        }
    }
}

/// Ranks as replicas of shards of parts: rank r has part r mod `tensor` of shard r / `tensor` mod `shard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Number of replicas.
    pub replicate: usize,
    /// Number of shards of each replica.
    pub shard: usize,
    /// Number of parts of each linear.
    pub tensor: usize,
}

impl Mesh {
    /// Number of ranks with batches of their own.
    pub fn readers(self) -> usize {
        self.replicate * self.shard
    }

    /// Number of ranks.
    pub fn ranks(self) -> usize {
        self.readers() * self.tensor
    }
}

impl ShardConfig {
    /// Mesh of a number of ranks. One rank alone is one shard of one replica.
    ///
    /// # Errors
    /// [`ShardError::Mesh`].
    pub fn mesh(&self, ranks: usize) -> Result<Mesh, ShardError> {
        let Self { replicate, shard, tensor, .. } = *self;
        if ranks == 1 {
            return Ok(Mesh { replicate: 1, shard: 1, tensor: 1 });
        }
        let others = replicate.checked_mul(tensor).filter(|others| *others > 0);
        let shards = match (shard, others) {
            (-1, Some(others)) => ranks / others,
            (shard, _) => usize::try_from(shard).unwrap_or(0),
        };
        match others.and_then(|others| others.checked_mul(shards)) {
            Some(all) if all == ranks => Ok(Mesh { replicate, shard: shards, tensor }),
            _ => Err(ShardError::Mesh { replicate, shard, tensor, ranks }),
        }
    }

    /// Ranks that divide this rank's linears, for [`TensorParallel::apply`](crate::TensorParallel::apply).
    /// All ranks call it.
    ///
    /// # Errors
    /// [`ShardError::Mesh`]; the errors of the ranks.
    pub fn tensor_ranks(&self, comm: &Communicator) -> Result<Communicator, ShardError> {
        let tensor = self.mesh(comm.world_size())?.tensor;
        comm.group(tensor, comm.rank() / tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_has_all_ranks() {
        let mesh = |[replicate, tensor]: [usize; 2], shard, ranks| {
            let mesh = ShardConfig { replicate, shard, tensor, ..ShardConfig::default() }.mesh(ranks);
            mesh.map(|mesh| [mesh.replicate, mesh.shard, mesh.tensor]).map_err(|error| error.to_string())
        };
        assert_eq!(mesh([1, 1], -1, 4), Ok([1, 4, 1]));
        assert_eq!(mesh([2, 1], -1, 4), Ok([2, 2, 1]));
        assert_eq!(mesh([4, 1], 1, 4), Ok([4, 1, 1]));
        assert_eq!(mesh([2, 2], -1, 8), Ok([2, 2, 2]));
        assert_eq!(mesh([1, 4], -1, 4), Ok([1, 1, 4]));
        assert_eq!(mesh([7, 5], 9, 1), Ok([1, 1, 1]));
        let one = |replicate, shard| ([replicate, 1], shard);
        let others =
            [one(3, -1), one(0, -1), one(0, 4), one(2, 1), one(1, 0), one(1, -2), one(8, -1), one(usize::MAX, 4)];
        for ([replicate, tensor], shard) in others.into_iter().chain([([1, 0], -1), ([1, 3], -1), ([2, 2], 2)]) {
            let error = mesh([replicate, tensor], shard, 4).unwrap_err();
            let words = format!("shard = {shard} and tensor = {tensor} do not make 4 ranks");
            assert!(error.contains(&words), "{error}");
        }
    }
}
