#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

// Each module imports only from earlier ones.
mod collectives;
mod config;
mod error;
mod words;

mod backend;

#[cfg(feature = "cubecl")]
mod device;

mod all_reduce;
mod world;

mod sharding;

mod operand;
mod values;

mod ahead;
mod kept;
mod peers;

mod source;

mod full_tensor;
mod gradients;
mod plan;
mod shardable;
mod sharder;

mod sharded;

pub use backend::ShardBackend;
pub use collectives::{DeviceCollectives, PendingOnDevice, ShardedAxis, Shards};
pub use config::{ReduceDtype, Reshard, ShardConfig};
#[cfg(feature = "cubecl")]
#[doc(hidden)]
pub use device::stage_collectives;
pub use error::ShardError;
pub use float8_comm::{CommError, Communicator, Engine, Options as CommOptions};
pub use full_tensor::full_tensor;
pub use gradients::JOINED_ELEMENTS;
pub use plan::{PlanDtypes, ShardPlan};
pub use shardable::ShardedParameter;
pub use sharded::Sharded;
pub use sharder::ShardSummary;
