//! Tensors of the decorator, and the FP8 copies that linears make of them: when a tensor is cast, and how long the codes live.
mod adapter;
mod cache;
mod cast;
mod codes;
mod copies;
mod recent;
mod sample;
mod source;
mod wrapped;

pub(crate) use adapter::{Adapter, Adapters, Dropout};
pub use cache::Slot;
pub(crate) use cache::{Fp8Copy, Layout};
pub(crate) use cast::{CastRequest, View};
pub(crate) use codes::Codes;
pub(crate) use copies::fp8_copy;
pub(crate) use recent::clear as clear_recent;
pub(crate) use sample::{push_sample, sample, take_sample};
pub(crate) use source::source_of;
pub use source::{Findings, ShardingReport, SourcedWeight, WeightCast, WeightSource, shared};
pub use wrapped::{Float8Tensor, Wrapped};
