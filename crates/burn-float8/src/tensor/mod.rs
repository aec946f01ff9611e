//! Tensors of the decorator and their FP8 copies: time of the cast, and lifetime of the codes.
mod adapter;
mod cache;
mod cast;
mod codes;
mod copies;
mod experts;
mod parallel;
mod sample;
mod shared_input_cast;
mod source;
mod wrapped;

pub(crate) use adapter::{Adapter, Adapters, Dropout};
pub use cache::WeightCache;
pub(crate) use cache::{Fp8Copy, Layout};
pub(crate) use cast::CastRequest;
pub(crate) use codes::Codes;
pub(crate) use copies::fp8_copy;
pub(crate) use experts::experts_of;
pub use experts::{Exchange, ExpertHooks, ExpertLayout};
pub use parallel::{Axis, ParallelHooks, ParallelStyle};
pub(crate) use parallel::{parallel_of, with_all_tokens};
pub(crate) use sample::{push_sample, sample, take_sample};
pub(crate) use shared_input_cast::clear as clear_shared_input_casts;
pub(crate) use source::source_of;
pub use source::{CastAmax, ShardHooks, ShardLayout, ShardingReport, SourcedWeight, WeightCast, shared};
pub(crate) use wrapped::sealed;
pub use wrapped::{Float8Tensor, Wrapped};
