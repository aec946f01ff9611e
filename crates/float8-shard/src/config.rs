//! [`ShardConfig`]: configuration of sharding.
use serde::{Deserialize, Serialize};

/// Lifetime of a weight that was gathered from all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Reshard {
    /// Until the optimizer replaces the weight: two gathers for each linear and step, over all
    /// micro-batches.
    #[default]
    AfterStep,
    /// Until the GEMM that reads it has been launched: two gathers for each linear and micro-batch,
    /// and no memory in between.
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

/// Configuration of sharding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardConfig {
    /// Lifetime of gathered weights.
    pub reshard: Reshard,
    /// Dtype of exchanged gradients.
    pub reduce_dtype: ReduceDtype,
}
