//! [`ShardConfig`]: how a model is sharded.
use serde::{Deserialize, Serialize};

/// How long the whole of a weight lives that was gathered from all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum Reshard {
    /// Until the optimizer replaces the weight: two gathers for each linear and step, over all micro-batches.
    #[default]
    AfterStep,
    /// Until the GEMM that reads it has been launched: two gathers for each linear and micro-batch, and no memory in between.
    AfterForward,
}

/// What ranks exchange of the gradients of sharded parameters. Over MPI they are added in f32 all the same; NCCL adds in this dtype.
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

/// How a model is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardConfig {
    /// How long gathered weights live.
    pub reshard: Reshard,
    /// What is exchanged of gradients.
    pub reduce_dtype: ReduceDtype,
}
