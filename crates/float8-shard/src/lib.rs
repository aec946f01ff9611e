#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

// Each module imports only from earlier ones; errors name the types of `comm`.
mod comm;
mod error;

mod collectives;
mod config;
mod wire;

mod backend;

#[cfg(feature = "cubecl")]
mod device;

mod all_reduce;
mod overlap;
mod world;

mod sharding;

mod operand;
mod values;

mod gather_cache;
mod prefetch;

mod experts;
mod hooks;
mod parallel_part;

mod full_tensor;
mod gradients;
mod place;
mod shard_params;
mod shardable;
mod tensor_parallel;

mod plan;
mod sharded;

pub use backend::ShardBackend;
pub use collectives::{DeviceCollectives, PendingOnDevice, ShardedAxis, Shards};
pub use comm::{Absence, Collective, Communicator, Count, Difference, Operation, Pending, Traffic, Whereabouts};
pub use config::{Mesh, ReduceDtype, Reshard, ShardConfig};
#[cfg(feature = "cubecl")]
#[doc(hidden)]
pub use device::stage_collectives;
pub use error::ShardError;
pub use full_tensor::full_tensor;
pub use gradients::JOINED_ELEMENTS;
pub use place::Place;
pub use plan::{Fp8Weights, PlanDtypes, ShardPlan};
pub use shard_params::ShardSummary;
pub use sharded::Sharded;
pub use tensor_parallel::{ParallelPlan, TensorParallel, TensorStyle};
