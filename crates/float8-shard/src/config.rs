//! [`ShardConfig`]: configuration of sharding, and the mesh of the ranks.
use serde::{Deserialize, Serialize};

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
    /// Copies of the model. The number of ranks is `replicate` times `shard`.
    pub replicate: usize,
    /// Ranks that divide a copy. 1 keeps whole weights (DDP); -1 takes all the rest.
    pub shard: i64,
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
            reshard: Reshard::default(),
            reduce_dtype: ReduceDtype::default(),
            experts: false,
        }
    }
}

/// Ranks as replicas of shards: rank r has shard r mod `shard` of replica r / `shard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Number of replicas.
    pub replicate: usize,
    /// Number of shards of each replica.
    pub shard: usize,
}

impl ShardConfig {
    /// Mesh of a number of ranks. One rank alone is one shard of one replica.
    ///
    /// # Errors
    /// [`ShardError::Mesh`].
    pub fn mesh(&self, ranks: usize) -> Result<Mesh, ShardError> {
        let Self { replicate, shard, .. } = *self;
        if ranks == 1 {
            return Ok(Mesh { replicate: 1, shard: 1 });
        }
        let shards = match shard {
            -1 => ranks / replicate.max(1),
            shard => usize::try_from(shard).unwrap_or(0),
        };
        let mesh = Mesh { replicate, shard: shards };
        if replicate.checked_mul(shards) == Some(ranks) {
            Ok(mesh)
        } else {
            Err(ShardError::Mesh { replicate, shard, ranks })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_has_all_ranks() {
        let mesh = |replicate, shard, ranks| {
            let mesh = ShardConfig { replicate, shard, ..ShardConfig::default() }.mesh(ranks);
            mesh.map(|mesh| [mesh.replicate, mesh.shard]).map_err(|error| error.to_string())
        };
        assert_eq!(mesh(1, -1, 4), Ok([1, 4]));
        assert_eq!(mesh(2, -1, 4), Ok([2, 2]));
        assert_eq!(mesh(4, 1, 4), Ok([4, 1]));
        assert_eq!(mesh(7, 9, 1), Ok([1, 1]));
        for (replicate, shard) in [(3, -1), (0, -1), (0, 4), (2, 1), (1, 0), (1, -2), (8, -1), (usize::MAX, 4)] {
            let error = mesh(replicate, shard, 4).unwrap_err();
            assert!(error.contains(&format!("parallelism.shard = {shard} do not make 4 ranks")), "{error}");
        }
    }
}
